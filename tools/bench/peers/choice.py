"""Table of the peers, and the choice of those that can run here.

A name says program, weights/KV cache, and whether prompt lookup is on: `openvino f16/u8 lookup` has
f16 weights, a KV cache of 8 bits and lookup. What cannot run is skipped, with the reason in the
log, before anything is measured.
"""

import argparse
import importlib.util
import logging
import shutil
import sys
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from minitri.core.errors import InputError, shorten
from minitri.engine import Engine
from tools.bench.peers import StartPeer
from tools.bench.peers.float16 import as_float16
from tools.bench.peers.in_transformers import transformers_model, transformers_peer
from tools.bench.peers.process import Worker, worker_peer

log = logging.getLogger("minitri")

PACKAGES = {"openvino": "openvino-genai", "llama.cpp": "llama-cpp-python"}
"""Packages to install for each program that runs in a process of its own."""
VARIANTS: dict[str, dict[str, Any]] = {
    "openvino f16/bf16": {"kv": "bf16", "lookup": False},
    "openvino f16/bf16 lookup": {"kv": "bf16", "lookup": True},
    "openvino f16/u8": {"kv": "u8", "lookup": False},
    "openvino f16/u8 lookup": {"kv": "u8", "lookup": True},
    "openvino f16/f32": {"kv": "f32", "lookup": False},
    "llama.cpp f16/f16": {},
}
"""Ways to run these programs: what `worker.py` is told."""
TRIAL = list(range(1, 17))
"""A prompt by which a peer shows that it can run."""
PEERS = ("transformers", *VARIANTS)


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
    """Selects the peers that can run these weights; `pythons` are the interpreters of
    programs that this one does not have."""
    peers: dict[str, StartPeer] = {}
    for name in PEERS:
        program = name.split()[0]
        if name not in wanted:
            continue
        try:
            if name == "transformers":
                peers[name] = in_transformers(path, engine)
            else:
                python = pythons.get(program, sys.executable)
                peers[name] = in_process(path, engine, name, python)
        except (InputError, OSError) as error:
            log.info("%s: skipped: %s", name, error)
    return peers


def in_transformers(path: Path, engine: Engine) -> StartPeer:
    """The peer in this process. Raises `InputError` if it cannot run."""
    if importlib.util.find_spec("transformers") is None:
        raise InputError("not installed; pip install transformers")
    if engine.config.rope.frequency_divisors is not None:
        raise InputError("its configs cannot say this GGUF file's RoPE divisors")
    return transformers_peer(transformers_model(path, engine))


def in_process(path: Path, engine: Engine, name: str, python: str) -> StartPeer:
    """A peer that has read a trial prompt. Raises `InputError` if it cannot run."""
    program = name.split()[0]
    rope = engine.config.rope
    if path.suffix != ".gguf":
        raise InputError(f"it needs a GGUF file, and {path.name} is none")
    if engine.model.device.type != "cpu":
        raise InputError(f"it is compared on a CPU, not on {engine.model.device.type}")
    if rope.kind != "default" or rope.frequency_divisors is not None:
        raise InputError("it is told of no RoPE scaling")
    try:
        version = Worker(python, program).version
    except InputError as error:
        advice = f"pip install {PACKAGES[program]}, or --peer-python {program}=PATH of a Python"
        raise InputError(f"{error} ({python}); {advice} that has it") from None
    settings = {"weights": str(as_float16(path)), "threads": torch.get_num_threads()}
    peer = worker_peer(python, program, settings | VARIANTS[name])
    list(islice(peer(TRIAL, 4), 2))
    log.info("%s %s, run by %s", name, version, python)
    return peer
