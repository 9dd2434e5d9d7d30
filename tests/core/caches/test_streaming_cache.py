"""The drafter's cache: sinks and recent tokens, rotated by slot."""

import functools

import pytest
import torch

from minitri.core.caches.streaming import StreamingCache
from minitri.core.errors import InputError
from minitri.core.runner import DraftRunner, Passes
from minitri.core.settings import SLIDE, SamplingParams, SpeculationConfig
from tests.core.rigs import Rig, fresh_read, random_prompt, tiny_config, tiny_model

SINKS, RECENT = 3, 12
SIZES = {"num_sink_tokens": SINKS, "num_recent_tokens": RECENT}
CONFIG = tiny_config(num_layers=1)
"""One layer: K and V depend on a token alone, so a slid window equals one that was read afresh."""
DEEP = tiny_config(num_layers=2, unrotated_layers=(1,))
TEXT = random_prompt(CONFIG, 200)
model_of = functools.cache(tiny_model)


def new_runner(config=CONFIG, batch_size=1) -> DraftRunner:
    speculation = SpeculationConfig("naive", gamma1=2, **SIZES)
    cache = StreamingCache(model_of(config), batch_size, speculation)
    # At temperature 1 distributions are the softmax of the logits.
    sampling, vocab_size = SamplingParams(1.0), config.vocab_size
    return DraftRunner(Passes(model_of(config), cache, sampling, vocab_size))


def distribution_of(runner, tokens) -> torch.Tensor:
    """What the drafter's model says after these tokens and nothing else."""
    return fresh_read(runner.model, tokens)[1][-1].softmax(-1)


def windowed(tokens: list[int], num_slots: int) -> list[int]:
    """The tokens that stand in the slots of a window: all, or sinks and the latest."""
    first = SINKS if num_slots < len(tokens) else num_slots
    return tokens[:first] + tokens[len(tokens) - num_slots + first :]


def read_on(runner, tokens, start, end):
    """Commits one token at a time; yields the length of the text and its distribution."""
    for n in range(start, end):
        probs_BNV = runner.next_probs([tokens[:n]], [True]).probs_BNV
        yield n, probs_BNV[0, 0]
        runner.prepare([tokens[: n + 1]], [True])


def test_a_deep_model_keeps_sinks_and_rotates_keys_by_their_slots():
    """Keys of every layer are right after any slide; before the first one all tokens are read."""
    runner, sinks = new_runner(DEEP), dict[str, torch.Tensor]()
    for n, distribution in read_on(runner, TEXT, 1, 110):
        window, length = runner.cache, runner.cache.lengths[0]
        if n < SINKS + RECENT + SLIDE:
            assert length == n
            assert torch.allclose(distribution, distribution_of(runner, TEXT[:n]), atol=1e-5)
        for name in ("raw_keys", "keys", "values") if n >= SINKS else ():
            now = getattr(window, name)[..., :SINKS, :]
            assert torch.equal(sinks.setdefault(name, now.clone()), now)
        rotary = runner.model.rope.at(torch.arange(length).unsqueeze(0))
        (raw_BKSD, unrotated_BKSD), keys_LBKSD = window.raw_keys, window.keys[:, :, :, :length]
        rotated = rotary.rotate(raw_BKSD[:, :, :length].transpose(1, 2)).transpose(1, 2)
        assert torch.allclose(keys_LBKSD[0], rotated, atol=1e-6)
        assert torch.equal(keys_LBKSD[1], unrotated_BKSD[:, :, :length])
    assert length < 60


@pytest.mark.parametrize(
    ("length", "num_read"), [(1, 0), (SINKS + 1, 0), (15, 0), (16, 0), (17, 0), (200, 0), (160, 10)]
)
def test_a_prompt_costs_one_pass_over_the_window(length, num_read):
    """Exact in a deep model too: all of the window is read at once, whatever stood there: at last
    the beginning of another text, of which the first tokens are the same."""
    runner, prompt = new_runner(DEEP), TEXT[:length]
    other = TEXT[:num_read] + random_prompt(DEEP, 5, seed=5)
    for _ in read_on(runner, other, 1, num_read):
        pass
    runner.prepare([prompt], [True])
    num_slots = min(length, SINKS + RECENT + 1)
    distribution = runner.next_probs([prompt], [True]).probs_BNV[0, 0]
    wanted = distribution_of(runner, windowed(prompt, num_slots))
    assert torch.allclose(distribution, wanted, atol=1e-5)
    assert (runner.cache.lengths, runner.cache.num_tokens) == ([num_slots], [length])


def test_ragged_rows_slide_on_their_own():
    """Rows in one batch give the distributions of a fresh pass over the window of each."""
    starts, runner, slides = [5, 12, 160], new_runner(batch_size=3), []
    texts = [random_prompt(CONFIG, 260, seed=n) for n in starts]
    for i in range(75):
        rows = [text[: n + i] for text, n in zip(texts, starts, strict=True)]
        before = list(runner.cache.lengths)
        runner.prepare(rows, [True] * 3)
        slides += [b for b in range(3) if runner.cache.lengths[b] < before[b]]
        probs_BNV = runner.next_probs(rows, [True] * 3).probs_BNV
        for b, row in enumerate(rows):
            wanted = distribution_of(runner, windowed(row, runner.cache.lengths[b]))
            assert torch.allclose(probs_BNV[b, 0], wanted, atol=1e-5), (i, b)
    assert slides == [2, 1, 0, 2, 1]  # one after the other


def test_a_window_that_the_drafter_cannot_hold_is_refused():
    settings = {"method": "naive", "gamma1": 2, "num_recent_tokens": 60, "num_sink_tokens": 4}
    small, enough = (tiny_model(tiny_config(context_length=n)) for n in (101, 102))
    with pytest.raises(InputError, match="101 tokens but its window needs 102 .*num_recent_tokens"):
        Rig(enough, [TEXT[:40]], draft=small, **settings)
    Rig(enough, [TEXT[:40]], draft=enough, **settings)
