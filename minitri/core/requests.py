"""Requests and events: the input of a run, and what it reports to its caller.

A `Request` is a prompt with its settings; in a run a `RequestState` collects its output. The caller
sees typed events. The core knows no tokenizer: a `Detokenizer` of the caller makes text of ids.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minitri.core.errors import InputError, shorten
from minitri.core.fields import brief, changed, check_fields, check_names, expect
from minitri.core.settings import TEXT_FIELDS, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.stats import LogProbs, RowStats, Stats, Tokens

if TYPE_CHECKING:  # with PyTorch, which programs load only when they need it
    from minitri.core.decoding.text_filters import TextFilters

Prompt = str | Sequence[int]  # a text, or token ids; the core itself reads token ids only
Detokenizer = Callable[[int | None], tuple[str, bool]]
"""Turns tokens into text: called with each token id of a row, and with None after the last.
Returns the characters that are final now, and whether a stop string is complete."""


@dataclass(frozen=True)
class PrefillProgress:
    """Event: a chunk of the prompt of one request has been read."""

    row: int  # number of the request, as `submit` returns it, or its place in a list from 0
    num_done: int  # tokens of the prompt read so far, with `num_cached`
    num_tokens: int  # tokens of the whole prompt
    num_cached: int  # tokens whose K and V were reused from an earlier text


@dataclass(frozen=True)
class Token:
    """Event: a new token of one request."""

    __repr__ = brief
    row: int  # number of the request
    token_id: int
    text: str  # what is final now: no half character, nothing that may begin a stop string
    origin: str  # stage that guessed it, `draft` or `retrieval`; else `recovered` or `bonus`
    logprob: float | None = None  # before all filters, if `GenerationConfig.logprobs` is set
    top_logprobs: tuple[tuple[int, float], ...] = ()  # token id and logprob, the likeliest first


@dataclass(frozen=True)
class End:
    """Event: one request has ended, with its whole output; other requests go on."""

    __repr__ = brief
    row: int  # number of the request
    finish_reason: str
    """Why the text ended: `eos`, `stop` or `length`; `failed`, in `Engine.open`, by `error`."""
    text: str  # texts of all `tokens`, joined
    token_ids: tuple[int, ...]  # all generated tokens, with an end-of-sequence token
    seed: int  # given with the request, or drawn for it
    tokens: tuple[Token, ...] = field(repr=False)  # events of all generated tokens
    stats: Stats = field(repr=False)  # of the whole run, updated while it goes on
    row_stats: RowStats = field(repr=False)  # of this request
    error: Exception | None = None  # why the request failed
    prompt_scores: tuple[LogProbs, ...] = field(default=(), repr=False)
    """Log-probabilities of the prompt's tokens after the first, with `Request.score_prompt`."""


@dataclass(frozen=True)
class Idle:
    """Event: a run of `Engine.open` has nothing to do until the next `submit`."""


Completion = End  # result of `Engine.complete`
Event = PrefillProgress | Token | End | Idle


@dataclass(init=False)
class Request:
    """A prompt and its settings: `Request("Once", temperature=0.7, max_new_tokens=8)`."""

    __repr__ = brief
    prompt: Prompt  # a text or token ids
    seed: int | None  # None: a seed is drawn
    sampling: SamplingParams
    generation: GenerationConfig  # only its `TEXT_FIELDS` count; the run has the others
    speculation: bool = True  # whether stages guess tokens for this text, if the run speculates
    owner: str = ""  # K and V of a prompt are reused only for requests of the same owner
    client: str = ""  # rows of the batch are shared out fairly between clients
    shown: Container[int] = ()  # ids of control tokens that the text spells out
    score_prompt: bool = False  # also report the prompt's log-probabilities; reuses no K and V

    def __init__(
        self,
        prompt: Prompt,
        seed: int | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        **fields: Any,
    ) -> None:
        """`fields`: other fields, or fields of `sampling` and `generation`. Raises `InputError`."""
        self.prompt = prompt
        self.seed = seed
        for other in dataclasses.fields(self)[4:]:
            setattr(self, other.name, fields.pop(other.name, other.default))
        self.sampling, self.generation = with_fields(fields, sampling, generation)
        check_fields(self)


NO_SPECULATION = SpeculationConfig("autoregressive")


@dataclass(eq=False)
class RequestState:
    """One request in a run: its prompt ids, its tokens so far, and why it ended."""

    number: int  # `row` in the events of this request
    request: Request
    prompt_ids: Tokens
    detokenize: Detokenizer = lambda _: ("", False)  # by default there is no text
    make_filters: "Callable[[], TextFilters | None]" = lambda: None
    """Makes the text filters when the request gets a row of the batch; None if it has none."""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_scores: list[LogProbs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats = RowStats(len(self.prompt_ids))

    @property
    def token_ids(self) -> Tokens:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def push(self, token_id: int, origin: str, eos: tuple[int, ...], *logprobs: Any) -> Token:
        """Appends a token of this `origin`; returns its event, whose last fields are `logprobs`.
        The text's last token, such as an end-of-sequence id in `eos`, sets `finish_reason`."""
        generation = self.request.generation
        self.stats.num_generated_tokens += 1
        self.stats.by_origin[origin] += 1
        text = ""
        is_stop = False
        if token_id in eos and not generation.ignore_eos:
            self.finish_reason = "eos"
        else:
            text, is_stop = self.detokenize(token_id)
            if self.stats.num_generated_tokens == generation.max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason and not is_stop:
            rest, is_stop = self.detokenize(None)
            text += rest
        if is_stop:
            self.finish_reason = "stop"
        self.tokens.append(Token(self.number, token_id, text, origin, *logprobs))
        return self.tokens[-1]

    def end(self, stats: Stats, error: Exception | None = None) -> End:
        return End(
            self.number,
            self.finish_reason or "cancelled",
            self.text,
            tuple(self.token_ids),
            self.request.seed or 0,
            tuple(self.tokens),
            stats,
            self.stats,
            error,
            tuple(self.prompt_scores),
        )


def settings_of(
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
    speculation: SpeculationConfig | bool = True,
    **fields: Any,
) -> tuple[SamplingParams, GenerationConfig, SpeculationConfig]:
    """The settings with `fields` replaced; speculation=False: no guesses. Raises `InputError`."""
    names = fields.keys() & vars(NO_SPECULATION).keys() - {"coupled"}
    if speculation is False and names:
        raise InputError(f"{min(names)} is given with speculation=False; leave one of them out")
    if isinstance(speculation, bool):
        speculation = SpeculationConfig() if speculation else NO_SPECULATION
    return tuple(with_fields(fields, sampling, generation, speculation))


def with_fields(values: Mapping[str, Any], *settings: Any) -> list[Any]:
    """Copies of `settings` (sampling, then generation, speculation) with `values` by field name.
    Raises `InputError` for a name or value that no field takes."""
    kinds = (SamplingParams, GenerationConfig, SpeculationConfig)
    for group, kind in zip(settings, kinds, strict=False):
        expect(group, kind)
    check_names(values, [name for group in settings for name in vars(group)])
    return [changed(group, values) for group in settings]


def check_run(batch_size: int, fields: Mapping[str, Any]) -> None:
    """Raises `InputError` for a wrong batch size, or for `fields` that only requests may set."""
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"batch_size is {shorten(repr(batch_size), 60)}; it must be at least 1")
    if names := fields.keys() & TEXT_FIELDS:
        raise InputError(f"{min(names)} is not a setting of a run; give it to each minitri.Request")
