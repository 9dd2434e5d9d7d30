"""The command line: `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the only line on
standard output is one JSON object. Exit codes: 0 done, 2 bad usage or bad input (one line), 130
interrupted; 1 is a bug.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from minitri.config import DEFAULT_MODEL, MODELS, GenerationConfig, SamplingParams
from minitri.errors import InputError
from minitri.exits import clean_exits

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.engine import DTYPES, Engine, load
    from minitri.generation import End, Generation, PrefillProgress, Token

DEMO_PROMPT_TOKENS = 4000
"""Length of the built-in prompt where nothing else is asked for: long enough to show, read in seconds on a laptop."""

METHODS = ("autoregressive",)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage text in front."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2."""
        raise InputError(f"{message}; see --help")


def build_parser() -> OneLineParser:
    """All flags. Defaults come from the fields of the config classes."""
    sampling, generation = SamplingParams(), GenerationConfig()
    parser = OneLineParser(
        prog="python -m minitri.generate",
        description="Generates text from a Llama model, streaming, after a prompt as long as its context.",
        epilog="examples:\n"
        "  python -m minitri.generate --prompt 'The sea was' --max-new-tokens 40\n"
        "  python -m minitri.generate --prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9\n"
        "  cat novel.txt | python -m minitri.generate --prompt-file - --rope-scaling yarn:4 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to decode (default: %(default)s)")
    prompt = parser.add_argument_group("prompt (default: --demo)").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file; - is standard input")
    prompt.add_argument("--demo", action="store_true", help="take Python's own help texts, 700 KB, as the prompt")
    parser.add_argument(
        "--max-prompt-tokens", type=positive, metavar="N",
        help=f"keep the first N tokens of the prompt (default: all; {DEMO_PROMPT_TOKENS} of the demo)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=generation.max_new_tokens,
        help="generate at most N tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", default=generation.prefill_chunk,
        help="read the prompt N tokens at a time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times; $'\\n' is a line break in most shells",
    )  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    law = parser.add_argument_group("sampling")
    law.add_argument(
        "--temperature", type=float, metavar="T", default=sampling.temperature,
        help="0 is greedy, 1 is the model's own law (default: %(default)s)",
    )  # fmt: skip
    law.add_argument(
        "--top-k", type=int, metavar="K", default=sampling.top_k,
        help="keep the K likeliest tokens; 0 is off (default: %(default)s)",
    )  # fmt: skip
    law.add_argument(
        "--top-p", type=float, metavar="P", default=sampling.top_p,
        help="keep the likeliest tokens up to this mass; 1 is off (default: %(default)s)",
    )  # fmt: skip
    law.add_argument(
        "--min-p", type=float, metavar="P", default=sampling.min_p,
        help="keep tokens at least P times as likely as the likeliest; 0 is off (default: %(default)s)",
    )  # fmt: skip
    law.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--quiet", action="store_true", help="no progress, log or statistics on standard error")
    return parser


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which model runs and how, shared with the benchmark."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="NAME|PATH|ORG/REPO",
        help="a named model, a folder or file, or a hub repository (default: %(default)s); names: " + ", ".join(MODELS),
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="of weights and KV cache (default: what is fast here)",
    )
    parser.add_argument("--device", default="auto", metavar="cpu|cuda|cuda:N", help="(default: cuda if it is there)")
    parser.add_argument(
        "--rope-scaling",
        metavar="KIND:FACTOR",
        help="stretch the context, e.g. yarn:4 makes 8K 32K (default: as trained)",
    )


def positive(text: str) -> int:
    """A flag's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt text that the flags name."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is None:
        return demo_text()
    source = "standard input" if args.prompt_file == "-" else args.prompt_file
    try:
        if args.prompt_file == "-":
            if sys.stdin is None:
                raise InputError("there is no standard input to read the prompt from; give --prompt or a file")
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(args.prompt_file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the prompt from {source}: {error.strerror}; check --prompt-file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start}); convert it, or give another file") from None


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode_prompt(engine: Engine, text: str, max_tokens: int | None) -> list[int]:
    """Token ids of the prompt, the first `max_tokens` of them."""
    if not text:
        raise InputError("the prompt is empty; give at least one character")
    return engine.tokenizer.encode(text, max_tokens)


class PrefillBar:
    """A progress bar on standard error with the time that the rest will take; none where nobody watches."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def show(self, event: PrefillProgress) -> None:
        """Moves the bar; removes it when the prompt has been read."""
        if self._bar is None:
            layout = "prompt {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens, {elapsed} passed, {postfix[0]}"
            self._bar = tqdm(
                total=event.num_tokens,
                leave=False,
                bar_format=layout,
                postfix=[""],
                disable=True if self._quiet else None,
            )
        self._bar.postfix = [f"{event.eta_seconds:.0f} s to go"]
        self._bar.update(event.num_done - self._bar.n)
        if event.num_done == event.num_tokens:
            self.close()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def stream(run: Generation, *, as_json: bool, quiet: bool) -> str:
    """Shows a run of one prompt as it goes; returns how it finished, `interrupted` after Ctrl-C."""
    bar = PrefillBar(quiet=quiet)
    try:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.show(event)
            elif isinstance(event, Token) and not as_json:
                print(event.text, end="", flush=True)
            elif isinstance(event, End):
                return event.finish_reason
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        bar.close()
        if not as_json:
            print(flush=True)
    raise AssertionError("a run ended without an End event")


def summary(engine: Engine, run: Generation) -> str:
    """The statistics for people."""
    stats = run.stats
    lines = []
    if stats.prefill_seconds:
        rate = stats.num_prefilled_tokens / stats.prefill_seconds
        lines.append(
            f"prefill  {stats.num_prefilled_tokens} of {stats.num_prompt_tokens} tokens in "
            f"{stats.prefill_seconds:.2f} s, {rate:.0f} tokens/s"
        )
    if stats.ms_per_token is not None:
        lines.append(
            f"decode   {stats.num_decoded_tokens} tokens after the first in {stats.decode_seconds:.2f} s, "
            f"{stats.ms_per_token:.1f} ms/token, {stats.tokens_per_second:.1f} tokens/s"
        )
    lines.append(
        f"memory   weights {engine.model.num_bytes / 1e6:.0f} MB, KV cache {stats.kv_cache_bytes / 1e6:.0f} MB"
    )
    return "\n".join(lines)


def report(engine: Engine, run: Generation, args: argparse.Namespace, finish_reason: str) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    row, stats = run.rows[0], run.stats
    return {
        "model": args.model,
        "method": args.method,
        "text": row.text,
        "token_ids": row.token_ids,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_generated_tokens": stats.num_generated_tokens,
        "finish_reason": finish_reason,
        "seed": args.seed,
        "temperature": args.temperature,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "ms_per_token": stats.ms_per_token,
        "tokens_per_second": stats.tokens_per_second,
        "levels": [],  # verification levels; autoregressive decoding has none
    }


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
    generation = GenerationConfig(args.max_new_tokens, tuple(args.stop), args.ignore_eos, args.prefill_chunk)
    text = read_prompt(args)
    limit = args.max_prompt_tokens
    if args.prompt is None and args.prompt_file is None and limit is None:
        limit = DEMO_PROMPT_TOKENS
        logging.getLogger("minitri").info("prompt: the first %d tokens of --demo", limit)
    engine = load(
        args.model, dtype=args.dtype, device=args.device, rope_scaling=args.rope_scaling, progress=not args.quiet
    )
    run = engine.generate(encode_prompt(engine, text, limit), sampling=sampling, generation=generation, seed=args.seed)
    finish_reason = stream(run, as_json=args.json, quiet=args.quiet)
    if args.json:
        print(json.dumps(report(engine, run, args, finish_reason)), flush=True)
    if not args.quiet:
        print(summary(engine, run), file=sys.stderr)
    return 130 if finish_reason == "interrupted" else 0


def show_log(*, quiet: bool) -> None:
    """Sends the package's log to standard error, message only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("minitri")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    with clean_exits():
        args = build_parser().parse_args(argv)
        show_log(quiet=args.quiet)
        for output in (sys.stdout, sys.stderr):
            if hasattr(output, "reconfigure"):
                output.reconfigure(encoding="utf-8", errors="replace")
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
