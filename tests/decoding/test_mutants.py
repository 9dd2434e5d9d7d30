"""Every known bug of speculative decoding, put in on purpose, is noticed.

Each mutant is a bug as other engines had it (the published TriForce code, its tree version, several
early samplers). For each there is a check that the real code passes and the mutant fails; the table
that `test_mutants_die` prints gives both figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from minitri import (
    End,
    GenerationConfig,
    InputError,
    SamplingParams,
    SpeculationConfig,
    Token,
    session,
)
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.decoding.cascade import Level
from minitri.decoding.random_source import IndependentSource
from minitri.decoding.sampling import sample
from minitri.decoding.verification import Verdict, verify
from minitri.generation import Generation
from minitri.runner import DraftRunner, ModelRunner
from tests.conftest import tiny_config, tiny_model
from tests.exactness import PROMPT, Table, output_distribution, target_distribution, toy_cascade

# --- the checks: a number that is (nearly) 0 for a correct engine


def distribution_error(*, level=Level, decide=verify) -> float:
    """Largest error of the output distribution of both levels together, by exact enumeration."""
    V, horizon = 3, 3
    target = Table(V, 0)
    middle, draft = Table(V, 1, near=target), Table(V, 2, near=target)

    def build(source, batch_size):
        return toy_cascade(source, batch_size, target, middle, draft, 2, 2, level)

    distribution = output_distribution(build, horizon, target, decide=decide)
    return float((distribution - target_distribution(target, horizon)).abs().max())


def joint_error(*, source=IndependentSource) -> float:
    """Distance of the joint distribution of two tokens from the truth, over 4,000 seeds: 0.02 by
    chance, at most 0.04."""
    num_rows, target = 4000, Table(3, 5)
    cascade = toy_cascade(
        source(list(range(num_rows))), num_rows, target, None, Table(3, 6, near=target), 1, 1
    )
    while min(map(len, cascade.sequences)) < len(PROMPT) + 2:
        cascade.step()
    distribution = torch.zeros(3, 3, dtype=torch.float64)
    for sequence in cascade.sequences:
        distribution[tuple(sequence[len(PROMPT) : len(PROMPT) + 2])] += 1 / num_rows
    return float((distribution - target_distribution(target, 2)).abs().max())


def run(engine, prompt, speculation, *, num_new=40, draft=None, sampling=SamplingParams()):  # noqa: B008
    engine = type(engine)(engine.model, engine.tokenizer, draft)
    settings = {
        "sampling": sampling,
        "generation": GenerationConfig(num_new),
        "speculation": speculation,
    }
    return list(engine.generate(prompt, **settings))


def rejections_of_itself(engine, **settings) -> float:
    """Share of guesses rejected although every stage is the target and sees all: a wrong K/V shows
    at once."""
    draft = engine.model if settings.pop("with_draft") else None
    speculation = SpeculationConfig(gamma1=3, gamma2=5, num_recent_tokens=200, **settings)
    end = run(engine, [7, 8, 9, 10, 11], speculation, draft=draft)[-1]
    return 1 - min(level.acceptance_rate for level in end.stats.levels)


def drafter_error(engine) -> float:
    return rejections_of_itself(engine, method="naive", with_draft=True)


class PoisonedRetrievalCache(RetrievalCache):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)


def retrieval_error(engine) -> float:
    """The same through a retrieval cache that holds NaN wherever nobody has written."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(session, "RetrievalCache", PoisonedRetrievalCache)
        try:
            return rejections_of_itself(engine, method="retrieval", with_draft=False, budget=64)
        except InputError:  # the distributions are not finite
            return 1.0


def window_error() -> float:
    """How far the drafter's distribution is from that of a fresh forward pass over its window, when
    it starts a row over."""
    model = tiny_model(tiny_config(vocab_size=32))
    speculation = SpeculationConfig(method="naive", num_sink_tokens=2, num_recent_tokens=10)
    drafter = DraftRunner(model, 1, SamplingParams(1.0), speculation, vocab_size=32)
    first = [token % 32 for token in range(3, 40)]
    second = [token * 5 % 32 for token in range(70)]
    window = second[:2] + second[-11:]
    distributions = []
    for text in ([first, second], [window]):
        for sequence in text:
            drafter.prepare([sequence], [True])
            distributions.append(drafter.next_probs([sequence], [0], [True])[0, -1])
        if len(text) == 2:
            drafter = DraftRunner(model, 1, SamplingParams(1.0), speculation, vocab_size=32)
    return float((distributions[1] - distributions[2]).abs().max())


def eos_error(engine) -> float:
    """Tokens emitted behind an end-of-sequence token, over ends at every place of a block."""
    speculation = SpeculationConfig(method="naive", gamma1=3, num_recent_tokens=60)
    prompt, excess = [7, 8, 9, 10, 11], 0
    eos = engine.model.config.eos_token_ids
    try:
        engine.model.config = engine.model.config.with_eos(())
        text = run(engine, prompt, speculation, num_new=24)[-1].token_ids
        for token in dict.fromkeys(text):
            engine.model.config = engine.model.config.with_eos((token,))
            excess += (
                len(run(engine, prompt, speculation, num_new=24)[-1].token_ids)
                - text.index(token)
                - 1
            )
    finally:
        engine.model.config = engine.model.config.with_eos(eos)
    return float(excess)


# --- the bugs


def resample_from_p(proposal, probs_BNV, uniforms_BN):
    """The published TriForce code: a rejected guess is replaced by a draw from p-hat, not from the
    residual."""
    verdict = verify(proposal, probs_BNV, uniforms_BN)
    rows = torch.arange(len(proposal.tokens))
    drawn = sample(probs_BNV[rows, torch.tensor(verdict.num_accepted)], uniforms_BN[:, -1])
    return Verdict(verdict.num_accepted, drawn.tolist())


def bonus_from_wrong_row(proposal, probs_BNV, uniforms_BN):
    """All accepted: the bonus token is drawn from p_n instead of p_{n+1}."""
    verdict = verify(proposal, probs_BNV, uniforms_BN)
    rows = torch.arange(len(proposal.tokens))
    counts = torch.tensor(proposal.counts)
    wrong = sample(probs_BNV[rows, (counts - 1).clamp_min(0)], uniforms_BN[:, -1]).tolist()
    full = [n == count for n, count in zip(verdict.num_accepted, proposal.counts, strict=True)]
    return Verdict(
        verdict.num_accepted,
        [
            bad if on else good
            for on, bad, good in zip(full, wrong, verdict.next_tokens, strict=True)
        ],
    )


def biased_numbers(proposal, probs_BNV, uniforms_BN):
    """Tests with numbers that are a little too small: guesses are accepted a bit too often."""
    uniforms_BN = uniforms_BN.clone()
    uniforms_BN[:, :-1] **= 1.001
    return verify(proposal, probs_BNV, uniforms_BN)


class DraftWithoutTopP(Level):
    """Tokens are drawn from a filtered distribution, but the proposal says they come from the
    distribution before the filter."""

    def propose(self, sequences, active):
        proposal = super().propose(sequences, active)
        if self.below is not None:
            return proposal
        return replace(
            proposal, probs_BNV=0.8 * proposal.probs_BNV + 0.2 / proposal.probs_BNV.shape[2]
        )


class GreedyDraftWithSoftQ(Level):
    """The drafter says its likeliest token, but the proposal carries its soft distribution."""

    def verify(self, sequences, active, proposal):
        if self.below is not None or self.stats.name != "draft":
            return super().verify(sequences, active, proposal)
        soft = self.runner.table
        self.runner.table = OneHot(soft)
        emitted, _ = super().verify(sequences, active, proposal)
        self.runner.table = soft
        contexts = [tuple(sequence[:-1]) for sequence in sequences]
        return emitted, torch.stack([soft.row(context) for context in contexts]).unsqueeze(1)


class OneHot:
    """A table whose rows are the likeliest tokens of another one."""

    def __init__(self, table):
        self.V, self.table = table.V, table

    def row(self, context):
        probs = self.table.row(context)
        return torch.nn.functional.one_hot(probs.argmax(), self.V).double()


class ReusedNoise(IndependentSource):
    """TriForce's tree version: one noise tensor per prompt, used again for every decision."""

    def __init__(self, seeds):
        super().__init__(seeds)
        self.seeds = seeds

    def verify(self, proposal, probs_BNV, starts, active):
        self.__init__(self.seeds)
        return super().verify(proposal, probs_BNV, starts, active)


def row_not_emptied(self, b):
    """The published streaming cache: its length is not reset for the second prompt, so the sinks
    are lost."""
    row = empty_row(self, b)
    row._lengths = [self._lengths[b]]
    return row


empty_row = StreamingCache.empty_row


def last_accepted_token_dropped(self, lengths):
    """All guesses accepted: the last one was never an input, but the cache counts it as read."""
    crop(self, lengths)
    if isinstance(self, DraftRunner):
        for b, length in enumerate(lengths):
            seen = self.cache.num_tokens[b]
            self.cache.set_window(b, num_slots=self.cache.lengths[b], num_tokens=max(seen, length))


crop = ModelRunner.crop


def tail_not_refreshed(self, b, start, end):
    """Accepted tokens keep the K/V that the small cache made for them, or none: the exact ones are
    not copied in."""
    if start == 0:
        copy_committed(self, b, start, end)
    else:
        self.rows[b].num_held += end - start


copy_committed = RetrievalCache._copy_committed


def eos_as_bonus_ignored(self, session, emitted):
    """The end of a text is looked for among the accepted tokens only."""
    eos = self._model.config
    for row, new in zip(self.rows, emitted, strict=True):
        for token, origin in zip(new.tokens, new.origins, strict=True):
            self._model.config = eos.with_eos(()) if origin == "bonus" else eos
            text = row.push(token, self._settings, self._model.config.eos_token_ids)
            self._model.config = eos
            yield Token(row.number, token, text, origin)
            if row.finish_reason:
                session.cascade.retire(row.number)
                yield End(row.number, row.finish_reason, row.text, tuple(row.token_ids), self.stats)
                break


# --- the table


@dataclass
class Mutant:
    check: Callable
    limit: float
    patch: tuple | None = None
    arguments: dict | None = None


MUTANTS = {
    "resample from p-hat": Mutant(distribution_error, 1e-12, arguments={"decide": resample_from_p}),
    "bonus from the wrong row": Mutant(
        distribution_error, 1e-12, arguments={"decide": bonus_from_wrong_row}
    ),
    "biased numbers": Mutant(distribution_error, 1e-12, arguments={"decide": biased_numbers}),
    "q without top-p": Mutant(distribution_error, 1e-12, arguments={"level": DraftWithoutTopP}),
    "greedy draft scored with soft q": Mutant(
        distribution_error, 1e-12, arguments={"level": GreedyDraftWithSoftQ}
    ),
    "reused noise": Mutant(joint_error, 0.04, arguments={"source": ReusedNoise}),
    "streaming length not reset": Mutant(
        window_error, 1e-5, patch=(StreamingCache, "empty_row", row_not_emptied)
    ),
    "last accepted token dropped from the drafter": Mutant(
        drafter_error, 1e-9, patch=(ModelRunner, "crop", last_accepted_token_dropped)
    ),
    "retrieval tail not refreshed": Mutant(
        retrieval_error, 1e-9, patch=(RetrievalCache, "_copy_committed", tail_not_refreshed)
    ),
    "EOS as bonus ignored": Mutant(
        eos_error, 0.5, patch=(Generation, "_emit", eos_as_bonus_ignored)
    ),
}


def test_mutants_die(engine, monkeypatch, capsys):
    rows = []
    for name, mutant in MUTANTS.items():
        given = (
            {"engine": engine}
            if mutant.check in (drafter_error, retrieval_error, eos_error)
            else {}
        )
        healthy = mutant.check(**given)
        with monkeypatch.context() as patching:
            if mutant.patch:
                patching.setattr(*mutant.patch)
            sick = mutant.check(**given, **(mutant.arguments or {}))
        rows.append((name, healthy, mutant.limit, sick))
    with capsys.disabled():
        print(f"\n  {'mutant':46s} {'check':22s} {'real code':>10s} {'limit':>8s} {'mutant':>8s}")
        for (name, healthy, limit, sick), mutant in zip(rows, MUTANTS.values(), strict=True):
            verdict = "dies" if healthy <= limit < sick else "LIVES"
            print(
                f"  {name:46s} {mutant.check.__name__:22s} {healthy:10.1e} {limit:8.0e} "
                f"{sick:8.1e}  {verdict}"
            )
    assert all(healthy <= limit < sick for _, healthy, limit, sick in rows)
