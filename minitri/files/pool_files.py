"""Files of a memory pool: KV snapshots of its longest text, and the KV store that engines share."""

from minitri.core.caches.full import HeldRow
from minitri.core.errors import InputError
from minitri.core.memory import MemoryPool
from minitri.core.model.llama import Llama
from minitri.files.kv_store import KVStore
from minitri.files.snapshots import Origin, read_snapshot, write_snapshot


def save_held(pool: MemoryPool, name: str, note: str) -> int:
    """Writes `pool.held` to a snapshot file; returns its number of tokens. Raises `InputError`."""
    if (held := pool.held) is None:
        raise InputError("there is no KV cache to save; let the engine read a prompt first")
    return write_snapshot(name, held, origin_of(pool.models.target), note)


def load_snapshot(pool: MemoryPool, name: str) -> tuple[HeldRow, str]:
    """Opens a snapshot as `pool.snapshot`; returns it and its note. Raises `InputError`."""
    pool.snapshot, note = read_snapshot(name, origin_of(pool.models.target))
    return pool.snapshot, note


def open_store(pool: MemoryPool, url: str, num_bytes: int) -> None:
    """Shares K and V of prompts with other engines from now on; see `KVStore`."""
    pool.store = KVStore(url, num_bytes, origin_of(pool.models.target))


def origin_of(model: Llama) -> Origin:
    """The facts that K and V depend on. Raises `InputError` if a file cannot state them."""
    execution = model.execution
    if execution.ranks.count > 1 or not execution.fingerprint:
        raise InputError(
            f"the KV cache of {model.config.name} is neither saved nor loaded: it was not read "
            "from a file, or is divided among processes"
        )
    return Origin(model.config, model.dtype, execution.fingerprint, execution.computed_by)
