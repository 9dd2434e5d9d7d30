"""Kernels in Triton, the kernel compiler that comes with PyTorch for GPUs."""

import logging
import math
import os
import warnings
from collections.abc import Callable

import torch

from minitri.errors import shorten

log = logging.getLogger("minitri")


def are_usable(what: str, largest_error: Callable[[], float], tolerance: float) -> bool:
    """Whether kernels are there, and agree with their oracle on this very device; else it warns.

    The environment variable MINITRI_KERNELS=off stands for no kernels.
    """
    if os.environ.get("MINITRI_KERNELS") == "off":
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # a compiler's, of its own code
            error = largest_error()
        reason = f"they are off by {error:.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # a compiler of kernels may raise anything
        error, reason = math.inf, shorten(failure, 80)
    if not error <= tolerance:
        log.warning("%s are not used (%s); plain operations take their place", what, reason)
    return error <= tolerance
