"""Archive of a user's chats: each is kept as text in a folder that only its user may read."""

import os
import time
from pathlib import Path

from minitri.core.log import log

NOWHERE = Path(os.devnull)  # holds no files


class Archive:
    """Keeps each conversation in a file in `folder`; NOWHERE, the default, keeps none."""

    def __init__(self, folder: Path = NOWHERE) -> None:
        self.folder = folder
        self.begin()

    def begin(self, *seen: Path) -> None:
        """Makes a new file, not written yet, the current one; `earlier` skips the files `seen`."""
        self._file = self.folder / f"{time.time_ns()}.json"
        self.seen = seen

    @property
    def earlier(self) -> Path:
        """The newest file except the current one and those in `self.seen`, else NOWHERE."""
        files = {*self.folder.glob("*.json")} - {self._file, *self.seen}
        return max(files, key=lambda file: file.stat().st_mtime_ns, default=NOWHERE)

    def read(self) -> str:
        """Returns the text of `earlier`, the latest file not yet read; makes a new file the current
        one. Raises `OSError` or `ValueError`, and leaves the current file as it is then."""
        if (file := self.earlier) == NOWHERE:
            raise ValueError("none is kept")
        self.seen += (file,)
        text = file.read_text("utf-8")
        self.begin(*self.seen)
        return text

    def write(self, note: str) -> None:
        """Replaces the current file by `note`, the conversation's text; warns if that fails."""
        unfinished = self._file.with_suffix(".part")
        try:
            unfinished.touch(0o600)
            unfinished.write_text(note, "utf-8")
            unfinished.replace(self._file)
        except OSError as error:
            log.warning("the conversation is not kept (%s); make room for it", error)


def state_folder() -> Path:
    """Makes the folder for chats in $XDG_STATE_HOME or ~/.local/state. If that fails it warns, and
    returns NOWHERE, a path that holds no files."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        folder = Path(home, "minitri").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "history").touch(0o600)
    except (OSError, RuntimeError) as error:
        log.warning("nothing that you type is kept (%s); set XDG_STATE_HOME to a folder", error)
        return NOWHERE
    return folder
