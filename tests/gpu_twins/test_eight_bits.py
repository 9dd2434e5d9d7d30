"""A copy in 8 bits guesses with the retrieval cache: its kernel equals the plain formula, and no
text depends on it.

On a CPU the kernel is run by Triton's interpreter, which has no bfloat16, and models take the
formula; on a GPU both are compiled.
"""

from types import SimpleNamespace

import pytest
import torch

from minitri.errors import InputError
from minitri.gpu import eight_bits
from minitri.gpu.eight_bits import EightBitLinear, eight_bit_copy, multiply_math, quantize
from minitri.gpu.graphs import GraphPool
from minitri.loading.devices import retrieval_copy
from minitri.model.execution import Execution
from minitri.roofline import bytes_per_pass, eight_bit_bytes
from tests.cascades import GREEDY, WARM, Rig, near_copy, plain_tokens, random_prompt
from tests.conftest import CPU, tiny_config, tiny_model
from tests.gpu_twins.conftest import as_on_a_gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CONFIG = tiny_config(num_layers=3)
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (60, 3, 21)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def before_nan(tensor):
    """The same, with NaN, or the largest numbers, right after it in memory."""
    bytes_ = torch.full((tensor.nbytes + 4096,), 127, dtype=torch.uint8, device=DEVICE)
    bytes_[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten().to(DEVICE)
    return bytes_[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32] + [torch.bfloat16] * ON_GPU)
@pytest.mark.parametrize("num_processors", [1, 132])
@pytest.mark.parametrize(
    ("M", "N", "E"), [(1, 70, 1040), (5, 64, 512), (21, 33, 96), (70, 40, 320)]
)
def test_the_kernel_equals_the_formula(M, N, E, num_processors, dtype, monkeypatch):
    """Every tile, with rows, columns and numbers that do not fill it; nothing after is read."""
    weights = pytest.importorskip("minitri.gpu.kernels.weights", reason="needs triton")
    monkeypatch.setattr(weights, "num_processors", lambda device: num_processors)
    weight_NE, scales_N = (before_nan(part) for part in quantize(random(N, E, seed=1)))
    x = before_nan(random(M, E).to(dtype))
    got = weights.multiply(x.view(M, 1, E), weight_NE, scales_N)
    assert got.shape == (M, 1, N)
    assert got.dtype == dtype
    exact = x.double() @ weight_NE.double().T * scales_N.double()
    rounding = 0.01 if ON_GPU and dtype != torch.float16 else 4 * torch.finfo(dtype).eps
    assert (got[:, 0].double() - exact).abs().max() <= rounding * exact.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_is_as_large_as_planned_and_shares_the_rest(tied):
    """A rounded weight is half a step from the original."""
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    model = tiny_model(config)
    before = [weight.clone() for weight in model.parameters()]
    twin = eight_bit_copy(model)
    assert twin.num_bytes == eight_bit_bytes(config)
    assert bytes_per_pass(twin) < bytes_per_pass(model) / 3
    ours = {id(weight) for weight in model.parameters()}
    own = [weight for weight in twin.parameters() if id(weight) not in ours]
    assert len(own) == 2 * (4 * config.num_layers + 1)
    assert torch.equal(twin.embed(torch.arange(9)), model.embed(torch.arange(9)))
    assert all(map(torch.equal, before, model.parameters()))
    weight_NE = random(40, 96) * torch.logspace(-6, 3, 40).unsqueeze(1)
    weight_NE[7] = 0
    quants_NE, scales_N = quantize(weight_NE.bfloat16())
    errors = (quants_NE.float() * scales_N.unsqueeze(1) - weight_NE.bfloat16().float()).abs()
    assert (errors <= scales_N.unsqueeze(1) * 0.501).all()


def wrong(model):
    """A copy that has little to do with its model, and the longest block that it has read."""
    twin, longest = eight_bit_copy(model), [0]

    def multiply(x, weight_NE, scales_N):
        longest[0] = max(longest[0], x.shape[-2])
        return multiply_math(x, weight_NE, scales_N)

    for number, layer in enumerate(twin.modules()):
        if isinstance(layer, EightBitLinear):
            layer.scales *= 1 + 0.5 * random(len(layer.scales), seed=number)
            layer.multiply = multiply
    return twin, longest


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("method", ["retrieval", "triforce"])
@pytest.mark.usefixtures("lengths_on_the_device")
def test_a_copy_however_wrong_changes_no_text(method, sampling):
    """Greedy and coupled, by eager and by static steps. It reads no prompt, and it is asked."""
    target = as_on_a_gpu(tiny_model(CONFIG))
    twin, longest = wrong(target)
    settings = {"sampling": sampling, "coupled": True, "num_new": 24, "seed": 3}
    exact = plain_tokens(target, PROMPTS, **settings)
    draft = near_copy(target, 0.02) if method == "triforce" else None
    settings |= {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 60}
    settings |= {"draft": draft, "retrieval_model": twin, "method": method}
    for graphs in (None, GraphPool(CPU)):
        rig = Rig(target, PROMPTS, graphs=graphs, **settings)
        assert rig.run() == exact
        assert rig.stats.stages[-1].acceptance_rate < 0.6
    assert 0 < longest[0] <= 1 + 2 + 3


@pytest.mark.parametrize(
    ("wanted", "device", "problem"),
    [("int8", "cpu", "GPU"), ("int4", "cuda", "kernels"), ("int8", "cuda", "no such arch")],
)
def test_weights_that_a_device_cannot_have_are_refused_in_one_line(
    wanted, device, problem, monkeypatch
):
    def fail(model):
        raise RuntimeError("no such arch")

    monkeypatch.setattr(eight_bits, "check_kernel", fail)
    model = SimpleNamespace(
        device=torch.device(device),
        dtype=torch.float32,
        execution=Execution(),
        config=SimpleNamespace(name="tiny"),
    )
    with pytest.raises(InputError, match=f"--draft-weights {wanted} .*{problem}"):
        retrieval_copy(model, wanted)
    assert retrieval_copy(model, "auto") is None
