"""Host memory that caches borrow, one after another."""

from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from minitri import InputError
from minitri.core.offload import allocation
from minitri.core.offload.host_memory import HostMemory
from tests.core.rigs import CPU


class Borrower: ...


def test_memory_comes_back_when_its_borrower_is_gone_and_serves_the_next_one():
    """Only the latest is kept, and a larger one takes its place; writable outside of inference."""
    host, borrowers = HostMemory(CPU), [Borrower(), Borrower()]
    with torch.inference_mode():
        tensors = [host.lend(it, (70,), torch.uint8) for it in borrowers]
    address = tensors[1].data_ptr()
    assert host.num_free_bytes == 0
    del borrowers[0], borrowers[0], tensors
    assert host.num_free_bytes == 70
    again = host.lend(host, (7, 10), torch.uint8)
    assert (again.shape, again.data_ptr(), host.num_free_bytes) == ((7, 10), address, 0)
    again.fill_(1)
    host.lend(Borrower(), (50,), torch.uint8)
    host.lend(host, (80,), torch.uint8)
    assert host.num_free_bytes == 0


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_registered_once_and_unregistered_when_it_is_given_up(error, monkeypatch, caplog):
    """Where it cannot be, one line says what that costs."""
    cuda = Mock()
    cuda.cudart().cudaHostRegister.return_value = error
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError))
    host = HostMemory(torch.device("cuda"))
    address = host.lend(Borrower(), (500, 400), torch.float32).data_ptr()
    assert host.lend(Borrower(), (400, 400), torch.float32).data_ptr() == address
    cuda.cudart().cudaHostRegister.assert_called_once_with(address, 800_000, 0)
    assert cuda.synchronize.call_count == 2  # for copies of the last borrower
    host.clear()
    unlocked = [call.cudart(), call.cudart().cudaHostUnregister(address)]
    assert (cuda.mock_calls[-2:] == unlocked) is (error == 0)
    assert cuda.synchronize.call_count == 2 + (error == 0)  # before it is unlocked
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(error)


def test_memory_that_caches_files_is_free_and_a_number_given_counts_more(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 50 kB\nHugePages_Total: 0\n")
    (tmp_path / "memory.max").write_text("60000\n")
    (tmp_path / "memory.stat").write_text("anon 10000\nfile 35000\nshmem 5000\n")
    monkeypatch.setattr(allocation, "Path", lambda path: tmp_path / Path(path).name)
    assert allocation.free_host_bytes() == 45_000
    (tmp_path / "memory.max").write_text("max\n")
    assert allocation.free_host_bytes() == 50 * 1024
    monkeypatch.setenv("MINITRI_HOST_GIB", "1.5")
    assert allocation.free_host_bytes() == 1.5 * 2**30
    monkeypatch.setenv("MINITRI_HOST_GIB", "much")
    with pytest.raises(InputError, match="MINITRI_HOST_GIB"):
        allocation.free_host_bytes()
