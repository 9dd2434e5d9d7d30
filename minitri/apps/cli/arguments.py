"""Command line flags that programs share, and the settings that they stand for.

A flag takes type and default from a field of a settings class, and its help from the text below the
field. Imports nothing of PyTorch."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import json
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.apps.cli.documents import read_text
from minitri.core.errors import MAX_COUNT, shorten
from minitri.core.fields import changed
from minitri.core.log import log
from minitri.core.settings import Bias
from minitri.files.named_models import ModelChoice
from minitri.text.grammar import Grammar

Settings = TypeVar("Settings")
HELP = Path(__file__).parents[1].joinpath("help.txt").read_text("utf-8")
TABLE = json.loads(Path(__file__).parents[1].joinpath("flags.json").read_text("utf-8"))
"""By key: `flags` that are no fields; `short` names; `topics`; flags of `programs` by heading;
their `defaults`; full `titles`; `exclusive` headings, for one flag only; more `arguments` by
heading or program; what a flag `needs`; flags `unused` by a method; `rare` ones: --help-all."""
SETTING = re.compile(r"(?<![\w=-])([a-z][a-z0-9_]*)=(True|False|(?=[^\s;,)]))?")
"""A setting in an error message, spelled as a parameter: `budget=30`, `budget=`, `offload=True`."""
SETTINGS = (ModelChoice, SamplingParams, GenerationConfig, SpeculationConfig)
"""Classes whose fields are flags; no two fields share a name."""


class Help(argparse._HelpAction):
    """Action of -h and --help, which show flags that most people need, and of --help-all (all).
    The help of a flag ends with its default if this is a number or a word."""

    def __call__(self, parser: ArgumentParser, *words: Any) -> None:
        for action in parser._actions:
            text = action.help or ""
            default = action.default
            is_value = type(default) in (int, float, str) and default != SUPPRESS
            if words[-1] != "--help-all" and {*TABLE["rare"]} & {*action.option_strings}:
                action.help = SUPPRESS
            elif is_value and "default:" not in text.lower():
                action.help = f"{text} (default: %(default)s)"
        super().__call__(parser, *words)


class OneLineParser(ArgumentParser):
    """An argument parser whose errors are `InputError`s of one line, without the usage."""

    def __init__(self, program: str = "", *own: type[Any], **settings: Any) -> None:
        """Makes the parser of a `program` in help.txt, its flags as in flags.json; `own` has more
        classes whose fields are flags. Without a program, `settings` are argparse's arguments."""
        if program:
            [about, *examples] = re.findall(rf"^(?:minitri|) +{program} .*", HELP, re.MULTILINE)
            settings = {
                "prog": f"minitri {program}",
                "usage": "%(prog)s [flags]",
                "description": about.split(None, 1)[1],
                "epilog": "\n  ".join(["examples:", *examples]),
            }
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=layout, add_help=False, **settings)
        self.register("action", "grammar", GrammarFlag)
        self.register("action", "switch", BooleanOptionalAction)
        self.classes = (*SETTINGS, *own)
        text = "the flags that most people need; --help-all: all flags, by topic"
        self.add_argument("-h", "--help", "--help-all", action=Help, help=text)
        self.add_flags("quiet", "verbose")
        for title, names in TABLE["programs"][program].items():
            group = self.add_flags(*names, title=title)
            for flag, options in TABLE["arguments"].get(title or program, {}).items():
                group.add_argument(flag, **arguments_of(options))
        self.set_defaults(**TABLE["defaults"].get(program, {}))

    def add_flags(self, *names: str, title: str = "") -> argparse._ActionsContainer:
        """Adds flags under the heading `title`, if any; `names` are fields of settings, or topics
        in flags.json. Returns the group of the flags, or the parser if they have no heading."""
        group: argparse._ActionsContainer = self
        if title:
            group = self.add_argument_group(TABLE["titles"].get(title, title))
        if title in TABLE["exclusive"]:
            group = group.add_mutually_exclusive_group()
        wanted = {field for name in names for field in TABLE["topics"].get(name, [name])}
        known = {
            field.name: options_of(field, settings)
            for settings in self.classes
            for field in dataclasses.fields(settings)
        }
        for name, options in (known | TABLE["flags"]).items():
            if name in wanted:
                flag = f"--{name.replace('_', '-')}"
                group.add_argument(*TABLE["short"].get(name, ()), flag, **arguments_of(options))
        return group

    def in_flags(self, error: InputError) -> str:
        """An error's message with settings spelled as flags, without remedies that have no flag."""
        flags = {flag[2:].replace("-", "_"): flag for flag in self._option_string_actions}

        def spelled(match: re.Match[str]) -> str:
            name, value = match.groups()
            if value == "False":
                name = f"no_{name}"
            return flags[name] + " " * (value == "") if name in flags else match[0]

        ways = [way for way in error.ways if {name for name, _ in SETTING.findall(way)} <= {*flags}]
        text = SETTING.sub(spelled, str(InputError(error.message, *ways)))
        name, _, rest = text.partition(" is ")
        return f"{flags[name]} is {rest}" if name in flags else text

    def error(self, message: str) -> NoReturn:
        way = "see --help-all"
        if rest := message.partition("unrecognized arguments: ")[2]:
            word, *_ = rest.split()
            message = f"{word} means nothing to {self.prog}"
            way = "see --help-all, and put a text of several words in quotes"
            for flag in difflib.get_close_matches(word, self._option_string_actions, 1):
                way = f"did you mean {flag}?"
        raise InputError(f"{shorten(message, 400)}; {way}")

    def check(self, args: Namespace) -> None:
        """Raises `InputError` for a flag without another that it needs, or with a bad value.
        Warns of a flag without effect."""
        known = self._option_string_actions
        given = {
            flag for flag, action in known.items() if vars(args).get(action.dest) != action.default
        }
        for flag, others in TABLE["needs"].items():
            if flag in given and given.isdisjoint(others) and known.keys() & others:
                raise InputError(
                    f"{flag} has no effect alone; add {' or '.join(others)}, or drop it"
                )
        for flag in unused_by(args):
            if flag in given:
                log.warning(f"{flag} is ignored: --method {args.method} has no use for it")
        for settings in self.classes:
            taken(settings, args)  # raises if bad

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"]:  # --flag=--, which argparse takes for an empty list
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def number_from(least: float, most: float = MAX_COUNT) -> Callable[[str], float]:
    """Makes the `type` of a flag for numbers from `least` to `most`, whole if `least` is `int`."""
    is_whole = isinstance(least, int)

    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = int(text) if is_whole else float(text)
            if least <= value <= most:
                return value
        wanted = f"{'whole ' * is_whole}number from {least} to {most:.15g}"
        raise argparse.ArgumentTypeError(f"{shorten(repr(text), 60)} is no {wanted}")

    return number


def arguments_of(row: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `add_argument` from a row of flags.json, whose `range` becomes a type."""
    options = {**row}
    if limits := options.pop("range", None):
        name = "N" if isinstance(limits[0], int) else "X"
        options |= {"type": number_from(*limits), "metavar": name}
    return options


class GrammarFlag(Action):
    """Stores a flag's value, or its file's text, as a `Grammar` of the kind that is its `const`."""

    def __call__(self, _: object, args: Namespace, value: Any, *__: object) -> None:
        kind = self.const
        if kind == "lark" or (kind == "json_schema" and not value.lstrip().startswith("{")):
            value = read_text(value, self.option_strings[0])
        args.grammar = Grammar(kind, value or "")


def options_of(field: "dataclasses.Field[Any]", settings: type[Any]) -> dict[str, Any]:
    """Arguments of `add_argument` for a field of a settings class."""
    # None: not given, so the model's files decide, or `USUAL` of hf_config.py.
    default = None if settings is SamplingParams else field.default
    texts = field_texts(settings)  # type: ignore[arg-type]  # a class has a hash
    text = texts[field.name].removesuffix(".")
    options: dict[str, Any] = {"default": default, "help": text}
    if field.type is bool:
        options["action"] = BooleanOptionalAction if default else "store_true"
    elif field.type == Sequence[str]:
        options |= {"action": "append", "default": None}
    elif field.type == Bias:
        # The settings check the parts.
        options |= {"action": "append", "metavar": "ID:BIAS", "type": lambda text: text.split(":")}
    return options | dict(field.metadata)  # its range or choices


@functools.cache
def field_texts(settings: type) -> dict[str, str]:
    """Help text of each field of a class, from the string below it, by the field's name."""
    source = Path(sys.modules[settings.__module__].__file__ or "").read_text("utf-8")
    own = source.partition(f"\nclass {settings.__name__}:")[2].partition("\nclass ")[0]
    pairs = re.findall(r'^    (\w+): .*?"""(.*?)"""', own, re.M | re.S)
    return {name: " ".join(text.split()).replace(r"\\", "\\") for name, text in pairs}


def taken(
    settings: type[Settings], args: Namespace, base: Settings | None = None, **others: Any
) -> Settings:
    """`base`, or else a class's defaults, changed by flags and `others`. Raises `InputError`."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return changed(base or settings(), given | others)


def unused_by(args: Namespace) -> Sequence[str]:
    """Flags that the method which `args` name, if any, ignores."""
    return TABLE["unused"].get(vars(args).get("method", ""), ())


def model_of(args: Namespace) -> dict[str, Any]:
    """Keyword arguments of `minitri.load`, taken from the flags."""
    options = vars(taken(ModelChoice, args)) | {"progress": not args.quiet and sys.stderr.isatty()}
    if "--draft" in unused_by(args):
        options["draft"] = "suffix"
    if "--budget" in unused_by(args) and options["draft_weights"] != "same":
        options["draft_weights"] = "drafter"
    return options


def speculation_of(args: Namespace, temperature: float = 0) -> SpeculationConfig:
    """Speculation settings by the flags. Raises `InputError`. Greedy texts (temperature 0) without
    --seed let the autotuner use measured times."""
    return taken(SpeculationConfig, args, timed=args.seed is None and temperature == 0)
