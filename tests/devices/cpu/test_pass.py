"""A pass of all layers in one call of the kernels against the plain network over each cache."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.model.cache import plain_slots
from minitri.core.model.llama import Block
from minitri.core.prefill import prefill
from minitri.core.settings import SpeculationConfig
from minitri.devices.choose import use_kernels
from minitri.devices.cpu import pytorch
from minitri.devices.cpu.kernel_layers import quantized_copy
from minitri.devices.cpu.kernels import Kernels, load_kernels
from minitri.devices.cpu.tiles import Tiles
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, random_prompt, tiny_config
from tests.devices.cpu.test_kernels import TOLERANCE, every_dtype, random
from tests.devices.test_attention import random_mask

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(attention_bias=True, head_norm=True, head_dim=32)
LONG = replace(CONFIG, context_length=1024)
WIDE = replace(LONG, hidden_size=576, intermediate_size=1536)
BROAD = replace(WIDE, intermediate_size=2048)
"""As the matrices of a real model, which PyTorch multiplies in other ways than small ones."""
FAMILIES = {"scaled, unrotated": replace(CONFIG, residual_scale=0.3, unrotated_layers=(1,))}
SPECULATION = SpeculationConfig(budget=64, chunk_size=8, num_recent_tokens=40, num_sink_tokens=4)
LENGTHS = [37, 5]
B = len(LENGTHS)


def filled_cache(kind: str = "full", dtype: torch.dtype = torch.float32, make_slots=plain_slots):
    """Two rows of random numbers; NaN after them."""
    model = tiny_model(CONFIG, dtype=dtype)
    cache = full = FullCache.allocate(model, B, 128, make_slots)
    if kind == "retrieval":
        cache = RetrievalCache(full, model, SPECULATION, [64, 64])
    elif kind == "streaming":
        cache = StreamingCache(model, B, SPECULATION)
    for seed, slots in enumerate(parts_of(cache)):
        slots[...] = random(*slots.shape, dtype=dtype, seed=seed)
        for b, length in enumerate(LENGTHS):
            slots[:, b, :, length:] = torch.nan
    cache.advance(LENGTHS)
    return cache


def parts_of(cache) -> list:
    raw = [cache.raw_keys] if isinstance(cache, StreamingCache) else []
    return [cache.keys, cache.values, *raw]


def on_kernels(config, dtype=torch.float32, kernels=None):
    model = tiny_model(config, dtype=dtype)
    use_kernels(model, kernels or load_kernels())
    return model


@pytest.mark.parametrize("kind", ["full", "tiled", "retrieval", "streaming", *FAMILIES])
@every_dtype
@pytest.mark.parametrize(
    ("T", "has_mask", "scale"), [(1, False, 1), (2, False, 1), (5, True, 1), (2, False, 1e-6)]
)
def test_a_pass_computes_and_writes_what_the_plain_layers_do(
    kernels, kind, dtype, T, has_mask, scale
):
    """Norms of almost zeros are bounded by their epsilon."""
    plain = tiny_model(FAMILIES.get(kind, CONFIG), dtype=dtype)
    plain.embed_tokens.weight.mul_(scale)
    fused = copy.deepcopy(plain)
    use_kernels(fused, kernels)
    tokens = torch.randint(CONFIG.vocab_size, (B, T), generator=torch.manual_seed(2))
    positions = torch.tensor(LENGTHS).unsqueeze(1) + torch.arange(T)
    mask = random_mask(T) if has_mask else None
    outs = []
    for model in (plain, fused):
        make_slots = kernels.make_slots if kind == "tiled" and model is fused else plain_slots
        cache = filled_cache(kind, dtype, make_slots)
        assert isinstance(cache.keys, Tiles) is (make_slots is not plain_slots)
        queries = torch.full((2, B, 3, CONFIG.num_heads, CONFIG.head_dim), 7.0, dtype=dtype)
        hidden = model.forward(Block(tokens, positions), cache, mask, queries)
        # NaN after what a row holds stays NaN, so it is known which slots were written.
        parts = (hidden, queries, *(slots[...] for slots in parts_of(cache)))
        outs.append([it.nan_to_num(99.0).float() for it in parts])
    for want, got in zip(*outs, strict=True):
        assert (want - got).abs().max() < 10 * TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize(("bits", "kind"), [(16, ""), (4, ""), *((16, kind) for kind in FAMILIES)])
def test_a_token_has_the_same_bits_whatever_shares_its_pass(kernels, dtype, bits, kind):
    """Neighbours in its block, other rows, threads."""
    config = replace(FAMILIES.get(kind, CONFIG), hidden_size=608, intermediate_size=160)
    model = on_kernels(config, dtype, kernels)
    if bits == 4:
        model = quantized_copy(model)
    tokens = torch.randint(config.vocab_size, (B, 20), generator=torch.manual_seed(2))

    def hidden(rows, *ends):
        cache, parts = new_cache(config, len(rows), dtype=dtype), []
        for start, end in zip((0, *ends), ends, strict=False):
            positions = torch.arange(start, end).expand(len(rows), -1)
            parts.append(model.forward(Block(tokens[rows, start:end], positions), cache))
            cache.advance([end - start] * len(rows))
        return torch.cat(parts, 1)

    whole = hidden([0, 1], 20)
    for threads in (1, 3, 2):
        kernels.num_threads = threads
        for ends in ((7, 20), range(1, 21)):
            assert torch.equal(hidden([0, 1], *ends), whole)
            assert torch.equal(hidden([1], *ends), whole[1:])


def read_in_chunks(config, dtype=torch.float32, *, is_quantized=False):
    """Reads a prompt in ways that must leave the same bits of K and V."""
    model = quantized_copy(on_kernels(config, dtype)) if is_quantized else on_kernels(config, dtype)
    model.layers.reads_prompts = is_quantized
    prompt = random_prompt(config, 701)
    caches = []
    for ends in ([700], [256, 700], [1, 2, 9, 340, 341, 470, 699, 700], range(100, 701, 100)):
        cache = new_cache(config, capacity=704, dtype=model.dtype)
        for end in ends:
            for _ in prefill(model, prompt[: end + 1], cache, 0, chunk=1024):
                pass
        caches.append((cache.keys[..., :700, :], cache.values[..., :700, :]))
    for pair in caches[1:]:
        assert all(map(torch.equal, pair, caches[0]))


@pytest.mark.parametrize(("config", "threads"), [(LONG, 1), (WIDE, 1), (BROAD, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_of_a_prompt_may_begin_anywhere(dtype, config, threads, monkeypatch):
    """Threads may share the outputs of few matrices; a step's threads are as many as before."""
    monkeypatch.setattr(load_kernels(), "num_threads", threads)
    with load_kernels().threads(2):
        read_in_chunks(config, dtype, is_quantized=dtype == torch.float16)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("bias", [True, False])
def test_chunks_may_begin_anywhere_on_a_machine_whose_products_depend_on_their_size(
    bias, monkeypatch, request
):
    """Fewer than 300 rows have other last bits, as with AMX."""

    def multiply(product, *matrices, **options):
        rows = matrices[-2] if product is not linear else matrices[0]
        return product(*matrices, **options).mul_(1 + 1e-3 * (len(rows) < 300))

    linear = F.linear
    monkeypatch.setattr(Kernels, "has_products", lambda *_: False)
    request.addfinalizer(pytorch.product_tile.cache_clear)
    pytorch.product_tile.cache_clear()
    for owner, name in ((F, "linear"), (torch, "mm"), (torch, "addmm")):
        monkeypatch.setattr(owner, name, functools.partial(multiply, getattr(owner, name)))
    read_in_chunks(replace(LONG, attention_bias=bias), is_quantized=bias)
    assert pytorch.product_tile(torch.float32, 64, 32, 1) == pytorch.TILE
