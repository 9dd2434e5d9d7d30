"""The flags of `python -m minitri.generate`, in groups that other programs of the package share.

Defaults are read from the fields of the settings classes, and `settings_of` turns flags back into them. This module
loads nothing and prints nothing.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from minitri.gpu.attention import BACKENDS
from minitri.model.config import DEFAULT_MODEL, MODELS
from minitri.devices import DTYPES
from minitri.errors import InputError
from minitri.loading.fetch import default_draft
from minitri.settings import METHODS, POLICIES, GenerationConfig, SamplingParams, SpeculationConfig

DEMO_PROMPT_TOKENS = 4000
"""Length of the built-in prompt where nothing else is asked for: long enough to show, read in seconds on a laptop."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage text in front, and keeps the line breaks of its
    description and epilog."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises the line, for exit code 2."""
        raise InputError(f"{message}; see --help")


def build_parser() -> OneLineParser:
    """All flags of `generate`."""
    generation = GenerationConfig()
    parser = OneLineParser(
        prog="python -m minitri.generate",
        description="Generates text from a Llama model, streaming, after a prompt as long as its context.",
        epilog="examples:\n"
        "  python -m minitri.generate --prompt 'The sea was' --max-new-tokens 40\n"
        "  python -m minitri.generate --prompt-file novel.txt --max-prompt-tokens 8000 --temperature 0.6 --top-p 0.9\n"
        "  python -m minitri.generate --demo --method triforce --draft ngram --budget 1024 --color\n"
        "  cat novel.txt | python -m minitri.generate --prompt-file - --rope-scaling yarn:4 --json",
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", default=generation.prefill_chunk,
        help="read the prompt N tokens at a time (default: %(default)s)",
    )  # fmt: skip
    add_gpu_flags(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times; $'\\n' is a line break in most shells",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after an end-of-sequence token"
    )
    add_sampling_flags(parser)
    add_speculation_flags(parser)
    parser.add_argument(
        "--color", action="store_true", help="color each token by the stage it came from"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no progress, log or statistics on standard error"
    )
    return parser


def add_prompt_flags(
    parser: argparse.ArgumentParser, *, max_prompt_tokens: int | None = None
) -> None:
    """What the model reads, and how much it writes."""
    prompt = parser.add_argument_group("prompt (default: --demo)").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="read the prompt from a UTF-8 file; - is standard input",
    )
    prompt.add_argument(
        "--demo", action="store_true", help="take Python's own help texts, 700 KB, as the prompt"
    )
    kept = max_prompt_tokens or f"all; {DEMO_PROMPT_TOKENS} of the demo"
    parser.add_argument(
        "--max-prompt-tokens", type=positive, metavar="N", default=max_prompt_tokens,
        help=f"keep the first N tokens of the prompt (default: {kept})",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=GenerationConfig().max_new_tokens,
        help="generate at most N tokens (default: %(default)s)",
    )  # fmt: skip


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model runs, and how."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="NAME|PATH|ORG/REPO",
        help="a named model, a folder or file, or a hub repository (default: %(default)s); names: " + ", ".join(MODELS),
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", *DTYPES),
        help="of weights and KV cache (default: what is fast here)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="auto", metavar="cpu|cuda|cuda:N", help="(default: cuda if it is there)"
    )
    parser.add_argument(
        "--attention", default="auto", choices=("auto", *BACKENDS),
        help="kernel for short blocks on a GPU (default: the first that works there)",
    )  # fmt: skip
    parser.add_argument(
        "--rope-scaling", metavar="KIND:FACTOR",
        help="stretch the context, e.g. yarn:4 makes 8K 32K (default: as trained)",
    )  # fmt: skip


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    """Where the KV cache is, and how a GPU computes."""
    parser.add_argument(
        "--offload", action="store_true",
        help="on a GPU, keep the KV cache of layers for which there is no room in host memory; python -m minitri.plan "
        "says what fits",
    )  # fmt: skip
    parser.add_argument(
        "--on-chip", type=int, metavar="N",
        help="with --offload: layers whose KV cache stays on the GPU (default: as many as fit)",
    )  # fmt: skip
    parser.add_argument(
        "--no-cuda-graphs", action="store_true", help="on a GPU, launch every kernel by itself"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The law of the next token."""
    sampling = SamplingParams()
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
    law.add_argument(
        "--seed", type=int, metavar="N",
        help="makes the text repeatable: the same command with the same seed gives the same text (default: seed 0, but "
        "what is left to be chosen, method, gammas or budget, follows the clock, and then so do the draws)",
    )  # fmt: skip


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """How the cascade is stacked. Nothing here changes what the model says."""
    default = SpeculationConfig()
    group = parser.add_argument_group(
        "speculation (lossless: none of this changes the law of the text)"
    )
    group.add_argument(
        "--method", choices=METHODS, default=default.method,
        help="auto: before every step, what pays; autoregressive: the model alone; naive: a drafter guesses; "
        "retrieval: the model guesses with a small part of its KV cache; triforce: the drafter guesses for that one "
        "(default: %(default)s)",
    )  # fmt: skip
    add_draft_flag(group)
    group.add_argument(
        "--policy", choices=POLICIES, default=default.policy,
        help="what the small KV cache holds (default: %(default)s; the others are for comparison)",
    )  # fmt: skip
    add_size_flags(group)
    group.add_argument(
        "--coupled",
        action="store_true",
        help="tie the draws to seed and position: one text per seed for all methods",
    )


def add_draft_flag(parser: argparse._ActionsContainer) -> None:
    """Who guesses first."""
    parser.add_argument(
        "--draft", default="auto", metavar="NAME|DIR|ngram|none",
        help="drafter for naive and triforce: a model of the same vocabulary, or lookup of the last words in the "
        "text (default: the one that belongs to the model, else ngram)",
    )  # fmt: skip


def add_size_flags(parser: argparse._ActionsContainer) -> None:
    """How far each level runs ahead, and how much the small caches hold."""
    default = SpeculationConfig()
    for name, help_text in (
        ("gamma1", "tokens the drafter guesses at a time"),
        ("gamma2", "tokens guessed with the small KV cache before the full one verifies them"),
    ):
        parser.add_argument(
            f"--{name}", type=auto_or_int, metavar="N|auto", default=getattr(default, name),
            help=f"{help_text} (default: auto, before every step what pays)",
        )  # fmt: skip
    whole_numbers = (
        ("chunk_size", "tokens that are retrieved together"),
        ("num_sink_tokens", "first tokens of the text, which every small cache keeps"),
        ("num_recent_tokens", "latest tokens, which the drafter's cache keeps"),
        ("observation_window", "latest tokens whose queries choose what the small KV cache holds"),
        ("rebuild_stride", "new tokens after which the small KV cache is chosen anew"),
    )
    for name, help_text in whole_numbers:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", default=getattr(default, name),
            help=f"{help_text} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--budget", type=auto_or_int, metavar="N|auto", default=default.budget,
        help="tokens in the small KV cache, a multiple of the chunk size (default: a quarter of the prompt, from "
        "256 to 4096; where method or gammas are auto, it then follows what pays)",
    )  # fmt: skip
    parser.add_argument(
        "--rebuild-threshold", type=float, metavar="RATE", default=default.rebuild_threshold,
        help="choose the small KV cache anew, too, when its acceptance rate falls below this (default: %(default)s, "
        "off)",
    )  # fmt: skip


def positive(text: str) -> int:
    """A flag's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def two_rates(text: str) -> tuple[float, float]:
    """A flag's value such as 0.46,0.92."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first <= 1 and 0 <= second <= 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two rates from 0 to 1, such as 0.46,0.92"
        )
    return first, second


def auto_or_int(text: str) -> int | None:
    """A flag's value that is a whole number, or `auto`, which is None."""
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Engine.generate` that the flags stand for. Raises `InputError`."""
    return {
        "sampling": SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p),
        "generation": GenerationConfig(
            args.max_new_tokens,
            tuple(args.stop),
            args.ignore_eos,
            args.prefill_chunk,
            args.offload,
            args.on_chip,
            not args.no_cuda_graphs,
        ),
        "speculation": speculation_of(args),
        "seed": 0 if args.seed is None else args.seed,
    }


def generation_of(args: argparse.Namespace, num_new: int) -> GenerationConfig:
    """Runs for measurements: no token ends them, and their KV cache is where the flags say. Raises `InputError`."""
    return GenerationConfig(
        num_new, ignore_eos=True, offload=args.offload, on_chip=args.on_chip, cuda_graphs=not args.no_cuda_graphs
    )  # fmt: skip


def speculation_of(args: argparse.Namespace) -> SpeculationConfig:
    """The flags of `add_speculation_flags` as settings. Raises `InputError`."""
    return SpeculationConfig(
        method=args.method,
        policy=args.policy,
        gamma1=args.gamma1,
        gamma2=args.gamma2,
        budget=args.budget,
        chunk_size=args.chunk_size,
        num_sink_tokens=args.num_sink_tokens,
        num_recent_tokens=args.num_recent_tokens,
        observation_window=args.observation_window,
        rebuild_stride=args.rebuild_stride,
        rebuild_threshold=args.rebuild_threshold,
        coupled=args.coupled,
        timed=args.seed is None,
    )


def draft_of(args: argparse.Namespace) -> str:
    """The drafter that the flags ask for: a name, a path, or `ngram`. Raises `InputError` if one is missing."""
    needs_drafter = args.method in ("auto", "naive", "triforce")
    if args.draft == "none" and needs_drafter:
        raise InputError(
            f"--method {args.method} needs a drafter, got --draft none; use --method retrieval"
        )
    if not needs_drafter or args.draft == "none":
        return "ngram"  # which costs nothing and is not used
    if args.draft == "auto" and args.method != "auto":
        return default_draft(
            args.model
        )  # which must be had; with --method auto `load` finds a way without it
    return str(args.draft)


def ignored_flags(args: argparse.Namespace) -> list[str]:
    """Flags that were set although the method has no use for them."""
    default = SpeculationConfig()
    ignored: list[str] = []
    if args.method == "auto":
        return ignored
    if args.method in ("autoregressive", "retrieval"):
        ignored += ["--draft"] * (args.draft not in ("auto", "none"))
        ignored += ["--gamma1"] * (args.gamma1 != default.gamma1)
    names: list[str] = []
    if args.method in ("autoregressive", "naive"):
        names += [
            "policy",
            "gamma2",
            "budget",
            "chunk_size",
            "observation_window",
            "rebuild_stride",
        ]
        names += ["rebuild_threshold"]
    if args.method == "autoregressive" or (args.method == "naive" and draft_of(args) == "ngram"):
        names += ["num_sink_tokens", "num_recent_tokens"]
    ignored += [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(args, name) != getattr(default, name)
    ]
    return ignored
