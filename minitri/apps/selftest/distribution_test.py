"""Statistical test of the default mode: do texts of a method follow the model's distribution?

A plain pass of the model over a finished text gives the distribution p of each token. Scores of the
emitted tokens are compared with their expected values under p (`martingale.py`):

- `likelihood`: p itself; detects distributions that are too sharp or too flat.
- `order`: middle of the token's interval in the CDF of p, by which tokens are sampled; detects
  random numbers that are biased or used twice.
- `drafter`: 1 where the drafter's distribution q is above p; detects traces of rejected guesses.

Guessed and bonus tokens are added up apart, since a bug may push them in opposite directions. Which
of both comes next is known before the token is sampled, so each sum is a martingale.

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
from minitri.text.prompt_ids import next_seed
from minitri.text.rows import text_filters

FALSE_ALARM = 1e-4
"""Odds that a correct engine fails a self-test, all methods and scores together."""
BATCH_SIZE = 32


def run_test(
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    *,
    num_new: int,
    seed: int,
) -> dict[str, float]:
    """Continues the prompts with independent random numbers; returns a p-value for every score."""
    generation = GenerationConfig(num_new, ignore_eos=True)
    requests = [
        Request(prompt, next_seed(seed, number), sampling, generation)
        for number, prompt in enumerate(prompts)
    ]
    run = engine.stream(requests, batch_size=BATCH_SIZE, speculation=speculation)
    tests: defaultdict[str, Martingale] = defaultdict(Martingale)
    for prompt, end in zip(prompts, run.results(), strict=True):
        add_text(tests, engine, prompt, end.tokens, sampling)
    return {name: test.p_value for name, test in tests.items()}


def add_text(
    tests: defaultdict[str, Martingale],
    engine: Engine,
    prompt: list[int],
    emitted: Sequence[Token],
    sampling: SamplingParams,
) -> None:
    """Adds the tokens of a generated text to the statistical test of every score."""
    new = [event.token_id for event in emitted]
    text = prompt + new
    V = engine.config.vocab_size
    filters = text_filters(sampling, prompt, engine.tokenizer, engine.config)

    def probs(model: Llama) -> Tensor:
        logits_NV = last_logits(model, text[:-1], len(new))[:, :V].clone()
        if filters is not None:
            filters.apply(logits_NV, [new[:n] for n in range(len(new))])
        return pad_vocabulary(probs_from_logits(logits_NV, sampling), V)

    p_NV = probs(engine.model)
    tokens_N = torch.tensor(new, device=p_NV.device)
    is_bonus_N = torch.tensor([event.origin == "bonus" for event in emitted], device=p_NV.device)
    scores = {"likelihood": p_NV, "order": p_NV.cumsum(1) - p_NV / 2}
    draft = engine.models.draft
    if draft is not None and len(text) <= draft.config.context_length:
        scores["drafter"] = (probs(draft) > p_NV).float()
    for name, scores_NV in scores.items():
        for kind, rows_N in (("guessed", ~is_bonus_N), ("bonus", is_bonus_N)):
            test = tests[f"{name} of {kind} tokens"]
            test.add_rows(tokens_N[rows_N], p_NV[rows_N], scores_NV[rows_N])


@torch.inference_mode()
def last_logits(model: Llama, sequence: list[int], num_tokens: int) -> Tensor:
    """Logits (N, V) after each of the last `num_tokens` tokens of a sequence, read in one block."""
    start = len(sequence) - num_tokens
    cache = FullCache.allocate(
        model.config, 1, len(sequence), dtype=model.dtype, device=model.device
    )
    for _ in prefill(model, sequence[: start + 1], cache, 0, chunk=1024):
        pass
    return model.logits(read_block(model, [sequence[start:]], cache)[0])


def is_alarm(p_values: dict[str, float], num_tests: int) -> bool:
    """Whether the smallest p-value is below `FALSE_ALARM`, over all of `num_tests` such tests."""
    return min(p_values.values()) * len(p_values) * num_tests < FALSE_ALARM


def windows(tokens: list[int], num_rows: int, length: int) -> list[list[int]]:
    """Pieces of at most `length` tokens, spread over a text, as prompts."""
    spare = max(len(tokens) - length, 0)
    return [tokens[row * spare // num_rows :][:length] for row in range(num_rows)]
