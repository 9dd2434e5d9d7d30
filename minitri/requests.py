"""What a run is asked for: requests, and the row of a batch that each becomes."""

from dataclasses import dataclass

from minitri.loading.prompt_ids import Prompt
from minitri.loading.text_stream import IncrementalDecoder, StopScanner
from minitri.loading.tokenizer import Tokenizer
from minitri.settings import GenerationConfig, SamplingParams
from minitri.stats import RowStats


@dataclass(frozen=True)
class Request:
    """A text to go on with, and how."""

    prompt: Prompt
    """A text or token ids."""
    seed: int = 0
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    generation: GenerationConfig = GenerationConfig()  # noqa: RUF009 (frozen)
    """Of these `max_new_tokens`, `stop`, `ignore_eos` and `logprobs`; the rest is of a run, not of
    a text."""
    speculation: bool = True
    """Whether anything is guessed for this text, if the run speculates."""


CANCELLED = "cancelled"


class Row:
    """The output of one request: its tokens, its text, and whether it is done."""

    def __init__(self, number: int, request: Request, ids: list[int], tokenizer: Tokenizer) -> None:
        self.number = number
        self.request = request
        self.prompt = ids
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stats = RowStats(len(ids))
        self._decoder = IncrementalDecoder(tokenizer, ids)
        self._scanner = StopScanner(request.generation.stop)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def push(self, token: int, origin: str, eos: tuple[int, ...]) -> str:
        """Takes in a token; returns the text that may be shown now. Sets `finish_reason`."""
        self.token_ids.append(token)
        self.stats.num_generated_tokens += 1
        self.stats.by_origin[origin] = self.stats.by_origin.get(origin, 0) + 1
        if token in eos and not self.request.generation.ignore_eos:
            self.finish_reason = "eos"
            fresh = self._scanner.push(self._decoder.flush())
        else:
            fresh = self._scanner.push(self._decoder.push(token))
            if (
                not self._scanner.found
                and len(self.token_ids) == self.request.generation.max_new_tokens
            ):
                self.finish_reason = "length"
                fresh += self._scanner.push(self._decoder.flush())
        if self._scanner.found:
            self.finish_reason = "stop"
        elif self.finish_reason:
            fresh += self._scanner.flush()
        self.text += fresh
        return fresh
