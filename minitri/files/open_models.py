"""Opened models: their configs and tokenizers are read, their weights not yet.

So wrong prompts and drafters are found before the minutes that it takes to read large weights.
"""

from dataclasses import replace

import torch

from minitri.core.errors import InputError, shorten
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
from minitri.files.checkpoint import Runtime, load_model, open_checkpoint
from minitri.files.fetch import LOOKUPS, default_draft, locate
from minitri.files.hf_config import stretch_rope
from minitri.files.named_models import MODELS, ModelChoice
from minitri.files.tokenizer_config import load_tokenizer
from minitri.files.weight_plan import WeightPlan, plan_weights
from minitri.text.tokenizer import Tokenizer, check_same_vocabulary


class OpenModel:
    """The located files of a model, with its config and tokenizer."""

    def __init__(self, choice: ModelChoice, *, progress: bool = False) -> None:
        """Finds or fetches the files, and reads all but the weights. Raises `InputError`."""
        self._progress = progress
        device = choose_device(choice.device, join())
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            # The first sum makes NCCL take its memory, before the model takes the rest.
            join().sum(torch.zeros(1, device=device))
        located = join().ask_first(lambda: locate(choice.model, progress=progress))
        log.debug("weights: %s", located.path)
        self.checkpoint = open_checkpoint(located.path)
        self.config = self.checkpoint.config(located.name)
        self._kernels = kernels_for(device, self.config) if join().count == 1 else None
        is_in_bfloat16 = self._kernels is not None and self.checkpoint.is_in_bfloat16()
        dtype = choose_dtype(choice.dtype, device, is_in_bfloat16)
        self._runtime = Runtime(device, dtype, choice.attention, join())
        self.choice = replace(choice, dtype=str(dtype).removeprefix("torch."))
        if row := MODELS.get(choice.model):
            self.config = replace(self.config, context_length=row.shape.context_length)
        if choice.rope_scaling is not None:
            self.config = stretch_rope(self.config, choice.rope_scaling)
        self.tokenizer: Tokenizer | None = None  # of a drafter with its target's table
        if self.config.draft_of is None:
            self.tokenizer = load_tokenizer(self.checkpoint, self.config)
            self.config = replace(self.config, eos_token_ids=self.tokenizer.special.ends)

    def load_target(self) -> tuple[Llama, Llama | None]:
        """Loads the target, and its copy in fewer bits for the retrieval cache, or None."""
        plan = self._plan()
        model = self._load(in_blocks=plan.target == "blocks")
        if plan.proposer != "blocks":
            return model, retrieval_copy(model, plan.proposer)
        proposer = self._load(in_blocks=True)
        if not self.config.tie_word_embeddings:
            proposer.num_bytes -= proposer.embed_tokens.weight.nbytes
            proposer.embed_tokens = model.embed_tokens
        return model, proposer

    def load_drafter(self, target: Llama) -> Llama:
        """Loads the model as a drafter; `target` lends its embedding table if it has none."""
        # A drafter is whole on every rank.
        self._runtime = replace(self._runtime, ranks=Ranks())
        model = self._load(target, in_blocks=self._plan().target == "blocks")
        return drafter_in_few_bits(model, self.choice.draft_weights)

    def _plan(self) -> WeightPlan:
        dtype, kernels = self._runtime.dtype, self._kernels
        plan = plan_weights(
            self.choice,
            self.checkpoint,
            dtype,
            has_kernels=kernels is not None,
            prefers_blocks=kernels is not None and not kernels.has_pairs(dtype),
            free_bytes=free_host_bytes(),
        )
        log.debug("%s: %s", self.config.name, plan)
        if plan.reason:
            problem = "the weights of %s stay quantized as in their file: %s"
            log.info(problem, self.config.name, plan.reason)
        return plan

    def _load(self, target: Llama | None = None, *, in_blocks: bool = False) -> Llama:
        model = load_model(
            self.checkpoint,
            self.config,
            self._runtime,
            target=target,
            in_blocks=in_blocks,
            must_keep=self.choice.weights == "native",
            progress=self._progress,
        )
        facts = (model.dtype, attention_name(model.attend), self.config.rope.describe())
        log.debug("%s: %s, attention %s, RoPE %s", self.config.name, *facts)
        return model


def open_drafter(choice: ModelChoice, tokenizer: Tokenizer, progress: bool) -> OpenModel | None:
    """Opens the drafter that a `ModelChoice` names; None for lookup, which also replaces a default
    drafter that cannot be used. Raises `InputError` about one that was chosen by name."""
    name = default_draft(choice.model) if choice.draft == "auto" else choice.draft
    if name in LOOKUPS:
        return None
    weights = "dense" if choice.weights == "dense" else "auto"
    plain = replace(choice, model=name, rope_scaling=None, weights=weights)
    try:
        drafter = OpenModel(plain, progress=progress)
        if drafter.tokenizer is not None:
            check_same_vocabulary(drafter.tokenizer, tokenizer, drafter.config.name)
        return drafter
    except InputError as error:
        if choice.draft != "auto":
            raise InputError(f"draft={shorten(name, 60)}: {error.message}", *error.ways) from None
        log.warning("%s; suffix lookup takes its place", error)
        return None
