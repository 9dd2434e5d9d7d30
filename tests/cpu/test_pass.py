"""A pass of all layers in one call of the kernels against the plain network over each cache."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minitri import Token, load
from minitri.caches.full import FullCache
from minitri.caches.policies import make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.cpu import kernel_layers
from minitri.cpu.kernel_layers import KernelLayers, use_kernels
from minitri.cpu.kernels import Kernels, load_kernels
from minitri.cpu.low_bit_models import quantized_copy
from minitri.runner import prefill
from minitri.settings import GenerationConfig, SpeculationConfig
from tests.conftest import tiny_config, tiny_model
from tests.cpu.test_kernels import TOLERANCE, compiled

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(attention_bias=True, head_norm=True)
SPECULATION = SpeculationConfig(budget=64, chunk_size=8, num_recent_tokens=40, num_sink_tokens=4)
B, CPU = 2, torch.device("cpu")
LENGTHS = [37, 5]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("kernels"))


def filled_cache(kind: str, dtype: torch.dtype) -> FullCache | RetrievalCache | StreamingCache:
    """Two rows of random numbers; NaN after them."""
    where = {"dtype": dtype, "device": CPU}
    full = FullCache.allocate(CONFIG, B, 128, **where)
    cache: FullCache | RetrievalCache | StreamingCache = full
    if kind == "retrieval":
        policy = make_policy("retrieval", full, SPECULATION.chunk_size)
        sizes = {"budgets": [64, 64], "num_heads": CONFIG.num_heads}
        cache = RetrievalCache(full, policy, SPECULATION, **sizes)
        for row, length in zip(cache.rows, LENGTHS, strict=True):
            row.num_held = row.num_committed = length
    elif kind == "streaming":
        cache = StreamingCache(CONFIG, tiny_model(CONFIG).rope, B, SPECULATION, **where)
    generator = torch.Generator().manual_seed(1)
    for slots in tensors(cache):
        slots.fill_(torch.nan)
        for b, length in enumerate(LENGTHS):
            slots[:, b, :, :length].normal_(generator=generator)
    if kind != "retrieval":
        cache.advance(LENGTHS)
    return cache


def tensors(cache: FullCache | RetrievalCache | StreamingCache) -> list[torch.Tensor]:
    raw = [cache.raw_keys] if isinstance(cache, StreamingCache) else []
    return [cache.keys, cache.values, *raw]


def check_pass(kernels: Kernels, kind: str, dtype: torch.dtype, T: int, *, has_rule: bool) -> None:
    plain = tiny_model(CONFIG, dtype=dtype)
    fused = copy.deepcopy(plain)
    use_kernels(fused, kernels)
    assert isinstance(fused.layers, KernelLayers)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(CONFIG.vocab_size, (B, T), generator=generator)
    positions = torch.tensor(LENGTHS).unsqueeze(1) + torch.arange(T)
    rule = None
    if has_rule:
        rule = (torch.rand(T, T, generator=generator) < 0.5) | torch.eye(T, dtype=torch.bool)
    outs = []
    for model in (plain, fused):
        cache = filled_cache(kind, dtype)
        queries = torch.full((2, B, 3, CONFIG.num_heads, CONFIG.head_dim), 7.0, dtype=dtype)
        assert CONFIG.num_layers == 2
        hidden = model(tokens, positions, cache, rule, queries_LBTHD=queries)
        # NaN after what a row holds stays NaN, so it is known which slots were written.
        outs.append([t.nan_to_num(99.0).float() for t in (hidden, queries, *tensors(cache))])
    for want, got in zip(*outs, strict=True):
        assert (want - got).abs().max() < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["full", "retrieval", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "has_rule"), [(1, False), (2, False), (5, True)])
def test_a_pass_computes_and_writes_what_the_plain_layers_do(kernels, kind, dtype, T, has_rule):
    check_pass(kernels, kind, dtype, T, has_rule=has_rule)


MUTANTS = {
    "V one slot late": (
        "std::copy(value, value + D, static_cast<T*>(p.values) + at)",
        "std::copy(value, value + D, static_cast<T*>(p.values) + at + p.kv_slot)",
    ),
    "rotated raw keys": (
        "std::copy(key, key + D, static_cast<T*>(p.raw_keys) + at)",
        "rotate_head(key, cos, sin, static_cast<T*>(p.raw_keys) + at, D)",
    ),
    "the lengths of row 0": ("(p.lengths[b] + t) * p.kv_slot", "(p.lengths[0] + t) * p.kv_slot"),
    "the first layer's cache": (
        "const T *keys = static_cast<T*>(p.keys) + i * p.kv_layer",
        "const T *keys = static_cast<T*>(p.keys)",
    ),
    "queries of all rows in one": ("(layer * p.B + b) * p.W", "layer * p.B * p.W"),
    "one norm for both": ("layer.post_norm", "layer.input_norm"),
    "one norm for q and k": ("h < p.H ? q_norm : k_norm", "q_norm"),
    "no residual": ("layer.down, p.x, p.x", "layer.down, nullptr, p.x"),
}
"""Wrong passes: a text of the source and what stands in its place."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_passes_are_noticed(name, tmp_path):
    mutant = compiled(tmp_path, change=MUTANTS[name])
    with pytest.raises(AssertionError):  # noqa: PT012
        for T in (1, 5):
            check_pass(mutant, "streaming", torch.float32, T, has_rule=T == 5)


def test_a_block_that_does_not_fit_is_refused(kernels):
    model = tiny_model(CONFIG)
    use_kernels(model, kernels)
    cache = filled_cache("full", torch.float32)
    cache.advance([128 - LENGTHS[0] - 1, 0])
    tokens = torch.zeros(B, 2, dtype=torch.int64)
    with pytest.raises(IndexError, match="127 of 128"):
        model(tokens, tokens, cache)


def test_a_copy_of_a_model_does_not_take_its_weights(kernels):
    """The addresses of weights that a pass keeps are of one model only."""
    model = tiny_model(CONFIG)
    use_kernels(model, kernels)
    tokens = torch.zeros(B, 1, dtype=torch.int64)
    before = model(tokens, tokens, filled_cache("full", torch.float32))
    twin = quantized_copy(model)
    rough = twin(tokens, tokens, filled_cache("full", torch.float32))
    assert not torch.equal(rough, before)
    assert torch.equal(model(tokens, tokens, filled_cache("full", torch.float32)), before)


def assert_chunks_may_begin_anywhere(kernels, dtype, config=CONFIG):
    """K and V have the same bits: a text may go on after what an earlier one left."""
    model = tiny_model(config, dtype=getattr(torch, dtype))
    use_kernels(model, kernels)
    prompt = torch.randint(0, config.vocab_size, (701,), generator=torch.manual_seed(0)).tolist()
    caches = []
    for ends in ([700], [256, 700], [1, 2, 9, 340, 341, 470, 699, 700], range(100, 701, 100)):
        cache = FullCache.allocate(config, 1, 704, dtype=model.dtype, device=model.device)
        for end in ends:
            for _ in prefill(model, prompt[: end + 1], cache, 0, chunk=1024):
                pass
        caches.append((cache.keys[..., :700, :], cache.values[..., :700, :]))
    for pair in caches[1:]:
        assert all(torch.equal(*both) for both in zip(pair, caches[0], strict=True))


LONG = replace(CONFIG, context_length=1024)
WIDE = replace(LONG, hidden_size=576, intermediate_size=1536)
"""As the matrices of a real model, which PyTorch multiplies in other ways than small ones."""


@pytest.mark.parametrize("config", [LONG, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_of_a_prompt_may_begin_anywhere(kernels, dtype, config):
    assert_chunks_may_begin_anywhere(kernels, dtype, config)


@pytest.mark.parametrize("bias", [True, False])
def test_chunks_may_begin_anywhere_on_a_machine_whose_products_depend_on_their_size(
    kernels, bias, monkeypatch
):
    """As with AMX: fewer than 600 rows have other last bits."""

    def scaled(product):
        def multiply(*matrices, **options):
            rows = matrices[-2] if product is not F.linear else matrices[0]
            out = product(*matrices, **options)
            return out.mul_(1 + 1e-3 * (len(rows) < 600))

        return multiply

    monkeypatch.setattr(kernel_layers, "_TILES", {})
    for owner, name in ((F, "linear"), (torch, "mm"), (torch, "addmm")):
        monkeypatch.setattr(owner, name, scaled(getattr(owner, name)))
    config = replace(LONG, attention_bias=bias)
    assert_chunks_may_begin_anywhere(kernels, "float32", config)
    assert set(kernel_layers._TILES.values()) == {kernel_layers.TILE}


def test_two_engines_in_two_threads_do_not_disturb_each_other(folder):
    """Tokens and bits are those of each alone, while the other reads prompts and decodes."""
    engines = [load(folder, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")]

    def run(engine):
        prompt = torch.randint(0, 90, (60,), generator=torch.manual_seed(1)).tolist()
        events = engine.generate(prompt, generation=GenerationConfig(12, prefill_chunk=7))
        text = [event.token_id for event in events if isinstance(event, Token)]
        cache = FullCache.allocate(engine.config, 1, 64, dtype=engine.model.dtype, device=CPU)
        for _ in prefill(engine.model, prompt, cache, 0, chunk=5):
            pass
        return text, cache.keys.float()[..., :59, :].tolist()

    alone = [run(engine) for engine in engines]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            assert list(threads.map(run, engines)) == alone
