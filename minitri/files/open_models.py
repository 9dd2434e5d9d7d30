"""Models whose files are open: configs and tokenizers are read, the weights not yet.

So whatever is wrong with a prompt or a drafter is found before the minutes that large weights take.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import torch

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.core.model.execution import Ranks
from minitri.core.model.llama import Llama
from minitri.core.offload.allocation import free_host_bytes
from minitri.devices.choose import (
    attention_name,
    choose_device,
    choose_dtype,
    drafter_in_few_bits,
    kernels_for,
    retrieval_copy,
)
from minitri.devices.parallel.ranks import join
from minitri.files.checkpoint import Checkpoint, load_model, open_checkpoint
from minitri.files.fetch import LOOKUPS, default_draft, locate
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_config import stretch_rope
from minitri.files.named_models import MODELS, ModelChoice
from minitri.text.tokenizer import Tokenizer, check_same_vocabulary


class OpenModel:
    """Finds or fetches the files of a model, and reads all but the weights."""

    def __init__(self, choice: ModelChoice, *, progress: bool = False) -> None:
        """Raises `InputError`."""
        self._choice = choice
        self._progress = progress
        self._device = choose_device(choice.device, join())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device.index or 0)
            # NCCL takes its memory before the model does.
            join().sum(torch.zeros(1, device=self._device))
        self._dtype = choose_dtype(choice.dtype, self._device)
        located = join().ask_first(lambda: locate(choice.model, progress=progress))
        log.debug("weights: %s", located.path)
        self.checkpoint = open_checkpoint(located.path)
        self.config = self.checkpoint.config(located.name)
        if row := MODELS.get(choice.model):
            self.config = replace(self.config, context_length=row.shape.context_length)
        if choice.rope_scaling is not None:
            self.config = stretch_rope(self.config, choice.rope_scaling)
        self.tokenizer: Tokenizer | None = None  # of a drafter with its target's table
        if self.config.draft_of is None:
            self.tokenizer = load_tokenizer(self.checkpoint, self.config)

    def load_with_copy(self) -> tuple[Llama, Llama | None]:
        """The model, and what proposes for it with the retrieval cache if that has fewer bits: the
        same matrices as a GGUF file has them, or a copy that is quantized here."""
        choice = self._choice
        file = self.checkpoint
        has_copy = (
            isinstance(file, GgufFile)
            and file.is_in_few_bits()
            and not self._is_native
            and choice.draft_weights in ("auto", "int4")
            and join().count == 1
            and kernels_for(self._device, self.config) is not None
        )
        if not has_copy:
            model = self.load()
            is_short = self._is_native and choice.weights == choice.draft_weights == "auto"
            return model, retrieval_copy(model, "same" if is_short else choice.draft_weights)
        with ThreadPoolExecutor(1) as pool:  # together they take half as long as in turns
            reading = pool.submit(
                load_model, file, self.config, dtype=self._dtype, device=self._device, native=True
            )
            model = self.load()
            copy = reading.result()
        if not self.config.tie_word_embeddings:
            copy.embed_tokens = model.embed_tokens
            copy.num_bytes -= model.embed_tokens.nbytes
        return model, copy

    @cached_property
    def _is_native(self) -> bool:
        """Whether weights stay quantized as the file has them: by choice, or where there is no
        memory for more."""
        file = self.checkpoint
        is_open = self._choice.weights == "auto" and join().count == 1
        if not is_open or not isinstance(file, GgufFile) or not file.quantized():
            return self._choice.weights == "native"
        needed, free = file.num_weights() * self._dtype.itemsize, free_host_bytes()
        if self._choice.draft_weights in ("auto", "int4"):
            needed += file.num_bytes()  # as many as the copy, or more
        if needed <= free or kernels_for(self._device, self.config) is None:
            return False
        reason = "in %s they take %.1f GB with what guesses, and %.1f GB of memory are free"
        dtype = str(self._dtype).removeprefix("torch.")
        problem = f"the weights of %s stay quantized as in their file: {reason}"
        log.info(problem, self.config.name, dtype, needed / 1e9, free / 1e9)
        return True

    def load_drafter(self, target: Llama) -> Llama:
        """Reads the weights of a drafter, to which its target lends what it lacks."""
        return drafter_in_few_bits(self.load(target), self._choice.draft_weights)

    def load(self, target: Llama | None = None) -> Llama:
        """Reads the weights. `target` lends its embedding table to a drafter that has none."""
        model = load_model(
            self.checkpoint,
            self.config,
            dtype=self._dtype,
            device=self._device,
            attention=self._choice.attention,
            target=target,
            native=self._is_native,
            progress=self._progress,
            ranks=join() if target is None else Ranks(),  # a drafter is whole on every rank
        )
        facts = (model.dtype, attention_name(model.attend), self.config.rope.describe())
        log.debug("%s: %s, attention %s, RoPE %s", self.config.name, *facts)
        return model


def open_drafter(choice: ModelChoice, tokenizer: Tokenizer, progress: bool) -> OpenModel | None:
    """The drafter, or None for lookup. Raises `InputError` about one that was asked for by name."""
    name = default_draft(choice.model) if choice.draft == "auto" else choice.draft
    if name in LOOKUPS:
        return None
    plain = replace(choice, model=name, rope_scaling=None, weights="auto")
    try:
        drafter = OpenModel(plain, progress=progress)
        if drafter.tokenizer is not None:
            check_same_vocabulary(drafter.tokenizer, tokenizer, drafter.config.name)
        return drafter
    except InputError as error:
        if choice.draft != "auto":
            problem = f"draft={shorten(name, 60)}: {error.message}"
            raise InputError(problem, *error.ways) from None
        log.warning("%s; suffix lookup takes its place", error)
        return None


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if there is none that fits."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        backend = checkpoint.tokenizer()
        settings = {key: it for key, it in checkpoint.tokenizer_config.items() if it is not None}
        add_bos = settings.get("add_bos_token", backend.adds_bos)
        template = settings.get("chat_template")
        tool_template = None
        if isinstance(template, list):  # of several ones
            several = {it["name"]: it["template"] for it in template}
            template = several.get("default")
            tool_template = several.get("tool_use")
        if not isinstance(add_bos, bool):
            raise TypeError(f"add_bos_token is {shorten(repr(add_bos), 60)}")
        for it in (template, tool_template):
            if not isinstance(it, str | None):
                raise TypeError(f"chat_template is {shorten(repr(it), 60)}")
    if not 1 <= backend.num_tokens <= config.vocab_size:
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
