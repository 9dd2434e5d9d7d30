"""Kernels in Triton, the kernel compiler that comes with PyTorch for GPUs."""

import logging
import os
import warnings
from collections.abc import Callable

from minitri.errors import shorten

log = logging.getLogger("minitri")

# That products and sums may be fused; Triton 3.9 warns, and would drop kernels where warnings are
# errors, unless it is told, and later versions do otherwise.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def are_usable(what: str, largest_error: Callable[[], float], tolerance: float) -> bool:
    """Whether kernels are there, and agree with their oracle on this very device; else it warns.

    The environment variable MINITRI_KERNELS=off stands for no kernels.
    """
    if os.environ.get("MINITRI_KERNELS") == "off":
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # a compiler's, of its own code
            error = largest_error()
    except Exception as failure:  # a compiler of kernels may raise anything
        log.warning("%s are not used (%s); decoding is slower", what, shorten(failure, 80))
        return False
    if not error <= tolerance:
        log.warning("%s are not used (off by %.2g); decoding is slower", what, error)
    return error <= tolerance
