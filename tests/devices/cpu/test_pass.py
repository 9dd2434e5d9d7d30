"""A pass of all layers in one call of the kernels against the plain network over each cache."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minitri import Token, load
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.model.llama import Block
from minitri.core.prefill import prefill
from minitri.core.settings import GenerationConfig, SpeculationConfig
from minitri.devices.cpu import products
from minitri.devices.cpu.kernel_layers import quantized_copy, use_kernels
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import Form
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, tiny_config
from tests.devices.cpu import test_kernels as claims
from tests.devices.cpu import test_tiles as tiles
from tests.devices.cpu.conftest import compiled
from tests.devices.cpu.test_kernels import TOLERANCE, every_dtype

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(attention_bias=True, head_norm=True)
LONG = replace(CONFIG, context_length=1024)
WIDE = replace(LONG, hidden_size=576, intermediate_size=1536)
"""As the matrices of a real model, which PyTorch multiplies in other ways than small ones."""
SPECULATION = SpeculationConfig(budget=64, chunk_size=8, num_recent_tokens=40, num_sink_tokens=4)
LENGTHS = [37, 5]
B = len(LENGTHS)


def filled_cache(kind: str, dtype: torch.dtype):
    """Two rows of random numbers; NaN after them."""
    cache = full = new_cache(CONFIG, B, 128, dtype=dtype)
    if kind == "retrieval":
        heads = CONFIG.num_heads
        cache = RetrievalCache(full, SPECULATION, budgets=[64, 64], num_heads=heads)
    elif kind == "streaming":
        cache = StreamingCache(tiny_model(CONFIG, dtype=dtype), B, SPECULATION)
    generator = torch.Generator().manual_seed(1)
    for slots in tensors(cache):
        slots.fill_(torch.nan)
        for b, length in enumerate(LENGTHS):
            part = slots[:, b, :, :length]
            part.copy_(torch.randn(part.shape, generator=generator))
    cache.advance(LENGTHS)
    return cache


def tensors(cache) -> list[torch.Tensor]:
    raw = [cache.raw_keys] if isinstance(cache, StreamingCache) else []
    return [cache.keys, cache.values, *raw]


@pytest.mark.parametrize("kind", ["full", "retrieval", "streaming"])
@every_dtype
@pytest.mark.parametrize(
    ("T", "has_rule", "scale"), [(1, False, 1), (2, False, 1), (5, True, 1), (2, False, 1e-6)]
)
def test_a_pass_computes_and_writes_what_the_plain_layers_do(
    kernels, kind, dtype, T, has_rule, scale
):
    """Norms of almost zeros are bounded by their epsilon."""
    plain = tiny_model(CONFIG, dtype=dtype)
    plain.embed_tokens.mul_(scale)
    fused = copy.deepcopy(plain)
    use_kernels(fused, kernels)
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
        hidden = model.forward(Block(tokens, positions), cache, rule, queries)
        # NaN after what a row holds stays NaN, so it is known which slots were written.
        outs.append([t.nan_to_num(99.0).float() for t in (hidden, queries, *tensors(cache))])
    for want, got in zip(*outs, strict=True):
        assert (want - got).abs().max() < 10 * TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize("bits", [16, 4])
def test_a_token_has_the_same_bits_whatever_shares_its_pass(kernels, dtype, bits):
    """Neighbours in its block, other rows, threads."""
    config = replace(CONFIG, hidden_size=608, intermediate_size=160)
    model = tiny_model(config, dtype=dtype)
    use_kernels(model, kernels)
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


def test_a_block_that_does_not_fit_is_refused():
    model = tiny_model(CONFIG)
    use_kernels(model, load_kernels())
    cache = filled_cache("full", torch.float32)
    cache.advance([128 - LENGTHS[0] - 1, 0])
    tokens = torch.zeros(B, 2, dtype=torch.int64)
    with pytest.raises(IndexError, match="127 of 128"):
        model.forward(Block(tokens, tokens), cache)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache: setattr(cache, "values", cache.values[..., :64, :]),
        lambda cache: setattr(cache, "values", cache.values.bfloat16()),
        lambda cache: (
            setattr(cache, "keys", cache.keys[:1]) or setattr(cache, "values", cache.keys)
        ),
        lambda cache: (
            setattr(cache, "keys", cache.keys[:, :1]) or setattr(cache, "values", cache.keys)
        ),
    ],
)
def test_a_cache_of_another_shape_is_refused(spoil):
    model = tiny_model(CONFIG)
    use_kernels(model, load_kernels())
    cache = filled_cache("full", torch.float32)
    spoil(cache)
    tokens = torch.zeros(B, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the CPU kernels cannot take"):
        model.forward(Block(tokens, tokens), cache)


@pytest.mark.parametrize("config", [LONG, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_of_a_prompt_may_begin_anywhere(dtype, config):
    """K and V have the same bits: a text may go on after what an earlier one left."""
    read_in_chunks(dtype, config)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_may_begin_anywhere_where_a_kernel_multiplies_faster(dtype, bias, monkeypatch):
    monkeypatch.setattr(products, "is_kernel_faster", lambda *_: True)
    read_in_chunks(dtype, replace(WIDE, attention_bias=bias))


def test_the_faster_product_is_chosen_once_for_a_machine(monkeypatch, tmp_path):
    """What was measured first stays, so that bits do not change with the load of a machine."""
    monkeypatch.setattr(products, "built_library", lambda _: tmp_path / "kernels.so")
    monkeypatch.setattr(products, "can_pack", lambda *_: True)

    def ask(own, theirs):
        seconds = iter((own, theirs))
        monkeypatch.setattr(products, "_seconds", lambda _: next(seconds))
        return products.is_kernel_faster.__wrapped__(load_kernels(), torch.bfloat16)

    assert ask(1.0, 2.0)
    assert ask(2.0, 1.0)
    (place,) = tmp_path.iterdir()
    products.publish(place, "PyTorch")  # by another process, which was late
    assert ask(2.0, 1.0)
    place.unlink()
    assert not ask(1.0, 1.2)
    assert not ask(1.0, 2.0)
    monkeypatch.setattr(products, "built_library", lambda _: tmp_path / "no" / "kernels.so")
    assert not ask(1.0, 2.0)  # it could not be kept


def test_chunks_may_begin_anywhere_on_three_threads(monkeypatch, request):
    """Which divide few matrices between two rows."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setattr(load_kernels(), "num_threads", 3)
    read_in_chunks("float32", replace(WIDE, intermediate_size=2048))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_of_16_bits_is_the_same_wherever_a_number_stands(dtype):
    """In a vector of a processor or not, so that the borders between threads do not matter."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    alone = torch.cat([F.silu(one) for one in every.split(1)])
    assert torch.equal(F.silu(every), alone)


def read_in_chunks(dtype, config):
    model = tiny_model(config, dtype=getattr(torch, dtype))
    use_kernels(model, load_kernels())
    prompt = torch.randint(0, config.vocab_size, (701,), generator=torch.manual_seed(0)).tolist()
    caches = []
    for ends in ([700], [256, 700], [1, 2, 9, 340, 341, 470, 699, 700], range(100, 701, 100)):
        cache = new_cache(config, capacity=704, dtype=model.dtype)
        for end in ends:
            for _ in prefill(model, prompt[: end + 1], cache, 0, chunk=1024):
                pass
        caches.append((cache.keys[..., :700, :], cache.values[..., :700, :]))
    for pair in caches[1:]:
        assert all(torch.equal(*both) for both in zip(pair, caches[0], strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_chunks_may_begin_anywhere_on_a_machine_whose_products_depend_on_their_size(
    bias, monkeypatch, request
):
    """As with AMX: fewer than 600 rows have other last bits."""

    def scaled(product):
        def multiply(*matrices, **options):
            rows = matrices[-2] if product is not F.linear else matrices[0]
            out = product(*matrices, **options)
            return out.mul_(1 + 1e-3 * (len(rows) < 600))

        return multiply

    monkeypatch.setattr(products, "is_kernel_faster", lambda *_: False)
    request.addfinalizer(products.product_tile.cache_clear)
    products.product_tile.cache_clear()
    for owner, name in ((F, "linear"), (torch, "mm"), (torch, "addmm")):
        monkeypatch.setattr(owner, name, scaled(getattr(owner, name)))
    read_in_chunks("float32", replace(LONG, attention_bias=bias))
    assert products.product_tile(torch.float32, 64, 32, 1) == products.TILE


def test_two_engines_in_two_threads_do_not_disturb_each_other(folder):
    """Tokens and bits are those of each alone, while the other reads prompts and decodes."""
    engines = [load(folder, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")]

    def run(engine):
        prompt = torch.randint(0, 90, (60,), generator=torch.Generator().manual_seed(1)).tolist()
        events = engine.generate(prompt, generation=GenerationConfig(12, prefill_chunk=7))
        text = [event.token_id for event in events if isinstance(event, Token)]
        cache = new_cache(engine.config, dtype=engine.model.dtype)
        for _ in prefill(engine.model, prompt, cache, 0, chunk=5):
            pass
        return text, cache.keys.float()[..., :59, :].tolist()

    alone = [run(engine) for engine in engines]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            assert list(threads.map(run, engines)) == alone


MUTANTS = """
begin = piece * PIECE;
    => begin = num_pieces > 1 && piece ? piece * PIECE - a.lengths[b] % BLOCK : piece * PIECE;
block : block + t + 1, 0) => block : block + t + 2, 0)
const float weight = power_of_2( => const float weight = p == 0 ? 0.0f : power_of_2(
store(sums, load(sums) * shrink); => ;
total *= shrink; => ;
if (e < E) { => if (false) {
rows.x + m * rows.stride + (e => rows.x + (e
x < -126.0f ? splat(-126.0f) : x; => maximum(x, splat(-126.0f));
Form::scale(panel, g, word * Form::SCALES / Form::WORDS => Form::scale(panel, g, 0
sum[m][v] = Vec{}; => ;
group_sums[m * rows.groups + g] => group_sums[g]
halves_at(panel + offsets, g / 8, lane) => halves_at(panel + scales, g / 8, lane)
(groups + g) * PANEL + lane => g * PANEL + lane
(a.rows ? row : n) % PANEL => n % PANEL
values + slot * p.kv_slot) => values + (slot + 1) * p.kv_slot)
std::copy(key, key + D, static_cast<T*>(p.raw_keys) + at + slot * p.kv_slot)
    => rotate_head(key, cos, sin, static_cast<T*>(p.raw_keys) + at + slot * p.kv_slot, D)
slot = p.lengths[b] + t => slot = p.lengths[0] + t
if (is_in_place && n == BLOCK) { => if (is_in_place) {
PANEL, steps * PANEL, next_keys} => PANEL, PANEL, next_keys}
(p.keys) + i * p.kv_layer => (p.keys)
(p.queries) + layer * p.queries_layer => (p.queries) + layer
layer.post_norm => layer.input_norm
h < p.H ? q_norm : k_norm => q_norm
layer.down, p.x, p.x => layer.down, nullptr, p.x
E) + float(eps) => E) + 0.0f
sums + (r - part) * BLOCK, k == 0); => sums + (r - part) * BLOCK, true);
std::min(a.R, part + PRODUCT_ROWS) => part + PRODUCT_ROWS > a.R ? a.R : part + PRODUCT_ROWS - 1
static_cast<T*>(a.out) + r * a.N; => static_cast<T*>(a.out);
"""
"""Wrong kernels: a text of the source => what stands in its place."""
OF_PAIRS = """\
if (s + 1 < n) b => if (s < n) b
_mm_cvtsi32_si128(at % 16) => _mm_cvtsi32_si128(0)
i % 2 ? upper : table => table
(slot, d, D, Op::STEP, 1)] => (slot, d, D, 1, 1)]
(slot, d, D, PANEL, Op::STEP) => (slot, d, D, PANEL, 1)
to[n / 2 * D + d] &= 0xffff; => ;
"""
"""Those that only a processor that multiplies pairs of bfloat16 notices."""
OF_UNIT = """\
memory + (rows + MOST_ROWS) * width => memory + rows * width
if (from_zero) _tile_zero(i); => if (true) _tile_zero(i);
columns.advance(LANES * columns.step) => columns.advance(columns.step)
count < LANES || w.E % WIDTH => false
sums[o * num_columns + r] => sums[o * num_columns]
"""
"""Those that only a processor with a matrix unit notices."""
OF_AVX2 = """\
zip<LANES / 2>(r[i] => zip<0>(r[i]
if (s >= n) { => if (false) {
BLOCK * D; i += LANES) store( => D; i += LANES) store(
unpack<Op>(panel, g, word, lane + v * LANES => unpack<Op>(panel, g, word, lane
>> (half + at % 16) => >> at % 16
"""
"""Those that only one notices which widens all numbers to float32."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    (MUTANTS.replace("\n    =>", " =>") + OF_PAIRS + OF_UNIT + OF_AVX2).strip().splitlines(),
)
def test_wrong_kernels_are_noticed(mutant, tmp_path):
    instructions = load_kernels().instructions
    for some, needed in ((OF_PAIRS, "BF16"), (OF_UNIT, "AMX"), (OF_AVX2, "AVX2")):
        if mutant in some and needed not in instructions:
            pytest.skip(f"this processor has no {needed}")
    wrong = compiled(tmp_path, change=mutant.split(" => "))
    dtype = torch.bfloat16
    with pytest.raises(AssertionError):  # noqa: PT012
        claims.test_attention_equals_the_oracle(wrong, dtype, 64)
        claims.test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(wrong, dtype)
        claims.test_attention_survives_scores_of_any_size(wrong)
        claims.test_what_is_not_finite_is_never_hidden(wrong, torch.float32, 1)
        claims.test_linear_equals_plain_formulas(wrong, torch.float32, 16, 33, 7)
        claims.test_linear_equals_plain_formulas(wrong, dtype, 16, 48, 7)
        for form in (Form.Q4, Form.Q8):
            claims.test_linear_equals_plain_formulas(wrong, dtype, form, 576, 7)
        for form in (Form.Q5_K, Form.Q6_K):
            claims.test_linear_equals_plain_formulas(wrong, dtype, form, 2304, 7)
        for case in ((1, False, 1), (5, True, 1), (2, False, 1e-6)):
            test_a_pass_computes_and_writes_what_the_plain_layers_do(
                wrong, "streaming", torch.float32, *case
            )
        tiles.test_attention_over_tiles_has_the_bits_of_plain_slots(wrong, 64)
        tiles.test_a_pass_over_tiles_has_the_bits_of_plain_slots(wrong)
        claims.test_a_product_of_many_rows_equals_plain_formulas(wrong, dtype, has_bias=True)
