"""The session pool: keeps the session of an engine's last run for the next one.

A run of as many texts that fits into its memory, with the same settings, begins there: with the
graphs that were captured on a GPU, and behind those first tokens of its prompts that the full cache
still holds. Other settings make another session over the same full cache. Host memory of a KV cache
is kept in any case.
"""

import dataclasses

from minitri.caches.prefixes import KVSource
from minitri.caches.snapshots import Origin, Snapshot, write_snapshot
from minitri.drafters.plugin import Drafter
from minitri.errors import InputError
from minitri.events import Batch
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.llama import Llama
from minitri.session import Session
from minitri.settings import SpeculationConfig

WORTH_COPYING = 64
"""Tokens at the beginning of a prompt for which two full caches may be in memory for a moment."""


class SessionPool:
    """Sessions over two models; at most one is kept, of the run that was opened last."""

    def __init__(
        self, target: Llama, draft: Llama | None, guesser: Llama | None, drafter: Drafter | None
    ) -> None:
        """Models and drafter of a `Session`."""
        self.target = target
        self._draft = draft
        self._guesser = guesser
        self._drafter = drafter
        self.host = HostMemory(target.device)
        self._kept: Session | None = None
        self.snapshot: Snapshot | None = None
        self._num_runs = 0

    def open(self, batch: Batch) -> Session:
        """A session that has begun to run `batch`: the one that was kept, or a new one.

        Raises `InputError` if there is no room.
        """
        self.target.ranks.check_same("prompts or settings", batch)
        kept, self._kept = self._kept, None
        if kept is not None and can_run(kept, batch):
            session = kept
        else:
            full = kept.full if kept is not None and fits(kept, batch) else None
            old = (
                kept.prefix if kept is not None and (full or self._is_worth(kept, batch)) else None
            )
            del kept  # gives up its memory for the new one
            session = Session(
                self.target, self._draft, batch, guesser=self._guesser, drafter=self._drafter,
                full=full, held=old, host=self.host,
            )  # fmt: skip
        session.prefix.snapshot = self.snapshot
        session.begin(batch)
        self._num_runs += 1
        session.number = self._num_runs
        return session

    def _is_worth(self, kept: Session, batch: Batch) -> bool:
        """Whether what a session holds is to be copied into a larger cache, for which there must be
        room beside it."""
        on_gpu = self.target.device.type == "cuda" or isinstance(kept.full, OffloadedFullCache)
        return not on_gpu and any(
            kept.prefix.num_shared(prompt) >= WORTH_COPYING for prompt in batch.prompts
        )

    def put(self, session: Session) -> None:
        """Keeps a session whose run is over, if it is the latest.

        With `offload` and no `on_chip` a shorter text may have room for more layers on the device,
        so such a session serves one run only, unless memory was reserved for longer ones.
        """
        is_latest, generation = session.number == self._num_runs, session.shape.generation
        is_fitted = isinstance(session.full, OffloadedFullCache)
        is_fitted &= generation.on_chip is None and not generation.reserve
        if is_latest and not is_fitted:
            self._kept = session

    @property
    def held(self) -> KVSource | None:
        """The longest text whose K and V are kept."""
        row = self._kept.prefix.longest if self._kept is not None else None
        return row or self.snapshot

    def save(self, path: str, note: str) -> int:
        """Writes `held` to a file, and a note; returns how many tokens. Raises `InputError`."""
        if self.held is None:
            raise InputError("there is no KV cache to save; let the engine read a prompt first")
        return write_snapshot(path, self.held, self._origin(), note)

    def load(self, path: str) -> Snapshot:
        """Opens a file of `save` for the texts of later runs. Raises `InputError`."""
        self.snapshot = Snapshot(path, self._origin())
        return self.snapshot

    def _origin(self) -> Origin:
        """What K and V here depend on. Raises `InputError` if no file can say so."""
        model, is_split = self.target, self.target.ranks.count > 1
        if is_split or not model.fingerprint:
            why = "is divided among processes" if is_split else "was not read from a file"
            name = model.config.name
            raise InputError(f"{name} {why}, so its KV cache is neither saved nor loaded")
        return Origin(model.config, model.dtype, model.fingerprint)

    def clear(self) -> None:
        """Frees what is kept; a run that is under way will not be kept either."""
        self._kept = self.snapshot = None
        self.host.clear()
        self._num_runs += 1


def can_run(session: Session, new: Batch) -> bool:
    """Whether the memory of a session, and what was captured in it, serve another batch."""
    old, cache = session.shape, session.retrieval_cache
    return (
        not session.is_broken
        and fits(session, new)
        and all(runner.can_sample_by(new.sampling) for runner in session.runners)
        and new.generation.prefill_chunk <= old.generation.prefill_chunk
        and _shapes(new.speculation) == _shapes(old.speculation)
        and (cache is None or max(new.budgets) <= cache.max_budget)
    )


def fits(session: Session, new: Batch) -> bool:
    """Whether the full cache of a session serves another batch."""
    old, placed = session.shape, ("offload", "on_chip", "cuda_graphs")
    is_sound = not (session.is_broken and isinstance(session.full, OffloadedFullCache))
    return (
        is_sound
        and len(new.prompts) == len(old.prompts)
        and new.capacity <= session.full.capacity
        and all(getattr(new.generation, n) == getattr(old.generation, n) for n in placed)
    )


def _shapes(speculation: SpeculationConfig) -> SpeculationConfig:
    """The settings without those that every run may choose anew."""
    return dataclasses.replace(speculation, coupled=False, timed=False)
