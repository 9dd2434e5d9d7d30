"""Fields of settings that say what they may be, and the one check that reads it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from minitri.errors import MAX_COUNT, InputError, shorten

T = TypeVar("T")
KINDS: dict[Any, str] = {bool: "true or false", bool | None: "true or false"}
KINDS |= {str: "a text", str | None: "a text"}


def one_of(default: Any, *choices: Any) -> Any:
    """A field that has one of these values."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def between(default: Any, least: float, most: float = MAX_COUNT) -> Any:
    """A field that is a number within bounds, None if that is the default; whole if `least` is."""
    return dataclasses.field(default=default, metadata={"range": (least, most)})


def changed(settings: T, values: Mapping[str, Any]) -> T:
    """A copy of settings with those of the values that have a field's name."""
    own = {name: value for name, value in values.items() if name in vars(settings)}
    return dataclasses.replace(settings, **own)  # type: ignore[type-var]


def check_fields(settings: Any, label: str = "") -> None:
    """Raises `InputError` unless fields are as `one_of` and `between` say, and texts, or true or
    false, where their types are; `label` goes first."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        rule = field.metadata
        kind: Any = field.type
        if choices := rule.get("choices"):
            wanted = f"one of {', '.join(map(str, choices))}"
            is_fine = any(type(value) is type(choice) and value == choice for choice in choices)
        elif "range" in rule and (value is not None or field.default is not None):
            least, most = rule["range"]
            number = int if isinstance(least, int) else int | float
            wanted = f"a{' whole' * (number is int)} number from {least:.6g} to {most:.15g}"
            is_fine = isinstance(value, number) and not isinstance(value, bool)
            is_fine = is_fine and least <= value <= most
        elif kind in KINDS:
            wanted = KINDS[kind]
            is_fine = isinstance(value, kind)
        else:
            continue
        if not is_fine:
            refuse(settings, field.name, f"it must be {wanted}", label)


def refuse(settings: Any, name: str, advice: str, label: str = "") -> NoReturn:
    """Raises `InputError` about a field."""
    raise InputError(f"{label}{name} is {shorten(repr(getattr(settings, name)), 60)}; {advice}")
