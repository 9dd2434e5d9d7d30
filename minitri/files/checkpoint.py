"""Checkpoints, Hugging Face folders or GGUF files: their weights, copied into a `Llama`, and their
tokenizers, with special tokens and chat templates.

Every tensor is copied into its place, a view of a parameter, so that memory holds each weight once.
A drafter may borrow the embedding table of its target (`ModelConfig.draft_of`). With another
target's table a drafter would guess badly with no error, so its files hold rows of the true one."""

import itertools
from pathlib import Path

import tokenizers
import torch
from torch import Tensor
from tqdm import tqdm

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.model.linear import TrimmedHead
from minitri.core.model.llama import Llama, sample_of_vocabulary
from minitri.devices.parallel.split import share
from minitri.files.families import NamedTensors, Settings, read_table, unfused
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_config import without_null
from minitri.files.hf_folder import Folder, is_there, lacking
from minitri.text.special_tokens import END_MARKS, SpecialTokens, add_tokens, control_tokens
from minitri.text.tokenizer import Tokenizer

MIN_SIMILARITY = 0.9  # least median cosine of a drafter's embedding sample and the target's
Checkpoint = Folder | GgufFile


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file, or a folder in the Hugging Face layout. Raises `InputError`."""
    if path.is_file() and path.suffix == ".gguf":
        return GgufFile(path)
    if not is_there(path / "config.json"):
        raise lacking(path, "config.json")
    return Folder(path)


def fill(model: Llama, tensors: NamedTensors, path: Path, progress: bool) -> None:
    """Copies `tensors`, a checkpoint's from `path`, into a model; draws a bar if `progress`. Raises
    `InputError` unless they are all of its weights. Tied weights may come as table, as LM head, or
    as both, if equal; RoPE's buffers are ignored."""
    places = placements(model)
    missing = {**places}
    head = "lm_head.weight"
    table = "model.embed_tokens.weight" if model.config.tie_word_embeddings else head
    unexpected = []
    # A bar with disable=None is shown where standard error is a terminal.
    with tqdm(desc="weights", total=len(missing), leave=False, disable=not progress or None) as bar:
        for name, tensor in tensors:
            filled = table if name == head else name
            part = share(name, tensor, model.execution.ranks)
            if filled in missing:
                copy_into(missing.pop(filled), part, f"{path}: {name}")
                bar.update()
            elif filled == table:
                again = places[table].clone()
                copy_into(again, part, f"{path}: {name}")
                if not torch.equal(places[table], again):
                    got = f"{path} has tie_word_embeddings=true, and a {head} of its own"
                    raise InputError(f"{got}; set that to false in its config.json")
            elif not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
    if missing or unexpected:
        names = ", ".join([*unexpected, *missing])
        problem = f"{path} lacks {len(missing)} tensors and has {len(unexpected)} unexpected"
        advice = "weights and config belong to different models, or the download is incomplete"
        for form, kind in read_table("quantized").items():
            if f".{form}" in names:
                advice = f"its weights are those of {kind}; use the original ones, or a GGUF file"
        raise InputError(f"{problem}: {shorten(names)}; {advice}")


def placements(model: Llama) -> dict[str, Tensor]:
    """Views of a model's parameters, by names of the checkpoint's tensors that are copied there."""
    names = read_table("tensor")
    if model.config.tie_word_embeddings:
        names["lm_head.weight"] = names["embed_tokens.weight"]
    places = {}
    for path, tensor in model.state_dict().items():
        name = f"model.{path}" if path.startswith("layers.") else names.get(path, path)
        for part, rows in unfused(name, tensor, model.config):
            places[part.replace(".qkv_proj.", ".")] = rows
    return places


def copy_into(place: Tensor, tensor: Tensor, name: str) -> None:
    """Copies a tensor to `place`. Raises `InputError` about `name` unless their shapes are equal,
    and both are of floats, or neither."""
    if tensor.is_floating_point() != place.is_floating_point() or tensor.shape != place.shape:
        got = f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
        asked = f"where the config asks for {place.dtype} {tuple(place.shape)}"
        raise InputError(f"{got} {asked}; use one that is not quantized, and its own config")
    with explain(f"{name} is no plain tensor"):
        place.copy_(tensor)


def check_drafter(model: Llama, target: Llama, path: Path) -> None:
    """Raises `InputError` about `path` unless the drafter `model` was made for the embedding table
    of this target. The rows of its LM head must belong to different tokens, too."""
    config = model.config
    lent = target.config
    assert isinstance(model.lm_head, TrimmedHead)
    ids = model.lm_head.token_ids
    fits = (config.vocab_size, config.hidden_size) == (lent.vocab_size, lent.hidden_size)
    if fits and 0 <= ids.min() <= ids.max() < config.vocab_size and len(ids.unique()) == len(ids):
        rows = target.embed(sample_of_vocabulary(config).to(target.device)).float()
        sample = model.embedding_sample.float()
        if torch.cosine_similarity(rows, sample, dim=-1).median() > MIN_SIMILARITY:
            return
    raise InputError(
        f"the drafter {path} was made for {shorten(config.draft_of)}, whose embeddings are not "
        f"those of {lent.name}, or its tokens are damaged; use another, or draft=suffix"
    )


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises `InputError` if it is missing or does not fit."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        pipeline = checkpoint.tokenizer()
        settings = without_null(checkpoint.tokenizer_config)
        special = _special_tokens(pipeline, settings, config, checkpoint)
        tokenizer = Tokenizer(pipeline, special, *_chat_templates(settings))
        pipeline.encode_special_tokens = settings.get("split_special_tokens") is True
    # Tokens may have been added without a row of weights: a prompt that has one is refused.
    beyond = {*range(config.vocab_size, tokenizer.num_tokens)}
    if not tokenizer.num_tokens or beyond - pipeline.get_added_tokens_decoder().keys():
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {tokenizer.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    return tokenizer


def _chat_templates(settings: Settings) -> tuple[str, str]:
    """The chat template in a tokenizer's settings, and that for tools; "" if there is none.
    Settings may hold a list of named ones. Raises `TypeError` and others for wrong settings."""
    setting = settings.get("chat_template", "")
    named = {"default": setting}
    if isinstance(setting, list):
        named = {entry["name"]: entry["template"] for entry in setting}
    source = named.get("default", "")
    tool_source = settings.get("tool_use", named.get("tool_use", ""))
    for template in (source, tool_source):
        if not isinstance(template, str):
            raise TypeError(f"chat_template is {shorten(repr(template), 60)}")
    return source, tool_source


def _special_tokens(
    pipeline: tokenizers.Tokenizer, settings: Settings, config: ModelConfig, checkpoint: Checkpoint
) -> SpecialTokens:
    """Special tokens of a model. Adds to `pipeline` those that only tokenizer_config.json has.
    Raises `InputError` if a BOS token is required and unknown, any error for wrong settings."""
    texts = add_tokens(pipeline, settings, is_raw=checkpoint.adds_bos)  # raw: no JSON file
    bos = config.bos_token_id
    if "bos_token" in texts:
        bos = pipeline.token_to_id(texts["bos_token"])
    if not isinstance(add := settings.get("add_bos_token", checkpoint.adds_bos), bool):
        raise TypeError(f"add_bos_token is {shorten(repr(add), 60)}")
    prefix = [config.vocab_size if bos is None else bos] if add else []
    tokens = filter(None, map(pipeline.id_to_token, range(pipeline.get_vocab_size())))
    encodings = map(pipeline.encode, itertools.chain("a", tokens))
    # A text with a token that is not special: "a", or one of the vocabulary if that lacks "a".
    sample = next(it for it in encodings if 0 in it.special_tokens_mask)
    if 1 in sample.special_tokens_mask:  # the post-processor adds tokens
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
