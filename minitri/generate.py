"""The program `minitri generate`, or `python -m minitri.generate`: continues a text.

Texts, or with --json objects of JSON, go to standard output, everything else to standard error.
Exit codes: 0 done, 2 bad input, or no memory or disk (one line), 130 interrupted; 1 is a bug."""

if __name__ == "__main__":  # `command` imports this file anew, guarding Ctrl-C, and then exits
    import sys

    from minitri import __main__ as command

    command.main(["generate", *sys.argv[1:]])

import json
from argparse import Namespace

import minitri
from minitri import End, GenerationConfig, InputError, Request
from minitri.apps.cli import arguments, boot
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import find_prompt
from minitri.apps.cli.jsonl import many
from minitri.apps.cli.report import answer, report, tokens
from minitri.apps.cli.terminal import LEGEND, print_stream, shown
from minitri.core.log import log
from minitri.files.named_models import table
from minitri.text.prompt_ids import next_seed


def build_parser() -> arguments.OneLineParser:
    """The parser of `minitri generate`: flags by `apps/flags.json`, and --list-models."""
    parser = arguments.OneLineParser("generate")
    parser.add_argument("--list-models", action="version", version=table(), help="named models")
    return parser


def run_command(args: Namespace) -> int:
    """Runs `minitri generate` by parsed flags; returns the exit code. Raises `InputError`."""
    if args.n > 1 and (args.prompts is not None or args.color):
        raise InputError("--n is for one prompt, without --color; leave one of them out")
    if args.prompts is not None:
        return many(args)
    text, source, usual_tokens = find_prompt(args)
    engine, [prompt] = boot.load_engine(args, text, usual_tokens=usual_tokens)
    sampling, seed = boot.sampling_of(args, engine, f"prompt: {tokens(len(prompt))}{source}")
    settings = arguments.taken(GenerationConfig, args)
    seeds = [next_seed(seed, number) for number in range(args.n)]
    requests = [Request(prompt, seed, sampling, settings) for seed in seeds]
    with boot.start_run(args, engine, requests) as run:
        return several(run, args) if args.n > 1 else one(run, args, engine)


def several(run: "minitri.Generation", args: Namespace) -> int:
    """Prints the --n texts after one prompt, each when it has ended; returns the exit code, 0."""
    for end in (event for event in run if isinstance(event, End)):
        log.info("text %d of %d, seed %d:", end.row + 1, args.n, end.seed)
        text = {"index": end.row, **answer(run.rows[end.row])}
        print(json.dumps(text) if args.json else shown(end.text), flush=True)
    return 0


def one(run: "minitri.Generation", args: Namespace, engine: "minitri.Engine") -> int:
    """Prints the run's only text as it grows, or its --json report; returns 0, 130 if stopped."""
    if args.color and not args.json:
        log.info(LEGEND)
    print_stream(run, args, engine.config, show=not args.json)
    text = json.dumps(report(engine, run, args), default=vars) if args.json else ""
    print(text, flush=True)
    return 0 if run.rows[0].finish_reason else 130


main = program(build_parser, run_command, parallel=True)
