"""The models that `--model` and `--draft` know by a short name: a row each of named_models.txt.

A row holds what must be known before any file is read. Its shape serves `minitri.plan` and
`bench --load dummy`, which need no weights; a model that really runs has that of its config file.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.loading.hf_config import FAMILIES

DEFAULT_MODEL = "smollm2-135m"


class NamedModel(NamedTuple):
    """A repository on the Hugging Face hub, the default drafter, and the context in tokens."""

    repo: str
    draft: str
    context: int


_TABLE = Path(__file__).with_name("named_models.txt").read_text("utf-8").splitlines()
_ROWS = {name: columns for name, *columns in map(str.split, _TABLE[1:])}
MODELS = {name: NamedModel(row[0], row[1], int(row[2])) for name, row in _ROWS.items()}


def shape_of(name: str) -> ModelConfig | None:
    """The config of a named model, as far as the table tells; None for any other name."""
    if name not in MODELS:
        return None
    _, _, context, kind, *numbers, tied = _ROWS[name]
    sizes: list[Any] = [*map(int, numbers), int(context)]
    settings = {"tie_word_embeddings": tied == "yes", "name": name, **FAMILIES[kind]}
    return ModelConfig(*sizes, **settings)


def table() -> str:
    """The named models in a table for people, without their shapes."""
    width = _TABLE[0].index("kind")
    return "\n".join(line[:width].rstrip() for line in _TABLE)


def unknown_model(name: str) -> InputError:
    """The error for a model that is neither a name, nor a path, nor a hub repository."""
    near = " or ".join(get_close_matches(name, MODELS, 3) or [DEFAULT_MODEL])
    return InputError(
        f"unknown model {name!r}; give a folder or file, a hub repository by its ORG/NAME, or a "
        f"name of `minitri --list-models`, such as {near}"
    )
