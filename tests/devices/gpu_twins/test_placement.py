"""Bytes are those that would be allocated, and placements fit; host memory that caches borrow."""

import functools
import gc
import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.apps import plan
from minitri.core import memory, roofline
from minitri.core.memory import MemoryPool, Models, allocate, demand_of
from minitri.core.offload.placement import CONTEXT, GIB, RESERVE, Demand, choose_on_chip
from minitri.core.roofline import Workload, num_weights, weights_per_pass
from minitri.core.shape import MemoryShape
from minitri.core.stack import Stack
from minitri.files.named_models import DEFAULT_MODEL, MODELS
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, tiny_config
from tests.devices.gpu_twins.conftest import CpuPool, as_on_a_gpu, offloaded

TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=6)
SEVEN_B, DRAFT = (MODELS[name].shape for name in ("llama2-7b-128k", "llama-68m"))


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"attention_bias": True}])
def test_weights_are_counted_as_the_model_has_them(changes):
    model = tiny_model(tiny_config(**changes))
    assert num_weights(model.config) == sum(weight.numel() for weight in model.parameters())
    untied = not model.config.tie_word_embeddings
    table = model.config.vocab_size * model.config.hidden_size
    assert weights_per_pass(model.config) == num_weights(model.config) - untied * table


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({"method": "triforce", "gamma1": 2, "gamma2": 6, "budget": 64}, [400, 400]),
        ({}, [2400, 3]),  # with two budgets
        ({"budget": 10**6}, [400, 1]),  # no text fills more than there is
    ],
)
def test_caches_are_counted_as_they_are_allocated(changes, lengths):
    window = {"sliding_window": 300, "sliding_layers": (1,)}
    config, B = tiny_config(num_layers=3, context_length=16384, **window), 2
    target = tiny_model(config)
    speculation = SpeculationConfig(num_recent_tokens=100, **changes)
    shape = MemoryShape(tuple(lengths), SamplingParams(), GenerationConfig(100), speculation)
    needs = Demand(config, config, shape, itemsize=4)
    full = new_cache(config, B, shape.capacity)
    assert needs.parts(3)["full KV cache"] == full.num_bytes
    memory = allocate(Models(target, target, target), shape, full=full)
    window = B * speculation.observation_window * 3 * config.num_heads * config.head_dim * 4
    held = sum(it.cache.num_bytes for it in memory.runners.values()) - full.num_bytes + window
    held += memory.retrieval_cache.queries_LBTHD.nbytes
    assert needs.parts(3)["small KV caches"] == held
    waiting = needs.parts(2)["activations"] - needs.parts(3)["activations"]
    assert waiting == max(lengths) * 4 * config.hidden_size
    cache = offloaded(1, B, shape.capacity, config=config)
    on_device = cache.keys.nbytes + cache.values.nbytes + cache.latest_LBTPKD.nbytes
    on_device += sum(buffer.kv_BSPKD.nbytes for buffer in cache.buffers)
    parts = needs.parts(1)
    assert parts["weights that only propose"] == parts["weights"] == num_weights(config) * 4
    assert parts["full KV cache"] + parts["staging buffers"] == on_device
    assert needs.on_host(1) == cache.host_LBSPKD.nbytes


@pytest.mark.parametrize("on_chip", [1, 0])
def test_captured_passes_are_counted(on_chip, lengths_on_the_device):
    """Over eight rows, by both rules, with activations; none of a target with hosted K and V."""
    config = tiny_config(num_layers=1, vocab_size=1000)
    model = as_on_a_gpu(tiny_model(config))
    speculation = SpeculationConfig("triforce", gamma1=1, gamma2=3, num_recent_tokens=60)
    warm = SamplingParams(0.9, 20, top_p=0.9, min_p=0.01)
    shape = MemoryShape((60,) * 8, warm, GenerationConfig(20), speculation)
    full = None if on_chip else offloaded(0, 8, shape.capacity, config=config)
    memory = allocate(Models(model, model, model), shape, full=full, graphs=CpuPool())
    gc.collect()  # else what earlier tests have left is freed meanwhile, which counts
    with torch.inference_mode(), profile(profile_memory=True) as profiled:
        for coupled in (False, True):
            Stack(memory, replace(shape, speculation=replace(speculation, coupled=coupled)))
    most = max(accumulate(it.nbytes() for it in profiled.profiler.kineto_results.events()))
    assert 0.7 < most / Demand(config, config, shape, 4).parts(on_chip)["captured passes"] < 1


SHAPE = MemoryShape((124928,), SamplingParams(), GenerationConfig(1), TRIFORCE)
NEEDS = Demand(SEVEN_B, DRAFT, SHAPE)


def test_an_engine_places_as_many_layers_as_fit():
    needs, offload = NEEDS, functools.partial(GenerationConfig, 1, offload=True)

    def chosen(generation, device_gib, host_gib=256):
        needs = replace(NEEDS, shape=replace(SHAPE, generation=generation))
        return choose_on_chip(needs, device_gib * GIB, host_gib * GIB)

    for gib in (23.2, 40, 72):
        best = chosen(offload(), gib)
        assert needs.on_device(best) <= gib * GIB < needs.on_device(best + 1)
    assert chosen(offload(on_chip=0), 80) == 0
    exact = needs.on_device(32) - RESERVE
    assert chosen(GenerationConfig(1), exact / GIB) == 32
    for wanted, device_gib, host_gib, problem in (
        (GenerationConfig(1), (exact - 1) / GIB, 256, "32 of 32 layers .* offload=True"),
        (offload(on_chip=33), 141, 256, "33 of 32 layers"),
        (offload(on_chip=31), 72, 256, "31 of 32 layers on the device, got 72.00"),
        (offload(), 12, 256, "0 of 32 layers on the device, got 12.00"),
        (offload(on_chip=0), 80, 20, "61.03 in host memory"),
    ):
        with pytest.raises(InputError, match=problem):
            chosen(wanted, device_gib, host_gib)


def test_what_fits_in_a_plan_fits_at_boot(call):
    """CUDA takes its context from the memory that a plan counts with."""
    flags = f"-m {SEVEN_B.name} --context 124928 --gpu-memory 24 --json"
    code, line, _ = call(plan.main, *flags.split())
    found = json.loads(line)
    assert (code, found["on_chip"]) == (0, 1)
    assert {row["on_chip"] for row in found["placements"] if row["fits"]} == {0, 1}
    shape = replace(SHAPE, generation=GenerationConfig(1, offload=True))
    assert choose_on_chip(replace(NEEDS, shape=shape), 24 * GIB - CONTEXT, 256 * GIB) == 1


def test_a_plan_counts_the_copy_that_a_gpu_makes_by_default(call):
    flags = f"-m {SEVEN_B.name} --context 124928 --gpu-memory 141 --json"
    default, own, none = (
        call(plan.main, *flags.split(), *more).json["placements"][0]
        for more in ([], ["--draft-weights", "int4"], ["--draft-weights", "same"])
    )
    assert default == own
    assert default["device_GiB"] > none["device_GiB"] + 3


def test_without_flags_this_machine_and_the_default_model_are_planned(call, monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = call(plan.main, "--json").json
    assert (found["model"], found["hardware"]["gib"]) == (DEFAULT_MODEL, 8)
    [row] = found["placements"]
    assert (row["fits"], row["host_GiB"]) == (True, 0)


def test_a_run_gets_as_many_of_its_first_rows_as_memory_holds_and_one_at_least(monkeypatch):
    models = Models(*[tiny_model(tiny_config())] * 2)
    run = SamplingParams(), GenerationConfig(9), SpeculationConfig()
    needs = demand_of(models, MemoryShape((90, 60), *run))
    room = needs.on_device(models.target.config.num_layers) - needs.num_weight_bytes
    for num_missing, lengths in ((0, (90, 60)), (1, (90,)), (room, (90,))):
        free = room - num_missing
        monkeypatch.setattr(memory, "free_host_bytes", lambda free=free: free)
        fitting = MemoryPool(models).fitting(MemoryShape((90, 60, 60, 60), *run))
        assert fitting.prompt_lengths == lengths


def test_nominal_costs_count_weights_layers_slots_and_guesses():
    """What the autotuner expects, by hand; hosted KV counts, as the link is slower."""
    machine, slot = roofline.GPU, 512 * 1024
    work = Workload(SEVEN_B, DRAFT, 10**6, 4096)
    alone = machine.seconds_per_pass + 32 * machine.seconds_per_layer
    alone += 2 * weights_per_pass(SEVEN_B) / machine.bytes_per_second
    whole, small = (alone + n * slot / machine.bytes_per_second for n in (10**6, 4096))
    assert work.seconds(machine, "retrieval", 0) == pytest.approx(small)
    assert work.seconds(machine, "target", 0) == pytest.approx(whole)
    guessing = whole * (1 + 5 * machine.share_of_kv)
    assert work.seconds(machine, "target", 5) == pytest.approx(guessing)
    assert work.seconds(machine, "draft", 0) < 0.1 * alone
    assert replace(work, draft=None).seconds(machine, "draft", 0) < 1e-8
    hosted = replace(work, hosted_share=1.0).seconds(machine, "target", 0)
    assert hosted == pytest.approx(10**6 * slot / 25e9)
    sliding = replace(SEVEN_B, sliding_window=1000, sliding_layers=tuple(range(8)))
    seconds = replace(work, target=sliding).seconds(machine, "target", 0)
    assert seconds == pytest.approx(alone + 750_250 * slot / machine.bytes_per_second)


def test_memory_that_caches_files_is_free(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 50 kB\nHugePages_Total: 0\n")
    (tmp_path / "memory.max").write_text("60000\n")
    (tmp_path / "memory.stat").write_text("anon 10000\nfile 35000\nshmem 5000\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / Path(path).name)
    assert memory.free_host_bytes() == 45_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_bytes() == 50 * 1024
