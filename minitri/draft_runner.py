"""A small Llama as drafter: a `Reader` with a streaming cache, and the check that it speaks the target's language.

What it adds to a reader is how it gets to the end of a long text: it reads the sinks and the recent tokens only, in the
slots in which they will stand, so that a prompt of any length costs it one short forward pass.
"""

from __future__ import annotations

from minitri.caches.streaming import SLIDE, StreamingCache
from minitri.errors import InputError
from minitri.gpu.graphs import GraphPool
from minitri.model.llama import Llama
from minitri.runner import Reader, read_block
from minitri.settings import SamplingParams, SpeculationConfig
from minitri.loading.tokenizer import Tokenizer


class DraftReader(Reader):
    """A draft model over a streaming cache of B rows."""

    def __init__(
        self,
        model: Llama,
        batch_size: int,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        *,
        vocab_size: int,
        graphs: GraphPool | None = None,
    ) -> None:
        num_slots = (
            speculation.num_sink_tokens + speculation.num_recent_tokens + SLIDE + speculation.room
        )
        if num_slots > model.config.context_length:
            raise InputError(
                f"the drafter {model.config.name} holds {model.config.context_length} tokens but its window needs "
                f"{num_slots} (num_recent_tokens={speculation.num_recent_tokens} and room for guesses); lower "
                "--num-recent-tokens, --num-sink-tokens or the gammas"
            )
        self.window = StreamingCache(
            model.config,
            model.rope,
            batch_size,
            num_sink_tokens=speculation.num_sink_tokens,
            num_recent_tokens=speculation.num_recent_tokens,
            room=speculation.room,
            dtype=model.dtype,
            device=model.device,
        )
        self._max_block = speculation.max_block
        super().__init__(
            model, self.window, sampling, vocab_size=vocab_size, graphs=graphs, block_sizes={1, 2, self._max_block}
        )  # fmt: skip

    def commit(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Makes the cache ready for the next guesses after sequences that are certain, all but their last tokens.

        A row that is more than a block behind, as every prompt is, catches up by itself: read with the batch it would
        pad the other rows beyond their room.
        """
        cache = self.window
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - 1 - cache.num_tokens[b] > self._max_block:
                self._read_window(b, sequence[:-1])
        cache.slide()

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Fills row b's cache with the sinks and the latest of these tokens, whatever was in it."""
        cache = self.window
        num_sinks = cache.num_sink_tokens
        window = tokens[:num_sinks] + tokens[num_sinks:][-cache.num_recent_tokens :]
        read_block(self.model, [window], cache.empty_row(b))
        cache.hold(b, num_slots=len(window), num_tokens=len(tokens))


def check_vocabularies(draft: Tokenizer, target: Tokenizer, draft_name: str) -> None:
    """Raises `InputError` unless the two tokenizers agree on every token that both have.

    Either may have more tokens at its end, or a padded model: what the drafter lacks it never guesses, and what the
    target lacks has no place in a law.
    """
    for token in range(min(draft.num_tokens, target.num_tokens)):
        theirs, ours = draft.token(token), target.token(token)
        if theirs != ours:
            raise InputError(
                f"the drafter {draft_name} has another vocabulary: its token {token} is {theirs!r}, the target's is "
                f"{ours!r}; use a drafter of the target's family, or --draft ngram"
            )
