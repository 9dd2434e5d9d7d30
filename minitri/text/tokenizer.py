"""Tokenizers: text to token ids and back, by sentencepiece or the package `tokenizers`.

The libraries do the work. `Tokenizer` adds the BOS token where the model wants one, and turns
conversations into text by the model's chat template.
"""

import functools
import itertools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sentencepiece
import tokenizers

from minitri.core.errors import InputError, check_unicode

if TYPE_CHECKING:
    from minitri.text.chat_template import ChatTemplate, Message


class SentencePieceBackend:
    """A sentencepiece model with Llama 2's conventions: byte fallback, a space before the text."""

    adds_bos = True
    """Whether prompts begin with BOS by default."""

    def __init__(self, model: bytes) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._model.vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def encode_marked(self, text: str) -> list[int]:
        controls = filter(self._model.is_control, range(self.num_tokens))
        marks = {self._model.id_to_piece(token): token for token in controls}
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
            ids += [marks[part]] if part in marks else self.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        # A model's vocabulary may be padded beyond the pieces, and the library refuses such ids.
        return str(self._model.decode([token for token in ids if token < self.num_tokens]))

    def token(self, number: int) -> str | None:
        return self._model.id_to_piece(number) if number < self.num_tokens else None

    def lexicon(self) -> list[bytes]:
        return [self._bytes(number) for number in range(self.num_tokens)]

    def _bytes(self, number: int) -> bytes:
        if self._model.is_control(number) or self._model.is_unknown(number):
            return b""
        piece = self._model.id_to_piece(number)
        if self._model.is_byte(number):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("▁", " ").encode()


class TokenizersBackend:
    """A pipeline of the package `tokenizers`, which reads spelled control tokens in any text."""

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        self._pipeline = pipeline
        self.num_tokens = 1 + max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1)
        self.adds_bos = bool(pipeline.encode("").ids)

    def encode(self, text: str) -> list[int]:
        # Unlike `encode`, this lets other threads run: 1 MB takes 0.3 s.
        return self._pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids

    encode_marked = encode

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        return self._pipeline.id_to_token(number)

    def lexicon(self) -> str:
        return str(self._pipeline.to_str())


Backend = SentencePieceBackend | TokenizersBackend


class Tokenizer:
    """A model's tokenizer, with its rules for BOS and its chat template.

    ids = engine.tokenizer.encode("Once upon a time")       # a list, BOS first where wanted
    text = engine.tokenizer.decode(ids)                     # without control tokens
    ids = engine.tokenizer.encode_chat("Why is the sea salty?")  # by the model's chat template
    """

    def __init__(
        self,
        backend: Backend,
        bos_token_id: int | None,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_template: str | None = None,
    ) -> None:
        """`bos_token_id` goes before every prompt that does not begin with it; None: no BOS.
        `template` is the source of a chat template, `special_tokens` are the texts that it knows by
        name, and `tool_template` is its substitute for conversations with tools."""
        self._backend = backend
        self._template = template
        self._tool_template = tool_template
        self._special_tokens = special_tokens or {}
        self.bos_token_id = bos_token_id
        self.num_tokens = backend.num_tokens  # one more than the largest token id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first. Raises `InputError` for lone surrogates."""
        check_unicode(text, "the prompt")
        ids = self._backend.encode(text)
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def spellings(self, word: str) -> list[list[int]]:
        """All token id lists that write a word: at the start of a text, after a space or a line."""
        line, after_line, *ways = map(self._backend.encode, ("\n", f"\n{word}", word, f" {word}"))
        if after_line[: len(line)] == line:  # the word without the space of sentencepiece
            ways.append(after_line[len(line) :])
        return [ids for n, ids in enumerate(ways) if ids and ids not in ways[:n]]

    @functools.cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The model's chat template, or None. Raises `InputError` if it is broken."""
        from minitri.text.chat_template import ChatTemplate  # starts a process, for conversations

        if not self._template:
            return None
        return ChatTemplate(self._template, self._special_tokens, self._tool_template)

    def encode_chat(self, messages: "str | Sequence[Message]") -> list[int]:
        """Token ids of a conversation, up to the beginning of the next answer. `messages` is a
        list of dicts such as `{"role": "user", "content": "Why?"}`, or the text of one message by
        the user. Raises `InputError`."""
        return self.encode_marked(self.render_chat(messages))

    def render_chat(self, messages: "str | Sequence[Message]", tools: Sequence[Any] = ()) -> str:
        """A conversation as text with control tokens spelled out; `tools` are functions that the
        model may call. Raises `InputError`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.chat_template is None:
            raise InputError(
                "this model has no chat template: it completes texts; use an instruct model, or "
                "write the conversation into the prompt"
            )
        return self.chat_template.render(messages, tools)

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text in which control tokens are spelled out; no BOS is added."""
        check_unicode(text, "the conversation")
        return self._backend.encode_marked(text)

    def decode(self, ids: Sequence[int], shown: Container[int] = ()) -> str:
        """Text without control tokens, except those in `shown`, which are spelled out; bytes that
        are not UTF-8 give U+FFFD."""
        text = ""
        for is_shown, tokens in itertools.groupby(ids, shown.__contains__):
            part = [*tokens]
            spelled = "".join(self.token(token) or "" for token in part) if is_shown else None
            text += spelled or self._backend.decode(part)
        return text

    def control_ids(self, spellings: Iterable[str]) -> dict[str, int]:
        """Token ids by spelling, for those of `spellings` that are one control token each."""
        encoded = {text: self.encode_marked(text) for text in spellings}
        return {
            text: ids[0] for text, ids in encoded.items() if len(ids) == 1 and not self.decode(ids)
        }

    def lexicon(self) -> str | list[bytes]:
        """The vocabulary: bytes of each token, b"" for control tokens; or tokenizer.json's text."""
        return self._backend.lexicon()

    def token(self, number: int) -> str | None:
        """The spelling of a token in the vocabulary; None for an unused id."""
        return self._backend.token(number)


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer, draft_name: str) -> None:
    """Raises `InputError` unless two tokenizers agree on every token that both have."""
    for token in range(min(draft.num_tokens, target.num_tokens)):
        theirs, ours = draft.token(token), target.token(token)
        if theirs != ours:
            raise InputError(
                f"the drafter {draft_name} has another vocabulary: its token {token} is "
                f"{theirs!r}, the target's is {ours!r}; use a drafter of the target's family, or "
                "draft=suffix"
            )
