"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

Names and conventions become those of Hugging Face. The rotary embedding of a Llama pairs
neighbouring dimensions in GGUF, so the rows of q and k matrices are in another order.

A row of a matrix is a chain of blocks of 32 weights or, in K-quants, 256 (`devices/cpu/quantized.h`
has the formats). They are repacked for the CPU kernels, or dequantized. Repacking is exact: in Q4_0
and Q5_0, where a weight is d (q - 8) or d (q - 16), the kernels' offset is -8 d or -16 d, exact in
float16 as d is.

Legend: N rows, X bytes of a row of a repacked matrix."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from minitri.core.config import ModelConfig
from minitri.core.errors import explain, shorten
from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.quantized import PANEL, Form, packed_shape
from minitri.files.families import NamedTensors, read_table, rotary_rows, unfused
from minitri.files.hf_config import read_config, require, without_null
from minitri.files.vocabulary import WITH_BOS, read_vocabulary

if TYPE_CHECKING:
    from minitri.files.gguf.container import StoredTensor

FORMS = {name: Form[theirs] for name, theirs in read_table("gguf_form").items()}
"""Types of GGUF that the CPU kernels can read, by name, with the kernels' `Form` of each."""
BYTES_AT_ONCE = 1 << 24  # of a file that are read before their memory is freed
_PAIRED = ("llama", "granite", "smollm3")  # in q and k, rows that rotate together are neighbours


class GgufFile:
    """An open GGUF file. Raises `InputError` if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain(f"{path.name} needs the package gguf", "run: pip install 'minitri[gguf]'"):
            from minitri.files.gguf.container import read_parts
        with explain(f"{path.name} is not a whole GGUF file"):
            self.metadata, stored, self.files = read_parts(path)
        require(self.metadata, {"general.type": "model"}, path.name)  # no adapter or the like
        get = self.metadata.get
        self._architecture: Any = get("general.architecture")
        names = read_table("gguf_tensor") | read_table(f"gguf_tensor_{self._architecture}")
        self._tensors = {
            ".".join(names.get(part, part) for part in name.split(".")): tensor
            for name, tensor in stored.items()
        }
        self.generation_config: dict[str, Any] = {}  # a GGUF file recommends no sampling
        self.tokenizer_config: dict[str, Any] = {
            "chat_template": get("tokenizer.chat_template"),
            "tool_use": get("tokenizer.chat_template.tool_use"),
            "add_bos_token": get("tokenizer.ggml.add_bos_token"),
        }
        self.adds_bos = (  # where the file does not say it
            get("tokenizer.ggml.model") == "llama" or get("tokenizer.ggml.pre") in WITH_BOS
        )

    def tokenizer(self) -> tokenizers.Tokenizer:
        return read_vocabulary(self.metadata, self.path.name)

    def config(self, name: str) -> ModelConfig:
        """The `ModelConfig` in the metadata, for a model that is called `name`.
        Raises `InputError` for a model of an unknown family, or wrong values."""
        with explain(f"{self.path.name} has damaged hyper-parameters"):
            prefix = f"{self._architecture}."
            given = {key.removeprefix(prefix): value for key, value in self.metadata.items()}
            settings = read_table("gguf_default") | without_null(given)
            if "rope.scaling.factor" in settings:
                settings.setdefault("rope.scaling.type", "linear")
            settings.setdefault("attention.head_count_kv", settings.get("attention.head_count"))
            if settings.get("tokenizer.ggml.model") == "llama":  # llama.cpp's defaults
                settings = read_table("gguf_llama") | settings
            get = settings.get
            ends = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
            attention = "model.layers.0.self_attn"
            stretch = {name: get(key) for key, name in read_table("gguf_rope").items()}
            for kind in ("short", "long"):
                stretch[f"{kind}_factor"] = self._numbers(f"rope_factors_{kind}.weight")
            if stretch["long_factor"]:
                stretch["attention_factor"] = settings.pop("rope.scaling.attn_factor", None)
            family = read_table("gguf_family").get(self._architecture, self._architecture)
            scalar = read_table("gguf_scalar").get(str(get("block_count")))
            config = read_config(
                {
                    **{name: get(key) for key, name in read_table("gguf_setting").items()},
                    "model_type": family,
                    "sliding_window": get("attention.sliding_window") or None,
                    "query_pre_attn_scalar": scalar or get("attention.key_length"),
                    "vocab_size": self._tensors["model.embed_tokens.weight"].shape[0],
                    "tie_word_embeddings": "lm_head.weight" not in self._tensors,
                    "attention_bias": f"{attention}.q_proj.bias" in self._tensors,
                    "output_bias": f"{attention}.o_proj.bias" in self._tensors,
                    "eos_token_id": [settings[end] for end in ends if end in settings],
                    "rope_parameters": stretch,
                },
                name,
            )
            window = config.sliding_window if config.sliding_layers else 0
            only = read_table("gguf_only") | {"attention.sliding_window": window}
            require(settings, only, self.path.name)
            rope = config.rope
            if divisors := self._numbers("rope_freqs.weight"):
                rope = replace(rope, frequency_divisors=divisors)
            # Stored as float32; the author wrote a short decimal that rounds to this number.
            return replace(config, rope=rope, rms_norm_eps=float(f"{config.rms_norm_eps:.6g}"))

    def _numbers(self, name: str) -> tuple[float, ...] | None:
        """Numbers of the vector `name` in the file, None if it has none; may raise any error."""
        stored = self._tensors.get(name)
        return tuple(dequantize(stored, None).tolist()) if stored else None

    def quantized(self) -> dict[tuple[str, tuple[int, ...]], Form]:
        """Formats of the matrices in the file that the CPU kernels can read, by name and shape."""
        return {
            (name, stored.shape): FORMS[stored.type.name]
            for name, stored in self._tensors.items()
            if stored.type.name in FORMS and len(stored.shape) == 2
        }

    def has_at_most(self, bits: int) -> bool:
        """Whether CPU kernels can read all matrices, and these have at most `bits` bits per weight
        in layers, and 8 in embedding table and LM head."""
        return all(
            FORMS.get(stored.type.name, Form.PLAIN).bits <= (bits if ".layers." in name else 8)
            for name, stored in self._tensors.items()
            if len(stored.shape) == 2
        )

    def tensors(
        self, config: ModelConfig, packed: Mapping[str, Tensor], kernels: Kernels | None
    ) -> NamedTensors:
        """Yields (Hugging Face name, tensor) for all weights, dequantized, by `kernels` if there
        are any. A tensor of that name in `packed` is filled with the matrix in the layout of the
        kernels, and yielded instead."""
        for name, stored in self._tensors.items():
            if name.startswith("rope_f"):  # divisors of frequencies, which `config` has read
                continue
            with explain(f"{self.path.name} has a tensor {shorten(name, 60)} that is not read"):
                rows = rotary_rows(name, stored.shape, config, self._architecture in _PAIRED)
                if kernels and name in packed:
                    weight = packed[name]
                    repack(stored, kernels, weight, rows)
                else:
                    weight = dequantize(stored, kernels)
                    weight = weight if rows is None else weight[rows]
                yield from unfused(name, weight, config)


def repack(
    stored: "StoredTensor", kernels: Kernels, place_NX: Tensor, rows_N: Tensor | None = None
) -> None:
    """Writes a stored quantized matrix into the uint8 tensor `place_NX`, in the kernels' layout.
    Row n is the file's row `rows_N[n]`, or row n without `rows_N`."""
    N, E = stored.shape
    rows_N = torch.arange(N) if rows_N is None else rows_N
    num_rows = -(-BYTES_AT_ONCE // (PANEL * stored.data.shape[1])) * PANEL
    for rows, place in zip(rows_N.split(num_rows), place_NX.split(num_rows), strict=True):
        kernels.repack(stored.data, FORMS[stored.type.name], rows, place, E)
        stored.release()


def dequantize(stored: "StoredTensor", kernels: Kernels | None) -> Tensor:
    """Dequantizes a tensor to float32, faster with kernels. Raises any error for integers."""
    import gguf

    form = FORMS.get(stored.type.name)
    if not (kernels and form) or len(stored.shape) != 2:
        values = gguf.dequantize(stored.data, stored.type)
        return torch.from_numpy(np.require(values, requirements="W"))  # no view of the file
    N, E = stored.shape
    packed_NX = torch.empty(packed_shape(N, E, form), dtype=torch.uint8)
    repack(stored, kernels, packed_NX)
    return kernels.dequantize(packed_NX, N, E, form, torch.float32)
