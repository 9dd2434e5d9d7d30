"""Bytes are those that would be allocated, placements fit, and a plan can be checked by hand."""

import functools
import json
from dataclasses import replace

import pytest

from minitri import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.apps import plan
from minitri.core.errors import InputError
from minitri.core.memory import Models, allocate
from minitri.core.offload.placement import (
    CONTEXT,
    GIB,
    RESERVE,
    Demand,
    MemoryShape,
    choose_on_chip,
)
from minitri.core.roofline import CPU as CPU_MACHINE
from minitri.core.roofline import GPU as GPU_MACHINE
from minitri.core.roofline import Machine, Workload, copy_bytes, num_weights, weights_per_pass
from minitri.core.settings import StepPlan
from minitri.files.named_models import MODELS
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, tiny_config
from tests.devices.gpu_twins.offload import offloaded
from tools.bench.pass_table import pass_table

TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=6)
PLAN = StepPlan("triforce", 2, 6)
SEVEN_B, DRAFT = (MODELS[name].shape for name in ("llama2-7b-128k", "llama-68m"))
WINDOW = SpeculationConfig(num_recent_tokens=100)


GROUPED = {"num_kv_heads": 4, "num_layers": 3, "attention_bias": True}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, GROUPED])
def test_weights_are_counted_as_the_model_has_them(changes):
    model = tiny_model(tiny_config(**changes))
    assert num_weights(model.config) == sum(weight.numel() for weight in model.parameters())
    untied = not model.config.tie_word_embeddings
    table = model.config.vocab_size * model.config.hidden_size
    assert weights_per_pass(model.config) == num_weights(model.config) - untied * table


@pytest.mark.parametrize(
    ("speculation", "lengths"),
    [
        (replace(WINDOW, method="triforce", gamma1=2, gamma2=6, budget=64), [400, 400]),
        (WINDOW, [2400, 3]),  # with two budgets
        (WINDOW, [8192, 9000]),
        (replace(WINDOW, budget=10**6), [400, 1]),  # no text fills more than there is
    ],
)
def test_caches_are_counted_as_they_are_allocated(speculation, lengths):
    config, B = tiny_config(num_layers=3, context_length=16384), 2
    target = tiny_model(config)
    shape = MemoryShape(tuple(lengths), SamplingParams(), GenerationConfig(100), speculation)
    needs = Demand(config, config, shape, itemsize=4)
    full = new_cache(config, B, shape.capacity)
    assert needs.parts(3)["full KV cache"] == full.num_bytes
    memory = allocate(Models(target, target, target), shape, full=full)
    window = B * speculation.observation_window * 3 * config.num_heads * config.head_dim * 4
    held = memory.num_cache_bytes - full.num_bytes + window
    held += memory.retrieval_cache.queries_LBTHD.nbytes
    assert needs.parts(3)["small KV caches"] == held
    waiting = needs.parts(2)["activations"] - needs.parts(3)["activations"]
    assert waiting == max(lengths) * 4 * config.hidden_size
    cache = offloaded(1, B, shape.capacity, config=config)
    on_device = cache.keys.nbytes + cache.values.nbytes + cache.latest_LBTPKD.nbytes
    on_device += sum(buffer.kv_BSPKD.nbytes for buffer in cache.buffers)
    parts = needs.parts(1)
    assert parts["full KV cache"] + parts["staging buffers"] == on_device
    assert needs.on_host(1) == cache.host_LBSPKD.nbytes


def seven_b(context: int = 124928, speculation=TRIFORCE, num_gpus: int = 1, **changes):
    shape = MemoryShape((context,), SamplingParams(), GenerationConfig(1), speculation)
    return Demand(SEVEN_B.share(num_gpus), DRAFT, shape, **changes)


def test_an_engine_places_as_many_layers_as_fit():
    needs, offload = seven_b(), functools.partial(GenerationConfig, offload=True)

    def chosen(generation, device_gib, host_gib=256):
        return choose_on_chip(needs, generation, device_gib * GIB, host_gib * GIB)

    for gib in (23.2, 40, 72):
        best = chosen(offload(), gib)
        assert needs.on_device(best) <= gib * GIB < needs.on_device(best + 1)
    assert not any(needs.fits(16 * GIB, 256 * GIB, n) for n in range(33))
    assert chosen(offload(on_chip=0), 80) == 0
    exact = needs.on_device(32) - RESERVE
    assert chosen(GenerationConfig(), 141) == chosen(GenerationConfig(), exact / GIB) == 32
    for wanted, device_gib, host_gib, message in (
        (GenerationConfig(), (exact - 1) / GIB, 256, "KV cache of 32 of 32 layers .* offload=True"),
        (offload(on_chip=33), 141, 256, "KV cache of 33 of 32 layers"),
        (offload(on_chip=31), 72, 256, "KV cache of 31 of 32 layers on the device, got 72.00"),
        (offload(), 12, 256, "KV cache of 0 of 32 layers on the device, got 12.00"),
        (offload(), 30, 1, "got 30.00 and 1.00; shorten"),
        (offload(on_chip=0), 80, 20, "61.03 in host memory"),
    ):
        with pytest.raises(InputError, match=message):
            chosen(wanted, device_gib, host_gib)


def run(capsys, *flags: str) -> tuple[int, list[str], str]:
    with pytest.raises(SystemExit) as exit_:
        plan.main(list(flags))
    captured = capsys.readouterr()
    return exit_.value.code, captured.out.splitlines(), captured.err


@pytest.mark.parametrize(("gib", "best"), [("24", 1), ("80", 32), ("141", 32)])
def test_a_plan_for_seven_billion_weights_after_122k_tokens(capsys, gib, best):
    """By hand: 12.55 GiB of weights, 61 GiB of KV in 32 layers of 1.91, twice that to stage, 2 of
    small caches, 1.2 of activations (0.95 for hidden states of the prompt), 0.5 in reserve. What
    fits in the plan fits at boot, when CUDA has taken its context."""
    flags = ("--context", "124928", "--gamma1", "2", "--gamma2", "6", "--budget", "4096")
    _, lines, _ = run(capsys, *flags, "--gpu-memory", gib)
    assert "{" not in "".join(lines)
    code, [line], _ = run(capsys, *flags, "--gpu-memory", gib, "--json")
    result = json.loads(line)
    assert (code, result["on_chip"]) == (0, best)
    rows = {row["on_chip"]: row for row in result["placements"]}
    assert set(rows) == {0, best, 32}
    assert rows[best]["fits"]
    assert rows[32]["parts"]["full KV cache"] == 32 * 2 * 32 * 124992 * 128 * 2
    by_hand = 12.55 + 0.13 + 3.88 + 2.04 + 1.19 + 0.5
    assert rows[0]["device_bytes"] / GIB == pytest.approx(by_hand, abs=0.03)
    assert rows[0]["host_bytes"] / GIB == pytest.approx(61.03, abs=0.01)
    needs = seven_b(speculation=replace(TRIFORCE, budget=4096))
    free = int(gib) * GIB - CONTEXT
    assert choose_on_chip(needs, GenerationConfig(offload=True), free, 256 * GIB) == best


def test_a_plan_that_does_not_fit_says_what_to_change(capsys, folder):
    """In one line. Of a folder its config is enough."""
    code, lines, error = run(capsys, "--gpu-memory", "24", "--prefill-chunk", "16384")
    assert (code, lines, error.count("\n")) == (2, [], 1)
    assert "lower --prefill-chunk" in error
    assert run(capsys, "--model", str(folder), "--draft", "ngram")[0] == 0


@pytest.mark.parametrize(
    ("flags", "gib", "memory", "link"),
    [
        (("--gpu", "h200"), 140.4, 0.8 * 4.8e12, 0.8 * 64e9),
        (("--gpu", "h200", "--gpu-memory", "70"), 70, 0.8 * 4.8e12, 0.8 * 64e9),
        (("--gpu", "gh200"), 95.6, 0.8 * 4e12, 0.8 * 450e9),
        (("--gpu-memory", "80"), 80, 2e12, 25e9),
    ],
)
def test_a_machine_is_its_data_sheet_as_far_as_it_is_reached(capsys, flags, gib, memory, link):
    """And figures that are given count as they are."""
    _, [line], _ = run(capsys, "--model", "llama3.2-1b", "--json", *flags)
    found = json.loads(line)
    assert found["hardware"]["gib"] == gib
    machine = found["hardware"]["machine"]
    assert machine["weight_bytes_per_second"] == pytest.approx(memory)
    assert machine["link_bytes_per_second"] == pytest.approx(link)
    assert len(found["placements"]) == 2


def test_the_cards_are_listed(capsys):
    _, lines, _ = run(capsys, "--gpu", "list")
    assert "h200        140.4  4800 " in "\n".join(lines)


def test_a_context_beyond_the_model_is_told(capsys):
    flags = ("--model", "smollm2-135m", "--gpu", "h200", "--context")
    code, _, error = run(capsys, *flags, "8193")
    assert (code, error.count("\n")) == (0, 1)
    assert "holds 8192 tokens, not 8193; it needs --rope-scaling" in error
    assert run(capsys, *flags, "8192")[2] == ""


def test_two_gpus_share_weights_and_kv_but_not_the_drafter():
    sizes = [{}, {"num_gpus": 2}, {"num_gpus": 2, "copy_bits": 4}]
    one, two, copied = (seven_b(**size).parts(32) for size in sizes)
    norms = (2 * SEVEN_B.num_layers + 1) * SEVEN_B.hidden_size * 2
    assert two["weights"] - norms == (one["weights"] - norms) / 2
    assert two["full KV cache"] == one["full KV cache"] / 2
    guessing = [parts["weights that only propose"] for parts in (one, two, copied)]
    assert guessing[0] == guessing[1] == guessing[2] - copy_bytes(SEVEN_B.share(2), 4)
    with pytest.raises(InputError, match="cannot be split over 3 ranks"):
        seven_b(num_gpus=3)


@pytest.mark.parametrize("machine", [CPU_MACHINE, GPU_MACHINE])
def test_nominal_costs_count_weights_layers_slots_and_guesses(machine):
    """What the autotuner expects before it has measured, by hand; hosted KV counts where the link
    is slower."""
    work = Workload(SEVEN_B, DRAFT, 10**6, 4096)
    costs = functools.partial(work.seconds, machine)
    alone = machine.seconds_per_pass + 32 * machine.seconds_per_layer
    alone += 2 * weights_per_pass(SEVEN_B) / machine.weight_bytes_per_second
    slot = 512 * 1024 / machine.kv_bytes_per_second
    whole = alone + 10**6 * slot
    assert costs("retrieval", 0) == pytest.approx(alone + 4096 * slot)
    assert costs("target", 0) == pytest.approx(whole)
    assert costs("target", 5) == pytest.approx(whole * (1 + 5 * machine.share_per_extra_token))
    assert costs("draft", 0) < 0.1 * alone
    assert replace(work, draft=None).seconds(machine, "draft", 0) == 0
    hosted = replace(work, hosted_share=1.0).seconds(machine, "target", 0)
    assert hosted == pytest.approx(max(whole, 10**6 * 512 * 1024 / 25e9))


def test_a_cascade_is_predicted_by_its_passes(monkeypatch):
    """No guess of the drafter is accepted: a round of two draft steps and one verification for each
    of six tokens."""
    monkeypatch.setattr(plan, "ACCEPTANCE", {"draft": 0.0, "retrieval": 1.0})
    work, machine = Workload(SEVEN_B, DRAFT, 100_000, 4096), Machine(2e12, 2e12, 50e9)
    found = plan.predict(work, machine, [PLAN])
    lines = pass_table(work, PLAN, 1024, machine).splitlines()[1:]
    ms = {line[:16].rstrip(): float(line.split()[-1]) for line in lines}
    step = 6 * (2 * ms["draft"] + ms["retrieval"]) + ms["target"]
    assert found["cascade"] == pytest.approx(step / 7, rel=1e-3)
    assert found["speedup"] == pytest.approx(ms["autoregressive"] / found["cascade"], rel=1e-3)
