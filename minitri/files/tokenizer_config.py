"""Makes the tokenizer of a checkpoint from its files: library, BOS token, chat template and special
tokens."""

from typing import Any

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder, read_json
from minitri.text.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Folder | GgufFile, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if it is missing or does not fit."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        backend = checkpoint.tokenizer()
        settings = {
            k: value for k, value in checkpoint.tokenizer_config.items() if value is not None
        }
        add_bos = settings.get("add_bos_token", backend.adds_bos)
        if not isinstance(add_bos, bool):
            raise TypeError(f"add_bos_token is {shorten(repr(add_bos), 60)}")
        template, tool_template = _chat_templates(settings.get("chat_template"))
    # Tokens may have been added without a row of weights: a prompt that has one is refused.
    beyond = range(config.vocab_size, backend.num_tokens)
    added = read_json(checkpoint.path / "tokenizer.json").get("added_tokens", ()) if beyond else ()
    added_ids = {token["id"] for token in added}
    if not (backend.num_tokens and all(token in added_ids for token in beyond)):
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {backend.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    bos = config.bos_token_id
    if add_bos and (bos is None or bos >= config.vocab_size):
        raise InputError(
            f"{checkpoint.path} asks for a BOS token but its config has bos_token_id={bos}; set it "
            f"to a token below {config.vocab_size}"
        )
    ids = {"bos_token": bos, "eos_token": next(iter(config.eos_token_ids), None)}
    special = {name: backend.token(i) or "" for name, i in ids.items() if i is not None}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return Tokenizer(backend, bos if add_bos else None, template, special, tool_template)


def _chat_templates(setting: Any) -> list[str | None]:
    """The chat templates without and with tools, from a setting that is one template or a list of
    named ones. Raises `TypeError` and others for wrong settings."""
    templates = [setting, None]
    if isinstance(setting, list):
        sources = {entry["name"]: entry["template"] for entry in setting}
        templates = [sources.get("default"), sources.get("tool_use")]
    for template in templates:
        if not isinstance(template, str | None):
            raise TypeError(f"chat_template is {shorten(repr(template), 60)}")
    return templates
