"""Models that `--model` and `--draft` know by a short name: the rows of named_models.txt.

`MODELS` has them by name. Their configs let programs compute sizes without model files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minitri.core.config import ModelConfig
from minitri.core.fields import check_fields, one_of
from minitri.core.settings import BACKENDS, DTYPES
from minitri.files.families import FAMILIES

DEFAULT_MODEL = "smollm2-135m"
LARGER = {12e9: "qwen2.5-1.5b (3.1 GB)", 4e9: "qwen2.5-0.5b (1.0 GB)"}  # by free bytes, best first


@dataclass(frozen=True)
class ModelChoice:
    """Which model runs, and how: arguments of `minitri.load`. Raises `InputError`."""

    model: str = DEFAULT_MODEL
    """A named model of --list-models, a folder or file, or of the hub ORG/NAME[@REVISION]."""
    dtype: str = one_of("auto", "auto", *DTYPES)
    """Number type of weights and KV cache. Default: what is fast here, mostly bfloat16."""
    attention: str = one_of("auto", "auto", *BACKENDS)
    """Backend for short blocks on a GPU. Default: triton, or math where triton fails."""
    weights: str = one_of("auto", "auto", "native", "dense")
    """Matrices of a GGUF file on a CPU: native keeps their 4 to 8 bits, dense has them in --dtype.
    Default: native where compiled kernels run."""
    draft_weights: str = one_of("auto", "auto", "int4", "int8", "drafter", "same")
    """Weights that guess with the retrieval cache: the target's (same), or a copy in fewer bits;
    the text stays the same. drafter: as same, and the drafter in 4 bits. Default: on compiled
    kernels int4 of drafter and unquantized target; on a GPU with much free memory of target."""
    device: str = "auto"
    """cpu, or a GPU: cuda, cuda:N. Default: cuda if there is one."""
    rope_scaling: str | None = None
    """Stretch the context: yarn:4 makes 32K of 8K. Default: as trained."""
    draft: str = "auto"
    """Drafter for naive and triforce: a model of the same vocabulary, or suffix, which looks the
    last words up in the text. Default: the one made for the model, else suffix."""

    def __post_init__(self) -> None:
        check_fields(self)


class NamedModel(NamedTuple):
    """A named model: its repository on the Hugging Face hub, default drafter, and config."""

    repo: str  # ORG/NAME on the hub
    draft: str  # default drafter
    shape: ModelConfig


def _read(line: str) -> NamedModel:
    name, repo, draft, context, _, _, kind, *numbers, tied = line.split()
    sizes: list[Any] = [int(number) for number in (*numbers, context)]
    settings = {"tie_word_embeddings": tied == "yes", "name": name, **FAMILIES[kind]}
    return NamedModel(repo, draft, ModelConfig(*sizes, **settings))


_TABLE = Path(__file__).with_name("named_models.txt").read_text("utf-8").splitlines()
MODELS = {row.shape.name: row for row in map(_read, _TABLE[1:])}


def table() -> str:
    """The named models as a text table for `--list-models`, and the families of models that run."""
    rows = [line[: _TABLE[0].index("kind")].rstrip() for line in _TABLE]
    return "\n".join([*rows, f"others, as folder, GGUF file or ORG/NAME: {', '.join(FAMILIES)}"])
