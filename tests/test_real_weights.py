"""SmolLM2-135M's real weights and a long real text: the same tokens as `transformers`, prompt inside and beyond 8K."""

from __future__ import annotations

import json

import pytest
import torch

from minitri.generate import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def reference(real_weights):
    """The same file, read by `transformers` on its own."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        real_weights.parent, gguf_file=real_weights.name, dtype=torch.float32, **unpacked()
    ).eval()


def unpacked():
    """Newer versions keep GGUF weights quantized unless told not to."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def test_the_command_gives_the_tokens_of_transformers(real_weights, reference, long_text, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(long_text, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["--model", "smollm2-135m", "--prompt-file", str(prompt), "--max-prompt-tokens", "3000", "--json", "--quiet",
              "--max-new-tokens", "32", "--temperature", "0", "--dtype", "float32"])  # fmt: skip
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == greedy_by_transformers(reference, real_weights, long_text, 3000, 32)


def greedy_by_transformers(reference, path, text, num_prompt, num_new):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = torch.tensor([tokenizer.encode(text)[:num_prompt]])
    out = reference.generate(tokens, max_new_tokens=num_new, do_sample=False, eos_token_id=2, pad_token_id=2)
    return out[0, num_prompt:].tolist()
