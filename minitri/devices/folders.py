"""Folders of weights, and of kernels built for this machine."""

import os
from pathlib import Path

from minitri.core.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE if (PACKAGE / "weights").exists() else PACKAGE.parent) / "weights"
"""Folder of the weights in a wheel or a clone; older versions put fetched weights there, too."""


def weights_folder() -> Path:
    """Folder for fetched weights and built kernels: $MINITRI_WEIGHTS, or one in the user's cache.
    Raises `InputError` if there is no home folder."""
    try:
        if os.environ.get("MINITRI_WEIGHTS"):
            return Path(os.environ["MINITRI_WEIGHTS"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitri"
    except RuntimeError:
        raise InputError("the home folder is unknown; set HOME or MINITRI_WEIGHTS") from None
