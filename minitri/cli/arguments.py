"""The flags of the programs, in groups that they share, and the settings that flags stand for.

Flags for a field of `SamplingParams`, `GenerationConfig` or `SpeculationConfig` take their kind and
default from the field and their help from the text below it. This module loads nothing.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from minitri import __version__
from minitri.errors import MAX_COUNT, InputError, shorten
from minitri.gpu.attention_backends import BACKENDS
from minitri.loading.devices import DRAFT_WEIGHTS, DTYPES, WEIGHTS
from minitri.loading.fetch import LOOKUPS, default_draft
from minitri.loading.named_models import DEFAULT_MODEL, MODELS
from minitri.loading.prompt_ids import MAX_SEED
from minitri.settings import (
    METHODS,
    VERIFICATIONS,
    GenerationConfig,
    SamplingParams,
    SpeculationConfig,
)

log = logging.getLogger("minitri")

Settings = TypeVar("Settings", SamplingParams, GenerationConfig, SpeculationConfig)
Flags = argparse._ActionsContainer
"""A parser, or a group of its flags."""

DEMO_PROMPT_TOKENS = 4000
"""Length of the built-in prompt where no other is asked for: read in seconds on a laptop."""
WITH_DRAFTER = ("auto", "naive", "triforce")
"""Methods that a drafter guesses for."""
WINDOW = ["num_sink_tokens", "num_recent_tokens"]
RETRIEVAL = ["gamma2", "budget", "chunk_size", "observation_window", "rebuild_stride"]
"""Settings of the drafter's cache, and of the retrieval level."""
CHOICES = {"method": METHODS, "verification": VERIFICATIONS}
METAVARS = {"temperature": "T", "top_k": "K", "top_p": "P", "min_p": "P", "logprobs": "K"}
METAVARS |= {"stop": "TEXT", "tree": "N|WxD"}
SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
SHORT = {"max_new_tokens": ["-n"], "quiet": ["-q"]}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of a flag that has one, unless its help text tells it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if default in (None, False, "", argparse.SUPPRESS) or action.nargs == 0:
            return text
        is_told = "default:" in text or not isinstance(default, int | float | str)
        return text if is_told else f"{text} (default: %(default)s)"


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

    def read(text: str) -> int:
        if re.fullmatch("-?[0-9]{1,10}", text) and least <= int(text) <= most:
            return int(text)
        bounds = f" from {least} to {most}" if least > -MAX_COUNT else f" of at most {most}"
        value = shorten(repr(text), 60)
        raise argparse.ArgumentTypeError(f"{value} is not a whole number{bounds}")

    return read


positive = whole(1)


def two_rates(text: str) -> tuple[float, float]:
    """A flag's value such as 0.46,0.92."""
    rate = r"(0?\.[0-9]+|0|1|1\.0+)"
    if not (found := re.fullmatch(f"{rate},{rate}", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not two rates from 0 to 1, as in 0.46,0.92")
    return float(found[1]), float(found[2])


def add_fields(flags: Flags, settings: type[Settings], *names: str) -> None:
    """A flag for each of these fields of a settings class."""
    texts = field_texts(settings)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for name in names:
        text, _, default = texts.get(name, "").rstrip(".").partition(". Default: ")
        text = text[:1].lower() + text[1:] + (f" (default: {default})" if default else "")
        options: dict[str, Any] = {"default": fields[name].default, "help": text.replace("%", "%%")}
        options |= kind_of(fields[name])
        flags.add_argument(*SHORT.get(name, []), f"--{name.replace('_', '-')}", **options)


def kind_of(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """How a field is given on a command line, by its type."""
    name = field.name
    if name in CHOICES:
        return {"choices": CHOICES[name]}
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if field.type == Sequence[str]:
        return {"action": "append", "metavar": METAVARS[name], "default": []}
    if field.type in (float, str):
        return {"type": field.type, "metavar": METAVARS[name]}
    if field.type is int:
        return {"type": whole(), "metavar": "N"}
    metavar = METAVARS.get(name, "N|auto")
    return {"type": lambda text: None if text == "auto" else whole()(text), "metavar": metavar}


def field_texts(settings: type) -> dict[str, str]:
    """The text below each field of a class."""
    [definition] = ast.parse(inspect.getsource(settings)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, below in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts


def add_switches(flags: Flags, **texts: str) -> None:
    """Flags without a value, each with its help text."""
    for name, text in texts.items():
        names = *SHORT.get(name, []), f"--{name.replace('_', '-')}"
        flags.add_argument(*names, action="store_true", help=text)


def add_model_flags(flags: Flags) -> None:
    """Which model runs, and how."""
    text = "a named model, a folder or file, or a hub repository; names: " + ", ".join(MODELS)
    name = "NAME|PATH|ORG/REPO"
    flags.add_argument("-m", "--model", default=DEFAULT_MODEL, metavar=name, help=text)
    copy = "of the target (same), or of a copy in fewer bits, where it guesses with the retrieval "
    copy += "cache; the text stays the same (default: int4 where compiled kernels run)"
    for name, choices, text in (
        ("dtype", ("auto", *DTYPES), "of weights and KV cache (default: what is fast here)"),
        ("attention", ("auto", *BACKENDS), "of short blocks on a GPU (default: first that works)"),
        ("weights", WEIGHTS, "native keeps the 4 or 8 bits of a GGUF file (default: in --dtype)"),
        ("draft-weights", DRAFT_WEIGHTS, copy),
    ):
        flags.add_argument(f"--{name}", default="auto", choices=choices, help=text)
    text = "(default: cuda if it is there)"
    flags.add_argument("--device", default="auto", metavar="cpu|cuda|cuda:N", help=text)
    text = "stretch the context, e.g. yarn:4 makes 8K 32K (default: as trained)"
    flags.add_argument("--rope-scaling", metavar="KIND:FACTOR", help=text)
    text = "cores of a CPU to compute on (default: all; leave some to other programs)"
    flags.add_argument("--threads", type=whole(1, 1024), metavar="N", help=text)
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
    text = f"keep the first N tokens of the prompt (default of the demo: {DEMO_PROMPT_TOKENS})"
    parser.add_argument("--max-prompt-tokens", type=positive, metavar="N", help=text)
    parser.set_defaults(max_prompt_tokens=max_prompt_tokens)
    text = "tokens that are kept of a prompt too long for the context (default: an error)"
    parser.add_argument("--fit", choices=("first", "last"), help=text)
    add_fields(parser, GenerationConfig, "max_new_tokens")
    return group


def add_gpu_flags(flags: Flags) -> None:
    """Where the KV cache is, and how a GPU computes."""
    add_fields(flags, GenerationConfig, "offload", "on_chip", "cuda_graphs")


def add_sampling_flags(
    parser: argparse.ArgumentParser, seed: str = "of the first run (default: 0)", about: str = ""
) -> None:
    """The distribution of the next token, and the seed with its help text."""
    group = parser.add_argument_group("sampling", about)
    add_fields(group, SamplingParams, *SAMPLING)
    group.add_argument("--seed", type=whole(0, MAX_SEED), metavar="N", help=seed)


def add_open_sampling_flags(parser: argparse.ArgumentParser, seed: str) -> None:
    """Sampling that the model's files decide where no flag does: flags are None then."""
    about = "default: as the model's generation_config.json says, or else greedy"
    add_sampling_flags(parser, seed, about)
    parser.set_defaults(**dict.fromkeys(SAMPLING))


def add_draft_flag(flags: Flags) -> None:
    """Who guesses first."""
    text = "drafter for naive and triforce: a model of the same vocabulary, or suffix, which looks "
    text += "the last words up in the text (default: the one made for the model, else suffix)"
    flags.add_argument("--draft", default="auto", metavar="NAME|DIR|suffix|none", help=text)


def add_size_flags(flags: Flags) -> None:
    """How far each level guesses ahead, and how much the small caches hold."""
    add_fields(flags, SpeculationConfig, "gamma1", *RETRIEVAL, *WINDOW, "tree", "verification")


def add_speculation_flags(parser: argparse.ArgumentParser, about: str) -> None:
    """Everything about guessing, in a group of its own."""
    group = parser.add_argument_group(f"speculation ({about})")
    add_fields(group, SpeculationConfig, "method")
    add_draft_flag(group)
    add_size_flags(group)
    add_fields(group, SpeculationConfig, "coupled")


def add_rates_flag(flags: Flags, name: str, text: str) -> None:
    """Acceptance rates to assume, of the drafter's guesses and of the retrieval level's."""
    options: dict[str, Any] = {"type": two_rates, "metavar": "DRAFT,RETRIEVAL"}
    text += " (default: 0.46,0.92, about the paper's)"
    flags.add_argument(f"--{name}", default=(0.46, 0.92), help=text, **options)


def taken(settings: type[Settings], args: argparse.Namespace, **others: Any) -> Settings:
    """Settings by the flags that are named after their fields. Raises `InputError`."""
    flags = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(settings)}
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
    return {**options, "progress": not args.quiet and sys.stderr.isatty()}


def speculation_of(args: argparse.Namespace) -> SpeculationConfig:
    """How the flags want to speculate; by the clock if no seed is given. Raises `InputError`."""
    return taken(SpeculationConfig, args, timed=args.seed is None)


def draft_of(args: argparse.Namespace) -> str:
    """The drafter that the flags ask for. Raises `InputError` if one is missing."""
    if args.method not in WITH_DRAFTER:
        return "suffix"  # which costs nothing and is not used
    if args.draft == "none":
        raise InputError(f"--method {args.method} needs a drafter; give --draft suffix or another")
    if args.draft == "auto" and args.method != "auto":
        return default_draft(args.model)  # must be had; for --method auto `load` may do without
    return str(args.draft)


def warn_of_ignored(args: argparse.Namespace) -> None:
    """Names the flags that were set although the method has no use for them."""
    uses_drafter = args.method in WITH_DRAFTER
    uses_retrieval = args.method not in ("autoregressive", "naive")
    uses_window = uses_retrieval or (uses_drafter and draft_of(args) not in LOOKUPS)
    unused = [] if uses_drafter else ["draft", "gamma1"]
    unused += [] if uses_retrieval else RETRIEVAL
    unused += [] if uses_window else WINDOW
    unset = {"draft": "none" if args.draft == "none" else "auto", **vars(SpeculationConfig())}
    for name in unused:
        if getattr(args, name) != unset[name]:
            flag = name.replace("_", "-")
            log.warning("--%s is ignored: --method %s has no use for it", flag, args.method)
