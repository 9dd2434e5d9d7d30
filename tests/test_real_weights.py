"""SmolLM2-135M's real weights, a long text: the tokens of `transformers`, and of every method."""

from pathlib import Path

import pytest
import torch

import minitri

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN4["rope_theta"] = 100000.0
SIZES = {"gamma1": 2, "gamma2": 4, "budget": 256, "rebuild_stride": 16, "max_new_tokens": 40}


def ours(text: str, num_prompt: int, **settings) -> tuple[minitri.Engine, list[int]]:
    engine = minitri.load("smollm2-135m", dtype="float32", device="cpu", **settings)
    return engine, engine.tokenizer.encode(text)[:num_prompt]


def theirs(path, text: str, num_prompt: int, rope: dict | None) -> list[int]:
    import transformers

    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    how = {"config": transformers.AutoConfig.from_pretrained(**where), "dtype": torch.float32}
    if rope is not None:
        how["config"].rope_parameters, how["config"].max_position_embeddings = rope, 32768
    if hasattr(transformers, "GgufConfig"):  # else they stay quantized
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **how).eval()
    ids = transformers.AutoTokenizer.from_pretrained(**where).encode(text)[:num_prompt]
    settings = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
    out = model.generate(torch.tensor([ids]), max_new_tokens=32, **settings)
    return out[0, num_prompt:].tolist()


YARN = {"rope_scaling": "yarn:4"}
FORMS = [(1000, {}, None), (1000, {"weights": "native"}, None), (8400, YARN, YARN4)]


@pytest.mark.parametrize(("num_prompt", "settings", "rope"), FORMS)
def test_tokens_are_those_of_transformers(real_weights, long_text, num_prompt, settings, rope):
    engine, prompt = ours(long_text, num_prompt, **settings)
    done = engine.complete(prompt, temperature=0, max_new_tokens=32)
    assert [*done.token_ids] == theirs(real_weights, long_text, num_prompt, rope)


@pytest.mark.usefixtures("real_weights")
@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_every_method_gives_the_autoregressive_tokens(long_text, draft):
    """With a budget far below the prompt. The model's own drafter is small and often right."""
    engine, prompt = ours(long_text, 700, draft=draft)
    for how in ({"temperature": 0}, {"temperature": 0.8, "coupled": True, "seed": 3}):
        alone = engine.complete(prompt, method="autoregressive", **how, **SIZES)
        for method in ("auto", "naive", "retrieval", "triforce"):
            done = engine.complete(prompt, method=method, **how, **SIZES)
            assert done.token_ids == alone.token_ids, method
    if draft == "auto":
        folder = Path(__file__).parent.parent / "weights" / engine.models.drafter_name
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 32e6
        done = engine.complete(prompt, method="naive", temperature=0, **SIZES)
        assert done.stats.levels[0].acceptance_rate > 0.3
