"""Fields of settings dataclasses: each declares its valid values, and one function checks them."""

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from minitri.core.errors import MAX_COUNT, InputError, shorten

Settings = TypeVar("Settings")
KINDS: dict[Any, str] = dict.fromkeys((bool, bool | None), "true or false")
KINDS |= dict.fromkeys((str, str | None), "a text")


def one_of(default: str | None, *choices: Any) -> Any:
    """A field that is one of these values; also false or empty if the default is None."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def between(default: Any, least: float, most: float = MAX_COUNT) -> Any:
    """A field that is a number within bounds, or None if that is the default. It must be whole if
    `least` is an `int`."""
    return dataclasses.field(default=default, metadata={"range": (least, most)})


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of settings with new values for its fields; other names are ignored."""
    known = {name: value for name, value in values.items() if name in vars(settings)}
    return dataclasses.replace(settings, **known)  # type: ignore[type-var]


def with_fields(values: Mapping[str, Any], *settings: Any) -> list[Any]:
    """Copies of several settings with new values for their fields. Raises `InputError` for a name
    that none of them has."""
    check_names(values, [name for group in settings for name in vars(group)])
    return [changed(group, values) for group in settings]


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises `InputError` for an unknown name, which suggests the most similar one."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"{shorten(name, 60)} is not a setting; {shorten(advice)}")


def expect(given: object, kind: type) -> None:
    """Raises `InputError` unless an object is of this kind."""
    if not isinstance(given, kind):
        raise InputError(f"got {shorten(repr(given), 60)} where a {kind.__name__} belongs")


def brief(settings: Any) -> str:
    """A short `__repr__`: fields that differ from their defaults; long values are cut."""
    cut = reprlib.Repr()
    cut.maxstring, cut.maxother = 80, 240
    shown = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        has_default = field.default is not dataclasses.MISSING and value == field.default
        is_empty = field.default_factory is not dataclasses.MISSING and not value
        if field.repr and not (has_default or is_empty):
            text = f"{value:.4g}" if isinstance(value, float) else cut.repr(value)
            shown.append(f"{field.name}={text}")
    return f"{type(settings).__name__}({', '.join(shown)})"


def check_fields(settings: Any) -> None:
    """Raises `InputError` unless every field has a valid value."""
    for field in dataclasses.fields(settings):
        if not is_allowed(field, getattr(settings, field.name)):
            refuse(settings, field.name, f"it must be {wanted(field)}")


def wanted(field: Any) -> str:
    """Describes the valid values of a field; empty if they are checked elsewhere."""
    if choices := field.metadata.get("choices"):
        words = (word if isinstance(word, str) else json.dumps(word) for word in choices)
        return f"one of {', '.join(words)}"
    if "range" not in field.metadata:
        return KINDS.get(field.type, "")
    least, most = field.metadata["range"]
    return f"a{' whole' * isinstance(least, int)} number from {least:.6g} to {most:.15g}"


def is_allowed(field: Any, value: Any) -> bool:
    """Whether a value is valid for a field."""
    if choices := field.metadata.get("choices"):
        is_choice = isinstance(value, type(choices[0])) and value in choices
        return is_choice or (field.default is None and not value)
    if "range" not in field.metadata or (value is None and field.default is None):
        return field.type not in KINDS or isinstance(value, field.type)
    least, most = field.metadata["range"]
    is_number = isinstance(value, int if isinstance(least, int) else int | float)
    return is_number and not isinstance(value, bool) and least <= value <= most


def refuse(settings: Any, name: str, advice: str) -> NoReturn:
    """Raises `InputError` about the value of a field, after the `label` of its class, if any."""
    got = f"{getattr(settings, 'label', '')}{name} is {shorten(repr(getattr(settings, name)), 60)}"
    raise InputError(f"{got}; {advice}")
