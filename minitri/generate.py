"""The program `minitri generate`, or `python -m minitri.generate`: continues a text.

Text, or with --json one JSON object, goes to standard output, everything else to standard error.
Exit codes: 0 done, 2 bad usage or bad input (one line), 130 interrupted; 1 is a bug.
"""

if __name__ == "__main__":  # before long imports: from here on Ctrl-C is answered by a line
    import sys

    from minitri import __main__ as command

    command.main(["generate", *sys.argv[1:]])

import argparse
import dataclasses
import json

import minitri
from minitri import End, GenerationConfig, InputError, Request
from minitri.apps.cli import arguments, boot
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import find_prompt
from minitri.apps.cli.jsonl import answers, many
from minitri.apps.cli.report import answer, report
from minitri.apps.cli.terminal import LEGEND, print_stream, shown
from minitri.apps.cluster.batch import on_replicas
from minitri.core.fields import between
from minitri.core.log import log
from minitri.core.settings import MAX_ROWS
from minitri.files.named_models import table
from minitri.text.prompt_ids import next_seed


@dataclasses.dataclass(frozen=True)
class GenerateFlags:
    """The flags that only `minitri generate` has."""

    prompts: str | None = None
    """File of many prompts, a JSON object per line, such as {"prompt": "Once", "id": 7, "seed": 3,
    "max_new_tokens": 40, "temperature": 0.6}; - is standard input. Prints an object for each."""
    batch_size: int = between(MAX_ROWS, 1, 1024)
    """Prompts of --prompts that run at the same time, if memory allows."""
    chat: bool = False
    """The prompt is a message: put it into the model's chat template."""
    load_kv: str | None = None
    """File of a KV cache to reuse, as far as the prompt begins like its text."""
    save_kv: str | None = None
    """File for the KV cache at the end (7B at 120,000 tokens: 60 GB; 135M at 8,000: 0.19 GB)."""
    ray: str | None = None
    """Answer --prompts on the Ray cluster at this address, or a local one; implies --coupled."""
    replicas: int = between(1, 1, 4096)
    """Engines on that cluster, each on a GPU if there are any."""
    output: str | None = None
    """With --prompts: append answers to this file; the same command skips those that it holds."""
    n: int = between(1, 1, MAX_ROWS)
    """Number of texts after the prompt; text i has the seed + i. (-n is --max-new-tokens.)"""


def build_parser() -> arguments.OneLineParser:
    """The command-line parser of `minitri generate`."""
    parser = arguments.OneLineParser("generate")
    group = arguments.add_prompt_flags(parser, "standard input if piped; demo at a terminal")
    text = "the same as --prompt TEXT"
    group.add_argument("prompt", nargs="?", metavar="TEXT", default=argparse.SUPPRESS, help=text)
    prompts, *others = vars(GenerateFlags())
    arguments.add_fields(group, GenerateFlags, prompts)
    arguments.add_fields(parser, GenerateFlags, *others)
    arguments.add_decoding_flags(parser)
    parser.add_argument("--list-models", action="version", version=table(), help="named models")
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Runs `minitri generate` by parsed flags; returns the exit code. Raises `InputError`."""
    if args.n > 1 and (args.prompts is not None or args.color):
        raise InputError("--n is for one prompt, without --color; leave one of them out")
    if args.prompts is not None:
        return many(args, answers if args.ray is None else on_replicas)
    text, source, usual_tokens = find_prompt(args)
    engine, [prompt] = boot.load_engine(args, text, usual_tokens=usual_tokens)
    sampling, seed = boot.sampling_of(args, engine, f"prompt: {len(prompt)} tokens{source}")
    settings = arguments.taken(GenerationConfig, args)
    seeds = [next_seed(seed, number) for number in range(args.n)]
    requests = [Request(prompt, seed, sampling, settings) for seed in seeds]
    with boot.start_run(args, engine, requests) as run:
        return several(run, args) if args.n > 1 else one(run, args, engine)


def several(run: "minitri.Generation", args: argparse.Namespace) -> int:
    """Writes several texts after one prompt, each when it is done."""
    for end in (event for event in run if isinstance(event, End)):
        log.info("text %d of %d, seed %d:", end.row + 1, args.n, end.seed)
        text = {"index": end.row, **answer(run.rows[end.row])}
        print(json.dumps(text) if args.json else shown(end.text), flush=True)
    return 0


def one(run: "minitri.Generation", args: argparse.Namespace, engine: "minitri.Engine") -> int:
    """Writes a text after a prompt, token by token; returns 130 after Ctrl-C."""
    if args.color and not args.json:
        log.info(LEGEND)
    print_stream(run, args, engine.config, show=not args.json)
    text = json.dumps(report(engine, run, args), default=vars) if args.json else ""
    print(text, flush=True)
    return 0 if run.rows[0].finish_reason else 130


main = program(build_parser, run_command, GenerateFlags, parallel=True)
