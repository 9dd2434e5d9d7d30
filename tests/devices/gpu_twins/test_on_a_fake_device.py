"""Whole runs of a 7B shape on a GPU that has no numbers: no device, type or shape is mixed up."""

from dataclasses import replace

import pytest
import torch

from minitri import Engine, GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig
from minitri.core.graphs import GraphPool
from minitri.devices.choose import choose_device, retrieval_copy
from minitri.files.named_models import MODELS
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from minitri.trees.tree_shape import shape_of
from tests.conftest import byte_level_tokenizer
from tests.devices.gpu_twins.fake_cuda import DEVICE, GIB, fake_cuda, trust_kernels
from tests.mutation import Mutant, mutated
from tools.bench import kernel_times, synthetic

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

TARGET = replace(MODELS["llama2-7b-128k"].shape, num_layers=3)
DRAFT = MODELS["llama-68m"].shape
WARM = SamplingParams(0.6, top_p=0.9)
UNTIL_4 = GenerationConfig(4, ignore_eos=True)
HOSTED = {"offload": True, "on_chip": 0}


@pytest.fixture
def cuda(monkeypatch):
    """On which all kernels compile, and are right."""
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device, and needs none")
    trust_kernels(monkeypatch)
    shape_of.cache_clear()  # masks are tensors, and real ones
    with fake_cuda(monkeypatch) as found:
        capture = GraphPool.capture

        def noted(pool, function, *examples):
            name = function.__name__
            found.captured.append("verdict" if name.startswith("verify") else name)
            return capture(pool, function, *examples)

        monkeypatch.setattr(GraphPool, "capture", noted)
        yield found
    shape_of.cache_clear()


def setup_of(backend="triton", weights="same", offload=(), **speculation):
    generation = GenerationConfig(4, ignore_eos=True, **dict(offload))
    settings = (SpeculationConfig(**speculation), generation, (0.5, 0.9))
    return synthetic.Setup(TARGET, DRAFT, *settings, torch.bfloat16, DEVICE, backend, weights)


def engine_of(backend, weights="same"):
    setup = setup_of(backend)
    target, draft = (synthetic.random_model(config, setup) for config in (TARGET, DRAFT))
    tokenizer = Tokenizer(TokenizersBackend(byte_level_tokenizer()), None)
    return Engine(target, tokenizer, draft, retrieval_copy(target, weights))


PASSES = {"forward", "probs", "verdict"}


@pytest.mark.parametrize(
    ("speculation", "placement", "backend", "weights", "captured"),
    [
        ({"method": "autoregressive"}, {}, "triton", "same", PASSES),
        ({"method": "auto"}, {}, "auto", "same", {*PASSES, "forward_one", "round"}),
        ({"method": "naive", "tree": "2x2"}, HOSTED, "flash", "same", PASSES),
        ({"method": "retrieval", "coupled": True}, {}, "flash", "int8", {*PASSES, "forward_one"}),
        ({"method": "triforce"}, {}, "math", "int4", {*PASSES, "round"}),
        ({"method": "triforce"}, {"cuda_graphs": False}, "triton", "int4", set()),
        ({"method": "triforce", "tree": "2x2"}, {}, "triton", "int8", PASSES),
        ({"method": "triforce"}, HOSTED, "triton", "int8", {*PASSES, "round"}),
        (
            {"method": "triforce", "coupled": True},
            {"offload": True, "on_chip": 2},
            "math",
            "same",
            {*PASSES, "round"},
        ),
    ],
)
def test_a_run_goes_to_its_end(speculation, placement, backend, weights, captured, cuda):
    """With all of its passes, draft rounds and verdicts in graphs, before its first token."""
    engine = engine_of(backend, weights)
    cuda.captured.clear()
    end = engine.complete(
        [1] * 30_000,
        seed=0,
        sampling=WARM,
        speculation=SpeculationConfig(**speculation),
        generation=GenerationConfig(16, ignore_eos=True, **placement),
    )
    assert len(end.token_ids) == 16
    assert set(cuda.captured) == captured
    assert (cuda.num_graphs > 0) == (cuda.num_replays > 0)
    assert end.stats.num_graphs == cuda.num_graphs


POSITIONS = "block.positions_BT"
PLACES = "places_BN[:, 1:]"


@pytest.mark.parametrize(
    ("function", "tensor", "device"),
    [("ModelRunner._output", "tensor", "device"), ("run_now", "tensor", "p_BNV.device")],
)
def test_numbers_that_stay_on_the_host_are_noticed(function, tensor, device, cuda):
    engine = engine_of("math")
    generation = replace(UNTIL_4, cuda_graphs=False)
    with mutated(
        Mutant("left behind", function, f"{tensor}.to({device}, non_blocking=True)", tensor, "")
    ):
        with pytest.raises(RuntimeError, match="same device"):
            engine.complete([1] * 40, method="triforce", generation=generation)


@pytest.mark.parametrize(
    ("function", "old", "new", "problem"),
    [
        ("Llama.forward", POSITIONS, f"{POSITIONS} + {POSITIONS}.tolist()[0][0]", "tolist"),
        ("Passes.forward", PLACES, f"torch.zeros({PLACES}.shape).long()", "same device"),
        (
            "Passes.__post_init__",
            "numbers_3.to(self.model.device)",
            "numbers_3",
            "on the host",
        ),
        (
            "verify_block",
            "arange(1, N + 1, device=passes_BN.device)",
            "arange(1, N + 1)",
            "same dev",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_in_one_line(function, old, new, problem, cuda):
    """In a pass of a model, and in a verdict: numbers of the host, which it would keep for good."""
    old, new = (text.replace("arange(", "torch.arange(") for text in (old, new))
    match = f"{problem}.*cuda_graphs=False"
    with mutated(Mutant("asks", function, old, new, "")):
        with pytest.raises(InputError, match=match) as caught:
            engine_of("math").complete([1] * 40, method="naive", generation=UNTIL_4)
    assert "\n" not in str(caught.value)


def test_filters_that_an_open_run_has_not_captured_are_refused(cuda):
    with engine_of("math").open() as run, pytest.raises(InputError, match="filters of one kind"):
        run.submit(Request([1], sampling=WARM))


@pytest.mark.parametrize(
    ("total_gib", "host_gib", "placement", "problem"),
    [
        (
            5,
            64,
            {},
            "on the device, got 5.00 .*; shorten the text, use offload=True, .* or use more",
        ),
        (3, 64, HOSTED, "on the device, got 3.00 .*; shorten the text"),
        (141, 2, HOSTED, "and 2.00; shorten the text"),
        (141, 2, {"offload": True}, None),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_allocated(
    total_gib, host_gib, placement, problem, cuda, monkeypatch
):
    """By the memory of a card, for the context and for its staging buffers, and of the host."""
    engine = engine_of("math")
    cuda.total = int(total_gib * GIB) - engine.model.num_bytes - engine.models.draft.num_bytes
    monkeypatch.setenv("MINITRI_HOST_GIB", str(host_gib))
    how = {"generation": GenerationConfig(16, **placement), "method": "triforce"}
    if problem is None:
        engine.generate([1] * 122_880, **how).close()
        return
    with pytest.raises(InputError, match=problem) as caught:
        engine.generate([1] * 122_880, **how)
    assert "\n" not in str(caught.value)
    assert not cuda.num_graphs


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_made_up_run_prints_as_it_goes_and_locks_host_memory_once(
    weights, cuda, monkeypatch, capsys
):
    """For both methods at each context: what was measured first is known if the rest hangs. In
    steps that are timed nothing is captured, whatever the length of a proposal."""
    monkeypatch.setattr(synthetic, "copy_bandwidth", lambda device, **how: 1e12)
    monkeypatch.setattr(synthetic, "idle_share", lambda step, num: 0.5)
    decode, printed = synthetic.decode, []

    def watched(*args, **settings):
        printed.append(capsys.readouterr().out)
        return decode(*args, **settings)

    monkeypatch.setattr(synthetic, "decode", watched)
    setup = setup_of("triton", weights, HOSTED, method="triforce")
    [row] = synthetic.sweep_contexts(setup, [30_000])["rows"]
    assert len(printed) == 2
    assert "30000 tokens: autoregressive {" in printed[1]
    assert len(cuda.host_sizes) == 1
    assert sum(row[how]["num_graphs"] for how in ("autoregressive", "cascade")) == cuda.num_graphs


@pytest.mark.parametrize(("driver_works", "name"), [(True, "cuda:7"), (False, "cuda")])
def test_a_device_that_is_not_there_is_refused_in_one_line(driver_works, name, monkeypatch):
    """One of two that there are, or any where the driver is too old: its devices are counted."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: driver_works)
    with pytest.raises(InputError, match=rf"'{name}' is not there .* {2 * driver_works} GPUs"):
        choose_device(name)
    assert choose_device("auto").type == ("cuda" if driver_works else "cpu")


def test_every_kernel_is_timed(cuda, capsys):
    """By a graph each: three backends for three blocks, four matrices of three types for three."""
    where = {"device": DEVICE, "dtype": torch.bfloat16}
    kernel_times.time_attention(TARGET, 122_880, where)
    kernel_times.time_matrices(TARGET, where)
    lines = capsys.readouterr().out.splitlines()
    assert sum(" us " in line for line in lines) >= 9 + 36
    assert cuda.num_graphs >= 9 + 36
    assert not [line for line in lines if "fails" in line]
