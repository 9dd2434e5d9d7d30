"""The folder for what a user typed, which only that user may read."""

import os
from pathlib import Path

from minitri.core.log import log

NOWHERE = Path(os.devnull)  # holds no files


def state_folder() -> Path:
    """$XDG_STATE_HOME/minitri, by default in ~/.local/state, or NOWHERE and a warning."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "minitri")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "history").touch(0o600)
    except (OSError, RuntimeError) as error:
        log.warning("nothing that you type is kept (%s); set XDG_STATE_HOME to a folder", error)
        folder = NOWHERE
    return folder
