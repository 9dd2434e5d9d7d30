"""The command line: `minitri "The sea was"`, or `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the
only line on standard output is one JSON object, with --json-stream there is one per token before
it. Exit codes: 0 done, 2 bad usage or bad input (one line), 130 interrupted; 1 is a bug.
"""

from minitri.cli.exits import clean_imports, is_piped, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import logging
    import sys

    from minitri.cli import arguments
    from minitri.cli.boot import (
        SAMPLING,
        add_kv_flags,
        check_kv_flags,
        load_engine,
        load_kv,
        model_sampling,
        save_kv,
        seed_of,
    )
    from minitri.cli.inputs import max_tokens_of, read_prompt
    from minitri.cli.jsonl import run_requests
    from minitri.cli.report import details, outline, report
    from minitri.cli.terminal import LEGEND, colored, json_line, nothing, plain, stream
    from minitri.engine import MAX_ROWS
    from minitri.errors import InputError
    from minitri.loading.named_models import table
    from minitri.parallel.ranks import join
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "generate",
        "'The sea was' -n 40",
        "--prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9",
        "--chat 'Why is the sea salty?' --system 'Answer in one sentence.'",
        "--demo --method triforce --draft suffix --budget 1024 --color",
        "--rope-scaling yarn:4 --fit last --json < novel.txt",
        "--prompts questions.jsonl --max-new-tokens 64 > answers.jsonl",
        description="Generates text from a Llama model after a prompt as long as its context.",
    )
    arguments.add_model_flags(parser)
    group = arguments.add_prompt_flags(parser, default="standard input if piped, else demo")
    group.add_argument("text", nargs="?", metavar="TEXT", help="the same as --prompt TEXT")
    group.add_argument(
        "--prompts", metavar="FILE", help="many: a file with a JSON object a line, such as "
        '{"prompt": "Once", "id": 7, "seed": 3, "max_new_tokens": 40, "temperature": 0.6}; writes '
        "one a line, too, as each is done; - is standard input",
    )  # fmt: skip
    text = "--prompts that run at a time, if memory allows (default: %(default)s)"
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=MAX_ROWS, metavar="N", help=text
    )
    arguments.add_fields(parser, GenerationConfig, "prefill_chunk")
    arguments.add_gpu_flags(parser)
    add_kv_flags(parser)
    arguments.add_fields(parser, GenerationConfig, "stop", "ignore_eos", "logprobs")
    arguments.add_sampling_flags(
        parser,
        "makes a text repeatable: the same command with the same seed writes the same text "
        "(default: a new one each time; open methods and gammas then follow the clock)",
        "default: as the model's generation_config.json says, or else greedy",
    )
    parser.set_defaults(**dict.fromkeys(SAMPLING))
    group = parser.add_argument_group("speculation (none of this changes the text's distribution)")
    arguments.add_fields(group, SpeculationConfig, "method")
    arguments.add_draft_flag(group)
    arguments.add_fields(group, SpeculationConfig, "policy")
    arguments.add_size_flags(group)
    arguments.add_fields(group, SpeculationConfig, "coupled")
    arguments.add_switches(
        parser,
        chat="the prompt is a message: put it into the model's chat template",
        color="color each token by the stage it came from",
        json="print one JSON object instead of the text; errors are one, too",
        json_stream="print a JSON object per token, and at the end that of --json",
        stats="all statistics, not only a line of them",
        quiet="no progress, log or statistics on standard error",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: a message of the system first"
    )
    text = "show the models that have names and exit"
    parser.add_argument("--list-models", action="version", version=table(), help=text)
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    sampling = arguments.taken(SamplingParams, args)
    generation = arguments.taken(GenerationConfig, args, stop=tuple(args.stop))
    speculation, draft = arguments.speculation_of(args), arguments.draft_of(args)
    if args.system is not None and not args.chat:
        raise InputError("--system has a text, but nothing is a message; add --chat")
    for flag in arguments.ignored_flags(args):
        log.warning("%s is ignored: --method %s has no use for it", flag, args.method)
    check_kv_flags(args)
    args.prompt = args.text if args.prompt is None else args.prompt
    is_given = args.demo or any(
        x is not None for x in (args.prompt, args.prompt_file, args.prompts)
    )
    if not is_given and join().ask_first(is_piped):
        log.info("prompt: standard input")
        args.prompt_file = "-"
    if args.prompts is not None:
        return run_requests(args, sampling, generation, speculation, draft)
    text, max_tokens = read_prompt(args.prompt_file, args.prompt), max_tokens_of(args)
    num_new = generation.max_new_tokens
    engine, [prompt] = load_engine(args, draft, [(text, max_tokens)], num_new=num_new)
    sampling = dataclasses.replace(sampling, **model_sampling(args, engine))
    vars(args).update(dataclasses.asdict(sampling))
    args.seed = seed_of(args, speculation)
    load_kv(args, engine)
    run = engine.generate(
        prompt, sampling=sampling, generation=generation, speculation=speculation, seed=args.seed
    )
    if args.json or args.json_stream:
        show = json_line if args.json_stream else nothing
    else:
        show = colored if args.color else plain
    if show is colored:
        log.info(LEGEND)
    finish_reason, tokens = stream(run, show, quiet=args.quiet)
    if show in (json_line, nothing):
        print(json.dumps(report(engine, run, args, finish_reason, tokens)), flush=True)
    log.info(outline(engine, run))
    if args.stats:
        log.info(details(engine, run))
    run.close()
    save_kv(args, engine, run.rows[0].stats.num_cached_tokens)
    return 130 if finish_reason == "interrupted" else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    with program(build_parser, argv, parallel=True) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
