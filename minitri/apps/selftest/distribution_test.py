"""Does a method sample from the model's distribution? A statistical test of the default mode.

After any text a plain pass of the model gives the distribution p that the next token must follow.
Each test gives every token of the vocabulary a score from 0 to 1, and adds up how far the scores of
the tokens that were emitted are from their mean under p: for an exact method that sum is a
martingale (`martingale.py`). The scores are

- `likelihood`: p itself, against too sharp or flat a distribution.
- `order`: the middle of the token's interval in the CDF of p, by which tokens are sampled, against
  random numbers that are biased or used twice.
- `drafter`: 1 where the drafter's distribution q is above p, against traces of rejected guesses: a
  recovered token that is sampled from p instead of the residual.

Tokens for which there was a guess and others (bonus tokens) are added up apart: which of both comes
next is certain before the token is sampled, and bugs may push them in opposite directions.

Legend: N tokens, V vocab.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from minitri import Engine, GenerationConfig, Request, SamplingParams, SpeculationConfig, Token
from minitri.apps.selftest.martingale import Martingale
from minitri.core.caches.full import FullCache
from minitri.core.decoding.sampling import pad_vocabulary, probs_from_logits
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.prefill import prefill
from minitri.text.filters import text_filters
from minitri.text.prompt_ids import next_seed

FALSE_ALARM = 1e-4
"""Odds that sound code fails a self-test, all methods and scores together."""
ROWS_AT_ONCE = 32


def run_test(
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    *,
    num_new: int,
    seed: int,
) -> dict[str, float]:
    """Continues the prompts with independent random numbers; returns for every score a p-value."""
    generation = GenerationConfig(num_new, ignore_eos=True)
    requests = [
        Request(prompt, next_seed(seed, number), sampling, generation)
        for number, prompt in enumerate(prompts)
    ]
    run = engine.stream(requests, batch_size=ROWS_AT_ONCE, speculation=speculation)
    sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for prompt, end in zip(prompts, run.results(), strict=True):
        for name, own_sums in score(engine, prompt, end.tokens, sampling).items():
            sums[name] += own_sums.cpu()
    return {name: Martingale(*both.tolist()).p_value for name, both in sums.items()}


def score(
    engine: Engine, prompt: list[int], emitted: Sequence[Token], sampling: SamplingParams
) -> dict[str, Tensor]:
    """By score, the sums over the new tokens of what it is off its mean and of its variance."""
    new = [event.token_id for event in emitted]
    text = prompt + new
    V = engine.config.vocab_size

    filters = text_filters(sampling, prompt, engine.tokenizer, engine.config)

    def probs(model: Llama) -> Tensor:
        logits_NV = last_logits(model, text[:-1], len(new))[:, :V]
        if filters is not None:
            logits_NV = logits_NV.clone()
            filters.apply(logits_NV, [new[:n] for n in range(len(new))])
        return pad_vocabulary(probs_from_logits(logits_NV, sampling), V)

    p_NV = probs(engine.model)
    tokens_N1 = torch.tensor(new, device=p_NV.device).unsqueeze(1)
    is_bonus_N = torch.tensor([event.origin == "bonus" for event in emitted], device=p_NV.device)
    scores = {"likelihood": p_NV, "order": p_NV.cumsum(1) - p_NV / 2}
    draft = engine.models.draft
    if draft is not None and len(text) <= draft.config.context_length:
        scores["drafter"] = (probs(draft) > p_NV).float()
    sums = {}
    for name, scores_NV in scores.items():
        off_NV = scores_NV - (p_NV * scores_NV).sum(1, keepdim=True)
        off_N = off_NV.gather(1, tokens_N1)[:, 0]
        both_N2 = torch.stack((off_N, (p_NV * off_NV**2).sum(1)), 1).double()
        sums[f"{name} of guessed tokens"] = both_N2[~is_bonus_N].sum(0)
        sums[f"{name} of bonus tokens"] = both_N2[is_bonus_N].sum(0)
    return sums


@torch.inference_mode()
def last_logits(model: Llama, sequence: list[int], width: int) -> Tensor:
    """Logits (N, V) after each of the last `width` tokens of a sequence, which are read at once."""
    start = len(sequence) - width
    cache = FullCache.allocate(
        model.config, 1, len(sequence), dtype=model.dtype, device=model.device
    )
    for _ in prefill(model, sequence[: start + 1], cache, 0, chunk=1024):
        pass
    return model.logits(read_block(model, [sequence[start:]], cache)[0])


def is_alarm(p_values: dict[str, float], num_tests: int) -> bool:
    """Whether one of them is too small for sound code that passes `num_tests` such tests."""
    return min(p_values.values()) * len(p_values) * num_tests < FALSE_ALARM


def windows(tokens: list[int], num_rows: int, length: int) -> list[list[int]]:
    """Pieces of a text to go on from, of at most `length` tokens, spread over it."""
    spare = max(len(tokens) - length, 0)
    return [tokens[row * spare // num_rows :][:length] for row in range(num_rows)]
