"""Kernels in Triton, the kernel compiler that comes with PyTorch for GPUs."""

import os
import warnings
from collections.abc import Callable

from minitri.core.errors import shorten

# Products and sums may be fused: Triton 3.9 warns unless this is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def problem_with(check: Callable[[], None]) -> str:
    """Why a kernel cannot be used here: the error that the test `check` raises; empty if none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of compilers about their own code
            check()
    except Exception as failure:  # a compiler of kernels may raise anything
        return shorten(failure, 80) or repr(failure)
    return ""
