"""Host memory that caches borrow, one after another; a stand-in for CUDA notes its calls."""

import gc
from pathlib import Path

import pytest
import torch

from minitri import GenerationConfig, InputError, SpeculationConfig
from minitri.core.offload import allocation
from minitri.core.offload import host_memory as module
from minitri.core.offload.host_memory import HostMemory
from tests.cascades import tiny_engine
from tests.core.rigs import CPU, random_prompt
from tests.devices.gpu_twins.offload import offloaded


class Borrower:
    """Something that may be collected."""


def test_memory_comes_back_when_its_borrower_is_gone_and_serves_the_next_one():
    """Only the latest is kept, and a larger one takes its place. It can be written outside of
    inference mode, too."""
    host, borrowers = HostMemory(CPU), [Borrower(), Borrower()]
    with torch.inference_mode():
        tensors = [host.lend(it, (70,), torch.uint8) for it in borrowers]
    address = tensors[1].data_ptr()
    assert host.num_free_bytes == 0
    del borrowers[0], borrowers[0], tensors
    assert host.num_free_bytes == 70
    again = host.lend(host, (3, 5), torch.float32)
    assert (again.shape, again.data_ptr(), host.num_free_bytes) == ((3, 5), address, 0)
    again.fill_(1.0)
    host.lend(Borrower(), (50,), torch.uint8)
    host.lend(host, (80,), torch.uint8)
    assert host.num_free_bytes == 0


class Cudart:
    """What of the CUDA runtime is called; a call that fails returns an error number."""

    def __init__(self, error: int) -> None:
        self.error, self.calls = error, []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.calls.append(("register", address, num_bytes, flags))
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))


def flags_of(address: int) -> str:
    """The flags that Linux shows for the mapping at an address; `dc`: not copied on fork."""
    maps = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    return maps.partition("VmFlags:")[2].partition("\n")[0]


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_registered_once_and_unregistered_when_it_is_given_up(error, monkeypatch, caplog):
    """Where it cannot be, one line says what that costs. A child process gets none of it."""

    def report_again(*settings, **more):
        raise RuntimeError("CUDA error: out of memory")

    cudart = Cudart(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: cudart.calls.append("wait"))
    monkeypatch.setattr(torch, "zeros", report_again)
    host, borrower = HostMemory(torch.device("cuda")), Borrower()
    address = host.lend(borrower, (500, 400), torch.float32).data_ptr()
    assert cudart.calls[0] == ("register", address, 800_000, 0)
    assert not Path("/proc/self/smaps").exists() or " dc" in flags_of(address)
    del borrower, cudart.calls[:]
    borrower = Borrower()
    assert host.lend(borrower, (400, 400), torch.float32).data_ptr() == address
    del borrower
    assert cudart.calls == ["wait"]  # for copies of the last borrower
    host.clear()
    gc.collect()
    assert cudart.calls[1:] == ([] if error else ["wait", ("unregister", address)])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(error)


def test_the_next_run_of_an_engine_takes_over_host_memory_until_it_is_released(monkeypatch):
    """Also for a shorter text; texts stay as they are."""
    sizes = {"generation": GenerationConfig(24, offload=True, prefill_chunk=32)}
    sizes["speculation"] = SpeculationConfig("retrieval", budget=24, num_recent_tokens=40)

    def allocate(target, draft, shape, host):
        return offloaded(0, 1, shape.capacity, config=target.config, host=host)

    monkeypatch.setattr("minitri.core.memory.allocate_full_cache", allocate)
    engine = tiny_engine()
    host = engine._pool.host
    prompts = [random_prompt(engine.config, n) for n in (300, 200)]
    free = []
    for prompt in prompts:
        text = engine.complete(prompt, **sizes).token_ids
        free.append(host.num_free_bytes)
    assert free[0] == free[1] > 0
    assert text == tiny_engine().complete(prompts[1], **sizes).token_ids
    engine.release()
    assert host.num_free_bytes == 0


def test_memory_that_caches_files_is_free_and_a_number_given_counts_more(tmp_path, monkeypatch):
    files = {
        "meminfo": "MemTotal: 999 kB\nMemAvailable: 50 kB\nHugePages_Total: 0\n",
        "memory.max": "60000\n",
        "memory.stat": "anon 10000\nfile 35000\nshmem 5000\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(allocation, "Path", lambda path: tmp_path / Path(path).name)
    assert allocation.free_host_bytes() == 45_000
    (tmp_path / "memory.max").write_text("max\n")
    assert allocation.free_host_bytes() == 50 * 1024
    monkeypatch.setenv("MINITRI_HOST_GIB", "1.5")
    assert allocation.free_host_bytes() == 1.5 * 2**30
    monkeypatch.setenv("MINITRI_HOST_GIB", "much")
    with pytest.raises(InputError, match="MINITRI_HOST_GIB"):
        allocation.free_host_bytes()
