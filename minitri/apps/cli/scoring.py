"""The program `minitri score FILE`: how likely the model finds a text, token by token."""

from minitri.apps.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import json
    import math

    from minitri.apps.cli import arguments, boot
    from minitri.apps.cli.inputs import read_text
    from minitri.apps.cli.report import where


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "score",
        "novel.txt --max-prompt-tokens 4000",
        "--json - < novel.txt",
        description="Tells how likely the model finds a text, before temperature and filters.",
    )
    parser.add_argument("file", metavar="FILE", help="a UTF-8 file; - is standard input")
    arguments.add_flags(parser, *arguments.MODEL, "max_prompt_tokens")
    text = "print one JSON object, with the natural logarithm of each token's probability"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(max_new_tokens=0, method="autoregressive", tree="")
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say."""
    engine, [ids] = boot.load_engine(args, [read_text(args.file, "FILE")])
    scores = engine.score(ids).tolist()
    mean = math.fsum(scores) / len(scores)
    found = {"num_tokens": len(ids), "logprob_per_token": mean, "perplexity": math.exp(-mean)}
    if args.json:
        each = {"token_ids": ids, "logprobs": [None, *scores]}
        print(json.dumps({"model": args.model, **where(engine.model), **found, **each}))
    else:
        print(
            "{} tokens, log-probability {:.4f} per token, perplexity {:.4f}".format(*found.values())
        )


main = program(build_parser, run_command)
