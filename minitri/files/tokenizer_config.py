"""Makes the tokenizer of a checkpoint from its files: library, special tokens, chat template."""

import itertools
from collections.abc import Mapping
from typing import Any

import tokenizers

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_config import without_null
from minitri.files.hf_folder import Folder
from minitri.text.special_tokens import END_MARKS, SpecialTokens, add_tokens, control_tokens
from minitri.text.tokenizer import ChatTemplate, Tokenizer


def load_tokenizer(checkpoint: Folder | GgufFile, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if it is missing or does not fit."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        pipeline = checkpoint.tokenizer()
        settings = without_null(checkpoint.tokenizer_config)
        special = _special_tokens(pipeline, settings, config, checkpoint)
        tokenizer = Tokenizer(pipeline, special, _chat_template(settings, special.texts))
        pipeline.encode_special_tokens = settings.get("split_special_tokens") is True
    # Tokens may have been added without a row of weights: a prompt that has one is refused.
    beyond = {*range(config.vocab_size, tokenizer.num_tokens)}
    if not tokenizer.num_tokens or beyond - pipeline.get_added_tokens_decoder().keys():
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {tokenizer.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    return tokenizer


def _chat_template(settings: Mapping[str, Any], texts: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template in a tokenizer's settings; None if there is none.
    They have one, or a list of named ones. Raises `TypeError` and others for wrong settings."""
    setting = settings.get("chat_template")
    named = {"default": setting}
    if isinstance(setting, list):
        named = {entry["name"]: entry["template"] for entry in setting}
    source = named.get("default")
    tool_source = settings.get("tool_use", named.get("tool_use"))
    for template in (source, tool_source):
        if not isinstance(template, str | None):
            raise TypeError(f"chat_template is {shorten(repr(template), 60)}")
    return ChatTemplate(source, texts, tool_source) if source else None


def _special_tokens(
    pipeline: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    config: ModelConfig,
    checkpoint: Folder | GgufFile,
) -> SpecialTokens:
    """Special tokens of a model; those that only its settings have are added to `pipeline`.
    Raises `InputError` if BOS is asked for and not known."""
    texts = add_tokens(pipeline, settings, is_raw=checkpoint.adds_bos)
    bos = config.bos_token_id
    if "bos_token" in texts:
        bos = pipeline.token_to_id(texts["bos_token"])
    if not isinstance(add := settings.get("add_bos_token", checkpoint.adds_bos), bool):
        raise TypeError(f"add_bos_token is {shorten(repr(add), 60)}")
    prefix = [config.vocab_size if bos is None else bos] if add else []
    tokens = filter(None, map(pipeline.id_to_token, range(pipeline.get_vocab_size())))
    encodings = map(pipeline.encode, itertools.chain("a", tokens))
    sample = next(it for it in encodings if 0 in it.special_tokens_mask)
    if 1 in sample.special_tokens_mask:  # the post-processor decides
        prefix = sample.ids[: sample.special_tokens_mask.index(0)]
    if max(prefix, default=0) >= config.vocab_size:
        way = f"set it to a token below {config.vocab_size}"
        raise InputError(f"{config.name} asks for a BOS token but has bos_token_id={bos}; {way}")
    named = [texts[name] for name in ("eos_token", "eot_token", "eom_token") if name in texts]
    marks = [*named, *{"</s>"} & control_tokens(pipeline).keys(), *END_MARKS]
    found = [*config.eos_token_ids, *map(pipeline.token_to_id, marks)]
    ends = dict.fromkeys(end for end in found if end is not None and end < config.vocab_size)
    if isinstance(checkpoint, GgufFile):  # in a folder only tokenizer_config.json names tokens
        usual = {"bos_token": bos, "eos_token": next(iter(ends), None)}
        texts = {name: pipeline.id_to_token(i) or "" for name, i in usual.items() if i is not None}
    return SpecialTokens(prefix, tuple(ends), texts)
