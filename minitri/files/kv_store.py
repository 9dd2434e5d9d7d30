"""The KV store: K and V of prompts in a local folder that engines share, by NFS for example.

A block is a snapshot of `BLOCK` tokens of a text. Its name is a digest of all facts on which its
bits depend, with all earlier tokens, and of the text's owner. Links and special files in the place
of a block are refused. Errors are logged, and prompts are then read as without a store. Everybody
who can write to the folder is trusted.
Legend: L layers, B = 1 row, K KV heads, T tokens, D head dim."""

import hashlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.core.model.llama import Llama
from minitri.files.snapshots import manifest_of, read_snapshot, write_snapshot

BLOCK = 256  # tokens of a block
WAITING_BYTES = 2**30  # most bytes of blocks that wait to be written; others are not stored


class KVStore:
    """A store of K and V for one model, in blocks of `BLOCK` tokens in a shared folder."""

    def __init__(self, folder: str, num_bytes: int, model: Llama) -> None:
        """Opens the store in `folder`. Raises `InputError`.
        Beyond `num_bytes` the least recently used blocks are deleted."""
        with explain(f"kv_store is {shorten(folder, 90)}, which cannot be opened", "name a folder"):
            if "://" in folder:
                raise ValueError("it is a URL")
            self._folder = Path(folder).expanduser().absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
        self._num_bytes = num_bytes
        self._model = model
        libraries = ("ONEDNN_", "DNNL_", "MKL_")  # their settings may change the bits
        settings = sorted(pair for pair in os.environ.items() if pair[0].startswith(libraries))
        # Hashed into the name of every block; `computed_by` decides last bits.
        self._root = (
            f"{manifest_of(model)} {model.execution.computed_by} {torch.__version__} {settings}"
        )
        self._block_bytes = BLOCK * model.config.kv_values_per_token * model.dtype.itemsize
        self._waiting: list[Future[None]] = []  # blocks to be written
        self._last_reason = ""
        self.writer = ThreadPoolExecutor(1)

    def longer(self, tokens: list[int], owner: str, held: HeldRow) -> HeldRow:
        paths = self._paths(tokens, owner)
        num_held = held.num_shared(tokens, owner)
        blocks = []
        with self._warning():
            if any(map(os.path.lexists, paths[num_held // BLOCK :][:1])):
                for path in paths:
                    blocks.append(self._read(path))
        if (num_stored := len(blocks) * BLOCK) <= num_held:
            return held
        keys_LBKTD = torch.cat([block.keys for block in blocks], 3)
        values_LBKTD = torch.cat([block.values for block in blocks], 3)
        return HeldRow(FullCache(keys_LBKTD, values_LBKTD), 0, tokens[:num_stored])

    def write(self, source: HeldRow) -> None:
        """Queues K and V of a text, in the blocks that the store lacks; a thread writes them."""
        paths = self._paths(source.tokens, source.owner)
        for path in reversed(paths):  # the first block becomes the newest
            with suppress(OSError):
                os.utime(path, follow_symlinks=False)
        for i, path in enumerate(paths):
            self._waiting = [job for job in self._waiting if not job.done()]
            has_room = len(self._waiting) * self._block_bytes <= WAITING_BYTES
            if has_room and not os.path.lexists(path):
                with self._warning():
                    pair = source.full.tokens(source.b, i * BLOCK, (i + 1) * BLOCK)
                    keys, values = (slots.to("cpu", copy=True)[:, None] for slots in pair)
                    block = HeldRow(FullCache(keys, values), 0, source.tokens[i * BLOCK :][:BLOCK])
                    with suppress(RuntimeError):  # the store is closed
                        self._waiting.append(self.writer.submit(self._write, path, block))

    def close(self) -> None:
        """Waits until all blocks are written; later blocks are dropped."""
        self.writer.shutdown()

    def _paths(self, tokens: list[int], owner: str | None) -> list[Path]:
        """Paths of files, written or not, for the whole blocks of `tokens`, a text of `owner`."""
        digests = [f"{self._root} {owner}"]
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            text = f"{digests[-1]} {tokens[end - BLOCK : end]}"
            digests.append(hashlib.sha256(text.encode()).hexdigest())
        return [self._folder / f"{digest}.kvblock" for digest in digests[1:]]

    def _read(self, path: Path) -> FullCache:
        """Reads one stored file with K and V of a block of tokens. Raises `OSError`, `InputError`.
        Deletes it if it is damaged or of another block, so that `write` can store it again."""
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(f"{path} is no regular file; delete it")
        try:
            row, note = read_snapshot(path, self._model)
            if note != path.name:
                raise InputError(f"{path.name} is another block; it is written anew")
        except InputError as error:
            if not isinstance(error.__cause__, OSError):  # the file cannot be read now
                path.unlink()
            raise
        return row.full

    def _write(self, path: Path, block: HeldRow) -> None:
        """Writes a block to `path`; if the files in the folder then exceed `num_bytes`, deletes an
        eighth of them, the least recently used."""
        kinds = (".kvblock", ".unfinished")
        with self._warning():
            write_snapshot(path, block, self._model, path.name)
            ours = {file: file.lstat() for file in self._folder.iterdir() if file.suffix in kinds}
            if sum(about.st_size for about in ours.values()) > self._num_bytes:
                oldest = sorted(ours, key=lambda file: ours[file].st_mtime)
                for file in oldest[: 1 + len(ours) // 8]:
                    file.unlink(missing_ok=True)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Context that logs errors, repeated ones once, missing files never, and raises none."""
        try:
            yield
        except FileNotFoundError:
            pass
        except Exception as error:
            if (reason := repr(error.__cause__ or error)) != self._last_reason:
                log.warning("KV store: %s", shorten(error))
            self._last_reason = reason
