"""Wrong kernels are noticed by the tests of this folder: one bug for each of their contracts."""

import itertools

import pytest
import torch

from minitri.core.errors import InputError
from minitri.core.settings import SamplingParams
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import Form
from tests.devices.cpu import test_draft_round as rounds
from tests.devices.cpu import test_filters as filters
from tests.devices.cpu import test_kernels as claims
from tests.devices.cpu import test_pass as passes
from tests.devices.cpu import test_quantized as quantized
from tests.devices.cpu.conftest import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        getattr(load_kernels(), "instructions", "") != "AVX2",
        reason="which of the claims notices a bug was tried on processors with AVX2 alone",
    ),
]
MUTANTS = """
mass.sum >= wanted => mass.sum > 2 * wanted
std::max(least, power_of_2( => std::max(0 * least, power_of_2(
float* first = std::find(x, x + n, top); => float* first = x + n; while (*--first != top);
a.logits + row * a.V, a.logits + (row + 1) * a.V, x) => a.logits, a.logits + a.V, x)
begin = piece * PIECE;
    => begin = p.num_pieces > 1 && piece ? piece * PIECE - a.lengths[b] % BLOCK : piece * PIECE;
block : block + t + 1, 0) => block : block + t + 2, 0)
const float weight = power_of_2( => const float weight = p == 0 ? 0.0f : power_of_2(
x < -126.0f ? splat(-126.0f) : x; => maximum(x, splat(-126.0f));
Form::scale(panel, g, word / PARTS => Form::scale(panel, g, 0
(a.rows ? row : n) % PANEL => n % PANEL
std::copy(key, key + D, static_cast<T*>(p.raw_keys) + at + slot * p.kv_slot)
    => rotate_head(key, cos, sin, static_cast<T*>(p.raw_keys) + at + slot * p.kv_slot, D)
slot = p.lengths[b] + t => slot = p.lengths[0] + t
if (is_in_place && n == BLOCK) { => if (is_in_place) {
E) + float(eps) => E) + 0.0f
sums + (r - part) * BLOCK, k == 0); => sums + (r - part) * BLOCK, true);
a.probs + at * a.width), => a.probs + (at - (i > 0)) * a.width),
a.uniforms[at] => a.uniforms[b * a.N]
row[a.ids[n]] = => row[a.ids[n + outputs]] =
unpack(panel, g, word, lane + v * LANES => unpack(panel, g, word, lane
largest / 32767 + sum_lanes(none) => largest / 32767
scales[g] * float(sum) => scales[g]
half = BITS == 6 ? g / 2 % 2 : g % 2 => half = g % 2
j % 8 < 4 ? *six & 63 : late => j % 8 < 4 ? *six & 63 : late & 31
this->dequantize(panel, (input + i) / GROUP => this->dequantize(panel, i / GROUP
"""


ONE_DTYPE = [("work(BFloat16Operand());", "{}"), ("work(Widened<Float16>());", "{}")]
"""What float32 alone does without: two thirds of the time of the compiler."""


def check(kernels, monkeypatch) -> None:
    """The claims about kernels, in float32, on a few cases each, the quick ones first."""
    dtype = torch.float32
    for V in (15, 50):
        filters.test_every_combination_of_filters_is_the_distribution_by_definition(kernels, V)
    filters.test_of_the_likeliest_tokens_greedy_decoding_takes_the_first(kernels)
    filters.test_logits_that_are_not_finite_give_no_distribution(kernels, filters.ALL)
    claims.test_attention_equals_the_oracle(kernels, dtype, 64)
    claims.test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(kernels, dtype)
    claims.test_what_is_not_finite_is_never_hidden(kernels, dtype)
    for form, E in ((16, 48), (Form.Q4, 576), (Form.Q8, 576), (Form.Q5_K, 2304), (Form.Q6_K, 2304)):
        claims.test_linear_equals_plain_formulas(kernels, dtype, form, E)
    claims.test_a_product_of_many_rows_equals_plain_formulas(kernels, dtype)
    for case in ((1, False, 1), (5, True, 1), (2, False, 1e-6)):
        passes.test_a_pass_computes_and_writes_what_the_plain_layers_do(
            kernels, "streaming", dtype, *case
        )
    for kind in quantized.FORMS:
        quantized.test_repacked_numbers_are_the_dequantized_ones(kernels, kind)
    monkeypatch.setattr(rounds, "load_kernels", lambda: kernels)
    for kind in ("lent", "larger"):
        rounds.check_rounds(rounds.models_of(kind, dtype), SamplingParams(1.0), gamma1=3)


@pytest.mark.parametrize(
    "mutant", MUTANTS.replace("\n    =>", " =>").strip().splitlines(), ids=itertools.count()
)
def test_a_wrong_kernel_is_noticed(mutant, tmp_path, monkeypatch):
    wrong = compiled(tmp_path, *ONE_DTYPE, tuple(mutant.split(" => ")))
    with pytest.raises((AssertionError, InputError)):
        check(wrong, monkeypatch)


def test_right_kernels_pass(tmp_path, monkeypatch):
    check(compiled(tmp_path, *ONE_DTYPE), monkeypatch)
