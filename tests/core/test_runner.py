"""The one place where logits become distributions."""

import pytest
import torch

from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.model.block import read_block
from minitri.core.runner import ModelRunner, Passes
from minitri.core.settings import SamplingParams
from tests.core.rigs import new_cache, random_prompt, tiny_config, tiny_model

FILTERED = SamplingParams(0.8, top_k=30, top_p=0.9, min_p=0.01)


def after(model, tokens: list[int], sampling, *sizes: int) -> list[torch.Tensor]:
    """The head's logits after the last token (1, V), and distributions by these vocabularies."""
    caches = [new_cache(model.config, 1, len(tokens), model.dtype) for _ in range(1 + len(sizes))]
    found = [model.lm_head(read_block(model, [tokens], caches.pop())[:, -1])]
    for size, cache in zip(sizes, caches, strict=True):
        runner = ModelRunner(Passes(model, cache, sampling, size))
        found.append(runner.next_probs([tokens], [True]).probs_BNV[:, 0])
    return found


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), FILTERED, SamplingParams()])
def test_a_drafters_vocabulary_is_cut_before_the_softmax_and_padded_after_it(sampling):
    """Tokens that the target does not have take no probability with them."""
    model = tiny_model(tiny_config(vocab_size=64))
    tokens = random_prompt(tiny_config(vocab_size=40), 30)
    logits, cut, whole, padded = after(model, tokens, sampling, 40, 64, 80)
    assert torch.allclose(cut, probs_from_logits(logits[:, :40], sampling), atol=1e-6)
    assert float(cut.sum()) == pytest.approx(1, abs=1e-6)
    if sampling.temperature:
        assert whole[:, 40:].sum() > 0.1
    assert torch.allclose(padded[:, :64], probs_from_logits(logits, sampling), atol=1e-6)
    assert not padded[:, 64:80].any()


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), FILTERED])
def test_a_bfloat16_models_distributions_are_float32(sampling):
    """Softmax and filters in bfloat16 would be off by 1e-2 of a probability."""
    model = tiny_model(tiny_config(), dtype=torch.bfloat16)
    logits, probs = after(model, random_prompt(model.config, 30), sampling, 64)
    assert logits.dtype == torch.bfloat16
    assert probs.dtype == torch.float32
    exact = probs_from_logits(logits.double(), sampling)
    assert (probs - exact).abs().max() < 1e-6
