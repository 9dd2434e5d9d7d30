"""Does a method sample from the model's distribution? A statistical test of the default mode.

With independent random numbers every method writes another text, so nothing can be compared token
by token. But behind any text a plain pass of the model gives the distribution p that the next token
must follow. Each test gives every token of the vocabulary a score, and adds up how far the scores
of the tokens that were emitted are from their mean under p. For an exact method that sum has mean 0
and a known variance, whatever the text, and is normal where tokens are many (the martingale central
limit theorem). The scores are

- `surprise`: log p. Tells whether the text is sampled from too sharp or too flat a distribution.
- `order`, `spread`: the middle m of the token's interval in the CDF of p by which tokens are
  sampled, and (m - 1/2)^2. Tell whether random numbers are biased or used twice.
- `drafter`: 1 where the drafter's distribution q is above p. Tells whether rejected guesses leave a
  trace: a recovered token that is sampled from p instead of the residual shows here first.

Tokens for which there was a guess and others (bonus tokens) are added up apart: which of both comes
next is certain before the token is sampled, and bugs may push them in opposite directions.

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
from minitri.generation import Token
from minitri.model.block import read_block
from minitri.model.llama import Llama
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
        """By score, the odds that the sum of sound code is as far from 0."""
        return {
            name: math.erfc(abs(found.total) / math.sqrt(2 * found.variance))
            for name, found in self.sums.items()
            if found.variance
        }

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
        normal, found = NormalDist(), self.sums[name]
        sigmas = normal.inv_cdf(1 - self.alarm_level / 2) + normal.inv_cdf(POWER)
        return sigmas * math.sqrt(found.variance) / found.num_tokens if found.num_tokens else 1.0

    def add(
        self, model: Llama, draft: Llama | None, prompt: list[int], emitted: list[Token],
        sampling: SamplingParams,
    ) -> None:  # fmt: skip
        """Takes in the tokens emitted behind a prompt."""
        new = [event.token_id for event in emitted]
        text, N, V = prompt + new, len(new), model.config.vocab_size
        tokens_N = torch.tensor(new, device=model.device)
        is_bonus_N = torch.tensor([event.origin == "bonus" for event in emitted])
        p_NV = probs_behind(model, text, N, sampling, V)
        floor_N1 = p_NV.where(p_NV > 0, 1.0).amin(1, keepdim=True)
        middle_NV = p_NV.cumsum(1) - p_NV / 2
        scores = {
            "surprise": p_NV.maximum(floor_N1).log(),
            "order": middle_NV,
            "spread": (middle_NV - 0.5) ** 2,
        }
        if draft is not None and len(text) <= draft.config.context_length:
            scores["drafter"] = (probs_behind(draft, text, N, sampling, V) > p_NV).double()
        for kind, is_kind_N in (("guessed", ~is_bonus_N), ("bonus", is_bonus_N)):
            rows = is_kind_N.to(model.device)
            for name, scores_NV in scores.items():
                score_sum = self.sums.setdefault(f"{name} of {kind} tokens", ScoreSum())
                score_sum.add(scores_NV[rows], p_NV[rows], tokens_N[rows])


@torch.inference_mode()
def probs_behind(
    model: Llama, text: list[int], num: int, sampling: SamplingParams, vocab_size: int
) -> Tensor:
    """Distributions (N, V) of the last `num` tokens of a text, in float64, by one plain pass."""
    cache = FullCache.allocate(model.config, 1, len(text), dtype=model.dtype, device=model.device)
    hidden_BTE = read_block(model, [text[:-1]], cache)
    logits_NV = model.logits(hidden_BTE[0, -num:])[:, :vocab_size].double()
    return pad_vocabulary(probs_from_logits(logits_NV, sampling), vocab_size)


def windows(tokens: list[int], num_rows: int, length: int) -> list[list[int]]:
    """Pieces of a text to go on from, of at most `length` tokens, spread over it."""
    last = max(len(tokens) - length, 0)
    starts = (last * row // max(num_rows - 1, 1) for row in range(num_rows))
    return [tokens[start : start + length] for start in starts]


def run_test(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams,
    speculation: SpeculationConfig, *, num_new: int, seed: int, num_tests: int,
) -> DistributionTest:  # fmt: skip
    """Continues the prompts in batches with independent random numbers, and tests the texts."""
    test = DistributionTest(num_tests)
    generation = GenerationConfig(num_new, ignore_eos=True)
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        emitted: list[list[Token]] = [[] for _ in batch]
        for event in engine.generate(
            batch, sampling=sampling, generation=generation, speculation=speculation,
            seed=seed + first,
        ):  # fmt: skip
            if isinstance(event, Token):
                emitted[event.row].append(event)
        for prompt, tokens in zip(batch, emitted, strict=True):
            test.add(engine.model, engine.draft, prompt, tokens, sampling)
    return test
