"""Text to token ids and back: sentencepiece, tokenizer.json, and the tokenizer in a GGUF file.

The libraries tokenize. Here the BOS token is added where the model wants it, and conversations are
written as the model's chat template says.
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
    """A `tokenizer.model` with Llama-2's conventions: byte fallback, a space before the text."""

    adds_bos = True
    """Whether prompts start with BOS unless the settings say otherwise."""

    def __init__(self, model: bytes) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._model.vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text))

    def encode_marked(self, text: str) -> list[int]:
        controls = filter(self._model.is_control, range(self.num_tokens))
        marks = {self._model.id_to_piece(token): token for token in controls}
        found: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
            found += [marks[part]] if part in marks else self.encode(part)
        return found

    def decode(self, ids: list[int]) -> str:
        # A model's vocabulary may be padded beyond the pieces, and the library refuses such ids.
        return str(self._model.decode([token for token in ids if token < self.num_tokens]))

    def token(self, number: int) -> str | None:
        return self._model.id_to_piece(number) if number < self.num_tokens else None

    def lexicon(self) -> list[bytes]:
        model = self._model
        found = []
        for number in range(self.num_tokens):
            piece = model.id_to_piece(number)
            text = bytes([int(piece[3:5], 16)]) if model.is_byte(number) else piece.encode()
            is_control = model.is_control(number) or model.is_unknown(number)
            found.append(b"" if is_control else text.replace("▁".encode(), b" "))
        return found


class TokenizersBackend:
    """A pipeline of the `tokenizers` package, which knows control tokens written out in a text."""

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        self._pipeline = pipeline
        self.num_tokens = 1 + max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1)
        self.adds_bos = bool(pipeline.encode("").ids)

    def encode(self, text: str) -> list[int]:
        # Unlike `encode` it lets other threads run: 1 MB takes 0.3 s.
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
    """A tokenizer library together with the model's rules for BOS and for conversations.

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
        `template` is the source of a chat template, `special_tokens` what it knows by name, and
        `tool_template` takes its place where there are tools."""
        self._backend, self._template = backend, template
        self._tool_template = tool_template
        self._special_tokens = special_tokens or {}
        self.bos_token_id = bos_token_id
        self.num_tokens = backend.num_tokens  # one more than the largest token id
        self.grammars: dict[Any, Any] = {}
        """Those compiled for its tokens: see `text/matcher.py`."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first. Raises `InputError` for lone surrogates."""
        check_unicode(text, "the prompt")
        ids = self._backend.encode(text)
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def spellings(self, word: str) -> list[list[int]]:
        """Token ids of a word at the beginning of a text, after a space, and in a line."""
        line = self._backend.encode("\n")
        after_line = self._backend.encode(f"\n{word}")
        found = [self._backend.encode(text) for text in (word, f" {word}")]
        if after_line[: len(line)] == line:  # as sentencepiece spells it within a word
            found.append(after_line[len(line) :])
        return [ids for n, ids in enumerate(found) if ids and ids not in found[:n]]

    @functools.cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The model's chat template, if it has one. Raises `InputError` if that is broken."""
        from minitri.text.chat_template import ChatTemplate  # with Jinja: for conversations only

        if not self._template:
            return None
        return ChatTemplate(self._template, self._special_tokens, self._tool_template)

    def encode_chat(self, messages: "str | Sequence[Message]") -> list[int]:
        """Token ids of a conversation, up to where the next answer begins: a list of messages such
        as `{"role": "user", "content": "Why?"}`, or the user's only one. Raises `InputError`."""
        return self.encode_marked(self.render_chat(messages))

    def render_chat(self, messages: "str | Sequence[Message]", tools: Sequence[Any] = ()) -> str:
        """The same as text, in which control tokens are spelled out, with tools that the model may
        call. Raises `InputError`."""
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
        """Text without control tokens, but for those that are to be `shown` as they are spelled;
        bytes that are no UTF-8 give U+FFFD."""
        text = ""
        for is_shown, tokens in itertools.groupby(ids, shown.__contains__):
            part = [*tokens]
            spelled = "".join(self.token(token) or "" for token in part) if is_shown else None
            text += spelled or self._backend.decode(part)
        return text

    def control_ids(self, spellings: Iterable[str]) -> dict[str, int]:
        """Of these texts those that the vocabulary has as control tokens, with their ids."""
        found = {text: self.encode_marked(text) for text in spellings}
        return {
            text: ids[0] for text, ids in found.items() if len(ids) == 1 and not self.decode(ids)
        }

    def lexicon(self) -> str | list[bytes]:
        """The bytes of all tokens, empty for control tokens; or the `tokenizers` JSON with them."""
        return self._backend.lexicon()

    def token(self, number: int) -> str | None:
        """How the vocabulary spells a token; None for an unused id."""
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
