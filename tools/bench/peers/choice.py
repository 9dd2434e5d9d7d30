"""Which peers there are, and which of them can run here.

A name says program, weights/KV cache, and what is on: `openvino f16/u8 lookup` has f16 weights, a
KV cache of 8 bits and prompt lookup; `native` weights are a quantized file's own, `fa` is
llama.cpp's flash attention. What cannot run is skipped, with the reason in the log, before
anything is measured.
"""

import argparse
import importlib.util
import logging
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from minitri.bench.compare import StartPeer
from minitri.engine import Engine
from minitri.errors import InputError, shorten
from tools.bench.peers.float16 import as_float16, is_quantized
from tools.bench.peers.in_transformers import (
    prompt_lookup_peer,
    transformers_model,
    transformers_peer,
)
from tools.bench.peers.process import Worker, worker_peer

log = logging.getLogger("minitri")

PACKAGES = {"openvino": "openvino-genai", "llama.cpp": "llama-cpp-python"}
"""What to install for a program that runs in a process of its own."""
TRIAL = list(range(1, 17))
"""A prompt by which a peer shows that it can run."""


@dataclass(frozen=True)
class Variant:
    """A way to run a program in a process of its own."""

    program: str
    weights: str
    kv: str
    is_flash: bool = False
    """llama.cpp only: flash attention, which a quantized KV cache needs."""
    is_lookup: bool = False

    @property
    def name(self) -> str:
        switches = " fa" * self.is_flash + " lookup" * self.is_lookup
        return f"{self.program} {self.weights}/{self.kv}{switches}"


VARIANTS = [
    Variant("openvino", "f16", "bf16"),
    Variant("openvino", "f16", "bf16", is_lookup=True),
    Variant("openvino", "f16", "u8"),
    Variant("openvino", "f16", "u8", is_lookup=True),
    Variant("openvino", "native", "u8"),
    Variant("llama.cpp", "f16", "f16"),
    Variant("llama.cpp", "f16", "f16", is_lookup=True),
    Variant("llama.cpp", "f16", "f16", is_flash=True),
    Variant("llama.cpp", "f16", "q8_0", is_flash=True),
    Variant("llama.cpp", "native", "f16"),
    Variant("llama.cpp", "native", "f16", is_flash=True),
    Variant("llama.cpp", "native", "q8_0", is_flash=True),
]
PEERS = ("transformers", "transformers lookup", *(variant.name for variant in VARIANTS))


def peer_names(text: str) -> list[str]:
    """A flag's value that names a peer, or all whose names begin so."""
    if names := [text] if text in PEERS else [name for name in PEERS if name.startswith(text)]:
        return names
    raise argparse.ArgumentTypeError(
        f"{shorten(repr(text), 60)} is no peer; there are {', '.join(PEERS)}, and their beginnings"
    )


def peer_python(text: str) -> tuple[str, str]:
    """A flag's value such as openvino=PATH: a program and the interpreter that has it."""
    program, _, python = text.partition("=")
    if program not in PACKAGES or shutil.which(python) is None:
        raise argparse.ArgumentTypeError(
            f"{shorten(repr(text), 200)} is not PROGRAM=PATH of a program ({', '.join(PACKAGES)}) "
            "and a Python interpreter"
        )
    return program, python


def find_peers(
    path: Path, engine: Engine, wanted: Collection[str], pythons: Mapping[str, str]
) -> dict[str, StartPeer]:
    """Those of the wanted peers that can run these weights; `pythons` are the interpreters of
    programs that this one does not have."""
    peers = dict(transformers_peers(path, engine, wanted))
    for program in PACKAGES:
        variants = [v for v in VARIANTS if v.program == program and v.name in wanted]
        if variants:
            peers |= program_peers(path, engine, variants, pythons.get(program, sys.executable))
    return peers


def transformers_peers(
    path: Path, engine: Engine, wanted: Collection[str]
) -> Iterator[tuple[str, StartPeer]]:
    """`transformers`, plain and with its prompt lookup, which share one model."""
    makers = {"transformers": transformers_peer, "transformers lookup": prompt_lookup_peer}
    names = [name for name in makers if name in wanted]
    if not names:
        return
    if importlib.util.find_spec("transformers") is None:
        log.info("transformers: skipped: not installed; pip install transformers")
    elif engine.config.rope.frequency_divisors is not None:
        log.info("transformers: skipped: its configs cannot say this GGUF file's RoPE divisors")
    else:
        model = transformers_model(path, engine)
        for name in names:
            yield name, makers[name](model)


def program_peers(
    path: Path, engine: Engine, variants: list[Variant], python: str
) -> dict[str, StartPeer]:
    """Variants of one program. Each reads a trial prompt, so that what fails is known at once."""
    program = variants[0].program
    if reason := unfit(path, engine, program):
        log.info("%s: skipped: %s", program, reason)
        return {}
    try:
        version = Worker(python, program).version
    except InputError as error:
        advice = f"pip install {PACKAGES[program]}, or --peer-python {program}=PATH of a Python"
        log.info("%s: skipped: %s (%s); %s that has it", program, error, python, advice)
        return {}
    log.info("%s %s, run by %s", program, version, python)
    peers, has_native = {}, is_quantized(path)
    for variant in variants:
        try:
            if variant.weights == "native" and not has_native:
                raise InputError(f"{path.name} is not quantized")
            peer = worker_peer(python, program, worker_settings(path, engine, variant))
            list(islice(peer(TRIAL, 4), 2))
            peers[variant.name] = peer
        except (InputError, OSError) as error:
            log.info("%s: skipped: %s", variant.name, error)
    return peers


def unfit(path: Path, engine: Engine, program: str) -> str | None:
    """Why a program cannot run this model, if it cannot."""
    rope = engine.config.rope
    if path.suffix != ".gguf":
        return f"it needs a GGUF file, and {path.name} is none"
    if engine.model.device.type != "cpu":
        return f"it is compared on a CPU, not on {engine.model.device.type}; give --device cpu"
    has_scaling = rope.kind != "default" or rope.frequency_divisors is not None
    if program == "openvino" and has_scaling:
        return "it reads no RoPE scaling from a GGUF file"
    if rope.kind == "llama3":
        return "it takes llama3 RoPE scaling from a GGUF file only"
    return None


def worker_settings(path: Path, engine: Engine, variant: Variant) -> dict[str, Any]:
    """What `worker.py` is told of a variant."""
    rope = engine.config.rope
    settings = {
        "weights": str(path if variant.weights == "native" else as_float16(path)),
        "threads": torch.get_num_threads(),
        "kv": variant.kv,
        "lookup": variant.is_lookup,
    }
    if variant.program == "llama.cpp":
        settings |= {
            "flash": variant.is_flash,
            "scaling": None if rope.kind == "default" else rope.kind,
            "factor": rope.factor,
            "original_context": rope.original_context or 0,
        }
    return settings
