"""Opened models: their configs and tokenizers are read, their weights not yet.

So wrong prompts and drafters are found before the minutes that it takes to read large weights."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitri.core.config import stretch_rope
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.core.model.execution import Ranks
from minitri.core.model.llama import Llama
from minitri.devices.choose import (
    attention_for,
    choose_device,
    choose_dtype,
    drafter_in_few_bits,
    kernels_for,
    retrieval_copy,
    use_kernels,
)
from minitri.devices.cpu.build import identity
from minitri.devices.cpu.kernel_layers import keep_quantized
from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.pytorch import can_pack, pack_linears
from minitri.devices.gpu.fused_modules import fuse_if_possible
from minitri.devices.parallel.group import RankGroup
from minitri.devices.parallel.ranks import join
from minitri.devices.parallel.split import SplitLlama
from minitri.files.checkpoint import (
    Checkpoint,
    check_drafter,
    fill,
    load_tokenizer,
    open_checkpoint,
    placements,
)
from minitri.files.fetch import LOOKUPS, default_draft, locate
from minitri.files.gguf.file import GgufFile
from minitri.files.named_models import MODELS, ModelChoice
from minitri.files.snapshots import fingerprint_of
from minitri.text.tokenizer import Tokenizer, check_same_vocabulary


class WeightPlan(NamedTuple):
    """Forms of a model's weights in memory, decided once before they are read."""

    retrieval_weights: str
    """Weights that guess with the retrieval cache: `native`, quantized as in the GGUF file, or a
    value of --draft-weights."""
    keeps_quantized: bool  # whether the target's matrices stay quantized as in a GGUF file


class OpenModel:
    """The located files of a model, with its config and tokenizer."""

    def __init__(self, choice: ModelChoice, *, progress: bool = False) -> None:
        """Finds or fetches the files of `choice`, reads all but weights. Raises `InputError`."""
        self._progress = progress
        self._ranks = ranks = join()
        self._device = device = choose_device(choice.device, ranks)
        if device.type == "cuda":
            with explain(f"{device} cannot be used", "end what uses it, or take another device"):
                torch.cuda.set_device(device.index or 0)
                # The first sum makes NCCL take its memory, before the model takes the rest.
                ranks.sum(torch.zeros(1, device=device))
        located = ranks.ask_first(lambda: locate(choice.model, progress=progress))
        log.debug("weights: %s", located.path)
        self.checkpoint = open_checkpoint(located.path)
        config = self.checkpoint.config(located.name)
        kernels = kernels_for(device, config) if ranks.count == 1 else None
        self._dtype = choose_dtype(choice.dtype, device, has_kernels=kernels is not None)
        self.choice = replace(choice, dtype=str(self._dtype).removeprefix("torch."))
        if row := MODELS.get(choice.model):
            # By the table, as the config.json of some named models states another length.
            config = replace(config, context_length=row.shape.context_length)
        if choice.rope_scaling is not None:
            config = stretch_rope(config, choice.rope_scaling)
        self.tokenizer: Tokenizer | None = None  # None: a drafter without embeddings
        if config.draft_of is None:
            self.tokenizer = load_tokenizer(self.checkpoint, config)
            config = replace(config, eos_token_ids=self.tokenizer.special.ends)
        self.config = config
        self.plan = plan_weights(choice, self.checkpoint, kernels)
        log.debug("%s: %s", config.name, self.plan)

    def load_target(self) -> tuple[Llama, Llama | None]:
        """Loads the target, and a copy in fewer bits if one guesses with the retrieval cache."""
        model = self._load(keeps_quantized=self.plan.keeps_quantized)
        if self.plan.retrieval_weights != "native":
            return model, retrieval_copy(model, self.plan.retrieval_weights)
        retrieval_model = self._load(keeps_quantized=True)
        if not self.config.tie_word_embeddings:
            retrieval_model.num_bytes -= retrieval_model.embed_tokens.weight.nbytes
            retrieval_model.embed_tokens = model.embed_tokens
        return model, retrieval_model

    def load_drafter(self, target: Llama) -> Llama:
        """Loads the model as a drafter; without an embedding table it uses that of `target`."""
        self._ranks = Ranks()  # a drafter is whole on every rank
        lender = target if self.config.draft_of else None
        model = self._load(keeps_quantized=self.plan.keeps_quantized, lender=lender)
        return drafter_in_few_bits(model, self.choice.draft_weights)

    def _load(self, *, keeps_quantized: bool, lender: Llama | None = None) -> Llama:
        """Loads a model, ready to run, on the compiled CPU kernels if there are such.
        `lender` is the target whose embedding table a drafter without one borrows. With
        `keeps_quantized`, matrices of a GGUF file that kernels can read stay quantized. Raises
        `InputError` if the files do not fit the config, or memory is too small."""
        config, checkpoint, device, ranks = self.config, self.checkpoint, self._device, self._ranks
        make = partial(SplitLlama, ranks=ranks) if isinstance(ranks, RankGroup) else Llama
        attend = attention_for(device, self._dtype, config, self.choice.attention)
        advice = "use a smaller model or dtype, or check the sizes in the config"
        # A size in the config may be larger than any tensor can be.
        with explain(f"the weights of {config.name} do not fit on {device}", advice):
            model = make(config, dtype=self._dtype, device=device, target=lender, attend=attend)
        kernels = kernels_for(device, config) if ranks.count == 1 else None
        computed_by = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        packed: dict[str, Tensor] = {}  # quantized matrices to fill, by their names in the file
        if kernels:
            use_kernels(model, kernels)
            computed_by = (
                f"{identity(kernels.library)} {kernels.instructions} {kernels.num_threads}"
            )
            if keeps_quantized and isinstance(checkpoint, GgufFile):
                packed = keep_quantized(model, placements(model), checkpoint.quantized())
        model.execution = replace(
            model.execution,
            computed_by=computed_by,
            identify=fingerprint_of(checkpoint.files, sorted(packed)),
        )
        tensors = checkpoint.tensors(config, packed, kernels)
        fill(model, tensors, checkpoint.path, self._progress)
        if lender:
            check_drafter(model, lender, checkpoint.path)
        if not model.execution.is_row_invariant and can_pack(self._dtype, device):
            pack_linears(model)
        model = fuse_if_possible(model).eval()
        if isinstance(model, SplitLlama):
            model.add_up()
        return model


def open_drafter(choice: ModelChoice, tokenizer: Tokenizer, progress: bool) -> OpenModel | None:
    """Opens the drafter that `choice` names for a target with this tokenizer; None: lookup in the
    text. Raises `InputError` if a drafter that was named is unfit; lookup replaces a default."""
    name = default_draft(choice.model) if choice.draft == "auto" else choice.draft
    if name in LOOKUPS:
        return None
    weights = "dense" if choice.weights == "dense" else "auto"
    plain = replace(choice, model=name, rope_scaling=None, weights=weights)
    try:
        drafter = OpenModel(plain, progress=progress)
        if drafter.tokenizer:
            check_same_vocabulary(drafter.tokenizer, tokenizer, drafter.config.name)
        return drafter
    except InputError as error:
        if choice.draft != "auto":
            raise InputError(f"draft={shorten(name, 60)}: {error.message}", *error.ways) from None
        log.warning("%s; suffix lookup takes its place", error)
        return None


def plan_weights(
    choice: ModelChoice, checkpoint: Checkpoint, kernels: Kernels | None
) -> WeightPlan:
    """Decides the forms of weights by `choice`. Raises `InputError` if a wanted one cannot be had.
    Where the CPU kernels run, matrices of a GGUF file stay quantized by default."""
    wanted = choice.draft_weights
    if not (kernels and isinstance(checkpoint, GgufFile) and checkpoint.quantized()):
        if choice.weights == "native":
            raise InputError(
                "weights=native needs a GGUF file of 4 to 8 bits and the compiled kernels; omit it"
            )
        return WeightPlan(wanted, keeps_quantized=False)
    if choice.weights == "dense":
        has_copy = wanted in ("auto", "int4") and checkpoint.has_at_most(6)
        return WeightPlan("native" if has_copy else wanted, keeps_quantized=False)
    is_small = wanted == "auto" and checkpoint.has_at_most(8)
    return WeightPlan("same" if is_small else wanted, keeps_quantized=True)
