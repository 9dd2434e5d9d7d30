"""The KV store: K and V of prompts in a folder that engines share, at any URL of fsspec.

A block is a snapshot of `BLOCK` tokens of a text. Its name is a digest of all facts on which its
bits depend, with all earlier tokens, and of the text's owner. Errors are logged, and prompts are
then read as without a store. Everybody who can write to the folder is trusted.
Legend: L layers, B = 1 row, K KV heads, T tokens, D head dim.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.files.snapshots import Origin, read_snapshot, write_snapshot

BLOCK = 256  # tokens of a block
WAITING_BYTES = 2**30  # most bytes of blocks that wait to be written; others are not stored


class KVStore:
    """A store of K and V for one model, in blocks in a shared folder."""

    def __init__(self, url: str, num_bytes: int, origin: Origin) -> None:
        """Opens the store at `url`. Beyond `num_bytes` the least recently used blocks are deleted
        (on a remote store: the oldest). Raises `InputError`."""
        problem = f"kv_store is {shorten(url, 90)}, which cannot be opened"
        with explain(problem, "name a folder, or pip install 'minitri[store]' and what is missing"):
            from fsspec.core import url_to_fs

            self._fs, self._folder = url_to_fs(url, use_listings_cache=False)
            self._fs.makedirs(self._folder, exist_ok=True)
        self._is_local = "local" in self._fs.protocol
        self._num_bytes = num_bytes
        self._origin = origin
        libraries = ("ONEDNN_", "DNNL_", "MKL_")  # their settings may change the bits
        settings = sorted(pair for pair in os.environ.items() if pair[0].startswith(libraries))
        # Hashed into the name of every block.
        self._root = f"{origin.manifest} {origin.computed_by} {torch.__version__} {settings}"
        self._known = set[str]()  # paths of blocks that exist
        self._block_bytes = BLOCK * origin.config.kv_values_per_token * origin.dtype.itemsize
        self._waiting: list[Future[None]] = []  # to be written
        self._last_reason = ""
        self.writer = ThreadPoolExecutor(1)

    def longer(self, tokens: list[int], owner: str, held: HeldRow) -> HeldRow:
        paths = self._paths(tokens, owner)
        num_held = held.num_shared(tokens, owner)
        blocks: list[FullCache] = []
        with self._warning():
            if any(map(self._fs.exists, paths[num_held // BLOCK :][:1])):
                for path in paths:
                    blocks.append(self._read(path))
        if (num_stored := len(blocks) * BLOCK) <= num_held:
            return held
        keys_LBKTD = torch.cat([block.keys[:] for block in blocks], 3)
        values_LBKTD = torch.cat([block.values[:] for block in blocks], 3)
        return HeldRow(FullCache(keys_LBKTD, values_LBKTD), 0, tokens[:num_stored])

    def write(self, source: HeldRow) -> None:
        """Writes the blocks of a prompt that the store lacks, in another thread."""
        paths = self._paths(source.tokens, source.owner)
        for path in reversed(paths) if self._is_local else ():  # the first block becomes the newest
            with contextlib.suppress(OSError):
                os.utime(path)
        for i, path in enumerate(paths):
            self._waiting = [job for job in self._waiting if not job.done()]
            has_room = len(self._waiting) * self._block_bytes <= WAITING_BYTES
            if path not in self._known and has_room:
                with self._warning():
                    pair = source.full.tokens(source.b, i * BLOCK, (i + 1) * BLOCK)
                    keys, values = (slots.to("cpu", copy=True)[:, None] for slots in pair)
                    block = HeldRow(FullCache(keys, values), 0, source.tokens[i * BLOCK :][:BLOCK])
                    with contextlib.suppress(RuntimeError):  # the store is closed
                        self._waiting.append(self.writer.submit(self._write, path, block))

    def close(self) -> None:
        """Waits until all blocks are written; later blocks are dropped."""
        self.writer.shutdown()

    def _paths(self, tokens: list[int], owner: str | None) -> list[str]:
        """Paths of all whole blocks of an owner's text, stored or not."""
        digests = [f"{self._root} {owner}"]
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            text = f"{digests[-1]} {tokens[end - BLOCK : end]}"
            digests.append(hashlib.sha256(text.encode()).hexdigest())
        return [f"{self._folder}/{digest}.kvblock" for digest in digests[1:]]

    def _read(self, path: str) -> FullCache:
        """Reads a block. Raises `FileNotFoundError`, or `InputError` for one of another name, which
        would have other tokens."""
        self._known.discard(path)
        name = Path(path).name
        with tempfile.TemporaryDirectory() as folder:
            self._fs.get_file(path, f"{folder}/{name}")
            row, note = read_snapshot(f"{folder}/{name}", self._origin)
        if note != name:
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

    def _make_room(self) -> None:
        """Deletes the oldest eighth of blocks and unfinished files if all exceed `num_bytes`."""
        files = self._fs.ls(self._folder, detail=True)
        ours = [file for file in files if file["name"].endswith((".kvblock", ".unfinished"))]
        if sum(file["size"] for file in ours) > self._num_bytes:
            paths = sorted((file["name"] for file in ours), key=self._fs.modified)
            for path in paths[: 1 + len(paths) // 8]:
                self._fs.rm_file(path)
                self._known.discard(path)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Context that logs an error in one line, once if it repeats; except for missing files."""
        try:
            yield
        except FileNotFoundError:
            pass
        except Exception as error:
            if (reason := repr(error.__cause__ or error)) != self._last_reason:
                log.warning("KV store: %s", shorten(error))
            self._last_reason = reason
