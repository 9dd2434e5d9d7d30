"""Folders for fetched weights and for kernels built for this machine."""

import os
from pathlib import Path

from minitri.core.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[2]  # the repository, if minitri runs from a clone


def weights_folder() -> Path:
    """The folder of weights and kernels: $MINITRI_WEIGHTS, weights/ in a clone, or the user's
    cache. Raises `InputError` if there is no home folder."""
    try:
        if os.environ.get("MINITRI_WEIGHTS"):
            return Path(os.environ["MINITRI_WEIGHTS"]).expanduser()
        if (CHECKOUT / "pyproject.toml").exists():
            return CHECKOUT / "weights"
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "minitri"
    except RuntimeError:
        raise InputError("the home folder is unknown; set HOME or MINITRI_WEIGHTS") from None
