"""The session pool: keeps the session of an engine's last run for the next one, on a GPU.

There capturing graphs takes longer than many runs, so a run of as many texts, not longer and with
the same settings, begins in the memory of the last one and captures nothing. On a CPU nothing is
captured and nothing is kept. Host memory of a KV cache is kept in any case.
"""

import dataclasses

from minitri.drafters.lookup import Sources
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.llama import Llama
from minitri.session import Batch, Session
from minitri.settings import SpeculationConfig


class SessionPool:
    """Sessions over two models; at most one is kept, of the run that was opened last."""

    def __init__(
        self, target: Llama, draft: Llama | None, guesser: Llama | None, sources: Sources
    ) -> None:
        """Models of a `Session`, and where it looks words up."""
        self.target = target
        self._draft = draft
        self._guesser = guesser
        self._sources = sources
        self.host = HostMemory(target.device)
        self._kept: Session | None = None
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
            del kept  # gives up its memory for the new one
            session = Session(
                self.target, self._draft, batch, guesser=self._guesser, sources=self._sources,
                host=self.host,
            )  # fmt: skip
        session.begin(batch)
        self._num_runs += 1
        session.number = self._num_runs
        return session

    def put(self, session: Session) -> None:
        """Keeps a session whose run is over, if it is the latest and captured something.

        With `offload` and no `on_chip` a shorter text may have room for more layers on the device,
        so such a session serves one run only.
        """
        is_latest = session.number == self._num_runs
        is_fitted = isinstance(session.full, OffloadedFullCache)
        is_fitted &= session.shape.generation.on_chip is None
        if is_latest and session.graphs is not None and not is_fitted:
            self._kept = session

    def clear(self) -> None:
        """Frees what is kept; a run that is under way will not be kept either."""
        self._kept = None
        self.host.clear()
        self._num_runs += 1


def can_run(session: Session, new: Batch) -> bool:
    """Whether the memory of a session, and what was captured in it, serve another batch."""
    old, cache = session.shape, session.retrieval_cache
    placed = ("offload", "on_chip", "cuda_graphs")
    runners = (session.draft, session.retrieval, session.target)
    return (
        all(it.can_sample_by(new.sampling) for it in runners if it is not None)
        and len(new.prompts) == len(old.prompts)
        and new.capacity <= session.full.capacity
        and new.generation.prefill_chunk <= old.generation.prefill_chunk
        and all(getattr(new.generation, n) == getattr(old.generation, n) for n in placed)
        and _shapes(new.speculation) == _shapes(old.speculation)
        and (cache is None or max(new.budgets) <= cache.max_budget)
    )


def _shapes(speculation: SpeculationConfig) -> SpeculationConfig:
    """The settings without those that every run may choose anew."""
    return dataclasses.replace(speculation, coupled=False, timed=False)
