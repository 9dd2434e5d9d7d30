"""Whole runs of a 7B shape on a GPU that has no numbers: no device, type or shape is mixed up."""

from dataclasses import replace

import pytest
import torch

from minitri import Engine, GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig
from minitri.devices.choose import choose_device
from minitri.files.named_models import MODELS
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from minitri.trees.tree_shape import shape_of
from tests.conftest import byte_level_tokenizer
from tests.devices.gpu_twins.fake_cuda import DEVICE, GIB, fake_cuda
from tests.mutation import Mutant, mutated
from tools.bench import synthetic

TARGET = replace(MODELS["llama2-7b-128k"].shape, num_layers=3)
DRAFT = MODELS["llama-68m"].shape
WARM = SamplingParams(0.6, top_p=0.9)
HOSTED = {"offload": True, "on_chip": 0}


@pytest.fixture
def cuda(monkeypatch):
    """A device on which all kernels compile, and are right."""
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device, and needs none")
    shape_of.cache_clear()  # masks are tensors, and real ones
    with fake_cuda(monkeypatch) as found:
        yield found
    shape_of.cache_clear()


def engine_of():
    generation = GenerationConfig(4, ignore_eos=True)
    settings = (SpeculationConfig(), generation, (0.5, 0.9), torch.bfloat16, DEVICE)
    setup = synthetic.Setup(TARGET, DRAFT, *settings, "math", "same")
    target, draft = (synthetic.random_model(config, setup) for config in (TARGET, DRAFT))
    tokenizer = Tokenizer(TokenizersBackend(byte_level_tokenizer()), None)
    return Engine(target, tokenizer, draft)


@pytest.mark.parametrize(
    ("speculation", "placement"),
    [
        ({"method": "auto"}, {}),
        ({"method": "naive", "tree": "2x2"}, HOSTED),
        ({"method": "triforce"}, {"cuda_graphs": False}),
        ({"method": "triforce", "tree": "2x2"}, {}),
        ({"method": "triforce", "coupled": True}, {"offload": True, "on_chip": 2}),
    ],
)
def test_a_run_goes_to_its_end(speculation, placement, cuda):
    """With all of its graphs before its first token."""
    end = engine_of().complete(
        [1] * 30_000,
        seed=0,
        sampling=WARM,
        speculation=SpeculationConfig(**speculation),
        generation=GenerationConfig(16, ignore_eos=True, **placement),
    )
    assert len(end.token_ids) == 16
    assert (cuda.num_graphs > 0) == (cuda.num_replays > 0) == placement.get("cuda_graphs", True)
    assert end.stats.num_graphs == cuda.num_graphs


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("ModelRunner._output", "tensor.to(device, non_blocking=True)", "tensor"),
        ("Passes.__post_init__", "numbers_3.to(self.model.device)", "numbers_3"),
        ("verify_block", "arange(1, N + 1, device=passes_BN.device)", "arange(1, N + 1)"),
    ],
)
def test_numbers_that_stay_on_the_host_are_noticed(function, old, new, cuda):
    generation = GenerationConfig(4, ignore_eos=True, cuda_graphs=False)
    old, new = (text.replace("arange(", "torch.arange(") for text in (old, new))
    with mutated(Mutant("left behind", function, old, new, "")):
        with pytest.raises(RuntimeError, match="same dev"):
            engine_of().complete([1] * 40, method="triforce", generation=generation)


def test_filters_that_an_open_run_has_not_captured_are_refused(cuda):
    with engine_of().open() as run, pytest.raises(InputError, match="filters of one kind"):
        run.submit(Request([1], sampling=WARM))


@pytest.mark.parametrize(
    ("total_gib", "host_gib", "placement", "problem"),
    [
        (5, 64, {}, "on the device, got 5.00 "),
        (3, 64, HOSTED, "on the device, got 3.00 "),
        (141, 2, HOSTED, "and 2.00"),
        (141, 2, {"offload": True}, None),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_allocated(
    total_gib, host_gib, placement, problem, cuda, monkeypatch
):
    """By the memory of a card, for the context and for its staging buffers, and of the host."""
    engine = engine_of()
    cuda.total = int(total_gib * GIB) - engine.model.num_bytes - engine.models.draft.num_bytes
    monkeypatch.setenv("MINITRI_HOST_GIB", str(host_gib))
    how = {"generation": GenerationConfig(16, **placement), "method": "triforce"}
    if problem is None:
        engine.generate([1] * 122_880, **how).close()
        return
    with pytest.raises(InputError, match=problem):
        engine.generate([1] * 122_880, **how)
    assert not cuda.num_graphs


@pytest.mark.parametrize(("driver_works", "name"), [(True, "cuda:7"), (False, "cuda")])
def test_a_device_that_is_not_there_is_refused(driver_works, name, monkeypatch):
    """One of two that there are, or any where the driver is too old: its devices are counted."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: driver_works)
    with pytest.raises(InputError, match=rf"'{name}' is not there .* {2 * driver_works} GPUs"):
        choose_device(name)
    assert choose_device("auto").type == ("cuda" if driver_works else "cpu")
