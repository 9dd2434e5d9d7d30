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
  trace: a recovered token that is sampled from p instead of the residual shows here.

Tokens for which there was a guess and others (bonus tokens) are added up apart: which of both comes
next is certain before the token is sampled, and bugs may push them in opposite directions.

All this holds as far as the plain pass computes the p that decoding used. Other dtypes than float32
round differently in blocks of other lengths, so an alarm there must be repeated in float32.

Legend: N tokens, V vocab.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minitri.decoding.sampling import pad_vocabulary, probs_from_logits
from minitri.engine import Engine
from minitri.loading.prompt_ids import MAX_SEED
from minitri.model.llama import Llama
from minitri.requests import Request, Token
from minitri.selftest.departures import last_logits
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

FALSE_ALARM = 1e-4
"""Odds that sound code fails a self-test, all methods and scores together."""
RATES = [sign * 2.0**-k for k in range(13) for sign in (-1, 1)]
"""The l above."""
ROWS_AT_ONCE = 32


@dataclass
class ScoreSum:
    """Scores of emitted tokens less their means under p."""

    total: float = 0.0
    variance: float = 0.0

    def add(self, scores_NV: Tensor, probs_NV: Tensor, tokens_N: Tensor) -> None:
        mean_N = (probs_NV * scores_NV).sum(1)
        self.variance += float((probs_NV * (scores_NV - mean_N.unsqueeze(1)) ** 2).sum())
        self.total += float((scores_NV.gather(1, tokens_N.unsqueeze(1))[:, 0] - mean_N).sum())

    @property
    def p_value(self) -> float:
        """The odds, at most, that the sum of sound code comes so far from 0."""
        logs = [it * self.total - (math.exp(abs(it)) - 1 - abs(it)) * self.variance for it in RATES]
        log_sum = float(torch.tensor(logs, dtype=torch.float64).logsumexp(0))
        return math.exp(min(0.0, math.log(len(logs)) - log_sum))


@dataclass
class DistributionTest:
    """The tests of one method; `add` takes in the texts of its rows."""

    num_tests: int
    """Methods that share the odds of a false alarm."""
    sums: dict[str, ScoreSum] = field(default_factory=dict)

    @property
    def p_values(self) -> dict[str, float]:
        """By score."""
        return {name: it.p_value for name, it in self.sums.items()}

    @property
    def alarm_level(self) -> float:
        """The p-value below which a score is an alarm."""
        return FALSE_ALARM / self.num_tests / max(len(self.sums), 1)

    @property
    def is_alarm(self) -> bool:
        return min(self.p_values.values()) < self.alarm_level

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
        V = model.config.vocab_size
        tokens_N = torch.tensor(new, device=model.device)
        is_bonus_N = torch.tensor(
            [event.origin == "bonus" for event in emitted], device=model.device
        )

        def probs(model: Llama) -> Tensor:
            logits_NV = last_logits(model, text[:-1], len(new))[:, :V]
            return pad_vocabulary(probs_from_logits(logits_NV, sampling), V)

        p_NV = probs(model)
        scores = {"likelihood": p_NV, "order": p_NV.cumsum(1) - p_NV / 2}
        if draft is not None and len(text) <= draft.config.context_length:
            scores["drafter"] = (probs(draft) > p_NV).float()
        for kind, rows in (("guessed", ~is_bonus_N), ("bonus", is_bonus_N)):
            for name, scores_NV in scores.items():
                score_sum = self.sums.setdefault(f"{name} of {kind} tokens", ScoreSum())
                score_sum.add(scores_NV[rows], p_NV[rows], tokens_N[rows])


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
    seeds = ((seed + number) % (MAX_SEED + 1) for number in range(len(prompts)))
    pairs = zip(prompts, seeds, strict=True)
    requests = [Request(prompt, own, sampling, generation) for prompt, own in pairs]
    emitted: list[list[Token]] = [[] for _ in prompts]
    for event in engine.stream(requests, batch_size=ROWS_AT_ONCE, speculation=speculation):
        if isinstance(event, Token):
            emitted[event.row].append(event)
    for prompt, tokens in zip(prompts, emitted, strict=True):
        test.add(engine.model, engine.draft, prompt, tokens, sampling)
    return test
