"""A benchmark without weights, of one method next to autoregressive decoding.

    python -m tools.bench synthetic --shape llama2-7b-128k --context 122880

Weights and KV cache are random numbers in the shape of a named model, nothing is prefilled, and
**verdicts are made up**: each guess is accepted with a given probability. All else is computed by
the code of real decoding, so the times are those of a real model of this shape at these acceptance
rates. No text comes out of this, and `minitri.generate` cannot reach it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minitri.apps.cli.arguments import OneLineParser, model_of, speculation_of, taken
from minitri.apps.cli.exits import program
from minitri.apps.cli.report import where
from minitri.apps.plan import ACCEPTANCE
from minitri.core.caches.full import FullCache
from minitri.core.config import ModelConfig
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.verification import Proposal
from minitri.core.errors import InputError
from minitri.core.memory import Models, computing
from minitri.core.model.llama import Llama
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.streams import HostMemory
from minitri.core.requests import Request
from minitri.core.roofline import CARDS, CPU, Workload
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.stack import Stack
from minitri.devices.choose import attention_for, choose_device, choose_dtype, retrieval_copy
from minitri.devices.cpu.pytorch import can_pack, pack_linears
from minitri.devices.cpu.tiles import Tiles
from minitri.devices.gpu.fused_modules import fuse_if_possible
from minitri.files.fetch import default_draft
from minitri.files.named_models import MODELS
from tools.bench.bandwidth import copy_bandwidth, idle_share
from tools.bench.compare import spread
from tools.bench.pass_table import pass_table
from tools.flags import positive
from tools.runs import begin

SAMPLING = SamplingParams(0.6, top_p=0.9)
WARMUP_STEPS = 3
PROFILED_STEPS = 4
"""Steps, after those that are timed, of which a GPU's work is recorded."""
MARGIN = 2 * (WARMUP_STEPS + PROFILED_STEPS + 2)
"""Blocks of room after the tokens that are asked for."""
BLOCK = 1 << 22
"""Random numbers that are made; larger tensors repeat them."""


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.bench synthetic", description=__doc__)
    add = parser.add_argument
    add("--shape", metavar="NAME", default="llama2-7b-128k", help="a named model")
    text = "tokens; several make a sweep (default: 8192)"
    add("--context", type=positive, action="append", metavar="N", help=text)
    parser.add_flags("dtype", "attention", "draft_weights", "device", "method", "SIZES", "json")
    parser.add_flags("max_new_tokens", "prefill_chunk", "offload", "on_chip", "cuda_graphs")
    parser.set_defaults(method="triforce", max_new_tokens=64, ignore_eos=True, seed=None)
    return parser


@dataclass(frozen=True)
class Setup:
    """Shapes and settings of a run with made-up weights."""

    target: ModelConfig
    draft: ModelConfig | None
    speculation: SpeculationConfig
    generation: GenerationConfig
    acceptance: tuple[float, float]
    """Acceptance rates of the drafter's and of the retrieval level's guesses."""
    dtype: torch.dtype
    device: torch.device
    attention: str = "auto"
    draft_weights: str = "same"


def setup_of(args: argparse.Namespace) -> Setup:
    """Setup by the flags. Raises `InputError`."""
    if args.shape not in MODELS:
        raise InputError(f"unknown shape {args.shape!r}; use one of minitri --list-models")
    shapes = {name: row.shape for name, row in MODELS.items()}
    if args.method == "auto":
        raise InputError("--method is auto, but here it is fixed; give triforce, say")
    args.model = args.shape
    args.gamma1 = args.gamma1 or 2
    args.gamma2 = args.gamma2 or (16 if args.offload else 6)
    draft = model_of(args)["draft"]
    device = choose_device(args.device)
    return Setup(
        shapes[args.shape],
        shapes.get(default_draft(args.shape) if draft == "auto" else draft),
        speculation_of(args),
        taken(GenerationConfig, args),
        (ACCEPTANCE["draft"], ACCEPTANCE["retrieval"]),
        choose_dtype(args.dtype, device),
        device,
        args.attention,
        args.draft_weights,
    )


def run_command(args: argparse.Namespace) -> None:
    """Measures a shape with made-up weights and verdicts, and prints."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes to the screen
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        result = sweep_contexts(setup_of(args), args.context or [8192])
    if args.json:
        print(json.dumps(result), flush=True)


def sweep_contexts(setup: Setup, contexts: list[int]) -> dict[str, Any]:
    """Decodes after several contexts, autoregressively and by the cascade, and prints next to what
    was measured what the bandwidths of copies predict. Whatever is known is printed at once."""
    config = setup.target
    target = random_model(config, setup)
    draft = random_model(setup.draft, setup) if setup.draft else None
    copy = retrieval_copy(target, setup.draft_weights)
    memory, link = (copy_bandwidth(setup.device, from_host=hosted) for hosted in (False, True))
    machine = dataclasses.replace(
        CARDS[1e9] if setup.device.type == "cuda" else CPU,
        bytes_per_second=memory,
        link_bytes_per_second=link,
    )
    plan = setup.speculation.plans[0]
    result = {
        "synthetic": True,
        "shape": config.name,
        "acceptance": setup.acceptance,
        "draft": setup.draft.name if setup.draft else "suffix",
        **where(target),
        "plan": str(plan),
        "copy_bytes_per_second": memory,
        "host_copy_bytes_per_second": link,
    }
    print(f"SYNTHETIC weights and verdicts: {result}", flush=True)
    rows = []
    host = HostMemory(setup.device)  # for all runs: to page-lock it takes longer than they do
    for context in contexts:
        with computing(Models(target, target, draft)):
            alone = decode(target, draft, context, setup, "autoregressive", host=host)
            print(f"\n{context} tokens: autoregressive {json.dumps(alone)}", flush=True)
            together = decode(target, draft, context, setup, plan.method, copy, host=host)
        speedup = alone["ms_per_token"] / together["ms_per_token"]
        row = {"context": context, "autoregressive": alone, "cascade": together, "speedup": speedup}
        rows.append(row)
        work = Workload(
            config,
            setup.draft,
            context,
            setup.speculation.budget_for(context),
            itemsize=setup.dtype.itemsize,
            hosted_share=1 - together["on_chip"] / config.num_layers,
        )
        table = pass_table(work, plan, setup.generation.prefill_chunk, machine)
        measured = {**together["phase_ms"], "autoregressive": alone["phase_ms"]["target"]}
        idle = together["idle_share"]
        print(
            f"{context} tokens: autoregressive {alone['ms_per_token']:.2f} ms/token, cascade "
            f"{together['ms_per_token']:.2f}, {together['tokens_per_step']:.2f} tokens a step, "
            f"speedup {speedup:.2f}, synthetic"
            + (f"; the GPU is idle for {idle:.0%}" if idle is not None else "")
        )
        print(f"{table}\nmeasured ms: {measured}", flush=True)
    return {**result, "rows": rows}


class SyntheticSource(IndependentSource):
    """A random source with made-up verdicts: a guess is accepted at a given rate.

    Real verdicts are computed, too, for their cost; their next tokens are kept.
    """

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.restart(0, seed)
        self._rate = rate
        self._generator = torch.Generator().manual_seed(seed)

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> list[list[int]]:
        """See `RandomSource`."""
        real = super().verify(proposal, probs_BNV, starts, active)
        made_up = []
        for guesses, (*_, next_token) in zip(proposal.tokens, real, strict=True):
            passes = torch.rand(len(guesses), generator=self._generator) < self._rate
            num_accepted = int(passes.int().cumprod(0).sum())
            made_up.append([*guesses[:num_accepted], next_token])
        return made_up


@torch.inference_mode()
def decode(
    target: Llama,
    draft: Llama | None,
    context: int,
    setup: Setup,
    method: str,
    copy: Llama | None = None,
    *,
    host: HostMemory | None = None,
) -> dict[str, Any]:
    """Decodes after `context` made-up tokens; milliseconds per token and per phase."""
    started = time.perf_counter()
    session = fresh_session(target, draft, context, setup, method, copy, host=host)
    start_seconds = time.perf_counter() - started  # to allocate, to page-lock and to capture
    stats, tokens = session.stats, session.sequences[0]
    session.start([*range(len(session.sequences))])
    for _ in range(WARMUP_STEPS):
        session.step()
    session.meter.clock.settle()
    for stage in stats.stages:
        stage.seconds = 0.0
    before, times = len(tokens), []
    rounds_before = [stage.num_rounds for stage in stats.stages]
    while len(tokens) - before < setup.generation.max_new_tokens:
        started = time.perf_counter()
        session.step()
        times.append(1e3 * (time.perf_counter() - started))
    session.meter.clock.settle()
    stats.num_decoded_tokens = num_tokens = len(tokens) - before
    on_gpu = target.device.type == "cuda"
    seconds = dict[str, float]()
    for stage, num_before in zip(stats.stages, rounds_before, strict=True):
        seconds[stage.name] = stage.seconds / max(stage.num_rounds - num_before, 1)
    return {
        "synthetic": True,
        "method": method,
        "context": context,
        "ms_per_token": sum(times) / num_tokens,
        "ms_per_step": spread(times),
        "tokens_per_step": num_tokens / len(times),
        "phase_ms": {name: 1e3 * value for name, value in seconds.items()},
        "idle_share": idle_share(session.step, PROFILED_STEPS) if on_gpu else None,
        "on_chip": session.memory.full.on_chip,
        "start_seconds": start_seconds,
    }


def fresh_session(
    target: Llama,
    draft: Llama | None,
    context: int,
    setup: Setup,
    method: str,
    copy: Llama | None = None,
    *,
    host: HostMemory | None = None,
) -> Stack:
    """A session whose full cache holds a made-up prompt but for its last token."""
    speculation = dataclasses.replace(setup.speculation, method=method)
    # As many slots for every method, which then take the same host memory.
    num_new = setup.generation.max_new_tokens + (MARGIN + 1) * setup.speculation.max_block
    num_new -= speculation.max_block
    generation = dataclasses.replace(setup.generation, max_new_tokens=num_new)
    vocab_size = min(model.config.vocab_size for model in (target, draft) if model is not None)
    prompt = random.Random(0).choices(range(vocab_size), k=context)
    low, high = setup.acceptance
    sources: dict[str, Any] = {
        "draft": IndependentSource(),
        "retrieval": SyntheticSource(low, seed=0),
        "target": SyntheticSource(low if method == "naive" else high, seed=1),
    }
    sources["draft"].restart(0, 0)
    models = Models(target, copy or target, draft)
    request = Request(prompt, 0, SAMPLING, generation)
    session = begin(models, [request], speculation, sources=sources, host=host)
    memory = session.memory
    fill_cache(memory.full)
    memory.full.advance([context - 1])
    if memory.retrieval_cache is not None:
        queries_LTHD = torch.zeros_like(memory.retrieval_cache.queries_LBTHD[:, 0, :1])
        memory.retrieval_cache.observe(0, queries_LTHD)
    return session


def random_model(config: ModelConfig, setup: Setup) -> Llama:
    """A model of random weights that keep activations in range."""
    attend = attention_for(setup.device, setup.dtype, config, setup.attention)
    model = Llama(config, dtype=setup.dtype, device=setup.device, attend=attend)
    for name, weight in model.named_parameters():
        fill(weight, 0.02, seed=len(name))
        if name.endswith("norm.weight"):
            weight.fill_(1)
    if can_pack(setup.dtype, setup.device):
        pack_linears(model)
    return fuse_if_possible(model).eval()


def fill_cache(full: FullCache) -> None:
    """Random K and V in every slot."""
    slots = (full.keys, full.values)
    tensors = [it.units.view(it.dtype) if isinstance(it, Tiles) else it[:] for it in slots]
    if isinstance(full, OffloadedFullCache):
        tensors += [full.host_LBSPKD, full.latest_LBTPKD]
    for tensor in tensors:
        fill(tensor, 1.0)


def fill(tensor: Tensor, scale: float, seed: int = 0) -> None:
    """Fills a tensor of any size with random numbers, in little time."""
    flat, generator = tensor.view(-1), torch.Generator().manual_seed(seed)
    block = scale * torch.randn(min(BLOCK, len(flat)), generator=generator)
    block = block.to(tensor.device, tensor.dtype)
    for part in flat.split(BLOCK):
        part.copy_(block[: len(part)])


main = program(build_parser, run_command)
