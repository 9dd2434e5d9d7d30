"""From texts to token ids and back: `/tokenize` and `/detokenize`, which are vLLM's."""

from dataclasses import dataclass
from typing import Any

from minitri.apps.serve.body import is_ids
from minitri.apps.serve.protocol import ChatFields, Protocol
from minitri.core.fields import check_fields, refuse


@dataclass(frozen=True)
class TokenizeFields:
    """Those of /tokenize."""

    model: str | None = None
    """One of the names at /v1/models. Default: the first."""
    prompt: str = ""
    """A text."""
    messages: Any = ()
    """In its place, those of a chat."""
    add_special_tokens: bool = True
    """Begin a text with the token that the model wants there, if it wants one."""
    add_generation_prompt: bool = True
    """End messages with what an answer begins with; may not be false."""
    return_token_strs: bool = False
    """Tell also how the vocabulary spells each token."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.add_generation_prompt:
            refuse(self, "add_generation_prompt", "messages are always followed by an answer")


@dataclass(frozen=True)
class DetokenizeFields:
    """Those of /detokenize."""

    model: str | None = None
    """One of the names at /v1/models. Default: the first."""
    tokens: Any = ()
    """A list of token ids."""


def tokenize(protocol: Protocol, body: bytes) -> dict[str, Any]:
    """What is answered. Raises as `Protocol.read`."""
    asked = protocol.parsed(body, TokenizeFields())
    tokenizer = protocol.engine.tokenizer
    encode = tokenizer.encode if asked.add_special_tokens else tokenizer.encode_marked
    chat = ChatFields(messages=asked.messages)
    ids = protocol.chat(chat).token_ids if asked.messages else encode(asked.prompt)
    spelled = [*map(tokenizer.token, ids)] if asked.return_token_strs else None
    counts = {"count": len(ids), "max_model_len": protocol.context}
    return counts | {"tokens": ids, "token_strs": spelled}


def detokenize(protocol: Protocol, body: bytes) -> dict[str, Any]:
    """What is answered. Raises as `Protocol.read`."""
    asked = protocol.parsed(body, DetokenizeFields())
    num_tokens = protocol.engine.config.vocab_size
    if not (is_ids(asked.tokens) and all(0 <= it < num_tokens for it in asked.tokens)):
        refuse(asked, "tokens", f"it must be a list of token ids, from 0 to {num_tokens - 1}")
    return {"prompt": protocol.engine.tokenizer.decode(asked.tokens)}
