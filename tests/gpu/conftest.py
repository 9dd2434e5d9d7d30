"""Everything in this folder needs a CUDA device, and is skipped without one."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; this PyTorch sees none"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(absent)


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
