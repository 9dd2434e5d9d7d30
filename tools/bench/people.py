"""What people meet: loading, the first token, decoding and memory, next to other engines.

    python -m tools.bench people
    python -m tools.bench people --model llama3.1-8b --prompt-tokens 40 --context 1000 --repeats 1
    python -m tools.bench people --model m.gguf --engine minitri --engine "minitri weights=dense"

Every engine runs in a process of its own, in turns, each round in another order: it loads the same
GGUF file, reads prompts, the shortest first of all, and goes on after some of them, greedily, with
its own defaults. Figures are medians (and ranges) over the rounds. Of named models only the default
one has its real weights; the others are random: their speed is real, but their texts make no sense,
so what speculation gains there says little. Wheels of llama.cpp use AVX2 at most; for more build
it: CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python. xllamacpp is its server in a wheel.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import minitri
from minitri.apps.cli import arguments
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import read_prompt
from minitri.apps.plan import config_of
from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.files.fetch import locate
from minitri.files.named_models import DEFAULT_MODEL, MODELS
from minitri.loader import OpenEngine
from tools.bench.random_gguf import random_gguf
from tools.flags import positive
from tools.paper.item import Table
from tools.paper.shapes import spread
from tools.paper.study import machine

WORKER = Path(__file__).with_name("worker.py")
PACKAGES = {
    "minitri": "minitri",
    "llama.cpp": "llama-cpp-python",
    "xllamacpp": "xllamacpp",
    "ik_llama.cpp": "ik-llama-cpp-python",
    "openvino": "openvino-genai",
}
"""The package to install for each program."""
Figures = dict[str, dict[str, list[float]]]
"""Numbers of every round, by contestant and by what they are."""
ENGINES = ("minitri", "minitri method=autoregressive", *list(PACKAGES)[1:])


@dataclass(frozen=True)
class Contestant:
    """A program with settings, as the flag --engine names it."""

    program: str
    options: dict[str, Any]
    python: str

    @property
    def name(self) -> str:
        return " ".join([self.program, *(f"{key}={it}" for key, it in self.options.items())])


@dataclass(frozen=True)
class Subject:
    """A model, and what is read of it: prompts, and how many tokens follow each."""

    model: str
    file: Path
    prompts: list[tuple[list[int], int]]


def contestant(text: str) -> Contestant:
    """A flag's value: a program, and words such as weights=native or python=PATH."""
    name, *words = text.split() or [""]
    if name not in PACKAGES or not all("=" in word for word in words):
        raise argparse.ArgumentTypeError(
            f"{shorten(repr(text), 60)} is no engine; give one of {', '.join(PACKAGES)}, and "
            "settings such as weights=native after it"
        )
    options: dict[str, Any] = dict(word.split("=", 1) for word in words)
    python = options.pop("python", sys.executable)
    for key, value in options.items():
        with contextlib.suppress(ValueError):
            options[key] = json.loads(value)
    return Contestant(name, options, python)


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(prog="python -m tools.bench people", description=__doc__)

    def add(flag: str, text: str, **settings: Any) -> None:
        parser.add_argument(flag, action="append", default=[], help=text, **settings)

    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    text = f"a GGUF file or named model (default: {DEFAULT_MODEL} and qwen2.5-1.5b)"
    add("--model", text, dest="models", metavar="MODEL")
    text = '"PROGRAM SETTING=VALUE ..."; python=PATH is one that has it (default: all, ours twice)'
    add("--engine", text, type=contestant, metavar="ENGINE")
    add("--prompt-tokens", "of a prompt (default: 10, 40, 200 and 1000)", **number)
    add("--context", "tokens to decode after (default: 100, 1000, 4000 and 8000)", **number)
    parser.add_argument("--new-tokens", **number, default=64, help="to decode")
    parser.add_argument("--repeats", **number, default=3, help="rounds")
    parser.add_argument("--busy", **number, default=0, help="busy programs to run next to it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_flags("prompt_file", "threads")
    return parser


def open_subject(args: argparse.Namespace, model: str) -> Subject:
    """Finds a model, or writes it, and its prompts. Raises `InputError`."""
    is_random, config = model in MODELS and model != DEFAULT_MODEL, config_of(model)
    lengths = sorted({*args.prompt_tokens, *args.context})
    most, holds = lengths[-1] + args.new_tokens, config.context_length
    if most > holds:
        problem = f"{model} holds {holds} tokens, fewer than {most} of the longest prompt"
        raise InputError(f"{problem} and --new-tokens; give smaller --context, --prompt-tokens")
    file = random_gguf(model) if is_random else locate(model).path
    if file.suffix != ".gguf":
        raise InputError(f"{file} is no GGUF file, which other engines need; give one as --model")
    if is_random:
        ids = random.Random(0).choices(range(2, config.vocab_size), k=2 * most)
    else:
        tokenizer = OpenEngine(model=str(file), draft="suffix").tokenizer
        ids = tokenizer.encode(read_prompt(args.prompt_file))
    if len(ids) < lengths[-1] + len(lengths):
        problem = f"the text has {len(ids)} tokens, fewer than the longest prompt"
        raise InputError(f"{problem}; give a longer --prompt-file, or a smaller --context")
    # No prompt begins like another one, which a cache could shorten. The first one warms up.
    prompts = [(ids[: lengths[0]], 1)]
    for start, length in enumerate(lengths, 1):
        num_new = args.new_tokens if length in args.context else 1
        prompts.append((ids[start : start + length], num_new))
    return Subject(str(file) if is_random else model, file, prompts)


def answers(one: Contestant, job: object) -> Generator[Any]:
    """What the worker of a program prints; closing the generator ends it. Raises `InputError`."""
    places = [str(Path(minitri.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    command = [one.python, str(WORKER), one.program]
    with tempfile.TemporaryFile("w+") as stdin:
        json.dump(job, stdin)
        stdin.seek(0)
        with subprocess.Popen(command, stdin=stdin, env=os.environ | env, **pipes) as process:
            try:
                for line in process.stdout or ():
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        raise InputError(shorten(answer["error"]))
                    yield answer
                if code := process.wait():
                    raise InputError(f"it ended with exit code {code}")
            finally:
                process.kill()


def find_versions(contestants: list[Contestant]) -> dict[str, str]:
    """Names with versions of the contestants that are installed. Logs how to get the others."""
    found = dict[str, str]()
    for one in contestants:
        try:
            version = minitri.__version__
            if one.program != "minitri":
                with contextlib.closing(answers(one, None)) as lines:
                    version = next(lines)
            found[one.name] = one.name.replace(one.program, f"{one.program} {version}", 1)
        except (InputError, OSError, ValueError) as error:
            get = f"pip install {PACKAGES[one.program]}, or add python=PATH of a Python that has it"
            log.warning("%s is left out: %s; %s", one.name, error, get)
    return found


def measure(one: Contestant, of: Subject, bar: Any) -> dict[str, float]:
    """Figures of one process by their names. Raises `InputError`."""
    context = max(len(prompt) + num_new for prompt, num_new in of.prompts) + 8
    job = {"model": of.model, "file": str(of.file), "context": context}
    job |= {"threads": torch.get_num_threads(), "options": one.options, "prompts": of.prompts}
    bar.set_postfix_str(f"{one.name}: loading")
    started = time.perf_counter()
    lines = answers(one, job)
    next(lines)
    figures = {"start, s": time.perf_counter() - started, "load, s": next(lines)}
    decoded = {}
    for number, (prompt, _) in enumerate(of.prompts):
        bar.set_postfix_str(f"{one.name}: {len(prompt)} tokens")
        first, later = next(lines)
        after = f"{len(prompt):,} tokens"
        figures[f"first token, {after}{', just loaded' * (not number)}, s"] = first
        if later is not None:
            decoded[f"decode after {after}, ms/token"] = later
        bar.update()
    peak = next(lines) / 1e6
    lines.close()
    return {**figures, **decoded, "peak memory, MB": peak}


def compare(args: argparse.Namespace, of: Subject, contestants: list[Contestant]) -> Figures:
    """Measures a model by the contestants that can run it."""
    found: Figures = {one.name: {} for one in contestants}
    order = [*contestants]
    total = len(of.prompts) * len(order) * args.repeats
    with tqdm(total=total, desc=of.file.name, disable=args.quiet, dynamic_ncols=True) as bar:
        for _ in range(args.repeats):
            for one in [*order]:
                try:
                    for key, number in measure(one, of, bar).items():
                        found[one.name].setdefault(key, []).append(number)
                except InputError as error:
                    order.remove(one)
                    del found[one.name]
                    log.warning("%s is left out of %s: %s", one.name, of.model, error)
            order = order[1:] + order[:1]
    return found


def show(result: Figures, versions: dict[str, str]) -> str:
    """The figures as a table in Markdown."""
    rows = []
    for key in dict.fromkeys(key for figures in result.values() for key in figures):
        numbers = [figures.get(key, []) for figures in result.values()]
        digits = 0 if key.startswith("peak") else 1 if "ms" in key else 2
        rows.append([key, *(spread(each, digits) if each else "" for each in numbers)])
    return Table(["", *(versions[name] for name in result)], rows).markdown()


@contextlib.contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """Keeps as many processes busy meanwhile."""
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_command(args: argparse.Namespace) -> None:
    """Measures and prints. Raises `InputError`."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    args.prompt_tokens = args.prompt_tokens or [10, 40, 200, 1000]
    args.context = args.context or [100, 1000, 4000, 8000]
    subjects = [open_subject(args, it) for it in args.models or (DEFAULT_MODEL, "qwen2.5-1.5b")]
    contestants = args.engine or [contestant(text) for text in ENGINES]
    versions = find_versions(contestants)
    contestants = [one for one in contestants if one.name in versions]
    if not contestants:
        raise InputError("no --engine can run; install one of them, or give --engine minitri")
    facts: dict[str, Any] = {"machine": machine(), "isa": torch.backends.cpu.get_cpu_capability()}
    facts |= {"load_average": round(os.getloadavg()[0], 1), "repeats": args.repeats}
    facts |= {"new_tokens": args.new_tokens, "busy_programs": args.busy}
    head = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    results = {}
    for of in subjects:
        with busy_programs(args.busy):
            results[of.model] = compare(args, of, contestants)
        if not args.json:
            size = f"{of.file.name}, {of.file.stat().st_size / 1e9:.2f} GB"
            print(f"{size}, {head}\n\n{show(results[of.model], versions)}", flush=True)
    if args.json:
        print(json.dumps({**facts, "versions": versions, "figures": results}), flush=True)


main = program(build_parser, run_command)
