"""A model's real weights in pieces that fit through a narrow door, and put together behind it.

    python -m tools.weight_pieces smollm2-135m pieces      # piece-1-of-5.safetensors and so on
    python -m tools.weight_pieces --join pieces folder     # a folder for --model

Matrices are rounded to 8 bits, with a scale for each row; joined they are bfloat16 again. A GGUF
file is read where its package is; to join them safetensors is enough.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program
from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain
from minitri.files.checkpoint import open_checkpoint
from minitri.files.fetch import locate

LIMIT = 31_000_000  # bytes of a piece
RUN = 4_000_000
"""Numbers of a matrix that stay together; so much room is left for names, too."""


def described(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a plain Llama."""
    return {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope.theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def rounded(weight_NE: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in int8, and the scale of each row, by which its largest number is met."""
    scales_N = weight_NE.abs().amax(1).float().div(127).clamp_min(1e-30)
    return (weight_NE.float() / scales_N.unsqueeze(1)).round().to(torch.int8), scales_N


def entries(model: str) -> Iterator[dict[str, Tensor]]:
    """Parts of a model that stay together: its files, then runs of rows with their scales."""
    located = locate(model)
    checkpoint = open_checkpoint(located.path)
    config = checkpoint.config(located.name)
    if config.rope.kind != "default" or config.draft_of is not None or config.head_norm:
        raise InputError(f"{config.name} is more than a plain Llama; give smollm2-135m or the like")
    files = {
        "config.json": json.dumps(described(config)),
        "tokenizer.json": checkpoint.tokenizer().to_str(),
    }
    for name, text in files.items():
        yield {f"{name}|file": torch.tensor(list(text.encode()), dtype=torch.uint8)}
    for name, tensor in checkpoint.tensors(config):
        if tensor.dim() != 2:
            yield {f"{name}|whole": tensor.bfloat16()}
            continue
        weight_NE, scales_N = rounded(tensor)
        step = max(1, RUN // weight_NE.shape[1])
        for start in range(0, len(weight_NE), step):
            run = slice(start, start + step)
            key = f"{name}|{start:09d}"
            yield {f"{key}|rows": weight_NE[run].clone(), f"{key}|scales": scales_N[run].clone()}


def write_pieces(model: str, folder: Path) -> None:
    pieces: list[dict[str, Tensor]] = [{}]
    for entry in entries(model):
        held = sum(it.nbytes for it in (*pieces[-1].values(), *entry.values()))
        if pieces[-1] and held > LIMIT - RUN // 4:
            pieces.append({})
        pieces[-1] |= entry
    folder.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces, 1):
        save_file(piece, folder / f"piece-{number}-of-{len(pieces)}.safetensors")
    print(f"{len(pieces)} pieces of at most {LIMIT / 1e6:.0f} MB in {folder}")


def join_pieces(pieces: Path, folder: Path) -> None:
    """Raises `InputError` if a piece is missing or damaged."""
    files = sorted(pieces.glob("piece-*-of-*.safetensors"))
    counts = {int(re.findall(r"\d+", file.name)[1]) for file in files}
    if len(files) != max(counts, default=1) or len(counts) > 1:
        names = ", ".join(file.name for file in files) or "nothing"
        raise InputError(f"{pieces} does not hold one whole set of pieces, got {names}; bring all")
    found: dict[str, Tensor] = {}
    for file in files:
        with explain(f"{file} is damaged"), safe_open(file, framework="pt") as piece:
            found |= {name: piece.get_tensor(name) for name in piece.keys()}  # noqa: SIM118
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, list[Tensor]] = {}
    for key, tensor in sorted(found.items()):
        name, *place, kind = key.split("|")
        if kind == "file":
            (folder / name).write_bytes(bytes(tensor.tolist()))
        elif kind != "scales":
            scales = found.get("|".join((name, *place, "scales")))
            whole = tensor if scales is None else tensor * scales.unsqueeze(1)
            tensors.setdefault(name, []).append(whole.bfloat16())
    joined = {name: torch.cat(runs) for name, runs in tensors.items()}
    save_file(joined, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{len(joined)} tensors in {folder}")


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.weight_pieces", description=__doc__)
    parser.add_argument("source", help="a model; with --join a folder of pieces")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--join", action="store_true", help="put pieces together")
    return parser


def run_command(args: argparse.Namespace) -> None:
    if args.join:
        join_pieces(Path(args.source), args.folder)
    else:
        write_pieces(args.source, args.folder)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
