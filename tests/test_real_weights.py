"""SmolLM2-135M's real weights, a long text: the tokens of `transformers`, and of every method."""

from pathlib import Path

import pytest
import torch

from minitri.apps.selftest import __main__ as selftest
from minitri.generate import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN4["rope_theta"] = 100000.0


@pytest.fixture
def prompt(long_text, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(long_text, encoding="utf-8")
    return path


def ours(prompt_file, call, num_prompt: int, *flags: str) -> dict:
    words = f"--model smollm2-135m --prompt-file {prompt_file} --json --quiet --max-new-tokens 32 "
    words += f"--max-prompt-tokens {num_prompt} --temperature 0 --dtype float32"
    done = call(main, *words.split(), *flags)
    assert done.code == 0
    return done.json


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


@pytest.mark.parametrize(
    ("num_prompt", "flags", "rope"),
    [
        (1000, (), None),
        (1000, ("--weights", "native"), None),
        (8400, ("--rope-scaling", "yarn:4"), YARN4),
    ],
)
def test_the_command_gives_the_tokens_of_transformers(
    real_weights, long_text, prompt, call, num_prompt, flags, rope
):
    report = ours(prompt, call, num_prompt, *flags)
    assert report["token_ids"] == theirs(real_weights, long_text, num_prompt, rope)


@pytest.mark.parametrize("draft", ["ngram", "auto"])
def test_every_method_gives_the_autoregressive_tokens(real_weights, call, draft):
    """With a budget far below the prompt, so that every level accepts and rejects."""
    flags = f"--model smollm2-135m --dtype float32 --draft {draft} --quiet --max-prompt-tokens 700 "
    flags += "--max-new-tokens 48 --budget 256 --rebuild-stride 16 --num-samples 0 "
    flags += "--method auto --method naive --method retrieval --method triforce --json"
    done = call(selftest.main, *flags.split())
    assert (done.code, done.json["num_equal"]) == (0, 8)


@pytest.mark.usefixtures("real_weights")
def test_the_drafter_of_the_default_model_is_used_and_often_right(prompt, call):
    report = ours(prompt, call, 1000, "--method=naive", "--gamma1=2", "--max-new-tokens=64")
    assert report["draft"] == "smollm2-135m-draft"
    assert report["levels"][0]["acceptance_rate"] > 0.3
    folder = Path(__file__).parent.parent / "weights" / "smollm2-135m-draft"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 32e6
