"""Wrong kernels are noticed by the tests of this folder: one bug for each of their contracts."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from minitri.core.decoding.verification import verify_block
from minitri.core.errors import InputError
from minitri.core.settings import SamplingParams
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import Form
from tests.devices.cpu import test_filters as filters
from tests.devices.cpu import test_kernels as claims
from tests.devices.cpu import test_pass as passes
from tests.devices.cpu import test_quantized as quantized
from tests.devices.cpu import test_rounds as rounds
from tests.devices.cpu import test_verify as verdicts
from tests.devices.cpu.conftest import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        getattr(load_kernels(), "instructions", "") != "AVX2",
        reason="which of the claims notices a bug was tried on processors with AVX2 alone",
    ),
]
FLOAT = torch.float32
CLAIMS = {
    "filters": lambda kernels: (
        filters.test_every_combination_of_filters_is_the_distribution_by_definition(kernels, 50)
    ),
    "greedy": filters.test_of_the_likeliest_tokens_greedy_decoding_takes_the_first,
    "attention": lambda kernels: claims.test_attention_equals_the_oracle(kernels, FLOAT, 64),
    "a row": lambda kernels: (
        claims.test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(
            kernels, FLOAT
        )
    ),
    "NaN": lambda kernels: claims.test_what_is_not_finite_is_never_hidden(kernels, FLOAT),
    "linear": lambda kernels: claims.test_linear_equals_plain_formulas(
        kernels, FLOAT, Form.Q4, 576
    ),
    "repack": lambda kernels: [
        quantized.test_repacked_numbers_are_the_dequantized_ones(kernels, kind)
        for kind in ("Q4_K", "Q6_K")
    ],
    "a pass": lambda kernels: passes.test_a_pass_computes_and_writes_what_the_plain_layers_do(
        kernels, "streaming", FLOAT, 2, False, 1e-6
    ),
    "a round": lambda kernels: rounds.check_rounds(
        rounds.models_of("lent", FLOAT), SamplingParams(1.0), gamma1=3
    ),
    "noise": lambda kernels: rounds.check_rounds(
        rounds.models_of("lent", FLOAT), SamplingParams(1.0), gamma1=3, coupled=True
    ),
    "a tree": lambda kernels: rounds.test_a_round_computes_what_the_modules_do(
        "lent tied", {"tree": "2x2"}
    ),
    "a verdict": lambda kernels: verdicts.test_verdicts_are_those_of_the_definition(
        kernels, verify_block, 50
    ),
    "no residual": lambda kernels: verdicts.test_a_residual_that_vanishes_falls_back_to_p(
        kernels, verify_block
    ),
    "one row alone": lambda kernels: verdicts.test_numbers_that_are_not_finite_end_their_row_alone(
        kernels, verify_block, math.nan
    ),
}
MUTANTS = Path(__file__).with_name("kernel_mutants.txt").read_text("utf-8")
ONE_DTYPE = [("work(BFloat16Operand());", "{}"), ("work(Widened<Float16>());", "{}")]
"""What float32 alone does without: two thirds of the time of the compiler."""


@pytest.mark.parametrize("mutant", MUTANTS.strip().splitlines(), ids=itertools.count())
def test_a_wrong_kernel_is_noticed(mutant, tmp_path, monkeypatch):
    claim, change = mutant.split(": ", 1)
    wrong = compiled(tmp_path, *ONE_DTYPE, tuple(change.split(" => ")))
    monkeypatch.setattr(rounds, "load_kernels", lambda: wrong)
    with pytest.raises((AssertionError, InputError)):
        CLAIMS[claim](wrong)
