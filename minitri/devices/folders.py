"""Folders of weights, and of kernels built for this machine."""

import os
from pathlib import Path

from minitri.core.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE if (PACKAGE / "weights").exists() else PACKAGE.parent) / "weights"
"""Weights that come with a wheel or a clone, where older versions unpacked fetched ones, too."""


def weights_folder() -> Path:
    """Folder for what is fetched or built: $MINITRI_WEIGHTS, or one in the user's cache.
    Raises `InputError` if there is no home folder."""
    try:
        if os.environ.get("MINITRI_WEIGHTS"):
            return Path(os.environ["MINITRI_WEIGHTS"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitri"
    except RuntimeError:
        raise InputError("the home folder is unknown; set HOME or MINITRI_WEIGHTS") from None
