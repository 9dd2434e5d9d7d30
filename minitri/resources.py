"""What an engine owns: its models, the memory that it keeps from one run to the next, snapshots of
that, and its end.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

from minitri.caches.snapshots import Origin, read_snapshot, write_snapshot
from minitri.drafters.plugin import Drafter
from minitri.errors import InputError
from minitri.generation import running
from minitri.loading.tokenizer import Tokenizer
from minitri.memory import MemoryPool, Models
from minitri.model.llama import Llama
from minitri.settings import SamplingParams

if TYPE_CHECKING:
    from minitri.worker import Worker


@dataclass(eq=False, repr=False)
class Resources:
    """Models and a tokenizer, and what the last run left in memory."""

    model: Llama
    tokenizer: Tokenizer
    draft: Llama | None = None
    retrieval_model: Llama | None = None
    drafter: Drafter | None = None
    """Who guesses: see `Models`."""
    sampling_defaults: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    """What the model's generation_config.json recommends; nothing here applies it."""

    def __post_init__(self) -> None:
        self.snapshot_note = ""
        proposers = (self.retrieval_model or self.model, self.draft, self.drafter)
        self.models = Models(self.model, *proposers)
        self.config = self.model.config
        self._memory: MemoryPool | None = MemoryPool(self.models)
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        if self._memory is None:
            return f"Engine({self.config.name!r}, closed)"
        where = f"{str(self.model.dtype).removeprefix('torch.')} on {self.model.device}"
        context = f"{self.config.context_length} tokens of context"
        return f"Engine({self.config.name!r}, drafter {self.drafter_name}, {where}, {context})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "an engine is neither pickled nor copied, as it holds weights, caches and threads; "
            "load it in each process, and send prompts and texts"
        )

    @property
    def _pool(self) -> MemoryPool:
        if self._memory is None:
            raise InputError(f"the engine of {self.config.name} is closed; load it again")
        return self._memory

    @property
    def drafter_name(self) -> str:
        """Of the object that guesses first, of the draft model, or `suffix`."""
        if self.drafter is not None:
            return type(self.drafter).__name__
        return self.draft.config.name if self.draft is not None else "suffix"

    @property
    def held_tokens(self) -> list[int]:
        """The longest text whose K and V are kept from the last run, or come from a snapshot."""
        return list(held.tokens) if (held := self._pool.held) is not None else []

    def save_kv(self, path: str | os.PathLike[str], note: str = "") -> int:
        """Writes K and V of `held_tokens` to a file, for `load_kv`, which appears when it is
        complete; returns how many tokens. Raises `InputError`."""
        with running(self._pool.models):
            if (held := self._pool.held) is None:
                raise InputError("there is no KV cache to save; let the engine read a prompt first")
            return write_snapshot(os.fsdecode(path), held, self._origin(), note)

    def load_kv(self, path: str | os.PathLike[str]) -> int:
        """Opens a file of `save_kv`: texts that begin like its tokens start after them, until
        `release`. Returns how many tokens it holds; its note is in `snapshot_note`. Raises
        `InputError` if it is damaged, or not of this model, dtype and RoPE."""
        held, self.snapshot_note = read_snapshot(os.fsdecode(path), self._origin())
        self._pool.snapshot = held
        return len(held.tokens)

    def _origin(self) -> Origin:
        """What K and V here depend on."""
        execution = self.model.execution
        if execution.ranks.count > 1 or not execution.fingerprint:
            raise InputError(
                f"the KV cache of {self.config.name} is neither saved nor loaded: it was not read "
                "from a file, or is divided among processes"
            )
        return Origin(self.config, self.model.dtype, execution.fingerprint)

    def release(self) -> None:
        """Frees the caches and graphs that are kept from one run to the next."""
        with self.models.lock:
            self._pool.clear()

    def close(self) -> None:
        """Ends all runs, also those of asyncio, and frees caches, graphs and weights. Whatever is
        asked for then raises `InputError`."""
        if self._memory is None:
            return
        if self._worker is not None:
            self._worker.close()
        for run in [*self._memory.runs]:
            run.close()
        self.release()
        self._memory = self.draft = self.retrieval_model = self.drafter = None
        del self.model, self.models
