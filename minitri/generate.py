"""The command line: `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the
only line on standard output is one JSON object. Exit codes: 0 done, 2 bad usage or bad input (one
line), 130 interrupted; 1 is a bug.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import json
    import logging
    import secrets
    import sys

    from minitri.cli import arguments
    from minitri.cli.prompts import load_engine, max_tokens_of, read_prompt
    from minitri.cli.report import report, summary
    from minitri.cli.requests import run_requests
    from minitri.cli.terminal import LEGEND, stream
    from minitri.engine import MAX_ROWS
    from minitri.loading.prompts import MAX_SEED
    from minitri.parallel.ranks import join
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "generate",
        "--prompt 'The sea was' --max-new-tokens 40",
        "--prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9",
        "--demo --method triforce --draft suffix --budget 1024 --color",
        "--prompt-file - --rope-scaling yarn:4 --json < novel.txt",
        "--prompts questions.jsonl --max-new-tokens 64 > answers.jsonl",
        description="Generates text from a Llama model after a prompt as long as its context.",
    )
    arguments.add_model_flags(parser)
    arguments.add_prompt_flags(parser).add_argument(
        "--prompts", metavar="FILE", help="many: a file with a JSON object a line, see the README; "
        "writes one a line, too, as each is done; - is standard input",
    )  # fmt: skip
    text = "--prompts that run at a time, if memory allows (default: %(default)s)"
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=MAX_ROWS, metavar="N", help=text
    )
    arguments.add_fields(parser, GenerationConfig, "prefill_chunk")
    arguments.add_gpu_flags(parser)
    arguments.add_fields(parser, GenerationConfig, "stop", "ignore_eos")
    arguments.add_sampling_flags(
        parser,
        "makes a text repeatable: the same command with the same seed writes the same text "
        "(default: a new one each time; open methods and gammas then follow the clock)",
    )
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
    if args.prompts is not None:
        args.seed = seed_of(args, speculation)
        return run_requests(args, sampling, generation, speculation, draft)
    text, max_tokens = read_prompt(args.prompt_file, args.prompt), max_tokens_of(args)
    args.seed = seed_of(args, speculation)
    num_new = generation.max_new_tokens
    engine, [prompt] = load_engine(args, draft, [(text, max_tokens)], num_new=num_new)
    run = engine.generate(
        prompt, sampling=sampling, generation=generation, speculation=speculation, seed=args.seed
    )
    if args.color and not args.json:
        log.info(LEGEND)
    finish_reason = stream(run, as_json=args.json, quiet=args.quiet, color=args.color)
    if args.json:
        print(json.dumps(report(engine, run, args, finish_reason)), flush=True)
    log.info(summary(engine, run))
    return 130 if finish_reason == "interrupted" else 0


def seed_of(args: argparse.Namespace, speculation: SpeculationConfig) -> int:
    """The seed that was given; or one drawn where it matters, which is told."""
    if args.seed is not None or args.temperature == 0:
        return args.seed or 0
    seed = join().agree(lambda: secrets.randbelow(MAX_SEED + 1))
    if len(speculation.plans) == 1:
        log.info("seed %d; --seed %d repeats this text", seed, seed)
    elif speculation.coupled:
        log.info("seed %d; --seed %d repeats this text, up to rounding", seed, seed)
    else:
        log.info("seed %d; the text follows the clock, too: give --seed if it has to repeat", seed)
    return seed


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    with program(build_parser, argv, parallel=True) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
