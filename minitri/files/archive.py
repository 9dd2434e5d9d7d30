"""Conversations that are kept, as text, in a folder which only its user may read."""

import os
import time
from pathlib import Path

from minitri.core.log import log

NOWHERE = Path(os.devnull)  # holds no files


class Archive:
    """A file for each conversation in `folder`, or none if that is NOWHERE."""

    def __init__(self, folder: Path = NOWHERE) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Begins another file; the latest one before is that of the `earlier` conversation."""
        self.earlier = max(self.folder.glob("*.json"), default=None)
        self._file = self.folder / f"{time.time_ns()}.json"

    def write(self, note: str) -> None:
        """Writes the current conversation in place of what it was before."""
        unfinished = self._file.with_suffix(".part")
        try:
            unfinished.touch(0o600)
            unfinished.write_text(note, "utf-8")
            unfinished.replace(self._file)
        except OSError as error:
            log.warning("the conversation is not kept (%s); make room for it", error)


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
