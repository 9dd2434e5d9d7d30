"""Matrices of 4 and 8 bits: what they stand for, how they lie, what models make of them."""

import pytest
import torch

from minitri import load
from minitri.apps.cli.arguments import model_of
from minitri.core.model.linear import TiedHead
from minitri.core.model.llama import Block
from minitri.core.roofline import bytes_per_pass
from minitri.core.settings import SamplingParams
from minitri.devices.choose import drafter_in_few_bits
from minitri.devices.cpu import quantized
from minitri.devices.cpu.kernel_layers import (
    KernelLinear,
    KernelPartialHead,
    KernelTiedHead,
    quantized_copy,
    use_kernels,
)
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import GROUP, Form, packed_shape, quantize
from minitri.generate import build_parser
from tests.cascades import settings_of
from tests.conftest import tiny_model, write_hf_folder
from tests.core.rigs import new_cache, random_prompt, tiny_config, trimmed_copy
from tests.devices.cpu.test_kernels import every_dtype, random

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")


@needs_kernels
@pytest.mark.parametrize("E", [32, 96, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_weight_is_half_a_step_from_the_original(bits, E, monkeypatch):
    """And by the rounding of scales and offsets to float16; numbers of groups are odd and even, and
    groups of equal weights and of zeros keep them. The size of the slices changes nothing."""
    weight_NE = random(40, E)
    weight_NE[7], weight_NE[8] = 0, 1.5
    groups_NGQ = weight_NE.unflatten(1, (-1, GROUP))
    least, most = groups_NGQ.aminmax(dim=2, keepdim=True)
    steps = (most - least) / 15 if bits == 4 else groups_NGQ.abs().amax(2, keepdim=True) / 127
    packed_NX = quantize(weight_NE, bits)
    assert packed_NX.dtype == torch.uint8
    assert packed_NX.shape == packed_shape(40, E, bits) == (48, packed_NX.shape[1])
    dequantize = load_kernels().dequantize
    whole = dequantize(packed_NX, E, bits, torch.float32)[:40]
    errors = (whole.view_as(groups_NGQ) - groups_NGQ).abs()
    assert (errors <= steps / 2 + 1e-3 * groups_NGQ.abs().amax(2, keepdim=True)).all()
    assert not errors[7].any()
    for numbers_at_once in (1, E * 17, E * 50):
        monkeypatch.setattr(quantized, "NUMBERS_AT_ONCE", numbers_at_once)
        again = dequantize(quantize(weight_NE, bits), E, bits, torch.bfloat16)[:40]
        assert torch.equal(again, whole.bfloat16())


@needs_kernels
@every_dtype
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_tied_head_are_those_of_its_matrix(bits, dtype):
    plain = TiedHead.empty(96, 50, dtype=dtype)
    head = KernelTiedHead(plain, load_kernels(), quantize(random(50, 96), bits), bits)
    table_VE = head.plain_weight(dtype)
    for numbers in (torch.tensor([[3, 49, 3], [0, 1, 2]]), torch.tensor(7), torch.arange(120) % 50):
        rows = head.rows(numbers)
        assert rows.dtype == dtype
        assert torch.equal(rows, table_VE[numbers])


@needs_kernels
def test_a_copy_in_4_bits_is_small_and_guesses_like_its_model(folder):
    model = load(folder, device="cpu", dtype="float32").model
    twin = quantized_copy(model)
    assert twin.num_bytes < model.num_bytes / 4
    tokens = torch.arange(5).unsqueeze(0)
    cache = new_cache(model.config, dtype=torch.float32)
    block = Block(tokens, tokens)
    exact, rough, again = (m.logits(m(block, cache)) for m in (model, twin, model))
    assert 0 < (exact - rough).norm() / exact.norm() < 0.6  # random weights: worse than any
    assert torch.equal(exact, again)  # a pass of the model does not take the copy's weights


def forms_of(model) -> tuple[set[Form], Form]:
    """Of a model's blocks, and of its LM head."""
    *forms, head = [it.form for it in model.modules() if isinstance(it, KernelLinear)]
    return {*forms}, head


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_is_loaded_in_4_bits_unless_it_is_to_be_the_same(folder, tied, tmp_path):
    """It takes less memory, and the texts are those of the model alone."""
    draft = write_hf_folder(tmp_path / "draft", seed=1, tie_word_embeddings=tied)
    names = {"draft": str(draft), "device": "cpu", "dtype": "float32"}
    small = load(folder, **names)
    plain = load(folder, draft_weights="same", **names)
    assert forms_of(small.models.draft) == ({Form.Q4}, Form.Q8)
    assert forms_of(plain.models.draft) == ({Form.PLAIN}, Form.PLAIN)
    num_bytes = small.models.draft.num_bytes
    assert num_bytes == sum(it.nbytes for it in small.models.draft.parameters())
    assert num_bytes < plain.models.draft.num_bytes * (0.3 if tied else 0.6)
    assert bytes_per_pass(small.models.draft) < bytes_per_pass(plain.models.draft) / 3
    prompt = random_prompt(small.config, 60)
    for params in (SamplingParams(), SamplingParams(0.9, 40, top_p=0.95)):
        ways = [
            settings_of(method, 40, params, budget=32, coupled=True)
            for method in ("autoregressive", "naive", "triforce")
        ]
        texts = {it.complete(prompt, **way).token_ids for it in (small, plain) for way in ways}
        assert len(texts) == 1


@needs_kernels
@pytest.mark.parametrize(("wanted", "form"), [("auto", Form.Q4), ("same", Form.PLAIN)])
def test_where_no_level_retrieves_the_drafter_alone_is_copied(folder, wanted, form, tmp_path):
    draft = write_hf_folder(tmp_path / "draft", seed=1)
    flags = f"--method naive --draft-weights {wanted} --device cpu --dtype float32"
    paths = ("--model", str(folder), "--draft", str(draft))
    engine = load(**model_of(build_parser().parse_args([*flags.split(), *paths])))
    assert engine.models.retrieval is engine.model
    assert forms_of(engine.models.draft)[0] == {form}


@needs_kernels
def test_a_drafter_in_4_bits_keeps_a_lent_table_and_a_trimmed_head():
    target = tiny_model(tiny_config())
    plain = trimmed_copy(target, range(3, 40))
    use_kernels(plain, load_kernels())
    twin = drafter_in_few_bits(plain, "auto")
    assert drafter_in_few_bits(plain, "same") is plain
    assert isinstance(twin.lm_head.linear, KernelPartialHead)
    assert forms_of(twin) == ({Form.Q4, Form.PLAIN}, Form.Q8)  # 48 columns are no whole groups
    assert twin.num_bytes == sum(it.nbytes for it in twin.parameters()) < plain.num_bytes
    tokens = torch.arange(5).unsqueeze(0)
    assert torch.equal(twin.embed(tokens), target.embed(tokens))
    block = Block(tokens, tokens)
    exact, rough = (it.logits(it(block, new_cache(it.config))) for it in (plain, twin))
    assert torch.equal(rough.isfinite(), exact.isfinite())
    known = exact.isfinite()
    assert 0 < (exact - rough)[known].norm() / exact[known].norm() < 0.6
