"""A drafter's round in one call of the kernels has the bits of single passes."""

import copy
from dataclasses import replace

import pytest
import torch

from minitri import SamplingParams
from minitri.core.decoding.level import Level
from minitri.core.drafters.draft_model import CapturedDraft
from minitri.core.errors import NotFiniteError
from minitri.devices.choose import drafter_in_few_bits
from minitri.devices.cpu.kernel_layers import use_kernels
from minitri.devices.cpu.kernels import load_kernels
from tests.conftest import tiny_model
from tests.core.rigs import GREEDY, Rig, random_prompt, tiny_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, context_length=512)
PROMPTS = [random_prompt(CONFIG, length, seed=length) for length in (1, 9, 150)]
WINDOW = {"num_sink_tokens": 3, "num_recent_tokens": 12}
FILTERED = SamplingParams(1.0, 20, top_p=0.9, min_p=0.02)


def models_of(kind: str, dtype: torch.dtype, kernels=None):
    """A target and its drafter, on kernels; the drafter may have another vocabulary, or a head over
    a part of it and its target's embeddings."""
    config = replace(CONFIG, tie_word_embeddings="tied" in kind)
    target = tiny_model(config, dtype=dtype)
    size = {"smaller": 50, "larger": 77}.get(kind, config.vocab_size)
    config = replace(config, vocab_size=size)
    if "lent" in kind:
        config = replace(config, draft_of="target", head_size=40, tie_word_embeddings=False)
    lender = target if "lent" in kind else None
    draft = type(target)(config, dtype=dtype, device=target.device, target=lender)
    generator = torch.manual_seed(5)
    for parameter in draft.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    if "lent" in kind:
        draft.lm_head.token_ids.copy_(torch.randperm(size, generator=generator)[:40])
    for model in (target, draft):
        use_kernels(model, kernels or load_kernels())
    return target, drafter_in_few_bits(draft.eval(), "auto" if "4 bits" in kind else "same")


def draft_twice(level, sequences, active, draft):
    """Guesses by single passes, then in one call, over slots that are NaN again; what is written,
    sampled and taken from the random source is the same."""
    cache = level.runner.cache
    generators = [level.source._by_row[b] for b in range(len(active))]
    before = [generator.get_state() for generator in generators]
    read, starts = cache.num_tokens, cache.lengths
    slots = (cache.raw_keys, cache.keys, cache.values)

    def outcome(proposal):
        """All that depends on a round, by row."""
        parts = [
            [proposal.tokens_BN[b], proposal.probs_BNV[b], generators[b].get_state()]
            + [tensor[:, b, :, starts[b] : cache.lengths[b]].clone() for tensor in slots]
            for b, on in enumerate(active)
            if on
        ]
        return cache.lengths, proposal.counts, parts

    *want, exact = outcome(Level._draft(level, sequences, active))
    cache.crop(read)
    for b, generator in enumerate(generators):
        generator.set_state(before[b])
        for tensor in slots:
            tensor[:, b, :, starts[b] :] = torch.nan
    proposal = draft(level, sequences, active)
    *got, parts = outcome(proposal)
    assert got == want
    for ours, theirs in zip(parts, exact, strict=True):
        assert all(map(torch.equal, ours, theirs))
    return proposal


def check_rounds(monkeypatch, models, sampling=FILTERED, gammas=(3,), **options):
    """Texts of three rows with filters of their own, of which the middle one ends first."""
    plain, seen = CapturedDraft._draft, []

    def draft(level, sequences, active):
        seen.append((len(active), sum(active)))
        return draft_twice(level, sequences, active, plain)

    with monkeypatch.context() as patch:
        patch.setattr(CapturedDraft, "_draft", draft)
        for gamma1 in gammas:
            settings = {"method": "naive", "gamma1": gamma1, "num_new": 999, **WINDOW, **options}
            rig = Rig(models[0], PROMPTS, draft=models[1], sampling=sampling, **settings)
            rig.runners["draft"].sampling[1] = replace(sampling, top_k=7)
            rig.start()
            for number in range(30):
                if number == 6:
                    rig.cascade.retire(1)
                rig.step()
            assert {(3, 3), (3, 2)} <= set(seen)


@pytest.mark.parametrize(
    ("kind", "dtype", "sampling", "gammas"),
    [
        ("same", torch.float32, FILTERED, (1, 3)),
        ("tied", torch.bfloat16, SamplingParams(1.0), (3,)),
        ("4 bits", torch.bfloat16, GREEDY, (2,)),
        ("tied 4 bits", torch.float32, FILTERED, (3,)),
        ("lent", torch.bfloat16, FILTERED, (3,)),
        ("lent tied", torch.float16, SamplingParams(0.6, top_p=0.9), (1, 8)),
        ("smaller", torch.float32, SamplingParams(0.6), (3,)),
        ("larger", torch.float32, FILTERED, (3,)),
    ],
)
def test_a_round_has_the_bits_of_single_passes(kind, dtype, sampling, gammas, monkeypatch):
    """Of rows of which some have ended, after slides of the window, next to rejected guesses."""
    check_rounds(monkeypatch, models_of(kind, dtype), sampling, gammas)


def test_rounds_below_a_retrieval_level_have_these_bits(monkeypatch):
    models = models_of("lent", torch.float32)
    check_rounds(monkeypatch, models, gammas=(2,), method="triforce", gamma2=4, budget=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_round_does_not_depend_on_its_neighbours(dtype, monkeypatch):
    """Nor on how many threads there are."""
    target, draft = models_of("4 bits", dtype)
    rig = Rig(target, PROMPTS, draft=draft, method="naive", gamma1=4, sampling=FILTERED)
    rig.start()
    runner = rig.runners["draft"]
    runner.prepare(rig.sequences, [True] * 3)
    numbers_BN = torch.rand(3, 4, dtype=torch.float64, generator=torch.manual_seed(1))

    def guess(rows: slice):
        """A round of some rows whose guesses are all rejected."""
        part = runner.of_rows(rows)
        read = part.cache.num_tokens
        sequences = rig.sequences[rows]
        guessed = part.guess(sequences, [True] * len(sequences), numbers_BN[rows])
        part.crop(read)
        return guessed

    together = guess(slice(0, 3))
    for num_threads in (1, 3):
        monkeypatch.setattr(draft.layers.kernels, "num_threads", num_threads)
        for b in range(3):
            for ours, theirs in zip(guess(slice(b, b + 1)), together, strict=True):
                assert torch.equal(ours[0], theirs[b])


def test_what_does_not_fit_is_refused():
    target, draft = models_of("same", torch.float32)
    rig = Rig(target, PROMPTS, draft=draft, method="naive", gamma1=2)
    runner, guess = rig.runners["draft"], draft.execution.round
    rows, filters, V = [[1], [2, 3], [4]], runner.sampling, CONFIG.vocab_size
    numbers_BN = torch.zeros(3, 2, dtype=torch.float64)
    other = copy.copy(runner.cache)
    other.values = other.values.bfloat16()
    for wrong in (
        (runner.cache, rows, numbers_BN.float(), filters),
        (runner.cache, rows, numbers_BN[:, :0], filters),
        (runner.cache, rows, numbers_BN[:2], filters),
        (runner.cache, rows, numbers_BN[:, :1].expand(3, runner.cache.capacity), filters),
        (runner.cache, rows, torch.zeros(2, 3, dtype=torch.float64).t(), filters),
        (runner.cache, rows[:2], numbers_BN, filters),
        (runner.cache, [[1], [], [4]], numbers_BN, filters),
        (runner.cache, rows, numbers_BN, filters[:2]),
        (other, rows, numbers_BN, filters),
    ):
        with pytest.raises(ValueError, match="the CPU kernels cannot take"):
            guess(*wrong, V)
    guess(runner.cache, [[10**9], [-(10**9)], [1]], numbers_BN, filters, V)  # some token instead


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED])
def test_a_drafter_that_is_not_finite_ends_a_text_with_an_error(sampling):
    target, draft = models_of("lent", torch.float32)
    draft.norm.weight[3] = torch.nan
    rig = Rig(target, PROMPTS, draft=draft, sampling=sampling, method="naive", gamma1=2)
    with pytest.raises(NotFiniteError):
        rig.run()


def test_what_one_call_cannot_do_is_done_by_single_passes():
    """Coupled noise; trees; embeddings of another number type."""
    target, draft = models_of("lent", torch.float32)
    for options in ({"coupled": True}, {"tree": "2x2"}):
        rig = Rig(target, PROMPTS, draft=draft, method="naive", **options)
        assert not isinstance(rig.cascade.stages[0], CapturedDraft)
    draft.lent_embedding = tiny_model(CONFIG, dtype=torch.bfloat16).embed
    draft.execution = replace(draft.execution, round=None)
    assert drafter_in_few_bits(draft, "same").execution.round is None
