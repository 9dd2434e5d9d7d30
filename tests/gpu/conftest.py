"""Everything in this folder needs a CUDA device, and is skipped without one."""

from __future__ import annotations

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
