"""The command line: `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the
only line on standard output is one JSON object. Exit codes: 0 done, 2 bad usage or bad input (one
line), 130 interrupted; 1 is a bug.
"""

import argparse
import json
import logging
import sys

from minitri.cli.exits import clean_exits, program

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.cli import arguments
    from minitri.cli.prompts import encode_prompt, max_tokens_of, read_prompt
    from minitri.cli.report import report, summary
    from minitri.cli.terminal import LEGEND, stream
    from minitri.engine import load
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "generate",
        "--prompt 'The sea was' --max-new-tokens 40",
        "--prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9",
        "--demo --method triforce --draft ngram --budget 1024 --color",
        "--prompt-file - --rope-scaling yarn:4 --json < novel.txt",
        description="Generates text from a Llama model after a prompt as long as its context.",
    )
    arguments.add_model_flags(parser)
    arguments.add_prompt_flags(parser)
    arguments.add_fields(parser, GenerationConfig, "prefill_chunk")
    arguments.add_gpu_flags(parser)
    arguments.add_fields(parser, GenerationConfig, "stop", "ignore_eos")
    arguments.add_sampling_flags(parser)
    group = parser.add_argument_group("speculation (none of this changes the text's distribution)")
    arguments.add_fields(group, SpeculationConfig, "method")
    arguments.add_draft_flag(group)
    arguments.add_fields(group, SpeculationConfig, "policy")
    arguments.add_size_flags(group)
    arguments.add_fields(group, SpeculationConfig, "coupled")
    arguments.add_switches(
        parser,
        color="color each token by the stage it came from",
        json="print one JSON object instead of the text",
        quiet="no progress, log or statistics on standard error",
    )
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    sampling = arguments.taken(SamplingParams, args)
    generation = arguments.taken(GenerationConfig, args, stop=tuple(args.stop))
    speculation, draft = arguments.speculation_of(args), arguments.draft_of(args)
    for flag in arguments.ignored_flags(args):
        log.warning("%s is ignored: --method %s has no use for it", flag, args.method)
    text, max_tokens = read_prompt(args.prompt_file, args.prompt), max_tokens_of(args)
    engine = load(**arguments.model_of(args), draft=draft)
    run = engine.generate(
        encode_prompt(engine, text, max_tokens), sampling=sampling, generation=generation,
        speculation=speculation, seed=args.seed or 0,
    )  # fmt: skip
    if args.color and not args.quiet:
        print(LEGEND, file=sys.stderr)
    finish_reason = stream(run, as_json=args.json, quiet=args.quiet, color=args.color)
    if args.json:
        print(json.dumps(report(engine, run, args, finish_reason)), flush=True)
    if not args.quiet:
        print(summary(engine, run), file=sys.stderr)
    return 130 if finish_reason == "interrupted" else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
