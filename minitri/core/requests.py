"""What a run is asked for and what it tells: requests, the row of a batch that each becomes, and
typed events in the order in which they happen."""

import html
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from minitri.core.errors import InputError, shorten
from minitri.core.fields import brief, expect, with_fields
from minitri.core.settings import TEXT_FIELDS, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.stats import LogProbs, RowStats, Stats
from minitri.text.prompt_ids import Prompt
from minitri.text.text_stream import IncrementalDecoder, StopScanner
from minitri.text.tokenizer import Tokenizer

SHADES = {"draft": "#bde7bd", "retrieval": "#b5e3ea", "recovered": "#f4bcbc", "bonus": "#f3e2a9"}
"""Colors of tokens in HTML, by their origins."""


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of a prompt has been read."""

    row: int
    """Number of the request, like that of all events."""
    num_done: int
    """Of the `num_tokens` of this prompt, those included that were in the KV cache."""
    num_tokens: int
    num_cached: int
    """Those whose K and V were there from an earlier text, or a snapshot."""


@dataclass(frozen=True)
class Token:
    """A new token of one row."""

    __repr__ = brief
    row: int
    token_id: int
    text: str
    """Text that became certain with it; empty inside a character or a possible stop string."""
    origin: str
    """Who guessed it, `draft` or `retrieval`; or of the target, `recovered` or `bonus`."""
    logprob: float | None = None
    """By the target alone, before temperature and filters, if `GenerationConfig.logprobs` asks."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The same of the likeliest tokens at this place, the best first."""


@dataclass(frozen=True)
class End:
    """One row is finished; the others go on. In a notebook tokens are colored by their origins."""

    __repr__ = brief
    row: int
    finish_reason: str
    """`eos`, `stop` or `length`; `failed` in a run that goes on without it: see `error`."""
    text: str
    """All text of the row: that of its `Token` events put together."""
    token_ids: tuple[int, ...]
    """All tokens generated, an end-of-sequence token included."""
    seed: int
    """The one that was given, or drawn where none was."""
    tokens: tuple[Token, ...] = field(repr=False)
    """Its `Token` events: with their origins, and log-probabilities if asked for."""
    stats: Stats = field(repr=False)
    """Those of the whole batch, live."""
    row_stats: RowStats = field(repr=False)
    error: Exception | None = None
    prompt_scores: tuple[LogProbs, ...] = field(default=(), repr=False)
    """Log-probabilities of the prompt's tokens but the first, if `Request.score_prompt` asks."""

    def _repr_html_(self) -> str:
        text = "".join(_shaded(it.text, it.origin) for it in self.tokens if it.text)
        legend = " ".join(_shaded(origin, origin) for origin in SHADES)
        return f'<pre style="white-space:pre-wrap">{text}</pre><small>{legend}</small>'


def _shaded(text: str, origin: str) -> str:
    """Text as HTML on the color of an origin."""
    style = f"background:{SHADES[origin]};color:black"
    return f'<span style="{style}" title="{origin}">{html.escape(text)}</span>'


@dataclass(frozen=True)
class Idle:
    """A run that stays open (`Engine.open`) has nothing to do until something is submitted."""


Completion = End
"""The whole output of one prompt; see `Engine.complete`."""
Event = PrefillProgress | Token | End | Idle


@dataclass(init=False)
class Request:
    """A text to go on with, and how: `Request("Once", temperature=0.7, max_new_tokens=8)`."""

    __repr__ = brief
    prompt: Prompt
    seed: int | None
    """None: one is drawn."""
    sampling: SamplingParams
    generation: GenerationConfig
    """Its `max_new_tokens`, `stop`, `ignore_eos` and `logprobs`; the rest belongs to a run."""
    speculation: bool
    """Whether anything is guessed for this text, if the run speculates."""
    owner: str
    """Whose it is: no text begins with K and V of another owner's."""
    client: str
    """Who asks: clients take turns, and those with the fewest rows are next."""
    shown: Container[int]
    """Control tokens that the text has, as they are spelled; others are left out."""
    score_prompt: bool
    """Whether the prompt's tokens have log-probabilities, too: then all of it is read."""

    def __init__(
        self,
        prompt: Prompt,
        seed: int | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: bool = True,
        owner: str = "",
        client: str = "",
        shown: Container[int] = (),
        score_prompt: bool = False,
        **fields: Any,
    ) -> None:
        """`fields` take the places of those of `sampling` and `generation`. Raises `InputError`."""
        expect(sampling, SamplingParams)
        expect(generation, GenerationConfig)
        self.prompt = prompt
        self.seed = seed
        self.speculation = speculation
        self.owner = owner
        self.client = client
        self.shown = shown
        self.score_prompt = score_prompt
        self.sampling, self.generation = with_fields(fields, sampling, generation)


ALONE = SpeculationConfig("autoregressive")
CANCELLED = "cancelled"


class Row:
    """The output of one request: its tokens, its text, and whether it is done."""

    def __init__(self, number: int, request: Request, ids: list[int], tokenizer: Tokenizer) -> None:
        self.number = number
        self.tokenizer = tokenizer
        self.arrived = 0  # when: after so many admissions
        self.request = request
        self.prompt = ids
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None
        self.prompt_scores: list[LogProbs] = []
        self.stats = RowStats(len(ids))
        self._decoder = IncrementalDecoder(tokenizer, ids, request.shown)
        self._scanner = StopScanner(request.generation.stop)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def push(self, token_id: int, origin: str, eos: tuple[int, ...], *logprobs: Any) -> Token:
        """Takes in a token, with the text that may be shown now. May set `finish_reason`."""
        generation = self.request.generation
        self.stats.num_generated_tokens += 1
        self.stats.by_origin[origin] += 1
        text = ""
        if token_id in eos and not generation.ignore_eos:
            self.finish_reason = "eos"
        else:
            text = self._decoder.push(token_id)
            if self.stats.num_generated_tokens == generation.max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            text += self._decoder.flush()
        text = self._scanner.push(text)
        if self._scanner.found:
            self.finish_reason = "stop"
        elif self.finish_reason:
            text += self._scanner.flush()
        self.tokens.append(Token(self.number, token_id, text, origin, *logprobs))
        return self.tokens[-1]

    def end(self, stats: Stats, error: Exception | None = None) -> End:
        """Of a row that is finished, in a run with these statistics."""
        reason = self.finish_reason or CANCELLED
        output = (reason, self.text, tuple(self.token_ids), self.request.seed or 0)
        scores = tuple(self.prompt_scores)
        return End(self.number, *output, tuple(self.tokens), stats, self.stats, error, scores)


def settings_of(
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
    speculation: SpeculationConfig | bool = True,
    **fields: Any,
) -> list[Any]:
    """The three, with `fields` in the places of theirs. Raises `InputError`."""
    if speculation is False and (names := fields.keys() & vars(ALONE).keys() - {"coupled"}):
        raise InputError(f"{min(names)} is given with speculation=False; leave one of them out")
    if isinstance(speculation, bool):
        speculation = SpeculationConfig() if speculation else ALONE
    expect(sampling, SamplingParams)
    expect(generation, GenerationConfig)
    expect(speculation, SpeculationConfig)
    return with_fields(fields, sampling, generation, speculation)


def check_run(batch_size: int, fields: Mapping[str, Any]) -> None:
    """Raises `InputError` for what is no setting of a run over requests."""
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"batch_size is {shorten(repr(batch_size), 60)}; it must be at least 1")
    for name in fields:
        if name in TEXT_FIELDS:
            raise InputError(f"{name} is not a setting of a run; give it to each minitri.Request")
