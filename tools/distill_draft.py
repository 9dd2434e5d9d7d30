"""Distillation of a drafter: a few layers of a target, trained to imitate its distributions.

    python -m tools.distill_draft --text a.txt --text b.txt --held-out c.txt --out my-drafter
    python -m minitri.generate --draft my-drafter --method triforce --demo

The drafter starts as some of the target's own layers, reads tokens from the target's embedding
table, and has an LM head over the tokens the target says most often (the others get q = 0, which
costs acceptance but never exactness). It is trained by KL divergence against the target's
distributions on texts and on what the target itself writes, in windows as its streaming cache will
show them: sinks, then recent tokens, at positions from 0 on.

All state is in the output folder while it is made; run the same command again after an
interruption. Held-out acceptance is the share of guesses that speculative sampling would accept,
sum of min(p, q) over the tokens whose p was stored, on texts never trained on.

Legend: B sequences at once, T tokens of a window, E hidden size, V vocab, C tokens of the head.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from minitri.apps.cli.arguments import MODEL, OneLineParser, add_flags
from minitri.apps.cli.exits import program
from minitri.core.config import ModelConfig, RopeConfig
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.errors import InputError
from minitri.core.model.cache import BlockKV
from minitri.core.model.linear import TrimmedHead
from minitri.core.model.llama import Block, Llama, sample_of_vocabulary
from minitri.core.settings import SamplingParams, SpeculationConfig
from minitri.devices.cpu.flash_attention import attend_cpu
from minitri.engine import Engine
from minitri.files.checkpoint import open_checkpoint, placements
from minitri.files.fetch import locate
from minitri.loader import load
from tools.distill_data import BATCH, LabelStore, W, continue_texts, label, read_texts, sequences_of
from tools.flags import positive
from tools.weight_pieces import described

SAMPLINGS = {
    "T=0": SamplingParams(0.0),
    "T=0.6, top-p 0.9": SamplingParams(0.6, top_p=0.9),
    "T=1": SamplingParams(1.0),
}
"""Sampling settings at which held-out acceptance is printed."""
SCORED = 128
"""Last tokens of a held-out window that count, of 256: in use the window is nearly always full."""
SAVE_SECONDS = 120


class NoCache:
    """A `Cache` that keeps nothing, so that gradients flow: every block is a text of its own."""

    def __init__(self, batch_size: int) -> None:
        self.lengths = self.num_tokens = self.next_positions = [0] * batch_size

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        keys_BKTD, values_BKTD = (x.transpose(1, 2) for x in (block.keys_BTKD, block.values_BTKD))
        return keys_BKTD.contiguous(), values_BKTD.contiguous()

    def advance(self, counts: list[int]) -> None:  # noqa: ARG002
        raise AssertionError("nothing is kept")

    def crop(self, num_tokens: list[int]) -> None:  # noqa: ARG002
        raise AssertionError("nothing is kept")

    def reset(self, b: int) -> None:
        pass


def build_parser() -> OneLineParser:
    parser, shown = OneLineParser(description=__doc__), "(default: %(default)s)"
    add_flags(parser, *MODEL)
    add = parser.add_argument
    several: dict[str, Any] = {"action": "append", "required": True, "type": Path}
    text = "UTF-8 text to learn from; may be given several times"
    add("--text", **several, metavar="FILE", help=text)
    text = "UTF-8 text that is only for measuring; may be given several times"
    add("--held-out", **several, metavar="FILE", help=text)
    add("--out", required=True, type=Path, metavar="DIR", help="the drafter's folder")
    numbers = (
        ("head_tokens", 8192, "tokens that the drafter can say"),
        ("text_tokens", 1_000_000, "tokens of the texts that the target labels, at most"),
        ("own_tokens", 250_000, "tokens that the target writes itself, about"),
        ("held_out_tokens", 65_536, "tokens of the held-out texts to measure on, at most"),
        ("train_tokens", 10_000_000, "tokens to train on, each epoch's counted"),
        ("batch", 16, "windows per training step"),
    )
    for name, default, text in numbers:
        flag, text = f"--{name.replace('_', '-')}", f"{text} {shown}"
        add(flag, type=positive, default=default, metavar="N", help=text)
    add("--learning-rate", type=float, default=4e-3, metavar="R", help=shown)
    add("--seed", type=int, default=0, metavar="N", help=shown)
    return parser


def make_labels(engine: Engine, args: argparse.Namespace) -> tuple[LabelStore, list[LabelStore]]:
    """The training store, and the held-out ones: texts, and what the target writes.

    Goes on where it was left.
    """
    train = read_texts(engine, args.text)
    held_out = read_texts(engine, args.held_out)
    names = [file.name for file in args.text], [file.name for file in args.held_out]

    def fill(
        name: str, files: list[str], texts: list[list[int]], num_text: int, num_own: int
    ) -> LabelStore:
        meta = {
            "model": engine.config.name,
            "dtype": str(engine.model.dtype),
            "rope": engine.config.rope.describe(),
            "files": files,
            "texts": hashlib.sha256(repr(texts).encode()).hexdigest(),
            "seed": args.seed,
            "num_text": num_text,
        }
        store = LabelStore(args.out / "labels" / name, meta)
        sequences = sequences_of(
            texts, next(iter(engine.tokenizer.special.prefix), None), args.seed
        )
        chosen = sequences[: num_text // W]
        if len(store) > len(chosen):  # batches of the target's own words count as a whole
            store.cut(len(store) - (len(store) - len(chosen)) % BATCH)
        num_batches = -(-num_own // (BATCH * W)) if num_own else 0
        num_missing = max(0, num_batches - max(0, len(store) - len(chosen)) // BATCH)
        total = max(0, len(chosen) - len(store)) * W + num_missing * BATCH * W
        quiet = args.quiet or not total
        with tqdm(total=total, desc=f"labels: {name}", unit=" tokens", disable=quiet) as bar:
            label(engine.model, chosen[len(store) :], store, bar.update)
            beginnings = itertools.cycle(sequences[::-1])
            for _ in range(max(0, len(store) - len(chosen))):
                next(beginnings)
            continue_texts(engine.model, beginnings, num_missing, store, args.seed, bar.update)
        return store

    own_held_out = min(BATCH * W, args.held_out_tokens)
    return fill("train", names[0], train, args.text_tokens, args.own_tokens), [
        fill("held-out texts", names[1], held_out, args.held_out_tokens, 0),
        fill("held-out, own words", names[1], held_out, 0, own_held_out),
    ]


def frequent_tokens(store: LabelStore, vocab_size: int, wanted: int) -> Tensor:
    """The tokens that the target says most often by its own distributions, (C,) ascending."""
    tokens, ids, logprobs = store.arrays()
    mass = np.zeros(vocab_size)
    for i in range(len(tokens)):
        probs = np.exp(logprobs[i].astype(np.float32))
        mass += np.bincount(ids[i].ravel(), probs.ravel(), vocab_size)
    likeliest = np.argsort(-mass, kind="stable")[: min(wanted, vocab_size)]
    return torch.from_numpy(np.sort(likeliest).astype(np.int64))


def draft_config(target: ModelConfig, num_layers: int, head_size: int, name: str) -> ModelConfig:
    """A target's shape with fewer layers, no stretched positions, no embeddings, a trimmed head."""
    return dataclasses.replace(
        target,
        num_layers=num_layers,
        rope=RopeConfig(theta=target.rope.theta),
        context_length=target.rope.original_context or target.context_length,
        tie_word_embeddings=False,
        draft_of=target.name,
        head_size=head_size,
        name=name,
    )


def start_from(engine: Engine, args: argparse.Namespace, head_ids: Tensor) -> Llama:
    """A drafter in float32: the target's first two layers and its last, its norm, and the head's
    rows."""
    target = engine.model
    last = target.config.num_layers - 1
    layers = [0, 1, last][: last + 1]
    config = draft_config(target.config, len(layers), len(head_ids), args.out.name)
    on_cpu = target.device.type == "cpu"  # whose compiled kernels know no gradients
    attend = attend_cpu if on_cpu else target.attend
    draft = Llama(config, dtype=torch.float32, device=target.device, target=target, attend=attend)
    places = placements(draft)
    sources: dict[str, list[str]] = {"model.norm.weight": ["model.norm.weight"]}
    for ours, theirs in enumerate(layers):
        for name in places:
            if name.startswith(f"model.layers.{ours}."):
                sources.setdefault(name.replace(f".{ours}.", f".{theirs}.", 1), []).append(name)
    checkpoint = open_checkpoint(locate(args.model).path)
    head = "model.embed_tokens.weight" if target.config.tie_word_embeddings else "lm_head.weight"
    for name, tensor in checkpoint.tensors(target.config):
        for place in sources.get(name, ()):
            places[place].copy_(tensor)
        if name == head:
            places["lm_head.weight"].copy_(tensor[head_ids])
        if name == "model.embed_tokens.weight":
            draft.embedding_sample.copy_(tensor[sample_of_vocabulary(config)])
    places["lm_head.token_ids"].copy_(head_ids)
    return draft


def write_drafter(draft: Llama, folder: Path) -> None:
    """An ordinary checkpoint folder, bfloat16, for `--draft`."""
    config = draft.config
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "draft_of": config.draft_of,
        "head_size": config.head_size,
        **described(config),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    tensors = {}
    for name, view in placements(draft).items():
        dtype = torch.bfloat16 if view.is_floating_point() else torch.int32
        tensors[name] = view.detach().to(dtype).contiguous().clone()
    save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")


class Windows:
    """Windows of a store as the drafter's cache will show them, with what the target would say."""

    def __init__(self, store: LabelStore, head_ids: Tensor, vocab_size: int) -> None:
        default = SpeculationConfig()
        self.num_sinks, self.num_recent = default.num_sink_tokens, default.num_recent_tokens
        self._tokens, self._ids, self._logprobs = store.arrays()
        self._place_V = torch.full((vocab_size,), -1, dtype=torch.int64)  # of a token in the head
        self._place_V[head_ids.cpu()] = torch.arange(len(head_ids))

    def __len__(self) -> int:
        return len(self._tokens)

    def at(self, numbers: list[int], offsets: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, T), and of the likeliest next ones (B, T, TOP) the places in the head (-1:
        none) and the log-probabilities."""
        sinks = [*range(self.num_sinks)]
        picks = np.array([[*sinks, *range(i, i + self.num_recent)] for i in offsets])  # (B, T)
        rows = np.array(numbers)[:, None]
        tokens, ids = (x[rows, picks].astype(np.int64) for x in (self._tokens, self._ids))
        logprobs = torch.from_numpy(self._logprobs[rows, picks].astype(np.float32))
        return torch.from_numpy(tokens), self._place_V[torch.from_numpy(ids)], logprobs

    def random(self, batch: int, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
        """Windows anywhere."""
        offsets = [rng.randrange(self.num_sinks, W - self.num_recent + 1) for _ in range(batch)]
        return self.at([rng.randrange(len(self)) for _ in range(batch)], offsets)


def hidden(draft: Llama, tokens_BT: Tensor) -> Tensor:
    """Final hidden states (B, T, E) of windows, each a text of its own."""
    B, T = tokens_BT.shape
    positions_BT = torch.arange(T, device=draft.device).expand(B, T)
    return draft(Block(tokens_BT.to(draft.device), positions_BT), NoCache(B))


def known_logits(draft: Llama, hidden_states: Tensor) -> Tensor:
    """Logits (..., C) over the tokens of the trimmed head."""
    assert isinstance(draft.lm_head, TrimmedHead)
    return draft.lm_head.linear(hidden_states).float()


def distillation_loss(
    draft: Llama, windows: tuple[Tensor, Tensor, Tensor], num_sinks: int
) -> Tensor:
    """KL(target || drafter) up to a constant, over the tokens that both know; not after sinks."""
    tokens_BT, places, logprobs = windows
    logq = known_logits(draft, hidden(draft, tokens_BT)[:, num_sinks:]).log_softmax(-1)
    places, logprobs = (part[:, num_sinks:].to(logq.device) for part in (places, logprobs))
    p = logprobs.exp() * (places >= 0)
    return -(p * logq.gather(-1, places.clamp_min(0))).sum(-1).mean()


@torch.inference_mode()
def acceptance(draft: Llama, windows: Windows) -> dict[str, float]:
    """Mean of sum min(p, q) over the last tokens of a window per sequence, by `SAMPLINGS`."""
    found: dict[str, list[Tensor]] = {name: [] for name in SAMPLINGS}
    for number in range(len(windows)):
        tokens_BT, places, logprobs = windows.at([number], [W - windows.num_recent])
        logits = known_logits(draft, hidden(draft, tokens_BT)[0, -SCORED:]).cpu()
        places, logprobs = places[0, -SCORED:], logprobs[0, -SCORED:]
        for name, params in SAMPLINGS.items():
            q = probs_from_logits(logits, params).gather(-1, places.clamp_min(0)) * (places >= 0)
            p = probs_from_logits(logprobs, params) if params.temperature < 1 else logprobs.exp()
            found[name].append(torch.minimum(p, q).sum(-1))
    return {name: float(torch.cat(parts).mean()) for name, parts in found.items()}


def make_optimizers(draft: Llama, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices where this PyTorch has it, AdamW for the rest."""
    matrices = [w for layer in draft.layers for w in layer.parameters() if w.ndim == 2]
    options: dict[str, Any] = {"lr": learning_rate, "weight_decay": 0.0}
    chosen = {id(w) for w in matrices}
    rest = [w for w in draft.parameters() if id(w) not in chosen]
    if not hasattr(torch.optim, "Muon"):
        return [torch.optim.AdamW([*matrices, *rest], betas=(0.9, 0.95), **options)]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), **options),
    ]


def train(
    draft: Llama, windows: Windows, held_out: dict[str, Windows], args: argparse.Namespace
) -> None:
    """Trains in place; saves its state every few minutes and on Ctrl-C, and goes on from there."""
    for weight in draft.parameters():
        weight.requires_grad_(True)
    optimizers = make_optimizers(draft, args.learning_rate)
    tokens_per_step = args.batch * windows.num_recent
    num_steps = max(1, args.train_tokens // tokens_per_step)
    state_file, step = args.out / "training.pt", 0
    names = ("head_tokens", "text_tokens", "own_tokens", "train_tokens", "batch")
    settings = {name: getattr(args, name) for name in (*names, "learning_rate", "seed")}
    if state_file.exists():
        state: dict[str, Any] = torch.load(state_file, weights_only=True)
        if state["settings"] != settings:
            raise InputError(
                f"{state_file} was begun with other settings ({state['settings']}); delete it to "
                "begin again, or repeat those settings"
            )
        step = state["step"]
        draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save() -> None:
        saved = [optimizer.state_dict() for optimizer in optimizers]
        state = {"settings": settings, "step": step, "optimizers": saved}
        state["draft"] = draft.state_dict()
        torch.save(state, state_file.with_suffix(".part"))
        state_file.with_suffix(".part").replace(state_file)

    def show(losses: list[float]) -> None:
        loss = f", loss {sum(losses) / len(losses):.3f}" if losses else ""
        tqdm.write(f"{step * tokens_per_step} tokens{loss}", file=sys.stderr)
        for name, scored in held_out.items():
            found = acceptance(draft, scored).items()
            rates = ", ".join(f"{rate:.3f} at {how}" for how, rate in found)
            tqdm.write(f"  accepted of {name}: {rates}", file=sys.stderr)

    losses: list[float] = []
    saved_at = time.monotonic()
    bf16 = torch.autocast(draft.device.type, torch.bfloat16)
    try:
        total, initial = num_steps * tokens_per_step, step * tokens_per_step
        with tqdm(total=total, initial=initial, desc="training", disable=args.quiet) as bar:
            while step < num_steps:
                if step % max(1, num_steps // 12) == 0:
                    show(losses)
                    losses.clear()
                factor = min(1.0, (step + 1) / 100, (num_steps - step) / (0.6 * num_steps))
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = args.learning_rate * factor
                batch = windows.random(args.batch, random.Random(f"{args.seed} {step}"))
                with bf16:
                    loss = distillation_loss(draft, batch, windows.num_sinks)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
                step += 1
                bar.update(tokens_per_step)
                if time.monotonic() - saved_at > SAVE_SECONDS:
                    save()
                    saved_at = time.monotonic()
    finally:
        save()
    show(losses)


def make_drafter(args: argparse.Namespace) -> None:
    """Labels texts, trains, and writes the drafter's folder."""
    if min(args.text_tokens, args.held_out_tokens) < W:
        problem = "--text-tokens and --held-out-tokens must be at least"
        raise InputError(f"{problem} {W}, the length of a sequence")
    both = {file.resolve() for file in args.text} & {file.resolve() for file in args.held_out}
    if both:
        raise InputError(
            f"{min(both)} is given as --text and as --held-out; a text can only be one of them"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    options = {"dtype": args.dtype, "device": args.device, "progress": not args.quiet}
    engine = load(args.model, draft="ngram", **options)
    store, held_out_stores = make_labels(engine, args)
    head_ids = frequent_tokens(store, engine.config.vocab_size, args.head_tokens)
    draft = start_from(engine, args, head_ids)
    windows, texts, own = (
        Windows(each, head_ids, engine.config.vocab_size) for each in (store, *held_out_stores)
    )
    train(draft, windows, {"held-out texts": texts, "the target's own words": own}, args)
    write_drafter(draft, args.out)
    print(f"{args.out}: use it with --model {args.model} --draft {args.out}")


main = program(build_parser, make_drafter)

if __name__ == "__main__":
    main()
