"""The flags of the programs, in groups that they share, and the settings that flags stand for.

Flags for a field of `SamplingParams`, `GenerationConfig` or `SpeculationConfig` take their default
from the field and their help from the text below it. This module loads nothing, prints nothing.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from minitri import __version__
from minitri.errors import MAX_COUNT, InputError, shorten
from minitri.gpu.attention_backends import BACKENDS
from minitri.loading.devices import DRAFT_WEIGHTS, DTYPES, WEIGHTS
from minitri.loading.fetch import default_draft, split_draft
from minitri.loading.named_models import DEFAULT_MODEL, MODELS
from minitri.loading.prompts import MAX_SEED
from minitri.settings import (
    METHODS,
    POLICIES,
    VERIFICATIONS,
    GenerationConfig,
    SamplingParams,
    SpeculationConfig,
)

Settings = TypeVar("Settings", SamplingParams, GenerationConfig, SpeculationConfig)
Flags = argparse._ActionsContainer
"""A parser, or a group of its flags."""

MAX_THREADS = 1024
DEMO_PROMPT_TOKENS = 4000
"""Length of the built-in prompt where no other is asked for: read in seconds on a laptop."""
WITH_DRAFTER = ("auto", "naive", "triforce")
"""Methods that a drafter guesses for."""
WINDOW = ("num_sink_tokens", "num_recent_tokens")
"""Settings of the drafter's cache."""
RETRIEVAL = (
    "gamma2", "budget", "chunk_size", "observation_window", "rebuild_stride", "rebuild_threshold",
)  # fmt: skip
"""Settings of the retrieval level."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of a flag that has one, unless its help text tells it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, value = action.help or "", action.default
        is_value = isinstance(value, int | float | str) and not isinstance(value, bool)
        if not is_value or value == argparse.SUPPRESS or "default:" in text:
            return text
        return f"{text} (default: {'%(default)g' if isinstance(value, float) else '%(default)s'})"


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage text in front."""

    def __init__(self, program: str = "", *examples: str, **settings: Any) -> None:
        """`examples` are flags of `python -m minitri.PROGRAM`, or `minitri PROGRAM`."""
        if program:
            is_command = Path(sys.argv[0]).stem == "minitri"
            command = f"minitri {program}" if is_command else f"python -m minitri.{program}"
            lines = ["examples:", *(f"  {command} {flags}" for flags in examples)]
            settings |= {"prog": command, "epilog": "\n".join(lines), "usage": "%(prog)s [flags]"}
        super().__init__(formatter_class=HelpFormatter, **settings)
        self.add_argument("--version", action="version", version=f"minitri {__version__}")

    def error(self, message: str) -> NoReturn:
        """Raises the line, for exit code 2."""
        raise InputError(f"{shorten(message, 400)}; see --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"]:  # --flag=--, which argparse takes for an empty list
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def whole(least: int = -MAX_COUNT, most: int = MAX_COUNT) -> Callable[[str], int]:
    """How to read a flag's value that must be a whole number within bounds."""
    bounds = f" from {least} to {most}" if least > -MAX_COUNT else f" of at most {most}"

    def read(text: str) -> int:
        if re.fullmatch("-?[0-9]{1,10}", text) and least <= int(text) <= most:
            return int(text)
        value = shorten(repr(text), 60)
        raise argparse.ArgumentTypeError(f"{value} is not a whole number{bounds}")

    return read


positive = whole(1)


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


def auto_or_whole(text: str) -> int | None:
    """A flag's value that is a whole number, or `auto`, which is None."""
    return None if text == "auto" else whole()(text)


SWITCH: dict[str, Any] = {"action": "store_true"}
AUTO: dict[str, Any] = {"type": auto_or_whole, "metavar": "N|auto"}
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"type": float, "metavar": "T"}, "top_k": {"type": whole(), "metavar": "K"},
    "top_p": {"type": float, "metavar": "P"}, "min_p": {"type": float, "metavar": "P"},
    "stop": {"action": "append", "metavar": "TEXT", "default": []},
    "ignore_eos": SWITCH, "offload": SWITCH, "coupled": SWITCH,
    "logprobs": {"type": whole(), "metavar": "K"},
    "method": {"choices": METHODS}, "policy": {"choices": POLICIES},
    "gamma1": AUTO, "gamma2": AUTO, "budget": AUTO,
    "rebuild_threshold": {"type": float, "metavar": "RATE"},
    "tree": {"metavar": "N|WxD"}, "verification": {"choices": VERIFICATIONS},
}  # fmt: skip
"""How the fields are given on a command line; those that are not here are counts."""
SHORT = {"max_new_tokens": ["-n"], "model": ["-m"], "quiet": ["-q"]}


def add_fields(flags: Flags, settings: type[Settings], *names: str) -> None:
    """A flag for each of these fields of a settings class."""
    texts = field_texts(settings)
    for name in names:
        text, _, default = texts.get(name, "").rstrip(".").partition(". Default: ")
        text = text[:1].lower() + text[1:] + (f" (default: {default})" if default else "")
        options = {"default": getattr(settings(), name), "help": text.replace("%", "%%")}
        options |= KINDS.get(name, {"type": whole(), "metavar": "N"})
        flags.add_argument(*SHORT.get(name, []), f"--{name.replace('_', '-')}", **options)


def add_switches(flags: Flags, **texts: str) -> None:
    """Flags without a value, each with its help text."""
    for name, text in texts.items():
        names = *SHORT.get(name, []), f"--{name.replace('_', '-')}"
        flags.add_argument(*names, action="store_true", help=text)


def field_texts(settings: type) -> dict[str, str]:
    """The text below each field of a class; empty where its source is not at hand."""
    try:
        [definition] = ast.parse(inspect.getsource(settings)).body
    except (OSError, TypeError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, below in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts


def add_model_flags(flags: Flags) -> None:
    """Which model runs, and how."""
    names = ", ".join(MODELS)
    for name, default, choices, metavar, text in (
        ("model", DEFAULT_MODEL, None, "NAME|PATH|ORG/REPO", "a named model, a folder or file, or "
         f"a hub repository (default: %(default)s); names: {names}"),
        ("dtype", "auto", ("auto", *DTYPES), None,
         "of weights and KV cache (default: what is fast here)"),
        ("device", "auto", None, "cpu|cuda|cuda:N", "(default: cuda if it is there)"),
        ("attention", "auto", ("auto", *BACKENDS), None,
         "kernel for short blocks on a GPU (default: the first that works there)"),
        ("weights", "auto", WEIGHTS, None,
         "on a CPU native keeps the Q4_0, Q4_1 and Q8_0 of a GGUF file as they are, which takes "
         "less memory (default: in --dtype)"),
        ("draft-weights", "auto", DRAFT_WEIGHTS, None,
         "of the target where it guesses with its retrieval cache: its own, or a copy; int4 is for "
         "CPUs, the text stays the same (default: int4 where compiled kernels run)"),
        ("rope-scaling", None, None, "KIND:FACTOR",
         "stretch the context, e.g. yarn:4 makes 8K 32K (default: as trained)"),
    ):  # fmt: skip
        options: dict[str, Any] = {"choices": choices, "metavar": metavar, "help": text}
        flags.add_argument(*SHORT.get(name, []), f"--{name}", default=default, **options)
    text = "cores of a CPU to compute on (default: all; leave some to other programs)"
    flags.add_argument("--threads", type=whole(1, MAX_THREADS), metavar="N", help=text)
    text = "stop with an error where texts might differ in the last bits: without compiled kernels"
    flags.add_argument("--bitwise", action="store_true", help=text)


def add_prompt_flags(
    parser: argparse.ArgumentParser, *, max_prompt_tokens: int | None = None, default: str = "demo"
) -> Flags:
    """What the model reads, and how much it writes; returns the group of which one may be given."""
    group = parser.add_argument_group(f"prompt (default: {default})")
    group = group.add_mutually_exclusive_group()
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file; - is standard input")
    group.add_argument("--demo", action="store_true", help="Python's own help texts, 700 KB")
    kept = max_prompt_tokens or f"all; {DEMO_PROMPT_TOKENS} of the demo"
    parser.add_argument(
        "--max-prompt-tokens", type=positive, metavar="N", default=max_prompt_tokens,
        help=f"keep the first N tokens of the prompt (default: {kept})",
    )  # fmt: skip
    text = "tokens that are kept of a prompt too long for the context (default: an error)"
    parser.add_argument("--fit", choices=("first", "last"), help=text)
    add_fields(parser, GenerationConfig, "max_new_tokens")
    return group


def add_gpu_flags(flags: Flags) -> None:
    """Where the KV cache is, and how a GPU computes."""
    add_fields(flags, GenerationConfig, "offload", "on_chip")
    text = "on a GPU, launch every kernel by itself"
    flags.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false", help=text)


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    seed: str = "of the first run (default: 0)",
    about: str | None = None,
) -> None:
    """The distribution of the next token, and the seed with its help text."""
    group = parser.add_argument_group("sampling", about)
    add_fields(group, SamplingParams, "temperature", "top_k", "top_p", "min_p")
    group.add_argument("--seed", type=whole(0, MAX_SEED), metavar="N", help=seed)


def add_draft_flag(flags: Flags) -> None:
    """Who guesses first."""
    flags.add_argument(
        "--draft", default="auto", metavar="NAME|DIR|layers:FILE|suffix|datastore:FILE|none",
        help="drafter for naive and triforce: a model of the same vocabulary; layers:FILE, some"
        " layers of the target (tools/find_layers.py); suffix, which looks the last words up in the"
        " text; or datastore:FILE, which does so in other texts, too (tools/build_datastore.py); a"
        " lookup and a model with a comma between take turns (default: the one that belongs to the"
        " model, else suffix)",
    )  # fmt: skip
    text = "let suffix and datastore look words up in the texts of earlier prompts, too"
    flags.add_argument("--draft-history", action="store_true", help=text)


def add_size_flags(flags: Flags) -> None:
    """How far each level guesses ahead, and how much the small caches hold."""
    add_fields(flags, SpeculationConfig, "gamma1", *RETRIEVAL, *WINDOW, "tree", "verification")


def add_rates_flag(flags: Flags, name: str, text: str) -> None:
    """Acceptance rates to assume, of the drafter's guesses and of the retrieval level's."""
    options: dict[str, Any] = {"type": two_rates, "metavar": "DRAFT,RETRIEVAL"}
    text += " (default: 0.46,0.92, about the paper's)"
    flags.add_argument(f"--{name}", default=(0.46, 0.92), help=text, **options)


def taken(settings: type[Settings], args: argparse.Namespace, **others: Any) -> Settings:
    """Settings by the flags that are named after their fields, and that were given or have a
    default. Raises `InputError`."""
    names = [field.name for field in dataclasses.fields(settings)]
    flags = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in flags.items() if value is not None}
    return settings(**{**given, **others})


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `load` that the flags stand for, without the drafter.

    Methods without a retrieval level have no use for a copy of the weights.
    """
    if getattr(args, "method", None) in ("autoregressive", "naive"):
        args.draft_weights = "same"
    names = ("model", "dtype", "device", "attention", "rope_scaling", "weights", "draft_weights")
    options = {name: getattr(args, name) for name in names}
    is_used = getattr(args, "method", None) in WITH_DRAFTER
    options["draft_history"] = getattr(args, "draft_history", False) and is_used
    return {**options, "progress": not args.quiet and sys.stderr.isatty()}


def speculation_of(args: argparse.Namespace) -> SpeculationConfig:
    """How the flags want to speculate; by the clock if no seed is given. Raises `InputError`."""
    return taken(SpeculationConfig, args, timed=args.seed is None)


def draft_of(args: argparse.Namespace) -> str:
    """The drafter that the flags ask for: a name, a path, `suffix` or a datastore.

    Raises `InputError` if one is missing.
    """
    if args.method not in WITH_DRAFTER:
        return "suffix"  # which costs nothing and is not used
    if args.draft == "none":
        raise InputError(
            f"--method {args.method} needs a drafter, got --draft none; use --method retrieval"
        )
    if args.draft == "auto" and args.method != "auto":
        return default_draft(args.model)  # must be had; for --method auto `load` may do without
    return str(args.draft)


def ignored_flags(args: argparse.Namespace) -> list[str]:
    """Flags that were set although the method has no use for them."""
    unused: list[str] = []
    if args.method in ("autoregressive", "retrieval"):
        unused += ["gamma1"] if args.draft in ("auto", "none") else ["draft", "gamma1"]
        unused += ["draft_history"] * args.draft_history
    if args.method in ("autoregressive", "naive"):
        unused += ["policy", *RETRIEVAL]
    if args.method == "autoregressive" or (
        args.method == "naive" and not split_draft(draft_of(args))[1]
    ):
        unused += WINDOW
    defaults = vars(SpeculationConfig())
    changed = [name for name in unused if getattr(args, name) != defaults.get(name)]
    return [f"--{name.replace('_', '-')}" for name in changed]
