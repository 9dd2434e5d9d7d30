"""The KV store: K and V of prompts in a folder that replicas share, at any URL of fsspec.

A block is a snapshot of `BLOCK` tokens, named by a digest of all that its bits depend on, the text
before it included, and of whose text it is. What goes wrong is a line of the log, and prompts are
read as ever. Who may write to the folder is trusted.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.files.snapshots import Origin, read_snapshot, write_snapshot

BLOCK = 256
"""Tokens."""
WAITING_BYTES = 2**30
"""Of blocks that are being written; further ones wait for a later prompt that begins like this."""


class KVStore:
    """Blocks of one model."""

    def __init__(self, url: str, num_bytes: int, origin: Origin) -> None:
        """Beyond `num_bytes` those go that were not used (but on a disk: not written) for longest.
        Raises `InputError`."""
        problem = f"kv_store is {shorten(url, 90)}, which cannot be opened"
        with explain(problem, "name a folder, or pip install 'minitri[store]' and what is missing"):
            from fsspec.core import url_to_fs

            self._fs, self._folder = url_to_fs(url, use_listings_cache=False)
            self._fs.makedirs(self._folder, exist_ok=True)
        self._is_local = "local" in self._fs.protocol
        self._num_bytes = num_bytes
        self._origin = origin
        libraries = ("ONEDNN_", "DNNL_", "MKL_")  # may compute products in another way
        settings = sorted(it for it in os.environ.items() if it[0].startswith(libraries))
        by = f"{origin.computed_by} {torch.__version__} {settings}"
        self._names = f"{origin.manifest} {by}"  # what those of blocks depend on, next to the text
        self._known = set[str]()  # blocks that need not be written
        size = BLOCK * origin.config.kv_values_per_token * origin.dtype.itemsize
        self._room = threading.Semaphore(1 + WAITING_BYTES // size)
        self._told = ""
        self.writer = ThreadPoolExecutor(1)

    def longer(self, tokens: list[int], owner: str, held: HeldRow) -> HeldRow:
        """The longest beginning of an owner's text, if it is longer than what is held; or that."""
        paths = self._paths(tokens, owner)
        num_held = held.num_shared(tokens, owner)
        found: list[FullCache] = []
        with self._warning():
            if any(map(self._fs.exists, paths[num_held // BLOCK :][:1])):
                for i, path in enumerate(paths):
                    found.append(self._read(path, tokens[i * BLOCK :][:BLOCK]))
        if (num_found := len(found) * BLOCK) <= num_held:
            return held
        keys_LBKTD = torch.cat([it.keys[:] for it in found], 3)
        values_LBKTD = torch.cat([it.values[:] for it in found], 3)
        return HeldRow(FullCache(keys_LBKTD, values_LBKTD), 0, tokens[:num_found])

    def write(self, source: HeldRow) -> None:
        """Writes, in another thread, what is not here of a prompt that was read."""
        paths = self._paths(source.tokens, source.owner)
        for path in reversed(paths) if self._is_local else ():  # the first one is used last
            with contextlib.suppress(OSError):
                os.utime(path)
        for i, path in enumerate(paths):
            if path not in self._known and self._room.acquire(blocking=False):
                given = None
                with self._warning():
                    pair = source.full.tokens(source.b, i * BLOCK, (i + 1) * BLOCK)
                    keys, values = (it.to("cpu", copy=True)[:, None] for it in pair)
                    block = HeldRow(FullCache(keys, values), 0, source.tokens[i * BLOCK :][:BLOCK])
                    with contextlib.suppress(RuntimeError):  # the store is closed
                        given = self.writer.submit(self._write, path, block)
                if given is None:
                    self._room.release()

    def close(self) -> None:
        """Waits until everything is written; later blocks are dropped."""
        self.writer.shutdown()

    def _paths(self, tokens: list[int], owner: str | None) -> list[str]:
        """Of the blocks of a text."""
        digests = [f"{self._names} {owner}"]
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            text = f"{digests[-1]} {tokens[end - BLOCK : end]}"
            digests.append(hashlib.sha256(text.encode()).hexdigest())
        return [f"{self._folder}/{digest}.kvblock" for digest in digests[1:]]

    def _read(self, path: str, tokens: list[int]) -> FullCache:
        """Raises `FileNotFoundError`, or `InputError` if the file is not this block."""
        self._known.discard(path)
        name = Path(path).name
        with tempfile.TemporaryDirectory() as folder:
            self._fs.get_file(path, f"{folder}/{name}")
            row, note = read_snapshot(f"{folder}/{name}", self._origin)
        if (row.tokens, note) != (tokens, name):
            raise InputError(f"{name} is another block; it is written anew")
        self._known.add(path)
        return row.full

    def _write(self, path: str, block: HeldRow) -> None:
        with self._warning(), tempfile.TemporaryDirectory() as folder:
            file = path if self._is_local else f"{folder}/block"
            write_snapshot(file, block, self._origin, Path(path).name)
            if not self._is_local:
                self._fs.pipe_file(path, Path(file).read_bytes())
            self._known.add(path)
            self._make_room()
        self._room.release()

    def _make_room(self) -> None:
        """Beyond the limit an eighth of the blocks goes, and what killed writers left."""
        files = self._fs.ls(self._folder, detail=True)
        ours = [it for it in files if it["name"].endswith((".kvblock", ".unfinished"))]
        if sum(it["size"] for it in ours) > self._num_bytes:
            paths = sorted((it["name"] for it in ours), key=self._fs.modified)
            for path in paths[: 1 + len(paths) // 8]:
                self._fs.rm_file(path)
                self._known.discard(path)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Whatever goes wrong is a line, one for all blocks; that a file is gone is not wrong."""
        try:
            yield
        except FileNotFoundError:
            pass
        except Exception as error:
            if (reason := repr(error.__cause__ or error)) != self._told:
                log.warning("KV store: %s", shorten(error))
            self._told = reason
