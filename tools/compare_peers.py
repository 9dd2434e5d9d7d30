"""minitri beside its peers: the same weights, the same prompt, greedy, on one machine in one run.

    python tools/compare_peers.py --prompt-file novel.txt --prompt-tokens 8000 --rounds 12

Peers are `transformers` and, for a GGUF model, llama.cpp through `llama-cpp-python` where it is installed (weights and
KV cache as f16). Everybody reads the prompt in turn; then everybody decodes a few tokens in turn, round after round, so
that a machine whose speed drifts is as slow for one as for the other. Prints medians with their range, and ratios to
transformers taken round by round; the last line is JSON. --repeats does all of it again, prompt included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minitri.bench import spread, synchronize
from minitri.checkpoint import open_checkpoint
from minitri.engine import Engine, load
from minitri.exits import clean_exits
from minitri.fetch import locate
from minitri.flags import add_model_flags, positive
from minitri.generate import encode_prompt, read_prompt
from minitri.generation import Token
from minitri.settings import GenerationConfig

Peer = Callable[[list[int], int], Iterator[int]]
"""Starts a greedy continuation of a prompt by some number of tokens, one at a time; the first follows the prefill."""


def minitri_peer(engine: Engine) -> Peer:
    def run(prompt: list[int], num_new: int) -> Iterator[int]:
        for event in engine.generate(prompt, generation=GenerationConfig(max_new_tokens=num_new, ignore_eos=True)):
            if isinstance(event, Token):
                yield event.token_id

    return run


def transformers_peer(path: Path, engine: Engine) -> Peer:
    from transformers import AutoModelForCausalLM, DynamicCache

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(export(path, engine, Path(folder)), dtype=engine.model.dtype)
    model = model.to(engine.model.device).eval()

    def run(prompt: list[int], num_new: int) -> Iterator[int]:
        cache, block = DynamicCache(config=model.config), prompt
        for _ in range(num_new):
            tokens = torch.tensor([block], device=engine.model.device)
            with torch.inference_mode():
                logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            block = [int(logits[0, -1].argmax())]
            yield block[0]

    return run


def export(path: Path, engine: Engine, folder: Path) -> Path:
    """The engine's model as a folder that `transformers` reads, RoPE scaling included."""
    config, rope = engine.config, engine.config.rope
    scaling = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.original_context}
    content = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps, "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias, "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    weights = {name: tensor.to(engine.model.dtype) for name, tensor in open_checkpoint(path).tensors(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llama_cpp_peer(path: Path, engine: Engine) -> Peer | None:
    if path.suffix != ".gguf" or engine.model.device.type != "cpu":
        return None
    try:
        import llama_cpp
    except ImportError:
        return None
    rope, threads, options = engine.config.rope, torch.get_num_threads(), {}
    if rope.kind == "yarn":
        options = {
            "rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
            "rope_freq_scale": 1 / rope.factor, "yarn_orig_ctx": rope.original_context,
        }  # fmt: skip
    weights = as_float16(path)

    def run(prompt: list[int], num_new: int) -> Iterator[int]:
        model = llama_cpp.Llama(
            str(weights), n_ctx=len(prompt) + num_new, n_threads=threads, n_threads_batch=threads, n_batch=512,
            verbose=False, type_k=llama_cpp.GGML_TYPE_F16, type_v=llama_cpp.GGML_TYPE_F16, **options,
        )  # fmt: skip
        yield from model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)

    return run


def as_float16(path: Path) -> Path:
    """The GGUF file with its matrices as f16, written once beside it."""
    target = path.with_suffix(".f16.gguf")
    if target.exists():
        return target
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader, partial = GGUFReader(path), target.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    for key, stored in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        element = stored.types[-1] if stored.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, stored.contents(), stored.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        matrix = tensor.tensor_type != GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, values.astype(np.float16 if matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.replace(target)


def measure(peers: dict[str, Peer], prompt: list[int], rounds: int, burst: int, device: torch.device) -> dict[str, Any]:
    """One pass: per peer the prefill seconds, and the ms/token of every round of `burst` tokens."""
    started_peers, prefill = {}, {}
    for name, peer in peers.items():
        print(f"{name} reads {len(prompt)} tokens ...", file=sys.stderr)
        started_peers[name] = peer(prompt, rounds * burst + 2)
        started = time.perf_counter()
        next(started_peers[name])
        synchronize(device)
        prefill[name] = time.perf_counter() - started
    decode: dict[str, list[float]] = {name: [] for name in peers}
    for tokens in started_peers.values():
        next(tokens)  # warm up
    for _ in range(rounds):
        for name, tokens in started_peers.items():
            started = time.perf_counter()
            for _ in range(burst):
                next(tokens)
            synchronize(device)
            decode[name].append(1e3 * (time.perf_counter() - started) / burst)
    return {name: {"prefill": prefill[name], "decode": decode[name]} for name in peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text (default: Python's help)")
    parser.add_argument("--prompt-tokens", type=positive, default=8000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--burst", type=positive, default=4, metavar="N", help="tokens per round (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    parser.set_defaults(prompt=None)
    args = parser.parse_args()
    engine = load(args.model, dtype=args.dtype, device=args.device, rope_scaling=args.rope_scaling)
    path = locate(args.model).path
    prompt = encode_prompt(engine, read_prompt(args), args.prompt_tokens)
    found = {
        "transformers": transformers_peer(path, engine),
        "minitri": minitri_peer(engine),
        "llama.cpp f16": llama_cpp_peer(path, engine),
    }
    peers = {name: peer for name, peer in found.items() if peer is not None}
    for peer in peers.values():
        list(zip(range(4), peer(prompt[:64], 4), strict=False))  # warm up
    passes = [measure(peers, prompt, args.rounds, args.burst, engine.model.device) for _ in range(args.repeats)]
    result = {}
    for name in peers:
        values = {
            "prefill_seconds": [run[name]["prefill"] for run in passes],
            "prefill_ratio": [run[name]["prefill"] / run["transformers"]["prefill"] for run in passes],
            "ms_per_token": [ms for run in passes for ms in run[name]["decode"]],
            "decode_ratio": [
                ms / theirs
                for run in passes
                for ms, theirs in zip(run[name]["decode"], run["transformers"]["decode"], strict=True)
            ],
        }
        result[name] = {key: spread(numbers) for key, numbers in values.items()}
    print(
        f"{len(prompt)} prompt tokens, {args.repeats} x {args.rounds} rounds of {args.burst} tokens, "
        f"{engine.model.dtype}, {torch.get_num_threads()} threads; medians (range)"
    )
    for name, columns in result.items():
        cells = [f"{key} {v['median']:.2f} ({v['min']:.2f} to {v['max']:.2f})" for key, v in columns.items()]
        print(f"{name:14s} " + "  ".join(cells))
    print(json.dumps({"num_prompt_tokens": len(prompt), "dtype": str(engine.model.dtype), **result}))


if __name__ == "__main__":
    with clean_exits():
        main()
