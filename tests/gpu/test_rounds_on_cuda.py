"""How often a step of decoding on a CUDA device waits for it: once for every verdict."""

import pytest
import torch

from minitri.gpu.attention_backends import choose_attention
from minitri.gpu.streams import clock_of
from minitri.settings import SamplingParams
from tests.cascades import Rig, random_prompt
from tests.gpu.conftest import waits
from tests.gpu.test_graphs_on_cuda import CONFIG, gpu_model


@pytest.mark.takes(seconds=10, gib=2)
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_step_waits_once_for_every_verdict(method, coupled):
    attend = choose_attention(torch.device("cuda"), torch.bfloat16, CONFIG)
    target, draft = (gpu_model(torch.bfloat16, attend) for _ in range(2))
    settings = {"sampling": SamplingParams(0.8, top_p=0.9), "budget": 64, "num_recent_tokens": 200}
    settings |= {"gamma1": 2, "gamma2": 4, "rebuild_stride": 1000, "num_new": 200}
    settings |= {"method": method, "coupled": coupled, "prefill_chunk": 512}
    rig = Rig(target, [random_prompt(CONFIG, 600)], draft=draft, **settings)
    with torch.inference_mode():
        rig.start()
        rig.session.step()  # in which the drafter reads its window
        before = rig.num_verdicts()
        with waits() as found:
            for _ in range(3):
                rig.session.step()
    assert len(found) == rig.num_verdicts() - before


@pytest.mark.takes(seconds=5, gib=2)
def test_the_clock_tells_what_the_device_took():
    """Not what the host took to launch it; known without waiting, once the device is done."""
    clock, seconds = clock_of(torch.device("cuda")), []
    a = torch.randn(8192, 8192, device="cuda")
    a @ a  # in which libraries are loaded
    for num in (2, 20):
        started = clock.now()
        for _ in range(num):
            a @ a
        clock.since(started, seconds.append)
    assert not seconds
    torch.cuda.synchronize()
    clock.settle()
    assert seconds[1] > 3 * seconds[0] > 0
