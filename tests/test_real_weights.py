"""SmolLM2-135M's real weights, a long text: the tokens of `transformers`, and of every method."""

from pathlib import Path

import pytest
import torch

import minitri

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN4["rope_theta"] = 100000.0
LENGTH = 700
SIZES = {"gamma1": 2, "gamma2": 4, "budget": 256, "rebuild_stride": 16, "max_new_tokens": 40}


def ours(text: str, **settings) -> tuple[minitri.Engine, list[int]]:
    engine = minitri.load("smollm2-135m", dtype="float32", device="cpu", **settings)
    return engine, engine.tokenizer.encode(text)[:LENGTH]


def theirs(path, text: str, rope: dict | None) -> list[int]:
    import transformers

    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    how = {"config": transformers.AutoConfig.from_pretrained(**where), "dtype": torch.float32}
    if rope is not None:
        how["config"].rope_parameters, how["config"].max_position_embeddings = rope, 32768
    if hasattr(transformers, "GgufConfig"):  # else they stay quantized
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **how).eval()
    ids = transformers.AutoTokenizer.from_pretrained(**where).encode(text)[:LENGTH]
    settings = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
    out = model.generate(torch.tensor([ids]), max_new_tokens=32, **settings)
    return out[0, LENGTH:].tolist()


FORMS = [
    ({"weights": "dense"}, None),
    ({"weights": "native"}, None),
    ({"rope_scaling": "yarn:4"}, YARN4),
]


@pytest.mark.parametrize(("settings", "rope"), FORMS)
def test_tokens_are_those_of_transformers(real_weights, long_text, settings, rope):
    engine, prompt = ours(long_text, **settings)
    done = engine.complete(prompt, temperature=0, max_new_tokens=32)
    assert [*done.token_ids] == theirs(real_weights, long_text, rope)


@pytest.mark.usefixtures("real_weights")
@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_every_method_gives_the_autoregressive_tokens(long_text, draft):
    """With a budget far below the prompt. The model's own drafter is small and often right."""
    engine, prompt = ours(long_text, draft=draft)
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
