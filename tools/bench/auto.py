"""What `auto` gains over autoregressive decoding in forty settings, and what a pass costs.

    python -m tools.bench auto --prompt-file persuasion.txt --prompt-file sensesensibility.txt

Settings are two ways to hold the weights of a 4-bit file, times beginnings of texts, times ways to
sample. The methods take turns after each beginning, whose K and V stay cached. A ratio above 1
says that auto is faster. A table of passes says what a verification of several tokens costs.
"""

import argparse
import statistics
import time
from collections import defaultdict, deque
from typing import Any

import torch
from tqdm import tqdm

import minitri
from minitri import Request, SpeculationConfig
from minitri.apps.cli import arguments
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import read_prompt
from minitri.core.caches.full import FullCache
from minitri.core.errors import InputError
from minitri.core.model.block import read_block
from minitri.core.prefill import prefill
from minitri.files.named_models import DEFAULT_MODEL
from tools.bench.compare import run_method
from tools.flags import positive
from tools.paper.item import Table
from tools.paper.shapes import spread
from tools.paper.study import machine

WEIGHTS = ("native", "dense")
CONTEXTS = [100, 1000, 4000, 7900]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "the same, coupled": {"temperature": 0.7, "top_p": 0.9},
    "T = 1": {"temperature": 1.0},
    "greedy, penalty 1.2": {"temperature": 0.0, "repetition_penalty": 1.2},
}
METHODS = ("autoregressive", "auto")
BLOCKS = (1, 2, 4, 7)  # tokens of a pass


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(prog="python -m tools.bench auto", description=__doc__)
    add = parser.add_argument
    text = "texts to begin with; may be given several times (default: Python's help)"
    add("--prompt-file", action="append", dest="prompt_files", metavar="FILE", help=text)
    text = f"tokens of a beginning; several times (default: {', '.join(map(str, CONTEXTS))})"
    add("--context", action="append", type=positive, default=[], metavar="N", help=text)
    add("--model", default=DEFAULT_MODEL, help=f"a GGUF file or named model ({DEFAULT_MODEL})")
    add("--new-tokens", type=positive, default=64, metavar="N", help="to decode each time (64)")
    add("--repeats", type=positive, default=3, metavar="N", help="turns of each method (3)")
    parser.add_flags("threads")
    return parser


def pass_seconds(engine: "minitri.Engine", prompt: list[int], repeats: int) -> dict[int, float]:
    """Median seconds of a pass over a block after a prompt, with its logits, by tokens."""
    model = engine.model
    cache = FullCache.allocate(model, 1, len(prompt) + max(BLOCKS))
    times = defaultdict[int, list[float]](list)
    with torch.inference_mode():
        deque(prefill(model, prompt, cache, 0, chunk=1024), 0)
        with model.execution.decoding():
            for num in BLOCKS * 8 * repeats:
                started = time.perf_counter()
                model.logits(read_block(model, [prompt[:num]], cache)[0])
                times[num].append(time.perf_counter() - started)
    return {num: statistics.median(seconds[1:]) for num, seconds in times.items()}


def turns(
    engine: "minitri.Engine", prompt: list[int], sampling: str, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Milliseconds per token of both methods in each turn."""
    is_coupled = "coupled" in sampling
    how = {"max_new_tokens": args.new_tokens, "ignore_eos": True, **SAMPLING[sampling]}
    pairs = []
    for turn in range(args.repeats):
        request = Request(prompt, seed=turn if is_coupled else None, **how)
        taken = {}
        for method in METHODS[:: 1 if turn % 2 else -1]:
            speculation = SpeculationConfig(method=method, coupled=is_coupled)
            taken[method] = run_method(engine, request, speculation, 0.0).ms_per_token
        pairs.append((taken[METHODS[0]], taken[METHODS[1]]))
    return pairs


def measure(
    engine: "minitri.Engine", prompts: list[list[int]], args: argparse.Namespace, bar: Any
) -> tuple[dict[int, float], dict[str, list[tuple[float, float]]]]:
    """Seconds of passes by tokens, and turns by the way to sample, after prompts of one length."""
    seconds = pass_seconds(engine, prompts[0], args.repeats)
    pairs = defaultdict[str, list[tuple[float, float]]](list)
    for prompt in prompts:  # read once: K and V stay cached
        for sampling in SAMPLING:
            pairs[sampling] += turns(engine, prompt, sampling, args)
            bar.update()
    return seconds, pairs


def run_command(args: argparse.Namespace) -> None:
    """Measures and prints. Raises `InputError`."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    texts = [read_prompt(file) for file in args.prompt_files or [None]]
    contexts = args.context or CONTEXTS
    passes, rows, ratios = [], [], []
    total = len(WEIGHTS) * len(contexts) * len(texts) * len(SAMPLING)
    with tqdm(total=total, disable=args.quiet, dynamic_ncols=True) as bar:
        for weights in WEIGHTS:
            engine = minitri.load(args.model, weights=weights)
            for length in contexts:
                name = f"{weights}, {length:,}"
                bar.set_postfix_str(name)
                prompts = [engine.tokenizer.encode(text)[:length] for text in texts]
                if min(map(len, prompts)) < length:
                    raise InputError(f"a text has fewer than {length} tokens; give a longer one")
                seconds, settings = measure(engine, prompts, args, bar)
                cells = [f"{1e3 * it:.1f} ({it / seconds[1]:.2f})" for it in seconds.values()]
                passes.append([name, *cells])
                for sampling, pairs in settings.items():
                    of = [first / second for first, second in pairs]
                    columns = [spread(numbers, 1) for numbers in zip(*pairs, strict=True)]
                    rows.append([f"{name}, {sampling}", *columns, spread(of)])
                    ratios.append(statistics.median(of))
    print(f"{args.model}, {machine()}, {torch.backends.cpu.get_cpu_capability()}\n")
    heads = [f"{num} tokens" for num in BLOCKS]
    print(Table(["pass, ms (of one token)", *heads], passes).markdown())
    heads = [f"{name}, ms/token" for name in METHODS]
    print(Table(["setting", *heads, "ratio"], rows).markdown())
    below = sum(ratio < 0.98 for ratio in ratios)
    summary = f"{spread(ratios)} over {len(ratios)} settings, {below} below 0.98"
    print(f"median ratio {summary}", flush=True)


main = program(build_parser, run_command)
