"""The random numbers of real runs: every decision of every level, row and step has its own.

`test_noise.py` looks at the numbers themselves; here the real engine runs and what it draws is
noted on its way into the verification.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding import noise, random_source
from minitri.decoding.noise import gumbel_argmax, hashed_uniforms, noise_key
from minitri.decoding.random_source import CoupledSource, IndependentSource
from minitri.decoding.verification import Proposal, Verdict, verify_block, verify_coupled
from tests.cascades import tiny_engine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10, 11], list(range(20, 90))]
SAMPLING = SamplingParams(1.1, top_p=0.95)
SPECULATION = {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 20}


class Recorder:
    """Notes the numbers of each row in the order in which they are drawn, decision by decision."""

    def __init__(self, monkeypatch, decide=verify_block) -> None:
        self._decide = decide
        self.decisions: dict[int, list[list[float]]] = {}
        self.keys: dict[int, dict[int, set[int]]] = {}
        self._active: list[bool] = []
        self._starts: list[int] = []
        for source in (IndependentSource, CoupledSource):
            monkeypatch.setattr(source, "verify", self._noting(source.verify))
        monkeypatch.setattr(random_source, "verify_block", self._verify)
        monkeypatch.setattr(random_source, "verify_coupled", self._verify_coupled)

    def _noting(self, real):
        def noted(source, proposal, probs_BNV, starts, active):
            self._active, self._starts = active, starts
            return real(source, proposal, probs_BNV, starts, active)

        return noted

    def _verify(self, proposal, probs_BNV, uniforms_BN):
        assert uniforms_BN.dtype == torch.float64
        for b, n in enumerate(proposal.counts):
            if self._active[b]:
                numbers = [*uniforms_BN[b, :n].tolist(), float(uniforms_BN[b, -1])]
                self.decisions.setdefault(b, []).append(numbers)
        return self._decide(proposal, probs_BNV, uniforms_BN)

    def _verify_coupled(self, proposal, probs_BNV, keys):
        for b, row in enumerate(keys):
            if self._active[b]:
                for i, key in enumerate(row[: proposal.counts[b] + 1]):
                    places = self.keys.setdefault(b, {})
                    places.setdefault(self._starts[b] + i, set()).add(key)
        return verify_coupled(proposal, probs_BNV, keys)


def run(monkeypatch, prompts, *, seeds, method, coupled=False, decide=verify_block):
    """What was recorded, and the tokens of each row."""
    with monkeypatch.context() as patching:
        recorder = Recorder(patching, decide)
        events = tiny_engine().generate(
            prompts,
            sampling=SAMPLING,
            generation=GenerationConfig(40, ignore_eos=True),
            speculation=SpeculationConfig(method, coupled=coupled, **SPECULATION),
            seed=seeds,
        )
        tokens = {event.row: event.token_ids for event in events if isinstance(event, End)}
    return recorder, tokens


METHODS = ["autoregressive", "naive", "retrieval", "triforce"]


@pytest.mark.parametrize("method", METHODS)
def test_all_numbers_of_a_run_are_distinct(monkeypatch, method):
    """Of all rows, levels and steps, the tests of a proposal and the token after them; 53 bits
    make a coincidence a matter of 1 in 10^9 runs."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[0, 1, 2], method=method)
    numbers = [n for row in recorder.decisions.values() for n in itertools.chain(*row)]
    assert len(set(numbers)) == len(numbers) > 100
    assert all(0 <= number < 1 for number in numbers)
    assert all(number * 2**24 % 1 > 0 for number in numbers)  # a float32 has 24 bits
    assert sum(number * 2**40 % 1 > 0 for number in numbers) > 0.99 * len(numbers)


@pytest.mark.parametrize("method", METHODS)
def test_a_rows_numbers_do_not_depend_on_its_neighbours(monkeypatch, method):
    """The same numbers for the same decisions alone, between others, and after others have
    ended."""
    together, tokens = run(monkeypatch, PROMPTS, seeds=[7, 8, 9], method=method)
    for b, prompt in enumerate(PROMPTS):
        alone, own = run(monkeypatch, [prompt], seeds=[7 + b], method=method)
        assert own[0] == tokens[b]
        assert alone.decisions[0] == together.decisions[b]


@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_what_stands_after_a_short_rows_guesses_never_matters(monkeypatch, method):
    """Numbers and distributions of the padding are replaced by NaN: the text stays."""
    settings = {"seeds": [7, 8, 9], "method": method}
    num_padded = []

    def poisoned(proposal, probs_BNV, uniforms_BN):
        q_BNV = proposal.probs_BNV.clone()
        for b, n in enumerate(proposal.counts):
            num_padded.append(q_BNV.shape[1] - n)
            uniforms_BN[b, n:-1] = torch.nan
            q_BNV[b, n:] = torch.nan
        return verify_block(replace(proposal, probs_BNV=q_BNV), probs_BNV, uniforms_BN)

    _, tokens = run(monkeypatch, PROMPTS, **settings)
    assert run(monkeypatch, PROMPTS, **settings, decide=poisoned)[1] == tokens
    assert max(num_padded) > 0


SEEDS, COUNTS = [0, 1, 2, 3, 2**32 - 1], [4, 1, 0, 4, 2]


@pytest.fixture
def streams(monkeypatch) -> list[torch.Tensor]:
    """Each row's numbers (decisions, n + 1) of 4,000 decisions about ragged proposals."""
    rows = [[] for _ in SEEDS]

    def note(proposal, probs_BNV, uniforms_BN):
        for row, numbers, n in zip(rows, uniforms_BN, proposal.counts, strict=True):
            row.append(torch.cat((numbers[:n], numbers[-1:])))
        return Verdict(COUNTS, COUNTS, [])

    monkeypatch.setattr(random_source, "verify_block", note)
    tokens, probs = [[0] * n for n in COUNTS], torch.ones(len(COUNTS), 5, 1)
    source = IndependentSource(SEEDS)
    for _ in range(4000):
        source.verify(Proposal.of(tokens, probs, tokens), probs, COUNTS, [True] * len(COUNTS))
    return [torch.stack(row) for row in rows]


def test_numbers_are_uniform_at_every_place_of_a_decision(streams):
    """Kolmogorov and Smirnov: a distance of 2.7 / sqrt(n) is a false alarm of 1 in 10^6."""
    for row in streams:
        for place in row.unbind(1):
            ranks = torch.arange(len(place) + 1, dtype=torch.float64) / len(place)
            ordered = place.sort().values
            distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
            assert float(distance) < 2.7 / len(place) ** 0.5


def test_numbers_of_two_rows_or_of_two_places_are_unrelated(streams):
    """Correlation of any two, in a decision and up to two decisions apart; 6 standard errors are a
    false alarm of 1 in 10^8."""
    places = torch.cat(streams, 1).T  # (all places of all rows, decisions)
    for shift in range(3):
        size = places.shape[1] - shift
        both = torch.cat((places[:, :size], places[:, shift:]))
        related = torch.corrcoef(both)[: len(places), len(places) :].abs()
        if shift == 0:
            related.fill_diagonal_(0)
        assert float(related.max()) < 6 / size**0.5


def test_the_noise_of_a_place_is_unrelated_to_its_neighbours():
    """Seeds, positions and tokens up to two apart; 6 standard errors, as above."""
    tokens = torch.arange(20_000)
    here = hashed_uniforms(torch.tensor(noise_key(5, 100)), tokens)
    for seed, position, shift in itertools.product(range(3, 8), range(98, 103), range(-2, 3)):
        if (seed, position, shift) != (5, 100, 0):
            there = hashed_uniforms(torch.tensor(noise_key(seed, position)), tokens + shift)
            related = torch.corrcoef(torch.stack((here, there)))[0, 1]
            assert float(related.abs()) < 6 / len(tokens) ** 0.5


@pytest.mark.parametrize("exponent", [9, 12, 15])
def test_noise_is_fine_enough_for_tokens_of_tiny_probability(exponent):
    """A token of probability p wins against one of nearly 1 while its uniform number is above
    about 1 - p: odds of p, as SplitMix64 maps keys to hashes one to one. Numbers of 24 bits end at
    1 - 2^-25, so it would never win."""
    p, number = 10.0**-exponent, 1
    probs = torch.tensor([1 - p, p], dtype=torch.float64)
    for part, wins in ((0.01, True), (100, False)):
        key = key_of(hash_=2**64 - int(2**64 * p * part) - 1, number=number)
        uniform = float(hashed_uniforms(torch.tensor(key), torch.tensor(number)))
        assert 1 - uniform == pytest.approx(p * part, rel=0.1)
        assert int(gumbel_argmax(probs, torch.tensor(key))) == wins


def key_of(*, hash_: int, number: int) -> int:
    """The key whose noise for this number is made of this hash: SplitMix64 backwards."""
    mask = 2**64 - 1
    x = hash_
    for bits, factor in ((31, noise._MIX2), (27, noise._MIX1), (30, 1)):
        x = x ^ (x >> bits) ^ (x >> 2 * bits)
        x = x * pow(factor, -1, 2**64) & mask
    x = (x - (number + 1) * noise._STEP) & mask
    return x - 2**64 if x >> 63 else x


@pytest.mark.parametrize("method", METHODS)
def test_coupled_noise_belongs_to_a_seed_and_a_position(monkeypatch, method):
    """All levels that sample for a position of a row use one key; no other place has it."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[3, 4, 5], method=method, coupled=True)
    keys = []
    for b, places in recorder.keys.items():
        assert set(places) >= set(range(len(PROMPTS[b]), len(PROMPTS[b]) + 40))
        assert all(len(found) == 1 for found in places.values())
        keys += [key for found in places.values() for key in found]
    assert len(set(keys)) == len(keys)
