"""Values from files that anyone may have written: checked one by one, never rounded or replaced.

Null is as good as absent.
"""

from collections.abc import Collection, Mapping
from typing import Any, get_args, get_type_hints

from minitri.errors import InputError, printable, shorten

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
    list: "a list",
}


def read_value(settings: Mapping[str, Any], key: str, kind: type[Any], default: Any = None) -> Any:
    """A value that must be of this kind. Raises `TypeError`.

    Nothing is rounded, and no text is read as a number.
    """
    value = settings.get(key)
    if value is None:
        return default
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{key} is {shorten(repr(value), 60)} where {_NAMES[kind]} belongs")
    return printable(value) if kind is str else kind(value)


def read_fields(
    settings: Mapping[str, Any],
    fields_of: type[Any],
    keys: Mapping[str, str],
    needed: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of a dataclass that a file has, of the kinds that their types say.

    `keys` are the file's own names of fields. What is absent is left out. Raises `TypeError`, and
    `ValueError` where a field that is `needed` is absent.
    """
    found = {}
    for field, hint in get_type_hints(fields_of).items():
        kind = (*get_args(hint), hint)[0]  # `int` of `int | None`
        key = keys.get(field, field)
        value = read_value(settings, key, kind)
        if value is not None:
            found[field] = value
        elif field in needed:
            raise ValueError(f"it has no {key}")
    return found


def require(settings: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raises `InputError` for a setting of which minitri runs the wanted value only."""
    for key, value in wanted.items():
        kind = type(value)
        found = settings.get(key) if value is None else read_value(settings, key, kind, value)
        if found != value:
            raise InputError(
                f"{name} has {key}={shorten(repr(found), 60)}, which minitri does not run; use a "
                f"model with {key}={shorten(value, 60)}"
            )


def as_token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id`, which may be absent, one number, or several. Raises `InputError`."""
    tokens = value if isinstance(value, list) else [value] * (value is not None)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(
            f"config has the token id {shorten(repr(value), 60)}, which is no whole number; "
            "correct it"
        )
    return tuple(tokens)
