"""Fields of settings dataclasses: each declares its valid values; `check_fields` checks them."""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from minitri.core.errors import MAX_COUNT, InputError, shorten

Settings = TypeVar("Settings")
KINDS: dict[Any, str] = dict.fromkeys((bool, bool | None), "true or false")
KINDS |= dict.fromkeys((str, str | None), "a text")


def one_of(default: str | None, *choices: str) -> Any:
    """A dataclass field whose value is one of `choices`, or None if None is the default."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def between(default: Any, least: float, most: float = MAX_COUNT) -> Any:
    """A dataclass field for a number from `least` to `most`, whole if `least` is an `int`."""
    return dataclasses.field(default=default, metadata={"range": (least, most)})


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of a dataclass object with new `values` by field name; other names are ignored."""
    known = {name: value for name, value in values.items() if name in vars(settings)}
    return dataclasses.replace(settings, **known)  # type: ignore[type-var]


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises `InputError` for a name that is not `known`; suggests the most similar known name."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"{shorten(name, 60)} is not a setting; {shorten(advice)}")


def expect(given: object, kind: type) -> None:
    """Raises `InputError` unless `given` is an instance of `kind`."""
    if not isinstance(given, kind):
        raise InputError(f"got {shorten(repr(given), 60)}; give a {kind.__name__}")


def brief(settings: Any) -> str:
    """A short `repr` of a dataclass object: fields not at defaults, each in 120 characters."""
    shown = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.repr and value not in (field.default, [], {}):
            shown.append(f"{field.name}={shorten(repr(value), 120)}")
    return f"{type(settings).__name__}({', '.join(shown)})"


def check_fields(settings: Any) -> None:
    """Raises `InputError` unless every field of the dataclass object `settings` is valid."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if choices := field.metadata.get("choices"):
            wanted = f"one of {', '.join(choices)}"
            is_valid = value in choices if isinstance(value, str) else value is field.default
        elif "range" not in field.metadata or (value is None and field.default is None):
            kind: Any = field.type
            wanted = KINDS.get(kind, "")
            is_valid = not wanted or isinstance(value, kind)
        else:
            least, most = field.metadata["range"]
            is_whole = isinstance(least, int)
            wanted = f"a{' whole' * is_whole} number from {least:.6g} to {most:.15g}"
            is_number = isinstance(value, int if is_whole else int | float)
            is_valid = is_number and not isinstance(value, bool) and least <= value <= most
        if not is_valid:
            refuse(settings, field.name, f"it must be {wanted}")


def refuse(settings: Any, name: str, advice: str) -> NoReturn:
    """Raises `InputError` "NAME is VALUE; ADVICE" for field `name` of the object `settings`."""
    got = f"{getattr(settings, 'label', '')}{name} is {shorten(repr(getattr(settings, name)), 60)}"
    raise InputError(f"{got}; {advice}")
