"""The command line: `minitri "The sea was"`, or `python -m minitri.generate`.

Text, or with --json one JSON object, goes to standard output, everything else to standard error.
Exit codes: 0 done, 2 bad usage or bad input (one line), 130 interrupted; 1 is a bug.
"""

from minitri.apps.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import os
    import stat
    import sys

    from minitri import End, GenerationConfig, InputError, Request, SamplingParams
    from minitri.apps.cli import arguments, boot
    from minitri.apps.cli.inputs import read_prompt
    from minitri.apps.cli.jsonl import run_lines
    from minitri.apps.cli.report import answer, report
    from minitri.apps.cli.terminal import LEGEND, shown, stream
    from minitri.core.errors import shorten
    from minitri.core.fields import between
    from minitri.core.log import log
    from minitri.core.settings import MAX_ROWS
    from minitri.devices.parallel.ranks import join
    from minitri.files.named_models import table
    from minitri.text.prompt_ids import next_seed


@dataclasses.dataclass(frozen=True)
class GenerateFlags:
    """What this program alone is asked for."""

    prompts: str | None = None
    """Many: a file with a JSON object a line, such as {"prompt": "Once", "id": 7, "seed": 3,
    "max_new_tokens": 40, "temperature": 0.6}; writes one a line, too, as each is done; - is
    standard input."""
    batch_size: int = between(MAX_ROWS, 1, 1024)
    """Prompts of a file that run at a time, if memory allows."""
    chat: bool = False
    """The prompt is a message: put it into the model's chat template."""
    load_kv: str | None = None
    """Start after what the prompt has in common with the text whose KV cache this file holds."""
    save_kv: str | None = None
    """In the end write the KV cache to this file (60 GB for 7B at 120,000 tokens, 0.19 GB for the
    default model at 8,000)."""
    ray: str | None = None
    """Answer --prompts on the Ray cluster at this address, or a local one; implies --coupled."""
    replicas: int = between(1, 1, 4096)
    """Engines on that cluster, each on a GPU if there are any."""
    output: str | None = None
    """There answers are appended; the same command goes on after those that it holds."""
    n: int = between(1, 1, MAX_ROWS)
    """Write N texts after the prompt, which is read once; text i has the seed + i."""
    json: bool = False
    """Print one JSON object instead of the text; of several texts one each."""


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "generate",
        "'The sea was' -n 40",
        "--prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9",
        "--chat 'Why is the sea salty?' --system 'Answer in one sentence.'",
        "--demo --method triforce --draft suffix --budget 1024 --color",
        "--rope-scaling yarn:4 --json < novel.txt",
        "--prompts questions.jsonl --max-new-tokens 64 > answers.jsonl",
        description="Generates text from a Llama model after a prompt as long as its context.",
    )
    arguments.add_flags(parser, *arguments.MODEL)
    group = arguments.add_prompt_flags(
        parser, default="standard input if piped; demo at a terminal"
    )
    text = "the same as --prompt TEXT"
    group.add_argument("prompt", nargs="?", metavar="TEXT", default=argparse.SUPPRESS, help=text)
    prompts, *others = vars(GenerateFlags())
    arguments.add_fields(group, GenerateFlags, prompts)
    arguments.add_flags(parser, "stop", "ignore_eos", "logprobs", *arguments.MEMORY)
    arguments.add_fields(parser, GenerateFlags, *others)
    arguments.add_flags(parser, "system", "color")
    arguments.add_decoding_flags(parser)
    text = "show the models that have names and exit"
    parser.add_argument("--list-models", action="version", version=table(), help=text)
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    arguments.taken(SamplingParams, args)  # bad values fail before anything is loaded
    generation = arguments.taken(GenerationConfig, args)
    speculation = arguments.speculation_of(args)
    if args.system is not None and not args.chat:
        raise InputError("--system has a text, but nothing is a message; add --chat")
    boot.check_save_kv(args)
    if args.n > 1 and (args.prompts is not None or args.color):
        raise InputError("--n is for one prompt, without --color; leave one of them out")
    if args.prompts is None and args.ray is not None:
        raise InputError("--ray is for many prompts; give --prompts FILE")
    if args.prompts is not None:
        if args.ray is not None:
            from minitri.apps.cluster.batch import run_on_replicas

            run_on_replicas(args, generation, dataclasses.replace(speculation, coupled=True))
        else:
            run_lines(args, generation, speculation)
        return 0
    if args.prompt is None and args.prompt_file is None:
        choose_prompt(args)
    engine, [prompt] = boot.load_engine(args, [read_prompt(args.prompt_file, args.prompt)])
    work = f"prompt: {len(prompt)} tokens"
    if args.prompt is None:
        source = {"-": "standard input", None: "--demo"}.get(args.prompt_file, args.prompt_file)
        work += f" of {shorten(source)}"
    sampling, seed = boot.sampling_of(args, engine, work)
    if args.n > 1:
        seeds = [next_seed(seed, i) for i in range(args.n)]
        requests = [Request(prompt, own, sampling, generation) for own in seeds]
        run = engine.stream(
            requests, batch_size=args.batch_size, generation=generation, speculation=speculation
        )
        for i in (event.row for event in run if isinstance(event, End)):
            log.info("text %d of %d, seed %d:", i + 1, args.n, seeds[i])
            told = {"index": i, **answer(run.rows[i])}
            print(json.dumps(told) if args.json else shown(told["text"]), flush=True)
        boot.conclude(args, engine, run)
        return 0
    run = engine.generate(
        prompt, sampling=sampling, generation=generation, speculation=speculation, seed=seed
    )
    if args.color and not args.json:
        log.info(LEGEND)
    stream(run, args, show=not args.json)
    print(json.dumps(report(engine, run, args)) if args.json else "", flush=True)
    boot.conclude(args, engine, run)
    return 0 if run.rows[0].finish_reason else 130


def choose_prompt(args: argparse.Namespace) -> None:
    """What is piped to standard input; at a terminal the beginning of the demo. Raises
    `InputError` where there is neither."""
    if not args.demo and join().ask_first(is_piped):
        args.prompt_file = "-"
    elif args.demo or join().ask_first(sys.stdin.isatty):
        args.max_prompt_tokens = args.max_prompt_tokens or arguments.DEMO_PROMPT_TOKENS
    else:
        raise InputError(
            "there is no text: standard input is neither a pipe nor a terminal; give one in "
            "quotes, a file with --prompt-file, or --demo"
        )


def is_piped() -> bool:
    """Whether standard input is a pipe or a file: no terminal, nor /dev/null."""
    return not stat.S_ISCHR(os.fstat(0).st_mode)


main = program(build_parser, run_command, parallel=True)

if __name__ == "__main__":
    main()
