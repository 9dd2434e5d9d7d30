"""The models that `--model` and `--draft` know by a short name: one row each.

A row holds what must be known before any file is read. Its shape serves `minitri.plan` and
`bench --load dummy`, which need no weights; a model that really runs has that of its config file.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.loading.hf_config import FAMILIES

DEFAULT_MODEL = "smollm2-135m"


class NamedModel(NamedTuple):
    """A row of the table."""

    repo: str
    """Repository on the Hugging Face hub."""
    draft: str
    """The default drafter: the name of a model, or `suffix`."""
    context: int
    """In tokens."""


_MODELS = """
name                repository                            drafter             context
llama2-7b-128k      NousResearch/Yarn-Llama-2-7b-128k     llama-68m           131072
llama2-13b-128k     NousResearch/Yarn-Llama-2-13b-128k    llama-68m           131072
lwm-text-128k       LargeWorldModel/LWM-Text-128K         llama-68m           131072
lwm-text-256k       LargeWorldModel/LWM-Text-256K         llama-68m           262144
lwm-text-512k       LargeWorldModel/LWM-Text-512K         llama-68m           524288
lwm-text-1m         LargeWorldModel/LWM-Text-1M           llama-68m           1048576
lwm-text-chat-128k  LargeWorldModel/LWM-Text-Chat-128K    llama-68m           131072
llama-68m           JackFram/llama-68m                    suffix              2048
llama3.1-8b         meta-llama/Llama-3.1-8B               llama3.2-1b         131072
llama3.2-1b         meta-llama/Llama-3.2-1B               suffix              131072
llama3.2-3b         meta-llama/Llama-3.2-3B               llama3.2-1b         131072
tinyllama-1.1b      TinyLlama/TinyLlama-1.1B-Chat-v1.0    llama-68m           2048
smollm2-135m        HuggingFaceTB/SmolLM2-135M-Instruct   smollm2-135m-draft  8192
smollm2-360m        HuggingFaceTB/SmolLM2-360M-Instruct   smollm2-135m        8192
smollm2-1.7b        HuggingFaceTB/SmolLM2-1.7B-Instruct   smollm2-135m        8192
mistral-7b          mistralai/Mistral-7B-Instruct-v0.3    suffix              32768
mistral-nemo-12b    mistralai/Mistral-Nemo-Instruct-2407  suffix              131072
qwen2.5-0.5b        Qwen/Qwen2.5-0.5B-Instruct            suffix              32768
qwen2.5-1.5b        Qwen/Qwen2.5-1.5B-Instruct            qwen2.5-0.5b        32768
qwen2.5-7b          Qwen/Qwen2.5-7B-Instruct              qwen2.5-0.5b        32768
qwen3-0.6b          Qwen/Qwen3-0.6B                       suffix              40960
qwen3-4b-256k       Qwen/Qwen3-4B-Instruct-2507           qwen3-0.6b          262144
qwen3-8b            Qwen/Qwen3-8B                         qwen3-0.6b          40960
"""
_SHAPES = """
name                kind     layers  hidden  inner  heads  KV  head_dim  vocabulary  tied
llama2-7b-128k      llama    32      4096    11008  32     32  128       32000       no
llama2-13b-128k     llama    40      5120    13824  40     40  128       32000       no
lwm-text-128k       llama    32      4096    11008  32     32  128       32000       no
lwm-text-256k       llama    32      4096    11008  32     32  128       32000       no
lwm-text-512k       llama    32      4096    11008  32     32  128       32000       no
lwm-text-1m         llama    32      4096    11008  32     32  128       32000       no
lwm-text-chat-128k  llama    32      4096    11008  32     32  128       32000       no
llama-68m           llama    2       768     3072   12     12  64        32000       no
llama3.1-8b         llama    32      4096    14336  32     8   128       128256      no
llama3.2-1b         llama    16      2048    8192   32     8   64        128256      yes
llama3.2-3b         llama    28      3072    8192   24     8   128       128256      yes
tinyllama-1.1b      llama    22      2048    5632   32     4   64        32000       no
smollm2-135m        llama    30      576     1536   9      3   64        49152       yes
smollm2-360m        llama    32      960     2560   15     5   64        49152       yes
smollm2-1.7b        llama    24      2048    8192   32     32  64        49152       yes
mistral-7b          mistral  32      4096    14336  32     8   128       32768       no
mistral-nemo-12b    mistral  40      5120    14336  32     8   128       131072      no
qwen2.5-0.5b        qwen2    24      896     4864   14     2   64        151936      yes
qwen2.5-1.5b        qwen2    28      1536    8960   12     2   128       151936      yes
qwen2.5-7b          qwen2    28      3584    18944  28     4   128       152064      no
qwen3-0.6b          qwen3    28      1024    3072   16     8   128       151936      yes
qwen3-4b-256k       qwen3    36      2560    9728   32     8   128       151936      yes
qwen3-8b            qwen3    36      4096    12288  32     8   128       151936      no
"""
"""`inner` is the size of the MLP, `KV` the number of KV heads; `tied`: the LM head is the table."""


def _rows(table: str) -> Iterator[tuple[str, list[str]]]:
    for line in table.strip().splitlines()[1:]:
        name, *fields = line.split()
        yield name, fields


MODELS = {
    name: NamedModel(repo, draft, int(context)) for name, (repo, draft, context) in _rows(_MODELS)
}


def shape_of(name: str) -> ModelConfig | None:
    """The config of a named model, as far as the table tells; None for any other name."""
    if name not in MODELS:
        return None
    kind, *row, tied = dict(_rows(_SHAPES))[name]
    sizes: list[Any] = [*map(int, row), MODELS[name].context]
    settings = {"tie_word_embeddings": tied == "yes", "name": name, **FAMILIES[kind]}
    return ModelConfig(*sizes, **settings)


def table() -> str:
    """The named models in a table for people."""
    return _MODELS.strip()


def unknown_model(name: str) -> InputError:
    """The error for a model that is neither a name, nor a path, nor a hub repository."""
    return InputError(
        f"unknown model {name!r}; give a folder or file, a hub repository ORG/NAME, or one of "
        f"{', '.join(MODELS)}"
    )
