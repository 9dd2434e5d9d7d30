"""The same numbers as `transformers`, the reference implementation that everybody compares with."""

import pytest
import torch

import minitri
from tests.conftest import write_hf_folder
from tests.core.rigs import fresh_read, random_prompt, tiny_config

TOLERANCE = 2e-5
"""Largest allowed difference of logits of size about 5, float32."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OWN = {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
KINDS = {
    "MHA": {"num_key_value_heads": 4},
    "GQA": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "Mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "Qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    "Qwen3": {"model_type": "qwen3", "head_dim": 32},
    "Qwen3, bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "own head dim": {"head_dim": 32},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "yarn, own factor": {"rope_scaling": {**YARN, **OWN}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_one_shot_chunked_and_incremental(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    path = write_hf_folder(tmp_path / "model", **KINDS[kind])
    tokens = random_prompt(tiny_config(vocab_size=320), 150)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    model = minitri.load(str(path), dtype="float32", device="cpu").model
    for size in (150, 64, 17, 1):
        assert (fresh_read(model, tokens, size)[1] - wanted).abs().max() < TOLERANCE
