"""Bytes are those that would be allocated, placements fit, and a plan can be checked by hand."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch

from minitri import GenerationConfig, SamplingParams, SpeculationConfig, plan
from minitri.errors import InputError
from minitri.execution import Ranks
from minitri.gpu.offload.offloaded_cache import RING, OffloadedFullCache
from minitri.gpu.placement import (
    CONTEXT,
    GIB,
    MAX_BUFFERS,
    RESERVE,
    choose_on_chip,
    demand,
    free_host_bytes,
)
from minitri.ledger import Workload, predict
from minitri.loading.named_models import MODELS, shape_of
from minitri.memory import MemoryShape, Models, allocate
from minitri.parallel.split import share_of
from minitri.roofline import CPU as CPU_MACHINE
from minitri.roofline import GPU as GPU_MACHINE
from minitri.roofline import Machine, eight_bit_bytes, num_weights, pass_costs, weights_per_pass
from minitri.settings import StepPlan
from tests.conftest import CPU, new_cache, tiny_config, tiny_model

TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_kv_heads": 4, "num_layers": 3},
    ],
)
def test_weights_are_counted_as_the_model_has_them(changes):
    model = tiny_model(tiny_config(**changes))
    assert num_weights(model.config) == sum(weight.numel() for weight in model.parameters())
    untied = not model.config.tie_word_embeddings
    table = model.config.vocab_size * model.config.hidden_size
    assert weights_per_pass(model.config) == num_weights(model.config) - untied * table


def test_llama2_7b_has_the_weights_and_the_kv_that_everybody_knows():
    config = shape_of("llama2-7b-128k")
    assert num_weights(config) == 6_738_415_616
    assert config.kv_values_per_token * 2 == 512 * 1024


def test_every_named_model_has_a_shape_or_comes_with_the_checkout():
    assert all(shape_of(name) or plan.committed_path(name) for name in MODELS)
    assert all(shape_of(name).context_length == MODELS[name].context for name in MODELS)
    assert shape_of("nobody") is None


@pytest.mark.parametrize(
    ("speculation", "lengths"),
    [
        (
            SpeculationConfig("triforce", gamma1=2, gamma2=6, budget=64, num_recent_tokens=100),
            [400, 400],
        ),
        (SpeculationConfig(num_recent_tokens=100), [2400, 3]),  # with two budgets
        (SpeculationConfig(num_recent_tokens=100), [8192, 9000]),
        (
            SpeculationConfig(num_recent_tokens=100, budget=10**6),
            [400, 1],
        ),  # no text fills more than there is
    ],
)
def test_caches_are_counted_as_they_are_allocated(speculation, lengths):
    config = tiny_config(num_layers=3, context_length=16384)
    target = tiny_model(config)
    num_tokens, B = max(lengths) + 100, 2
    needs = demand(
        config, config, speculation, num_tokens=num_tokens, prompt_lengths=lengths, itemsize=4
    )
    full = new_cache(config, B, num_tokens + speculation.max_block)
    assert needs.kv_layer * 3 == full.num_bytes
    shape = MemoryShape(tuple(lengths), SamplingParams(), GenerationConfig(100), speculation)
    session = allocate(Models(target, target, target), shape, full=full)
    small = session.retrieval_cache
    means = small._policy._means
    held = session.num_cache_bytes - full.num_bytes + small._queries.nbytes
    verified = 3 * B * speculation.max_block * config.num_heads * config.head_dim * 4
    assert needs.small_caches == held + verified
    assert needs.parts(3)["small KV caches"] == held + verified + means.nbytes
    assert needs.parts(2)["small KV caches"] == held + verified + means.nbytes / 3  # of one layer
    hidden_states = needs.parts(2)["activations"] - needs.parts(3)["activations"]
    assert hidden_states == max(lengths) * config.hidden_size * 4
    offloaded = OffloadedFullCache.placed(
        config, B, num_tokens + speculation.max_block, on_chip=1, dtype=torch.float32, device=CPU
    )
    staging = offloaded._staging
    on_device = offloaded.keys.nbytes + offloaded.values.nbytes + staging.ring_PLBKTD.nbytes
    on_device += sum(buffer.kv_PBKSD.nbytes for buffer in staging.buffers)
    parts = needs.parts(1)
    assert parts["full KV cache"] + parts["staging buffers"] == on_device
    assert needs.on_host(1) == staging.host_PLBKSD.nbytes
    assert needs.ring_layer == 2 * B * config.num_kv_heads * RING * config.head_dim * 4


def seven_b(context: int = 124928):
    config, draft = shape_of("llama2-7b-128k"), shape_of("llama-68m")
    return demand(config, draft, TRIFORCE, num_tokens=context, prompt_lengths=[context])


def test_the_most_layers_that_fit_do_fit_and_one_more_does_not():
    needs = seven_b()
    for gib in (24, 40, 48, 80):
        best = needs.most_on_chip(gib * GIB)
        assert best is not None
        assert needs.on_device(best) <= gib * GIB < needs.on_device(best + 1)
    assert needs.most_on_chip(16 * GIB) is None
    assert needs.most_on_chip(141 * GIB) == 32


def test_what_is_left_beside_the_layers_is_for_staging_buffers():
    """At least two, which every placement has; a layer on the device is worth more than a third."""
    needs = seven_b()
    for gib in (23.2, 40, 48, 72):
        best = needs.most_on_chip(gib * GIB)
        assert needs.num_buffers(best, gib * GIB) == 2
        assert needs.num_buffers(best - 1, gib * GIB) == 3
    assert needs.num_buffers(0, 60 * GIB) == MAX_BUFFERS
    assert needs.num_buffers(20, 24 * GIB) == 2


def test_an_engine_places_layers_by_the_same_numbers():
    needs, offload = seven_b(), functools.partial(GenerationConfig, offload=True)
    there = {"host_bytes": 256 * GIB, "name": "m"}
    assert choose_on_chip(needs, GenerationConfig(), device_bytes=141 * GIB, **there) == 32
    assert choose_on_chip(needs, offload(), device_bytes=80 * GIB, **there) == needs.most_on_chip(
        80 * GIB
    )
    assert choose_on_chip(needs, offload(on_chip=0), device_bytes=80 * GIB, **there) == 0
    exact = needs.on_device(32) - RESERVE
    assert choose_on_chip(needs, GenerationConfig(), device_bytes=exact, **there) == 32
    with pytest.raises(InputError, match=r"^m needs \d+\.\d GiB on the device .* use --offload"):
        choose_on_chip(needs, GenerationConfig(), device_bytes=exact - 1, **there)
    with pytest.raises(InputError, match="--on-chip is 33 layers, but m has 32"):
        choose_on_chip(needs, offload(on_chip=33), device_bytes=80 * GIB, **there)
    with pytest.raises(InputError, match=r"--on-chip 31 needs .* 2\d layers fit"):
        choose_on_chip(needs, offload(on_chip=31), device_bytes=72 * GIB, **there)
    with pytest.raises(InputError, match="even with its whole KV cache in host memory, got 12.0"):
        choose_on_chip(needs, offload(), device_bytes=12 * GIB, **there)
    with pytest.raises(InputError, match="of host memory beside .* got 1.0"):
        choose_on_chip(needs, offload(), device_bytes=30 * GIB, host_bytes=GIB, name="m")
    with pytest.raises(InputError, match="--on-chip 0 needs"):
        choose_on_chip(
            needs, offload(on_chip=0), device_bytes=80 * GIB, host_bytes=20 * GIB, name="m"
        )


def test_predictions_are_bytes_over_bandwidth():
    """7B at 100,000 tokens: 13.2 GB of weights read, 52.4 GB of KV, 2.1 GB of it within the
    budget."""
    config, draft = shape_of("llama2-7b-128k"), shape_of("llama-68m")
    plan = StepPlan("triforce", 2, 6)

    def predicted(on_chip: int):
        workload = Workload(config, draft, on_chip, num_tokens=100_000, budget=4096)
        return predict(workload, Machine(2e12, 2e12, 50e9), plan, (0.0, 1.0))

    here, half = predicted(32), predicted(16)
    assert here["target"] == pytest.approx(1e3 * (13.215e9 + 52.43e9) / 2e12, rel=1e-3)
    assert here["retrieval"] == pytest.approx(1e3 * (13.215e9 + 2.147e9) / 2e12, rel=1e-3)
    # No guess of the drafter is accepted: a round of two draft steps and one verification for
    # each of six tokens.
    step = 6 * (2 * here["draft"] + here["retrieval"]) + here["target"] + here["commit"]
    assert here["cascade"] == pytest.approx(step / 7)
    assert half["target"] == pytest.approx(1e3 * 52.43e9 / 2 / 50e9, rel=1e-3)
    assert half["speedup"] == pytest.approx(half["target"] / half["cascade"])


def run(capsys, *flags: str) -> tuple[int, list[str], str]:
    with pytest.raises(SystemExit) as exit_:
        plan.main(list(flags))
    captured = capsys.readouterr()
    return exit_.value.code, captured.out.splitlines(), captured.err


@pytest.mark.parametrize(("gib", "best"), [("24", 1), ("80", 31), ("141", 32)])
def test_a_plan_for_seven_billion_weights_behind_122k_tokens(capsys, gib, best):
    """By hand: 12.55 GiB of weights, 61 GiB of KV in 32 layers of 1.91, twice that to stage, 2.2 of
    small caches (2 for the budget, 0.12 for the chunk means of one layer), 1.2 of activations (0.95
    for hidden states of the prompt), 0.5 in reserve."""
    code, lines, _ = run(capsys, "--context", "124928", "--gpu-memory", gib, "--budget", "4096")
    result = json.loads(lines[-1])
    assert (code, result["on_chip"]) == (0, best)
    rows = {row["on_chip"]: row for row in result["placements"]}
    assert set(rows) == {0, best, 32}
    assert rows[best]["fits"]
    assert rows[32]["parts"]["full KV cache"] == 32 * 2 * 32 * 124992 * 128 * 2
    assert rows[0]["device_bytes"] / GIB == pytest.approx(
        12.55 + 0.13 + 3.88 + 2.16 + 1.19 + 0.5, abs=0.03
    )
    assert rows[0]["host_bytes"] / GIB == pytest.approx(61.03, abs=0.01)


def test_the_context_of_cuda_is_counted_in_a_plan_and_not_at_boot(capsys):
    """A 24 GB card has 23.2 GiB free: what fits at boot fits in the plan, to the byte."""
    needs = seven_b(122880)
    exact = needs.on_device(0)
    assert choose_on_chip(
        needs, GenerationConfig(offload=True), device_bytes=exact, host_bytes=256 * GIB, name="m"
    ) == 0  # fmt: skip
    for spare, code in ((0, 0), (-2e-9, 2)):
        size = repr((exact + CONTEXT) / GIB + spare)
        flags = ("--context", "122880", "--gamma1", "2", "--gamma2", "6", "--gpu-memory", size)
        assert run(capsys, *flags)[0] == code
    assert run(capsys, "--context", "122880", "--gpu-memory", "24")[0] == 0


def test_a_plan_that_does_not_fit_says_what_would(capsys):
    """And that does: each piece of advice is taken."""
    small = ("--context", "122880", "--gpu-memory", "24", "--prefill-chunk", "16384")
    code, _, error = run(capsys, *small)
    tokens, chunk = re.search(
        r"a context of (\d+) tokens or --prefill-chunk (\d+) or", error
    ).groups()
    assert code == 2
    assert "twice as many such GPUs (torchrun) would fit" in error
    assert run(capsys, *small, "--context", tokens)[0] == 0
    assert run(capsys, *small, "--context", str(int(tokens) + 1024))[0] == 2
    assert run(capsys, *small, "--prefill-chunk", chunk)[0] == 0
    assert run(capsys, *small, "--prefill-chunk", str(2 * int(chunk)))[0] == 2
    assert run(capsys, *small, "--gpus", "2")[0] == 0
    error = run(capsys, "--gpu-memory", "36", "--dtype", "float32")[2]
    assert "--dtype bfloat16" in error
    assert "use a smaller model or dtype" in run(capsys, "--gpu-memory", "3")[2]


def test_two_gpus_share_weights_and_kv_but_not_the_drafter():
    config, draft = shape_of("llama2-7b-128k"), shape_of("llama-68m")
    options = {"num_tokens": 122880, "prompt_lengths": [122880]}
    one = demand(config, draft, TRIFORCE, **options)
    two = demand(config, draft, TRIFORCE, num_gpus=2, **options)
    norms = (2 * config.num_layers + 1) * config.hidden_size * 2
    assert two.weights - norms == (one.weights - norms) / 2
    assert two.kv_layer == one.kv_layer / 2
    assert two.draft_weights == one.draft_weights
    copied = demand(config, draft, TRIFORCE, num_gpus=2, has_copy=True, **options)
    assert copied.draft_weights - two.draft_weights == eight_bit_bytes(two_gpu_share(config))
    with pytest.raises(InputError, match="cannot be split over 3 ranks"):
        demand(config, draft, TRIFORCE, num_gpus=3, **options)


def two_gpu_share(config):
    ranks = Ranks()
    ranks.count = 2
    return share_of(config, ranks)


def test_gammas_are_the_fastest_for_where_the_kv_cache_is(capsys):
    """A pass over KV in host memory is so dear that it had better verify many guesses."""
    flags = ("--context", "124928", "--gpu-memory", "141", "--budget", "4096")
    _, lines, _ = run(capsys, *flags)
    here, there = (row["predicted_ms"] for row in json.loads(lines[-1])["placements"])
    _, lines, _ = run(capsys, *flags, "--gamma1", "2", "--gamma2", "6")
    given = [row["predicted_ms"] for row in json.loads(lines[-1])["placements"]]
    assert there["plan"]["gamma2"] > here["plan"]["gamma2"]
    assert [row["plan"] for row in given] == 2 * [
        {"method": "triforce", "gamma1": 2, "gamma2": 6, "tree": ""}
    ]
    assert here["speedup"] >= given[0]["speedup"]
    assert there["speedup"] > 1.3 * given[1]["speedup"]


def test_a_plan_says_what_does_not_fit(capsys):
    code, lines, error = run(
        capsys, "--model", "lwm-text-512k", "--gpu-memory", "24", "--host-memory", "512"
    )
    assert code == 2
    assert next(line for line in lines if line.startswith("fits")).split() == ["fits", "no", "no"]
    assert error.startswith("minitri: lwm-text-512k needs ")
    assert error.count("\n") == 1


def test_a_plan_of_a_folder_reads_its_config_only(folder, capsys):
    code, lines, _ = run(capsys, "--model", str(folder), "--draft", "ngram")
    assert code == 0
    assert json.loads(lines[-1])["on_chip"] == json.loads(lines[-1])["placements"][0]["on_chip"]
    assert run(capsys, "--model", "smollm2-135m")[0] == 0  # with the drafter of the checkout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "lama"), "unknown model 'lama'"),
        (("--gpu-memory", "-1"), "'-1' is not a number above 0"),
        (("--acceptance", "0.5"), "'0.5' is not two rates"),
        (("--acceptance", "0.5,2"), "is not two rates"),
        (("--context", "0"), "'0' is not a whole number"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, flags, message):
    code, _, error = run(capsys, *flags)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_offload_needs_a_gpu_and_on_chip_needs_offload(engine):
    with pytest.raises(InputError, match="offload is for GPUs: .* leave --offload out"):
        engine.generate([5, 6], generation=GenerationConfig(4, offload=True))
    with pytest.raises(InputError, match="on_chip is 3, which means nothing without offload"):
        GenerationConfig(on_chip=3)
    with pytest.raises(InputError, match="on_chip is -1"):
        GenerationConfig(offload=True, on_chip=-1)


def test_free_host_memory_is_what_the_system_says():
    assert free_host_bytes() > 1 << 20


@pytest.mark.parametrize("machine", [CPU_MACHINE, GPU_MACHINE])
def test_nominal_costs_count_weights_layers_slots_and_guesses(machine):
    """What the autotuner expects before it has measured, by hand; hosted KV counts where the link
    is slower."""
    config, draft = shape_of("llama2-7b-128k"), shape_of("llama-68m")
    size = {"machine": machine, "itemsize": 2, "num_tokens": 10**6, "num_retrieved": 4096}
    costs = pass_costs(config, draft, **size)
    weight_bytes = 2 * weights_per_pass(config)
    alone = machine.seconds_per_pass + 32 * machine.seconds_per_layer
    alone += weight_bytes / machine.weight_bytes_per_second
    slot = 512 * 1024 / machine.kv_bytes_per_second
    assert costs("retrieval", 0) == pytest.approx(alone + 4096 * slot)
    assert costs("target", 0) == pytest.approx(alone + 10**6 * slot)
    assert costs("target", 5) == pytest.approx(
        (alone + 10**6 * slot) * (1 + 5 * machine.share_per_extra_token)
    )
    assert costs("draft", 0) < 0.1 * alone
    assert pass_costs(config, None, **size)("draft", 0) == 0
    hosted = pass_costs(config, draft, **size, hosted_share=1.0)("target", 0)
    assert hosted == pytest.approx(max(alone + 10**6 * slot, 10**6 * 512 * 1024 / 25e9))
