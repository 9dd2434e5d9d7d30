"""Tokenizers: text to token ids and back, by the package `tokenizers`.

The library does the work. `Tokenizer` adds the tokens that the model wants in front, and turns
conversations into text by the model's chat template. `StreamDetokenizer` makes whole characters of
new tokens, up to the first stop string."""

import codecs
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from minitri.core.errors import InputError, check_unicode, explain, shorten
from minitri.text.sandbox import Sandbox
from minitri.text.special_tokens import SpecialTokens, control_tokens

_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())  # letters equal to their byte first
BYTES = dict(zip(_LETTERS, sorted(range(256), key=lambda n: chr(n) not in _LETTERS), strict=True))
"""Bytes by the letters that stand for them in byte-level vocabularies."""
SANDBOX = Sandbox("render", 5, 1 << 29)  # 5 s and 512 MiB
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""A message: `role`, of `ROLES`, `content`, and other keys that the model's template reads."""
Messages = str | Message | Sequence[Message]  # one or several, or the text of one by the user


class Tokenizer:
    """A model's tokenizer, with its special tokens and its chat template.

    ids = engine.tokenizer.encode("Once upon a time")       # a list, BOS first where wanted
    text = engine.tokenizer.decode(ids)                     # without control tokens
    ids = engine.tokenizer.encode_chat("Why is the sea salty?")  # by the model's chat template
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008 (frozen)
        chat_template: str = "",
        tool_template: str = "",
    ) -> None:
        """Wraps the library's `pipeline`. Templates are Jinja sources: without a `chat_template`
        there are no chats; a `tool_template` is for chats with tools. Raises `ValueError`."""
        self.pipeline = pipeline
        self.chat_template = chat_template
        self.tool_template = tool_template
        decoder = pipeline.decoder.__getstate__() if pipeline.decoder else b""
        kinds = {*re.findall(r'"type":"(\w+)"', decoder.decode())} - {"Sequence", "Fuse"}
        if unknown := kinds - {"ByteLevel", "ByteFallback", "Replace", "Strip", "Metaspace"}:
            raise ValueError(f"it spells words by {', '.join(unknown)}, not by bytes or pieces")
        self._letters = BYTES if "ByteLevel" in kinds else {}
        self.strips_space = "Strip" in kinds or "Metaspace" in kinds
        self.special = special
        self._added = pipeline.get_added_tokens_decoder().keys()
        self.controls = control_tokens(pipeline)
        self._hidden = {*self.controls.values()}
        ids = pipeline.get_vocab().values()
        self.num_tokens = 1 + max(ids, default=-1)  # one more than the largest id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with BOS in front where the model wants it.
        Control tokens may be spelled out. Raises `InputError` for lone surrogates."""
        ids = self.encode_marked(text)
        prefix = [*self.special.prefix]
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def spellings(self, word: str) -> list[list[int]]:
        """All lists of token ids of a word: at a text's start, after a space, after a line feed."""
        line, after_line, *ways = map(self.encode_marked, ("\n", f"\n{word}", word, f" {word}"))
        if after_line[: len(line)] == line:  # the word without the space of sentencepiece
            ways.append(after_line[len(line) :])
        return [ids for n, ids in enumerate(ways) if ids and ids not in ways[:n]]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to the beginning of the next answer.
        `messages` is a list of dicts such as `{"role": "user", "content": "Why?"}`, or one of them,
        or the text of one by the user. Raises `InputError`."""
        return self.encode_marked(self.render_chat(messages))

    def render_chat(self, messages: Messages, tools: Sequence[Any] = ()) -> str:
        """A conversation, as for `encode_chat`, as text up to the next answer; control tokens are
        spelled out. `tools` are functions that the model may call, as in OpenAI's API. The role
        developer becomes system if the template does not know it. Raises `InputError`."""
        if not self.chat_template:
            problem = "this model has no chat template: it completes texts; use an instruct model"
            raise InputError(f"{problem}, or write the conversation into the prompt")
        source = (tools and self.tool_template) or self.chat_template
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif isinstance(messages, Mapping):
            messages = [messages]
        with explain("messages are no list of dicts", "give dicts with role and content"):
            for message in messages:
                if (role := message.get("role", "user")) not in ROLES and str(role) not in source:
                    got = f"a message has the role {shorten(repr(role), 60)}"
                    raise InputError(f"{got}; give one of {', '.join(ROLES)}")
        if "developer" not in source:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        variables = {
            "messages": [*messages],
            "tools": [*tools] or None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special.texts,
        }
        advice = "give a prompt of plain text, or correct the template"
        with explain("the model's chat template fails", advice):
            return SANDBOX.ask([source, variables])

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text in which control tokens are spelled out; no BOS is added."""
        check_unicode(text, "the prompt")
        # Unlike `pipeline.encode`, lets other threads run (1 MB: 0.3 s).
        return self.pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without control tokens; bytes that are not UTF-8 give U+FFFD."""
        text = self.text_bytes(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def text_bytes(self, ids: Iterable[int], shown: Container[int] = ()) -> bytes:
        """UTF-8 of successive tokens, maybe cut inside a character; of control tokens only those
        with ids in `shown`. The space that sentencepiece puts in front is kept."""
        return b"".join(
            self.token_bytes(token) for token in ids if token not in self._hidden or token in shown
        )

    def control_ids(self, spellings: Iterable[str]) -> dict[str, int]:
        """Token ids by spelling, for those of `spellings` that are one control token each."""
        return {text: self.controls[text] for text in spellings if text in self.controls}

    def token(self, number: int) -> str | None:
        """The spelling of token id `number` in the vocabulary; None for an unused id."""
        return self.pipeline.id_to_token(number)

    def token_bytes(self, number: int) -> bytes:
        """Bytes of a token id, maybe part of a character; of an added token, its spelling."""
        piece = self.token(number) or ""
        if number in self._added:
            return piece.encode()
        if self._letters.keys() >= {*piece}:
            return bytes(self._letters[letter] for letter in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer, draft_name: str) -> None:
    """Raises `InputError`, about `draft_name`, unless tokenizers agree on all tokens of both."""
    for token in range(min(draft.num_tokens, target.num_tokens)):
        theirs, ours = draft.token(token), target.token(token)
        if theirs != ours:
            got = f"the drafter {draft_name} has another vocabulary: token {token} is {theirs!r}"
            advice = "use a drafter of the target's family, or draft=suffix"
            raise InputError(f"{got}, the target's is {ours!r}; {advice}")


class StreamDetokenizer:
    """Turns one output's tokens into text with stop strings: the core's `Detokenizer`."""

    CONTEXT = 6  # last prompt tokens that are decoded first: the output may complete a character

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        """For the output after `prompt_ids`, which ends before the first of the strings `stop`.
        `shown` are ids of control tokens that the text spells out, while others are left out."""
        self._tokenizer, self._shown = tokenizer, shown
        self._stop = stop
        self._held = ""  # what may begin a stop string
        self._stop_ids = {*tokenizer.control_ids(stop).values()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = tokenizer.text_bytes(prompt_ids[-self.CONTEXT :], shown)
        self._decoder.decode(before)
        self._is_broken = bool(self._decoder.getstate()[0])  # the prompt ends inside a character
        self._strips = tokenizer.strips_space and not before

    def __call__(self, token: int | None) -> tuple[str, bool]:
        """Takes a token; returns the text that is final now, and whether a stop string is complete.
        None ends the output: half characters become U+FFFD, a half stop string becomes text."""
        is_stop = token in self._stop_ids
        tokens = [] if token is None or is_stop else [token]
        data = self._tokenizer.text_bytes(tokens, self._shown)
        if self._strips and data:
            data, self._strips = data.removeprefix(b" "), False
        text = self._decoder.decode(data, not tokens)
        if self._is_broken and text:  # the cut character of the prompt
            text, self._is_broken = text.removeprefix("\ufffd"), False
        text = self._held + text
        starts = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if ends:  # the first stop string that is complete
            return text[: min(ends)[1]], True
        held = max((overlap(text, stop) for stop in self._stop), default=0) if tokens else 0
        self._held = text[len(text) - held :]
        return text[: len(text) - held], is_stop


def overlap(text: str, stop: str) -> int:
    """Length of the longest string that ends `text` and begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
