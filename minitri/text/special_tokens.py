"""Special tokens of a model: what goes in front of a text, what ends one, what templates name.

One record is made of all files that name such tokens. The first that says anything decides:

* in front: tokenizer.json's post-processor, if it adds anything; `add_bos_token`; BOS, where
  sentencepiece or (GGUF) a rule in `WITH_BOS` cuts words. Nothing is added at the end of a text
* BOS: `bos_token` of tokenizer_config.json; `bos_token_id` of config.json or GGUF
* ends: all of `eos_token_id` of generation_config.json, or else config.json (GGUF: eos, eot, eom);
  `eos_token`, `eot_token` and `eom_token` of tokenizer_config.json; `END_MARKS`; and </s> where it
  is a control token (in GGUF always), as it may be a tag of HTML
* control tokens: of the vocabulary's file, and those that tokenizer_config.json adds or names; if
  it has no `added_tokens_decoder`, special_tokens_map.json names and added_tokens.json adds them"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from minitri.core.errors import shorten

_MARKS = """
<eos> [EOS] <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <turn|> <|endoftext|>
<|end_of_text|> <|eot|> <|end_of_turn|> <|endofturn|> <|END_OF_TURN_TOKEN|> <EOT> _<EOT> [EOT]
<end_of_utterance> <｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|>
<|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
END_MARKS = _MARKS.split()
"""Spellings of tokens that end a turn, or a file of code; llama.cpp ends a text there, too."""
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class SpecialTokens(NamedTuple):
    """Special tokens of one model."""

    prefix: Sequence[int] = ()
    """Tokens in front of every prompt that does not begin with them: none, or BOS as a rule."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text or a turn."""
    texts: Mapping[str, str] = {}
    """Spellings of tokens by the names that chat templates know, such as bos_token."""


def control_tokens(pipeline: tokenizers.Tokenizer) -> dict[str, int]:
    """Ids of a tokenizer's control tokens, which texts do not show, by their spellings."""
    added = pipeline.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def add_tokens(
    pipeline: tokenizers.Tokenizer, settings: Mapping[str, Any], *, is_raw: bool
) -> dict[str, str]:
    """Adds control tokens to a pipeline by `settings`, a tokenizer_config.json. Returns spellings
    by names such as bos_token. `is_raw`: the tokens are found in texts before these are normalized,
    else their flags decide. Raises `ValueError` for a token with two ids."""
    if isinstance(extra := settings.get("extra_special_tokens"), dict):  # tokens with other names
        settings = {**settings, **extra, "extra_special_tokens": ()}
    keys = dict.fromkeys([*_NAMES, *(key for key in settings if key.endswith("_token"))])
    named = {key: text for key in keys if (text := _text(settings.get(key)))}
    texts = [*named.values()]
    for kind in ("additional", "extra"):
        values = settings.get(f"{kind}_special_tokens", ())
        if isinstance(values, str):
            raise TypeError(f"{kind}_special_tokens is the text {shorten(values, 60)}, not a list")
        texts += filter(None, map(_text, values))
    kept = {*control_tokens(pipeline), *named.values()}  # control tokens, whatever flags say
    tokens = {}
    declared = settings.get("added_tokens_decoder", {})
    for number, value in sorted((int(key), value) for key, value in declared.items()):
        plain = {"content": value, "special": value in texts}  # of added_tokens.json
        flags = plain if isinstance(value, str) else {k: value[k] for k in value if k != "__type"}
        token = tokenizers.AddedToken(**flags | ({"normalized": False} if is_raw else {}))
        token.special |= token.content in kept
        tokens[number] = token
    pipeline.add_tokens([*tokens.values()])
    for number, token in tokens.items():
        if (other := pipeline.token_to_id(token.content)) != number:
            text = shorten(repr(token.content), 60)
            raise ValueError(f"{text} is token {number} in one file and {other} in another")
    present = {token.content: token for token in pipeline.get_added_tokens_decoder().values()}
    texts = [text for text in texts if text in kept or text not in present]
    pipeline.add_special_tokens([present.get(text, text) for text in texts])
    return named


def _text(value: Any) -> str:
    """Spelling of a special token that a setting names by text, or by an object; "" if none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
