"""Does a method sample from the model's distribution? A statistical test of the default mode.

With independent random numbers every method writes another text, so nothing can be compared token
by token. But after any text a plain pass of the model gives the distribution p that the next token
must follow. Each test gives every token of the vocabulary a score from 0 to 1, and adds up how far
the scores of the tokens that were emitted are from their mean under p. For an exact method that sum
is a martingale S: its mean is 0 and its variance V known, whatever the text, and the mean over some
l of exp(l S - (exp |l| - 1 - |l|) V) is above 1 / a with odds of at most a (Freedman 1975, Ville).
The scores are

- `likelihood`: p itself. Tells whether the text is sampled from too sharp or flat a distribution.
- `order`: the middle of the token's interval in the CDF of p, by which tokens are sampled. Tells
  whether random numbers are biased or used twice.
- `drafter`: 1 where the drafter's distribution q is above p. Tells whether rejected guesses leave a
  trace: a recovered token that is sampled from p instead of the residual shows here first.
- `residual`: `order` within the residual max(p - q, 0), 1/2 elsewhere. The same for recovered
  tokens alone.

Tokens for which there was a guess and others (bonus tokens) are added up apart: which of both comes
next is certain before the token is sampled, and bugs may push them in opposite directions.

All this holds as far as the plain pass computes the p that decoding used. Other dtypes than float32
round differently in blocks of other lengths, so an alarm there must be repeated in float32.

Legend: N tokens, V vocab.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.decoding.sampling import pad_vocabulary, probs_from_logits
from minitri.engine import Engine
from minitri.loading.prompt_ids import MAX_SEED
from minitri.model.block import read_block
from minitri.model.llama import Llama
from minitri.requests import Token
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

FALSE_ALARM = 1e-4
"""Odds that sound code fails a self-test, all methods and scores together."""
POWER = 0.99
"""Odds at which the smallest shift that is reported would be found."""
ROWS_AT_ONCE = 32


@dataclass
class ScoreSum:
    """Scores of emitted tokens less their means under p."""

    total: float = 0.0
    variance: float = 0.0
    num_tokens: int = 0

    def add(self, scores_NV: Tensor, probs_NV: Tensor, tokens_N: Tensor) -> None:
        mean_N = (probs_NV * scores_NV).sum(1)
        self.variance += float((probs_NV * (scores_NV - mean_N.unsqueeze(1)) ** 2).sum())
        self.total += float((scores_NV.gather(1, tokens_N.unsqueeze(1))[:, 0] - mean_N).sum())
        self.num_tokens += len(tokens_N)


@dataclass
class DistributionTest:
    """The tests of one method; `add` takes in the texts of its rows."""

    num_tests: int
    """Methods that share the odds of a false alarm."""
    sums: dict[str, ScoreSum] = field(default_factory=dict)

    @property
    def p_values(self) -> dict[str, float]:
        """By score, a bound of the odds that the sum of sound code is as far from 0."""
        return {name: bound(s.total, s.variance) for name, s in self.sums.items()}

    @property
    def alarm_level(self) -> float:
        """The p-value below which a score is an alarm."""
        return FALSE_ALARM / self.num_tests / max(len(self.sums), 1)

    @property
    def worst(self) -> str:
        """The score with the smallest p-value."""
        return min(self.p_values, key=self.p_values.__getitem__)

    @property
    def is_alarm(self) -> bool:
        return self.p_values[self.worst] < self.alarm_level

    def smallest_shift(self, name: str) -> float:
        """The mean shift of a score per token that is found with odds of `POWER`."""
        found = self.sums[name]
        low, high = 0.0, float(found.num_tokens)
        while high - low > 0.1:
            total = (low + high) / 2
            is_alarm = bound(total, found.variance) < self.alarm_level
            low, high = (low, total) if is_alarm else (total, high)
        luck = NormalDist().inv_cdf(POWER) * math.sqrt(found.variance)
        return (high + luck) / found.num_tokens if found.num_tokens else 1.0

    def add(
        self,
        model: Llama,
        draft: Llama | None,
        prompt: list[int],
        emitted: list[Token],
        sampling: SamplingParams,
    ) -> None:
        """Takes in the tokens emitted after a prompt."""
        new = [event.token_id for event in emitted]
        text = prompt + new
        N = len(new)
        V = model.config.vocab_size
        tokens_N = torch.tensor(new, device=model.device)
        is_bonus_N = torch.tensor([event.origin == "bonus" for event in emitted])
        p_NV = probs_after(model, text, N, sampling, V)
        scores = {"likelihood": p_NV, "order": p_NV.cumsum(1) - p_NV / 2}
        if draft is not None and len(text) <= draft.config.context_length:
            residual_NV = p_NV - probs_after(draft, text, N, sampling, V)
            scores["drafter"] = (residual_NV < 0).float()
            residual_NV.clamp_(min=0)
            order_NV = residual_NV.cumsum(1) - residual_NV / 2
            order_NV /= residual_NV.sum(1, keepdim=True).clamp_min(1e-9)
            scores["residual"] = order_NV.where(residual_NV > 0, 0.5)
        for kind, is_kind_N in (("guessed", ~is_bonus_N), ("bonus", is_bonus_N)):
            rows = is_kind_N.to(model.device)
            for name, scores_NV in scores.items():
                score_sum = self.sums.setdefault(f"{name} of {kind} tokens", ScoreSum())
                score_sum.add(scores_NV[rows], p_NV[rows], tokens_N[rows])


def bound(total: float, variance: float) -> float:
    """The odds, at most, that the sum of the scores of sound code comes so far from 0."""
    rates = [sign * 2.0**-k for k in range(13) for sign in (-1, 1)]
    logs = [rate * total - (math.exp(abs(rate)) - 1 - abs(rate)) * variance for rate in rates]
    best = max(logs)
    log_mean = best + math.log(sum(math.exp(value - best) for value in logs) / len(logs))
    return math.exp(min(0.0, -log_mean))


@torch.inference_mode()
def probs_after(
    model: Llama, text: list[int], num: int, sampling: SamplingParams, vocab_size: int
) -> Tensor:
    """Distributions (N, V) of the last `num` tokens of a text, by one plain pass."""
    cache = FullCache.allocate(model.config, 1, len(text), dtype=model.dtype, device=model.device)
    hidden_BTE = read_block(model, [text[:-1]], cache)
    logits_NV = model.logits(hidden_BTE[0, -num:])[:, :vocab_size]
    return pad_vocabulary(probs_from_logits(logits_NV, sampling), vocab_size)


def windows(tokens: list[int], num_rows: int, length: int) -> list[list[int]]:
    """Pieces of a text to go on from, of at most `length` tokens, spread over it."""
    last = max(len(tokens) - length, 0)
    starts = (last * row // max(num_rows - 1, 1) for row in range(num_rows))
    return [tokens[start : start + length] for start in starts]


def run_test(
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    *,
    num_new: int,
    seed: int,
    num_tests: int,
) -> DistributionTest:
    """Continues the prompts in batches with independent random numbers, and tests the texts."""
    test = DistributionTest(num_tests)
    generation = GenerationConfig(num_new, ignore_eos=True)
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        emitted: list[list[Token]] = [[] for _ in batch]
        for event in engine.generate(
            batch,
            sampling=sampling,
            generation=generation,
            speculation=speculation,
            seed=[(seed + first + b) % (MAX_SEED + 1) for b in range(len(batch))],
        ):
            if isinstance(event, Token):
                emitted[event.row].append(event)
        for prompt, tokens in zip(batch, emitted, strict=True):
            test.add(engine.model, engine.draft, prompt, tokens, sampling)
    return test
