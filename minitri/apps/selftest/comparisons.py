"""Comparisons of the self-test: one engine, one prompt, every speculative method.

Texts: rounding explains a difference if both tokens' scores are at most `bound` below the best.
That is twice the largest difference between a token's logits from a pass of its own and from one of
a block, or twice the dtype's spacing if larger, divided by the temperature if that is above 0.

Samples: a plain pass of the model over a finished text gives the distribution p of each token.
Scores of the emitted tokens are compared with their expected values under p (`martingale.py`):

- `likelihood`: p itself; detects distributions that are too sharp or too flat.
- `order`: middle of the token's interval in the CDF of p, by which tokens are sampled; detects
  random numbers that are biased or used twice.
- `drafter`: 1 where the drafter's distribution q is above p; detects traces of rejected guesses.

Guessed and bonus tokens are added up apart, since a bug may push them in opposite directions. Which
of both comes next is known before the token is sampled, so each sum is a martingale.

Legend: N tokens, V vocab."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from minitri import Engine, GenerationConfig, Request, SamplingParams, SpeculationConfig
from minitri.apps.cli.arguments import taken
from minitri.apps.cli.report import Json, progress_bar
from minitri.apps.selftest.martingale import Martingale
from minitri.core import prefill, stats
from minitri.core.caches.full import FullCache
from minitri.core.decoding.sampling import (
    gumbel_scores,
    noise_keys,
    pad_vocabulary,
    probs_from_logits,
)
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.text import prepare, prompt_ids

LENGTH = 64  # tokens of the prompt, and of the output, of each text of the statistical test
FALSE_ALARM = 1e-4  # odds that a correct engine fails, all methods and scores together


def is_bitwise(engine: Engine, args: Namespace) -> bool:
    """Whether every forward pass rounds alike, so that rounding cannot explain a difference."""
    return engine.model.execution.is_row_invariant and not args.tree


def compare_texts(engine: Engine, prompt: list[int], args: Namespace) -> Iterator[Json]:
    """Yields rows: greedy and seed-coupled texts of each method against autoregressive ones."""
    generation = taken(GenerationConfig, args)
    for mode, temperature in (("greedy", 0.0), ("coupled", args.temperature)):
        how: Json = {"generation": generation, "seed": args.seed, "temperature": temperature}
        for method in progress_bar(
            args, iterable=("autoregressive", *args.methods), desc=mode, unit=" methods"
        ):
            speculation = taken(SpeculationConfig, args, method=method, coupled=mode == "coupled")
            tokens = [*engine.complete(prompt, speculation=speculation, **how).token_ids]
            if method == "autoregressive":
                expected = tokens
                continue
            n = stats.num_common(expected, tokens)
            row: Json = {
                "mode": mode,
                "method": method,
                "verdict": "equal",
                "num_tokens": len(tokens),
                "num_equal_tokens": n,
            }
            if n < len(tokens):
                engine.release()
                text = prompt + tokens[:n]
                pair = [expected[n], tokens[n]]
                width = speculation.max_block
                gap, bound = compare_scores(engine.model, text, pair, width, temperature, args.seed)
                is_tie = gap <= bound and not is_bitwise(engine, args)
                row |= {"verdict": "tie" if is_tie else "BUG", "score_gap": gap, "bound": bound}
            yield row


def compare_scores(
    model: Llama, text: list[int], pair: list[int], width: int, temperature: float, seed: int
) -> tuple[float, float]:
    """How far the worse token of `pair` scores below the best of all after `text`, and the gap that
    rounding can explain, as measured by a pass over `width` tokens at once. Scores are logits, or
    at a temperature above 0 log p plus Gumbel noise by `seed`."""
    one_1V, block_1V = (last_logits(model, text, n)[-1:] for n in (1, min(width, len(text))))
    spacing = torch.finfo(model.dtype).eps * one_1V.abs().max()
    bound = 2 * float((one_1V - block_1V).abs().max().maximum(spacing)) / (temperature or 1.0)
    scores_1V = one_1V
    if temperature:
        keys_1 = noise_keys(seed, torch.tensor([len(text)])).to(one_1V.device)
        probs_1V = probs_from_logits(one_1V, SamplingParams(temperature))
        scores_1V = gumbel_scores(probs_1V, keys_1)
    return float(scores_1V.max() - scores_1V[0, pair].min()), bound


def compare_samples(engine: Engine, prompt: list[int], args: Namespace) -> Iterator[Json]:
    """Yields report rows: whether methods' samples after parts of `prompt` follow the target."""
    # A cache so small that the guesses of the retrieval level are often wrong.
    budget = args.budget or 4 * args.chunk_size
    num = -(-args.num_samples // LENGTH)
    spare = max(len(prompt) - LENGTH, 0)
    prompts = [prompt[row * spare // num :][:LENGTH] for row in range(num)]
    is_exact = is_bitwise(engine, args) or engine.model.dtype == torch.float32
    methods = args.methods if prompts and args.temperature else ()
    for method in progress_bar(args, iterable=methods, desc="sampled", unit=" methods"):
        speculation = taken(SpeculationConfig, args, method=method, budget=budget)
        p_values = run_test(engine, prompts, speculation, args)
        least = min(p_values.values())
        verdict = "consistent"
        if least * len(p_values) * len(args.methods) < FALSE_ALARM:
            verdict = "BUG" if is_exact else "unclear"
        yield {
            "mode": "sampled",
            "method": method,
            "verdict": verdict,
            "num_tokens": len(prompts) * LENGTH,
            "least_p_value": least,
            "p_values": p_values,
        }


def run_test(
    engine: Engine, prompts: list[list[int]], speculation: SpeculationConfig, args: Namespace
) -> dict[str, float]:
    """p-values, by names such as "likelihood of bonus tokens", of tests whether texts after
    `prompts`, generated with `speculation`, follow the model's distribution."""
    sampling = taken(SamplingParams, args)
    generation = GenerationConfig(LENGTH, ignore_eos=True)
    requests = [
        Request(prompt, prompt_ids.next_seed(args.seed, number), sampling, generation)
        for number, prompt in enumerate(prompts)
    ]
    run = engine.stream(requests, batch_size=32, speculation=speculation)
    tests = defaultdict[str, Martingale](Martingale)
    draft = engine.models.draft
    for prompt, end in zip(prompts, run.results(), strict=True):
        new = [*end.token_ids]
        p_NV = probs_of_text(engine, engine.model, prompt, new, sampling)
        scores = {"likelihood": p_NV, "order": p_NV.cumsum(1) - p_NV / 2}
        if draft:
            scores["drafter"] = (probs_of_text(engine, draft, prompt, new, sampling) > p_NV).float()
        for n, token in enumerate(end.tokens):
            kind = "bonus" if token.origin == "bonus" else "guessed"
            for name, scores_NV in scores.items():
                tests[f"{name} of {kind} tokens"].add(new[n], p_NV[n], scores_NV[n])
    return {name: test.p_value for name, test in tests.items()}


def probs_of_text(
    engine: Engine, model: Llama, prompt: list[int], new: list[int], sampling: SamplingParams
) -> Tensor:
    """Distributions (N, V), by `sampling`, after a prompt and before each of N `new` tokens."""
    V = engine.config.vocab_size
    logits_NV = last_logits(model, (prompt + new)[:-1], len(new))[:, :V].clone()
    filters = prepare.text_filters(sampling, prompt, engine.tokenizer, engine.config)
    if filters:
        filters.apply(logits_NV, [new[:n] for n in range(len(new))])
    return pad_vocabulary(probs_from_logits(logits_NV, sampling), V)


@torch.inference_mode()
def last_logits(model: Llama, tokens: list[int], num_tokens: int) -> Tensor:
    """Logits (N, V) after each of the last `num_tokens` tokens of a text, read in one block."""
    start = len(tokens) - num_tokens
    cache = FullCache.allocate(model, 1, len(tokens))
    for _ in prefill.prefill(model, tokens[: start + 1], cache, 0, chunk=1024):
        pass
    return model.logits(read_block(model, [tokens[start:]], cache)[0])
