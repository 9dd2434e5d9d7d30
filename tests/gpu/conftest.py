"""Everything here needs a CUDA device. Each test says what it takes there: seconds by reckoning,
compilation included, and GiB of free memory."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_device = torch.cuda.is_available()
    free_gib = torch.cuda.mem_get_info()[0] / 2**30 if has_device else 0.0
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        mark = item.get_closest_marker("takes")
        if mark is None:
            raise pytest.UsageError(f"{item.nodeid} does not say what it takes; mark it with takes")
        reason = "needs a CUDA device; this PyTorch sees none"
        if has_device:
            reason = f"needs {mark.kwargs['gib']} GiB of a GPU, of which {free_gib:.1f} are free"
        item.add_marker(pytest.mark.skipif(free_gib < mark.kwargs["gib"], reason=reason))


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """What makes the host wait for the device meanwhile."""
    found: list[str] = []
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")  # among others that this is a prototype
        torch.set_warn_always(True)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.set_warn_always(always)
    texts = [str(warning.message) for warning in seen]
    found += [text for text in texts if "called a synchronizing CUDA operation" in text]
