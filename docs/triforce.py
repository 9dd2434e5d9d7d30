"""TriForce in one file: writes on after a long text, faster, without loss (arXiv 2404.11912).

    python docs/triforce.py novel.txt    # reads its beginning; colours show who guessed what

For each token a model reads its weights, and keys and values (KV) of the whole text. So two
proposers guess first, and the model with all its KV, the target, verifies many tokens at once:

    draft      a tiny model with a window of the text      guesses gamma1 tokens, one by one
    retrieval  the target with the chunks that matter now  verifies them, until it has gamma2
    target     the target with the full cache              verifies these: what it accepts is text

Whatever is guessed, the text follows the target's own distribution. A guess was sampled from q, its
proposer's distribution; p is the verifier's at the same place. § is a section of the paper, a line
is one of its Algorithm 1. Shapes: L layers, T tokens of a pass, N guesses (or as many and one), S
slots of a cache, P = 2 (K and V), K KV heads, H query heads, G = H / K, R = G T, D size of a head,
E hidden size, V vocabulary, C chunks of M tokens in the text, B of them in the budget.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CHUNK_SIZE = 8  # tokens that are retrieved together
NUM_SINKS, NUM_RECENT = 4, 252  # first and latest tokens that the drafter sees
HUB = Path("~/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct").expanduser()
FETCHED = Path(os.environ.get("MINITRI_WEIGHTS", "~/.cache/minitri")).expanduser() / "smollm2-135m"
MODEL = [*HUB.glob("snapshots/*"), *FETCHED.glob("*.gguf"), FETCHED][0]  # minitri's default
DRAFT = Path(__file__).resolve().parents[1] / "weights/smollm2-135m-draft"
FLAGS = {"model": MODEL, "draft": DRAFT, "rule": "block", "temperature": 0.6, "seed": 0}
FLAGS |= {"gamma1": 2, "gamma2": 6, "budget": 512, "prompt-tokens": 2000, "new-tokens": 100}
PLAIN = {"model_type": "llama", "rope_type": "default", "hidden_act": "silu", "mlp_bias": False}
PLAIN |= {"attention_bias": False, "quantization_config": None}  # a config says this, or nothing
BAD_INPUT = (OSError, ValueError, ImportError, NotImplementedError, SafetensorError)
COLORS = {"draft": "\x1b[32m", "retrieval": "\x1b[36m", "target": "\x1b[33m"}


def triforce(prompt: list[int], stages: Any, gamma1: int, gamma2: int) -> Iterator[tuple[int, str]]:
    """Algorithm 1 (§4.3): tokens after the prompt, without end, each with the stage that guessed it
    or "target". With gamma2 = 0 none is guessed: this is autoregressive decoding."""
    draft, retrieval, target = stages
    text, block, q_NV, origins = [*prompt], list[int](), torch.empty(0, 0), list[str]()
    while True:
        tokens, _ = target.verify(text, block, q_NV)  # lines 20 to 29; at first it reads the prompt
        text += tokens
        yield from zip(tokens, [*origins[: len(tokens) - 1], "target"], strict=True)
        if gamma2 > 0:
            retrieval.follow(target, len(text) - 1)  # line 30; the last token is not read yet
            block, q_NV, origins = guess_block(text, draft, retrieval, gamma1, gamma2)


def guess_block(text: list[int], draft: Any, retrieval: Any, gamma1: int, gamma2: int) -> Any:
    """Lines 4 to 19, the hierarchy (§4.2): rounds until there are gamma2 tokens, or up to gamma1
    more. What the retrieval level emits follows its p, whoever guessed it (§2.1): so p is its q for
    the target. For this, none is thrown away, and their number alone decides on another round."""
    block, q, origins = list[int](), list[Tensor](), list[str]()
    while len(block) < gamma2:
        guesses, draft_q_NV = draft.propose(text + block, gamma1)  # lines 6 and 7
        tokens, p_NV = retrieval.verify(text + block, guesses, draft_q_NV)  # lines 8 to 17
        block += tokens
        q.append(p_NV)
        origins += ["draft"] * (len(tokens) - 1) + ["retrieval"]
    return block, torch.cat(q), origins


def verify(tokens: list[int], q_NV: Tensor, p_NV: Tensor, u_N: Tensor, accept: Any) -> list[int]:
    """VERIFY and CORRECT (§2.1): the accepted guesses and one token more, by the last number of u:
    after a rejection a sample of max(scale * p - q, 0), *recovered*; else of p, a *bonus*. The
    rule `accept` gives the number of accepted guesses, and the scale: 1 by the token rule."""
    n, scale = accept(tokens, q_NV, p_NV, u_N)
    rest_V = scale * p_NV[n]
    if n < len(tokens) and (rest_V > q_NV[n]).any():  # rounding may have left nothing
        rest_V = (rest_V - q_NV[n]).clamp_min(0)
    cdf_V = rest_V.double().cumsum(0)
    token = torch.searchsorted(cdf_V, u_N[-1:].to(cdf_V.device) * cdf_V[-1], right=True)
    return [*tokens[:n], min(int(token), len(cdf_V) - 1)]


def accept_by_token(tokens: list[int], q_NV: Tensor, p_NV: Tensor, u_N: Tensor) -> Any:
    """Token rule (§2.1; Leviathan et al. 2023): guess x passes with probability p(x) / q(x)."""
    for i, x in enumerate(tokens):
        if u_N[i] * q_NV[i, x] >= p_NV[i, x]:
            return i, 1.0
    return len(tokens), 1.0


def accept_by_block(tokens: list[int], q_NV: Tensor, p_NV: Tensor, u_N: Tensor) -> Any:
    """Block rule (Sun et al. 2024, arXiv 2403.10444, algorithm 2): each prefix x_1 .. x_i has a
    test, and the longest that passes is accepted. `keep` is the probability that a prefix is part
    of what is accepted; `passes` is that of its own test, which counts if no longer one passes."""
    num_accepted, kept, keep = 0, 1.0, 1.0
    for i, x in enumerate(tokens):
        keep = passes = min(1.0, keep * float(p_NV[i, x]) / float(q_NV[i, x]))
        if keep < 1 and i + 1 < len(tokens):
            left = float((keep * p_NV[i + 1] - q_NV[i + 1]).clamp_min(0).sum())
            passes = left / (left + 1 - keep)
        if u_N[i] < passes:
            num_accepted, kept = i + 1, keep
    return num_accepted, kept


def verify_coupled(tokens: list[int], p_NV: Tensor, seed: int, position: int) -> list[int]:
    """Coupled rule (not in the paper): all stages take argmax(log p + g), a sample from p, by the
    same Gumbel noise g, hashed from seed, position and token. A guess is accepted if the verifier
    takes the same token. So a seed has one text."""
    emitted = list[int]()
    for i, p_V in enumerate(p_NV):
        ids = p_V.nonzero()[:, 0]
        key = splitmix(splitmix(torch.tensor(seed)) + position + i).to(ids.device)
        bits = splitmix(key + ids * -0x61C8864680B583EB) >> 12 & (1 << 52) - 1
        noise = -(-((bits.double() + 0.5) * 2.0**-52).log()).log()
        emitted.append(int(ids[(p_V[ids].double().log() + noise).argmax()]))
        if emitted[i:] != tokens[i : i + 1]:
            break
    return emitted


def splitmix(x: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014): a hash of int64. A mask makes a shift that of unsigned."""
    x = x - 0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


class Stage:
    """A model and its KV cache, allocated once; this class is the target with the full cache. The
    first `length` slots are valid, and a pass writes to the next ones alone: so a lower `length`
    forgets rejected guesses. A pass has at most `room` tokens, but for a prompt's. `how`: flags."""

    def __init__(self, model: "Llama", how: Any, num_slots: int, room: int) -> None:
        self.model, self.how, self.room = model, how, room
        self.kv_LSPKD = self.allocate((model.L, num_slots + room, 2, model.K, model.D))
        self.query_LHD = model.embedding.new_zeros(model.L, model.H, model.D)  # set by attention
        self.length = 0  # valid slots
        self.offset = 0  # a token's position, by which its key is rotated, is its slot + offset
        self.num_read = 0  # tokens of the text that were read; not all of them need have a slot
        self.forward = capture(model, self) if self.kv_LSPKD.is_cuda else model.forward

    def propose(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """DRAFT (lines 6 and 7): tokens, and q of each. To verify no guess is to sample from p."""
        guesses, q = list[int](), list[Tensor]()
        for _ in range(count):
            token, p_1V = self.verify(text + guesses, [], torch.empty(0, 0))
            guesses += token
            q.append(p_1V)
        return guesses, torch.cat(q)

    def verify(self, text: list[int], guesses: list[int], q_NV: Tensor) -> tuple[list[int], Tensor]:
        """Lines 8 to 17, 20 to 29: accepted guesses and one token more, and the p they follow."""
        p_NV = self.probs(text, guesses)
        if self.how.rule == "coupled":
            tokens = verify_coupled(guesses, p_NV, self.how.seed, len(text))
        else:
            accept = accept_by_block if self.how.rule == "block" else accept_by_token
            u_N = torch.rand(len(p_NV), dtype=torch.float64, generator=self.how.generator)
            tokens = verify(guesses, q_NV, p_NV, u_N, accept)
        return tokens, p_NV[: len(tokens)]

    def probs(self, text: list[int], guesses: list[int]) -> Tensor:
        """Distributions (N + 1, V) after the text and each guess, by a pass over what the cache
        lacks. The text's last token may be in place of a rejected guess, so it is always read."""
        kept = min(self.num_read, len(text) - 1)
        self.length, self.num_read = self.length - self.num_read + kept, kept
        unread = text[self.num_read :]
        if len(unread) > self.room:  # line 2: a prompt, but for its last token
            for chunk in torch.tensor(self.window(unread[:-1])).split(512):
                self.read(chunk, self.model.forward)
            self.num_read, unread = len(text) - 1, unread[-1:]
        hidden_TE = self.read(torch.tensor(unread + guesses), self.forward)
        logits_NV = self.model.logits(hidden_TE[-1 - len(guesses) :])
        if self.how.temperature == 0:
            return F.one_hot(logits_NV.argmax(-1), logits_NV.shape[1]).float()
        return (logits_NV / self.how.temperature).softmax(-1)

    def read(self, tokens_T: Tensor, forward: Any) -> Tensor:
        """Hidden states (T, E) of tokens after the cached ones, whose K and V the cache gets."""
        end = self.length + len(tokens_T)
        slots_T = torch.arange(self.length, end)
        inputs_3T = torch.stack((tokens_T, slots_T + self.offset, slots_T)).to(self.model.device)
        hidden_TE = forward(inputs_3T, self, end)
        self.length, self.num_read = end, self.num_read + len(tokens_T)
        return hidden_TE

    def window(self, tokens: list[int]) -> list[int]:  # what is read of a prompt
        return tokens

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        return self.model.embedding.new_zeros(shape)

    def layer(self, layer: int) -> Tensor:  # all slots, on the device; take layers in their order
        return self.kv_LSPKD[layer]

    def update(self, layer: int, slots_T: Tensor, kvr_T3KD: Tensor) -> Tensor:
        return self.layer(layer).index_copy_(0, slots_T, kvr_T3KD[:, :2])  # K and V of all slots


class RetrievalStage(Stage):
    """The target with `budget` tokens of the full cache: the chunks that matter now (§4.1), the
    least important first, for each layer and KV head; after them come the guesses."""

    num_exact = 0  # tokens of the text that `build` chose from, or `follow` copied
    next_slot = 0  # where the next one is copied to, modulo the budget
    built_at = -torch.inf  # the text's length when chunks were chosen

    def follow(self, target: Stage, num_tokens: int) -> None:
        """Line 30: forgets the block, and copies the target's K and V of new tokens: to free slots,
        then from slot 0 on, over the least important. At a stride first rebuilds (§4.3)."""
        if num_tokens - self.built_at >= self.how.budget // 2:
            self.build(target, num_tokens)
        end = self.next_slot + num_tokens - self.num_exact
        slots = [slot % self.how.budget for slot in range(self.next_slot, end)]
        exact_LTPKD = target.kv_LSPKD[:, self.num_exact : num_tokens]
        self.kv_LSPKD[:, slots] = exact_LTPKD.to(self.model.device)
        self.next_slot, self.length = end, min(end, self.how.budget)
        self.num_read = self.num_exact = num_tokens
        self.offset = num_tokens - self.length

    def build(self, target: Stage, num_tokens: int) -> None:
        """Chooses chunks by the attention of the target's latest query to the mean of their keys: a
        softmax per query head, summed by KV head. The first and latest chunks always stay."""
        M, C = CHUNK_SIZE, num_tokens // CHUNK_SIZE
        B = min(C, self.how.budget // M)
        heads_K = torch.arange(self.model.K, device=self.model.device)
        for layer, query_HD in enumerate(target.query_LHD):
            kv_CMPKD = target.layer(layer)[: C * M].unflatten(0, (C, M))
            mean_keys_KDC = kv_CMPKD[:, :, 0].mean(1).permute(1, 2, 0)
            q_KGD = query_HD.unflatten(0, (self.model.K, -1)) / self.model.D**0.5
            scores_KC = (q_KGD @ mean_keys_KDC).float().softmax(-1).sum(1)
            scores_KC[:, :1] = scores_KC[:, C - max(1, B // 8) :] = torch.inf
            best_BK = scores_KC.topk(B).indices.flip(1).T
            kv_BKMPD = kv_CMPKD.permute(0, 3, 1, 2, 4)[best_BK, heads_K]
            self.kv_LSPKD[layer, : B * M] = kv_BKMPD.permute(0, 2, 3, 1, 4).flatten(0, 1)
        self.built_at, self.num_exact, self.next_slot = num_tokens, C * M, B * M


class DraftStage(Stage):
    """A small model with a streaming cache (§2.2, StreamingLLM): attention sinks and recent tokens.
    Its keys are stored raw and rotated by *slot*, so a short context is enough for any text."""

    def update(self, layer: int, slots_T: Tensor, kvr_T3KD: Tensor) -> Tensor:
        values_SKD, raw_SKD = super().update(layer, slots_T, kvr_T3KD[:, 1:]).unbind(1)
        angles = self.model.angles(torch.arange(len(raw_SKD), device=raw_SKD.device))
        return torch.stack((self.model.rotate(raw_SKD, angles), values_SKD), 1)

    def window(self, tokens: list[int]) -> list[int]:
        return tokens[:NUM_SINKS] + tokens[NUM_SINKS:][-NUM_RECENT:]

    def read(self, tokens_T: Tensor, forward: Any) -> Tensor:
        if self.length + self.room > self.kv_LSPKD.shape[1]:  # keeps sinks and latest tokens
            latest = self.kv_LSPKD[:, self.length - NUM_RECENT : self.length].clone()
            self.length = NUM_SINKS + NUM_RECENT
            self.kv_LSPKD[:, NUM_SINKS : self.length] = latest
        return super().read(tokens_T, forward)


class LookupStage(Stage):
    """Drafter without a model (not in the paper): what last followed the latest two tokens."""

    def propose(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        ends = (i for i in range(len(text) - 1, 1, -1) if text[i - 2 : i] == text[-2:])
        end = next(ends, len(text))
        guesses_N = torch.tensor(text[end : end + count], device=self.model.device).long()
        return guesses_N.tolist(), F.one_hot(guesses_N, len(self.model.embedding)).float()


class OffloadedStage(Stage):
    """The target with its full cache in host memory (§5.1, offloading): while a layer computes, the
    next one (after the last, the first) is copied to the other of two buffers on the device."""

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        like = self.model.embedding
        self.stream = torch.cuda.Stream() if like.is_cuda else None
        self.buffers = [like.new_zeros(shape[1:]) for _ in range(2)]  # one in use, one being filled
        return torch.zeros(shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def layer(self, layer: int) -> Tensor:
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)  # for the copy of this layer
            self.stream.wait_stream(torch.cuda.current_stream())  # which may read the other buffer
        self.buffers.reverse()
        with torch.cuda.stream(self.stream):
            self.buffers[1].copy_(self.kv_LSPKD[(layer + 1) % self.model.L], non_blocking=True)
        return self.buffers[0]

    def update(self, layer: int, slots_T: Tensor, kvr_T3KD: Tensor) -> Tensor:
        kv_SPKD = super().update(layer, slots_T, kvr_T3KD)
        new = slice(self.length, self.length + len(slots_T))  # copied when the pass ends
        self.kv_LSPKD[layer, new].copy_(kv_SPKD[new], non_blocking=True)
        return kv_SPKD


def capture(model: "Llama", stage: Stage) -> Callable[..., Tensor]:
    """A stage's pass as a CUDA graph (§4.3, implementation): one launch in place of thousands. Its
    shapes are fixed: a shorter block repeats its last token, and a mask hides invalid slots."""
    num_slots, places_T = stage.kv_LSPKD.shape[1], torch.arange(stage.room, device=model.device)
    run: Any = torch.cuda.make_graphed_callables(
        lambda inputs_3T: model.forward(inputs_3T, stage, num_slots), (places_T.repeat(3, 1),)
    )

    def replay(block_3T: Tensor, *_: Any) -> Tensor:
        T = block_3T.shape[1]
        return run(block_3T[:, places_T.clamp(max=T - 1)])[:T]

    return replay


class Llama:
    """The network (Touvron et al. 2023); config and weights have Hugging Face's names."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: Any) -> None:
        self.config, self.weights, self.tokenizer = config, weights, tokenizer
        self.embedding = weights["model.embed_tokens.weight"]
        self.device = self.embedding.device
        self.head = weights.get("lm_head.weight", self.embedding)
        self.head_ids = weights.get("lm_head.token_ids")  # of a drafter that says few tokens
        self.L, self.H = sum("q_proj" in name for name in weights), config["num_attention_heads"]
        rows_q, rows_k = (len(weights[f"model.layers.0.self_attn.{x}_proj.weight"]) for x in "qk")
        self.D, self.K = rows_q // self.H, rows_k * self.H // rows_q

    def forward(self, inputs_3T: Tensor, stage: Stage, num_visible: int) -> Tensor:
        """Hidden states (T, E) of tokens, each of which sees the visible slots up to its own."""
        tokens_T, positions_T, slots_T = inputs_3T
        sees_TS = torch.arange(num_visible, device=self.device) <= slots_T[:, None]
        where = slots_T, sees_TS.repeat(self.H // self.K, 1), self.angles(positions_T)
        x_TE = F.embedding(tokens_T, self.embedding)
        for layer in range(self.L):
            name = f"model.layers.{layer}"
            y_TE = self.norm(x_TE, f"{name}.input_layernorm")
            x_TE = x_TE + self.attention(y_TE, layer, stage, where)
            y_TE = self.norm(x_TE, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(y_TE, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x_TE = x_TE + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return self.norm(x_TE, "model.norm")

    def attention(self, x_TE: Tensor, layer: int, stage: Stage, where: Any) -> Tensor:
        """Attention; the R queries of the heads that share a KV head are rows of one matrix."""
        slots_T, sees_RS, angles = where
        name = f"model.layers.{layer}.self_attn."
        heads = (self.linear(x_TE, f"{name}{part}_proj") for part in "qkv")
        q_THD, raw_TKD, v_TKD = (part.unflatten(1, (-1, self.D)) for part in heads)
        q_THD = self.rotate(q_THD, angles)
        stage.query_LHD[layer] = q_THD[0]  # of the text's last token, when it verifies
        kvr_T3KD = torch.stack((self.rotate(raw_TKD, angles), v_TKD, raw_TKD), 1)  # K, V, raw K
        kv_SPKD = stage.update(layer, slots_T, kvr_T3KD)[: sees_RS.shape[1]]
        keys, values = kv_SPKD.permute(1, 2, 0, 3).unsqueeze(1)  # (1, K, S, D)
        q_1KRD = q_THD.transpose(0, 1).reshape(1, self.K, -1, self.D)
        out_1KRD = F.scaled_dot_product_attention(q_1KRD, keys, values, sees_RS)
        out_THD = out_1KRD.reshape(self.H, -1, self.D).transpose(0, 1)
        return self.linear(out_THD.flatten(1), f"{name}o_proj")

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, 1, D) of the rotary embedding (Su et al. 2021)."""
        exponents = torch.arange(0, self.D, 2, device=self.device).float() / self.D
        turns = positions_T[:, None] * (1.0 / self.config["rope_theta"] ** exponents)
        angles_T1D = turns.repeat(1, 2).unsqueeze(1)
        return angles_T1D.cos(), angles_T1D.sin()

    def rotate(self, x_THD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates every head: its dimensions i and i + D / 2 by one angle."""
        first, second = x_THD.float().chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (x_THD * angles[0] + turned * angles[1]).to(x_THD.dtype)

    def linear(self, x_TE: Tensor, name: str) -> Tensor:
        return F.linear(x_TE, self.weights[f"{name}.weight"])

    def norm(self, x_TE: Tensor, name: str) -> Tensor:
        weight_E = self.weights[f"{name}.weight"]
        return F.rms_norm(x_TE, weight_E.shape, weight_E, self.config["rms_norm_eps"])

    def logits(self, hidden_NE: Tensor) -> Tensor:
        logits = (self.head @ hidden_NE.T).T.float().contiguous()  # faster so for a few rows
        if self.head_ids is None:
            return logits
        no_NV = logits.new_full((len(logits), len(self.embedding)), -torch.inf)
        return no_NV.index_copy_(1, self.head_ids, logits)


def load(path: Path, device: torch.device, lent: dict[str, Tensor]) -> Llama:
    """A model in Hugging Face's layout, or MODEL. Raises `ValueError` if it is no plain Llama."""
    config = json.loads(((DRAFT if path.is_file() else path) / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config = {"rope_theta": 10000.0, "rope_type": rope.get("type"), **config, **rope}
    for key, plain in PLAIN.items():
        if (got := config.get(key)) != plain and (got is not None or key == "model_type"):
            raise ValueError(f"{path} has {key}={got!r:.60}, not {plain}; use minitri")
    if path.is_file():
        weights, tokenizer = read_gguf(path)
    else:
        weights = {k: w for file in path.glob("*.safetensors") for k, w in load_file(file).items()}
        tokenizer = next(map(Tokenizer.from_file, map(str, path.glob("tokenizer.json"))), None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, weight in weights.items():
        weights[name] = weight.to(device, dtype if weight.is_floating_point() else torch.int64)
    if not {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"} <= {*lent, *weights}:
        raise ValueError(f"{path} lacks weights, or is quantized; give a whole model that is not")
    return Llama(config, lent | weights, tokenizer)


def read_gguf(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Weights, dequantized, and tokenizer of SmolLM2-135M, whose sizes are also its drafter's."""
    import gguf

    if not path.name.startswith("SmolLM2-135M"):
        raise ValueError(f"{path} is not SmolLM2-135M's GGUF file; give a folder, or use minitri")
    reader, weights = gguf.GGUFReader(path), dict[str, Tensor]()
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "v", "output")}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for tensor in reader.tensors:
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if part in ("attn_q", "attn_k"):  # neighbours rotate together, not halves of 64
            weight = weight.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
        weights[f"{layer.replace('blk', 'model.layers')}.{names[part]}.weight".lstrip(".")] = weight
    tokens, merges = (reader.fields[f"tokenizer.ggml.{x}"].contents() for x in ("tokens", "merges"))
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(pair.split(" ")) for pair in merges]))
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return weights, tokenizer


def make_stages(model: Llama, how: Any, num_tokens: int) -> tuple[Any, RetrievalStage, Stage]:
    """The stages of Algorithm 1, for a text of at most `num_tokens` tokens."""
    how.generator = torch.Generator().manual_seed(how.seed)
    room = 1 + how.gamma1 + how.gamma2
    target_type = OffloadedStage if how.offload and model.L > 1 else Stage  # L = 1: no next layer
    target = target_type(model, how, num_tokens, room)
    retrieval = RetrievalStage(model, how, how.budget + how.gamma2, room=1 + how.gamma1)
    if how.draft == Path("lookup") or (how.draft == DRAFT and how.model != MODEL):
        return LookupStage(model, how, 0, 1), retrieval, target
    draft = load(how.draft, model.device, {"model.embed_tokens.weight": model.embedding})
    if len(draft.embedding) != len(model.embedding):
        raise ValueError(f"{how.draft} has another vocabulary than the model")
    # If all is accepted, it has yet to read its last guess and a bonus token of either verifier.
    return DraftStage(draft, how, NUM_SINKS + 2 * NUM_RECENT, room=3), retrieval, target


def parse(words: list[str] | None = None) -> Namespace:
    """The flags of the program."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file; --rule is token, block or coupled")
    parser.add_argument("--offload", action="store_true", help="keep the full cache on the host")
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default}")
    how = parser.parse_args(words)
    numbers = how.gamma1, how.gamma2, how.budget, how.prompt_tokens, how.new_tokens
    if min(numbers) < 1 or how.temperature < 0 or how.rule not in ("token", "block", "coupled"):
        parser.error("give numbers from 1 on, --temperature from 0, --rule token, block or coupled")
    return how


def write(run: Iterator[tuple[int, str]], model: Llama, count: int, *, show: bool) -> Any:
    """Prints tokens of a run if `show`; returns who guessed them, and ms for each but the first."""
    stream, ends = decoders.DecodeStream(skip_special_tokens=True), model.config.get("eos_token_id")
    origins, start, colors = list[str](), 0.0, COLORS if sys.stdout.isatty() else {}
    for _, (token, origin) in zip(range(count), run, strict=False):
        start = start or time.perf_counter()
        origins.append(origin)
        if show and (piece := stream.step(model.tokenizer, token)):
            print(f"{colors[origin]}{piece}\x1b[0m" if colors else piece, end="", flush=True)
        if token in (ends if isinstance(ends, list) else [ends]):
            break
    return origins, 1e3 * (time.perf_counter() - start) / max(1, len(origins) - 1)


def main(words: list[str] | None = None) -> None:
    """Reads a text, writes on, and does it again without guesses; the prompt is in the cache."""
    how = parse(words)
    text = how.text.read_text("utf-8", "replace")
    model = load(how.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"), {})
    ids = model.tokenizer.encode(text).ids[: how.prompt_tokens]
    most = model.config["max_position_embeddings"]
    if not 0 < len(ids) <= most - how.new_tokens:
        raise ValueError(f"{how.text} gives {len(ids)} tokens; 1 to {most} fit, with new ones")
    run = ids, make_stages(model, how, len(ids) + how.new_tokens)
    origins, ms = write(triforce(*run, how.gamma1, how.gamma2), model, how.new_tokens, show=True)
    _, alone = write(triforce(*run, 0, 0), model, how.new_tokens, show=False)
    shares = [f"{COLORS[who]}{who} {origins.count(who) / len(origins):.0%}" for who in COLORS]
    print("\n\nguessed by", *shares, f"\x1b[0m {ms:.1f} ms/token, {alone:.1f} without guesses")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, *BAD_INPUT) as error:
        sys.exit(f"\x1b[0mtriforce.py: {(str(error) or 'interrupted').splitlines()[0]}")
