"""What a run tells: typed events, in the order in which they happen."""

from dataclasses import dataclass, field

from minitri.stats import RowStats, Stats


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of a prompt has been read."""

    row: int
    """Number of the request, like that of all events."""
    num_done: int
    """Tokens of this prompt read so far, those included that were in the KV cache."""
    num_tokens: int
    """Tokens of this prompt."""
    num_cached: int
    """Tokens of this prompt whose K and V were there from an earlier text, or a snapshot."""


@dataclass(frozen=True)
class Token:
    """A new token of one row."""

    row: int
    token_id: int
    text: str
    """Text that became certain with this token; empty while a character or a possible stop string
    is incomplete."""
    origin: str
    """Where it came from: the stage that guessed it, `draft` or `retrieval` (or `lookup`, where it
    takes turns with a drafter's model), or the target itself, `recovered` or `bonus`."""
    logprob: float | None = None
    """Natural logarithm of its probability by the target alone, before temperature and filters,
    whoever guessed it; None unless `GenerationConfig.logprobs` asks for it."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The same of the likeliest tokens at this place, the best first."""


@dataclass(frozen=True)
class End:
    """One row is finished; the others go on."""

    row: int
    finish_reason: str
    """`eos`, `stop` or `length`."""
    text: str
    """All text of the row: that of its `Token` events put together."""
    token_ids: tuple[int, ...]
    """All tokens generated, an end-of-sequence token included."""
    stats: Stats = field(repr=False)
    """The statistics of the whole batch, live."""
    row_stats: RowStats = field(repr=False)
    """Those of this row."""


@dataclass(frozen=True)
class Idle:
    """A run that stays open (`Engine.open`) has nothing to do until something is submitted."""


@dataclass(frozen=True)
class Completion:
    """The whole output of one prompt; see `Engine.complete`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats = field(repr=False)


Event = PrefillProgress | Token | End | Idle
