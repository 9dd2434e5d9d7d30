"""The flags of the programs, in groups that they share, and the settings that flags stand for.

A flag for a field of a settings class takes its kind and default from the field and its help from
the text below it. This module loads nothing.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig, __version__
from minitri.core.errors import MAX_COUNT, shorten
from minitri.core.fields import between, changed
from minitri.core.log import log
from minitri.core.settings import Bias
from minitri.files.named_models import ModelChoice
from minitri.text.grammar import Grammar
from minitri.text.prompt_ids import MAX_SEED

Settings = TypeVar("Settings")
Flags = argparse._ActionsContainer
"""A parser, or a group of its flags."""

SHORT = {"model": ["-m"], "prompt": ["-p"], "max_new_tokens": ["-n"]}
SHORT |= {"quiet": ["-q"], "verbose": ["-v"]}
SETTING = re.compile(r"(?<![\w=-])([a-z][a-z0-9_]*)=(True|False|(?=[^\s;,)]))?")
"""One in a message, as a parameter."""


@dataclasses.dataclass(frozen=True)
class SharedFlags:
    """What several programs ask for and no other class holds."""

    quiet: bool = False
    """No progress, log or statistics on standard error."""
    verbose: bool = False
    """More about files, kernels and memory on standard error."""
    threads: int | None = between(None, 1, 1024)
    """Cores of a CPU to compute on; leave some to other programs. Default: all."""
    bitwise: bool = False
    """Stop with an error where texts might differ in the last bits: without compiled kernels."""
    prompt: str | None = None
    """The prompt itself."""
    prompt_file: str | None = None
    """A UTF-8 file; - is standard input."""
    demo: bool = False
    """The help texts of Python, 700 KB."""
    max_prompt_tokens: int | None = between(None, 1)
    """Keep the first N tokens of the prompt; of the demo 4000 if nothing else is said."""
    seed: int | None = between(None, 0, MAX_SEED)
    """The same command with the same seed writes the same text. Default: drawn."""
    system: str | None = None
    """How the model is to behave: a message of the system."""
    color: bool = False
    """Color each token by the stage it came from."""
    kv_store: str | None = None
    """Folder, or URL of fsspec, where K and V of prompts are kept for later and for others."""
    kv_store_size: float = between(10.0, 0.001)
    """GiB that it may hold; what was not used for longest goes."""


SETTINGS = (ModelChoice, SharedFlags, SamplingParams, GenerationConfig, SpeculationConfig)
"""Whose fields are flags; no two have the same name. The following are those that go together."""
MODEL = {*vars(ModelChoice()), "threads", "bitwise"} - {"draft"}
MEMORY = ("prefill_chunk", "offload", "on_chip", "cuda_graphs", "kv_store", "kv_store_size")
SAMPLING = [*vars(SamplingParams())]
WINDOW = ("num_sink_tokens", "num_recent_tokens")
"""Of the drafter's cache."""
RETRIEVAL = ("gamma2", "budget", "chunk_size", "observation_window", "rebuild_stride")
SIZES = ("gamma1", *RETRIEVAL, *WINDOW, "tree", "verification")
SPECULATION = ("method", "coupled", "draft", *SIZES)
UNUSED: dict[str, tuple[str, ...]] = {
    "autoregressive": ("draft", "gamma1", *RETRIEVAL, *WINDOW),
    "naive": RETRIEVAL,
    "retrieval": ("draft", "gamma1"),
}
"""What methods have no use for; the others use all."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of a flag that is a number or a word, unless its help text tells it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_value = type(action.default) in (int, float, str) and action.default != argparse.SUPPRESS
        return text + " (default: %(default)s)" * (is_value and "default:" not in text.lower())


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage text in front."""

    def __init__(self, program: str = "", *examples: str, **settings: Any) -> None:
        """`examples` are flags of `minitri PROGRAM`."""
        if program:
            settings |= {"prog": f"minitri {program}", "usage": "%(prog)s [flags]"}
            lines = ["examples:", *(f"  minitri {program} {flags}" for flags in examples)]
            settings["epilog"] = "\n".join(lines)
        super().__init__(formatter_class=HelpFormatter, **settings)
        self.add_argument("--version", action="version", version=f"minitri {__version__}")
        add_flags(self, "quiet", "verbose")

    def in_flags(self, error: InputError) -> str:
        """What went wrong in the words of this program: settings as its flags, and of the ways out
        those whose settings it has."""
        flags = {
            name: flag
            for action in self._actions
            for flag in action.option_strings[::-1]
            if flag.startswith("--")
            for name in (flag[2:].replace("-", "_"), action.dest)
        }

        def spelled(match: re.Match[str]) -> str:
            name, value = match.groups()
            if name not in flags:
                return match[0]
            if value == "False":
                return f"--no-{flags[name][2:]}"
            return flags[name] + " " * (value == "")

        ways = [it for it in error.ways if all(one[1] in flags for one in SETTING.finditer(it))]
        text = SETTING.sub(spelled, str(InputError(error.message, *ways)))
        name, _, rest = text.partition(" is ")
        return f"{flags[name]} is {rest}" if name in flags else text

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{shorten(message, 400)}; see --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"]:  # --flag=--, which argparse takes for an empty list
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def whole(least: int, most: float = MAX_COUNT) -> Callable[[str], int]:
    """How to read a flag's value that must be a whole number within bounds."""

    def read(text: str) -> int:
        if re.fullmatch("-?[0-9]{1,10}", text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{shorten(repr(text), 60)} is not a whole number from {least} to {most}"
        )

    return read


positive = whole(1)


def read_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit, of `ID:BIAS`."""
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        problem = f"{shorten(repr(text), 60)} is not a token id and a number, as in 42:-1.5"
        raise argparse.ArgumentTypeError(problem) from None


class GrammarFlag(argparse.Action):
    """Makes the setting `grammar` of a flag's value; several choices are one grammar."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, value: Any, _flag: object = None
    ) -> None:
        """Raises `InputError`."""
        kind = self.const
        if kind == "choice":
            earlier = namespace.grammar
            value = json.dumps([*(json.loads(earlier.text) if earlier else ()), value])
        elif kind == "lark" or (kind == "json_schema" and not value.lstrip().startswith("{")):
            from minitri.apps.cli.inputs import read_text  # with parts of PyTorch

            value = read_text(value, self.option_strings[0])
        namespace.grammar = Grammar(kind, value or "")


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """One way to say what the whole output must be."""
    title = "grammar of the whole output (needs minitri[grammar]); one of"
    group = parser.add_argument_group(title).add_mutually_exclusive_group()
    for name, kind, metavar, text in (
        ("--json-schema", "json_schema", "FILE|JSON", "JSON that this schema allows"),
        ("--json-object", "json_object", None, "any object of JSON"),
        ("--regex", "regex", "REGEX", "what this regular expression matches"),
        ("--grammar", "lark", "FILE", "what the rule start of this Lark grammar derives"),
        ("--choice", "choice", "TEXT", "this text; may be given several times: one of them"),
    ):
        options: dict[str, Any] = {"nargs": None if metavar else 0, "metavar": metavar}
        group.add_argument(
            name, action=GrammarFlag, const=kind, dest="grammar", help=text, **options
        )


def add_flags(flags: Flags, *names: str, title: str = "") -> None:
    """A flag for each of these fields of `SETTINGS`, in a group of their own if it has a title."""
    group = flags.add_argument_group(title) if title else flags
    for settings in SETTINGS:
        add_fields(group, settings, *names)


def add_fields(flags: Flags, settings: type[Any], *names: str) -> None:
    """A flag for each of these fields of a settings class, by default all."""
    texts = field_texts(settings)  # type: ignore[arg-type]  # a class has a hash
    for field in dataclasses.fields(settings):
        if (names and field.name not in names) or field.name == "grammar":
            continue
        text = texts[field.name]
        options: dict[str, Any] = {"default": field.default}
        begins_with_a_name = text[1].isupper()
        options["help"] = (text[0] if begins_with_a_name else text[0].lower()) + text[1:-1]
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        elif field.type == Sequence[str]:
            options |= {"action": "append", "default": []}
        elif field.type == Bias:
            options |= {"action": "append", "default": [], "type": read_bias, "metavar": "ID:BIAS"}
        elif field.type in (int, int | None):
            options |= {"type": whole(*field.metadata["range"]), "metavar": "N"}
        elif field.type in (float, float | None):
            options["type"] = float
        else:
            options["choices"] = field.metadata.get("choices")
        flags.add_argument(*SHORT.get(field.name, []), as_flag(field.name), **options)


def as_flag(name: str) -> str:
    """How a setting is spelled."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def field_texts(settings: type) -> dict[str, str]:
    """The text below each field of a class; every field has one."""
    found = re.findall(r'^    (\w+): .*?"""(.*?)"""', inspect.getsource(settings), re.M | re.S)
    return {name: " ".join(text.split()).replace(r"\\", "\\") for name, text in found}


def add_prompt_flags(parser: argparse.ArgumentParser, default: str = "demo") -> Flags:
    """What the model reads, and how much it writes; returns the group of which one may be given."""
    title = f"prompt (default: {default})"
    group = parser.add_argument_group(title).add_mutually_exclusive_group()
    add_flags(group, "prompt", "prompt_file", "demo")
    add_flags(parser, "max_prompt_tokens", "max_new_tokens")
    return group


def add_decoding_flags(parser: argparse.ArgumentParser, otherwise: str = "greedy") -> None:
    """Speculation, and sampling that the model's files decide where no flag does: those are None
    then."""
    title = f"sampling (default: as the model's generation_config.json says, or else {otherwise})"
    add_flags(parser, *SAMPLING, "seed", title=title)
    add_grammar_flags(parser)
    parser.set_defaults(**dict.fromkeys(SAMPLING))
    title = "speculation (none of this changes the text's distribution)"
    add_flags(parser, *SPECULATION, title=title)


def taken(
    settings: type[Settings],
    args: argparse.Namespace,
    base: Settings | None = None,
    **others: Any,
) -> Settings:
    """Settings by the flags that are named after their fields, the rest as in `base`, or by
    default. Raises `InputError`."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return changed(base or settings(), given | others)


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `load` by the flags. Names those that the method has no use for."""
    options = vars(taken(ModelChoice, args)) | {"progress": not args.quiet and sys.stderr.isatty()}
    defaults = {"draft": "auto", **vars(SpeculationConfig())}
    unused = UNUSED.get(vars(args).get("method", ""), ())
    for name in unused:
        if vars(args).get(name, defaults[name]) != defaults[name]:
            log.warning("%s is ignored: --method %s has no use for it", as_flag(name), args.method)
    if "draft" in unused:
        options["draft"] = "suffix"
    if "budget" in unused and options["draft_weights"] != "same":
        options["draft_weights"] = "drafter"
    return options


def speculation_of(args: argparse.Namespace) -> SpeculationConfig:
    """How the flags want to speculate; by the clock if no seed is given. Raises `InputError`."""
    return taken(SpeculationConfig, args, timed=args.seed is None)
