"""Matrices of 4 and 8 bits: what they stand for, how they lie, what models make of them. K and V in
tiles: read and written like plain tensors, and multiplied to the same bits."""

from random import Random

import gguf
import numpy as np
import pytest
import torch

from minitri import load
from minitri.core.model.cache import gather_path
from minitri.core.model.llama import Block
from minitri.devices.choose import drafter_in_few_bits, use_kernels
from minitri.devices.cpu import quantized
from minitri.devices.cpu.kernel_layers import KernelLinear
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import GROUP, Form, packed_shape, quantize
from minitri.devices.cpu.tiles import tiled_slots
from minitri.files.gguf.container import StoredTensor
from minitri.files.gguf.file import FORMS, repack
from tests.conftest import tiny_model, write_hf_folder
from tests.core.rigs import new_cache, tiny_config, trimmed_copy
from tests.devices.cpu.test_kernels import random

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")


@pytest.mark.parametrize("E", [32, 96, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_weight_is_half_a_step_from_the_original(bits, E, monkeypatch):
    """Groups of equal weights and of zeros keep them; sizes of slices change nothing."""
    weight_NE = random(40, E)
    weight_NE[7], weight_NE[8] = 0, 1.5
    groups_NGQ = weight_NE.unflatten(1, (-1, GROUP))
    least, most = groups_NGQ.aminmax(dim=2, keepdim=True)
    steps = (most - least) / 15 if bits == 4 else groups_NGQ.abs().amax(2, keepdim=True) / 127
    packed_NX = quantize(weight_NE, bits, load_kernels().repack)
    assert packed_NX.shape == packed_shape(40, E, bits) == (48, packed_NX.shape[1])
    whole = load_kernels().dequantize(packed_NX, 40, E, bits, torch.float32)
    errors = (whole.view_as(groups_NGQ) - groups_NGQ).abs()
    assert (errors <= steps / 2 + 1e-3 * groups_NGQ.abs().amax(2, keepdim=True)).all()
    assert not errors[7].any()
    for numbers_at_once in (1, E * 17, E * 50):
        monkeypatch.setattr(quantized, "NUMBERS_AT_ONCE", numbers_at_once)
        assert torch.equal(quantize(weight_NE, bits, load_kernels().repack), packed_NX)


@pytest.mark.parametrize("kind", FORMS)
def test_repacked_numbers_are_the_dequantized_ones(kernels, kind):
    """Exactly: with all values of q, scales of 0, negative and denormal ones, odd groups; any
    scales and minima of K-quants; and rows in another order."""
    stored_as, form, random = gguf.GGMLQuantizationType[kind], FORMS[kind], np.random.default_rng(0)
    block, num_bytes = gguf.GGML_QUANT_SIZES[stored_as]
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    for E in (block, 3 * block, 18 * block):
        blocks = random.integers(0, 256, (70, E // block, num_bytes), np.uint8)
        has_offsets = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
        factors = blocks[..., -2:] if kind == "Q6_K" else blocks[..., : 4 if has_offsets else 2]
        numbers = random.normal(size=(*factors.shape[:2], factors.shape[2] // 2))
        factors[:] = numbers.astype("<f2").view(np.uint8)
        factors[0] = 0
        factors[1:20] = [3, 128] * (factors.shape[2] // 2)  # -3 / 2^24
        stored = blocks.reshape(70, -1)
        wanted = torch.from_numpy(gguf.dequantize(stored, stored_as))
        matrix = StoredTensor(stored_as, (70, E), stored)
        packed_NX = torch.empty(packed_shape(70, E, form), dtype=torch.uint8)
        repack(matrix, kernels, packed_NX, order)
        unpacked = kernels.dequantize(packed_NX, 70, E, form, torch.float32)
        assert torch.equal(unpacked, wanted[order])
        if kind not in ("Q4_0", "Q5_0"):  # which lose signs of zeros
            assert torch.equal(unpacked.view(torch.int32), wanted[order].view(torch.int32))


def forms_of(model) -> tuple[set[Form], Form]:
    forms = {it.form for it in model.layers.modules() if isinstance(it, KernelLinear)}
    return forms, getattr(model.lm_head, "linear", model.lm_head).form


def test_a_copy_in_4_bits_guesses_like_its_model_and_keeps_a_lent_table_and_a_trimmed_head():
    target = tiny_model(tiny_config())
    plain = trimmed_copy(target, range(3, 40))
    use_kernels(plain, load_kernels())
    twin = drafter_in_few_bits(plain, "auto")
    assert drafter_in_few_bits(plain, "same") is plain
    assert forms_of(twin) == ({Form.Q4, Form.PLAIN}, Form.Q8)  # 48 columns are no whole groups
    assert twin.num_bytes == sum(it.nbytes for it in twin.parameters()) < plain.num_bytes
    tokens = torch.arange(5).unsqueeze(0)
    assert torch.equal(twin.embed(tokens), target.embed(tokens))
    block, cache = Block(tokens, tokens), new_cache(target.config)
    exact, rough, again = (it.logits(it(block, cache)) for it in (plain, twin, plain))
    assert torch.equal(exact, again)  # a pass of the model does not take the copy's weights
    known = exact.isfinite()
    assert torch.equal(rough.isfinite(), known)
    assert 0 < (exact - rough)[known].norm() / exact[known].norm() < 0.6  # weights are random


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_is_loaded_in_4_bits_unless_it_is_to_be_the_same(folder, tied, tmp_path):
    """A drafter of 4 bits takes less memory; the target of a cascade of two is not copied."""
    draft = write_hf_folder(tmp_path / "draft", seed=1, tie_word_embeddings=tied)
    names = {"draft": str(draft), "device": "cpu", "dtype": "float32"}
    small, plain = load(folder, **names), load(folder, draft_weights="same", **names)
    assert plain.models.retrieval is plain.model
    ours, theirs = small.models.draft, plain.models.draft
    assert forms_of(ours) == ({Form.Q4}, Form.Q8)
    assert forms_of(theirs) == ({Form.PLAIN}, Form.PLAIN)
    assert ours.num_bytes == sum(weight.nbytes for weight in ours.parameters())
    assert ours.num_bytes < theirs.num_bytes * (0.3 if tied else 0.6)


@pytest.mark.parametrize(
    ("dtype", "pair"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)]
)
@pytest.mark.parametrize("which", [0, 1])
def test_tiles_are_read_and_written_like_a_tensor(dtype, pair, which):
    """Ranges that begin and end anywhere, single slots, rows, and paths of a tree."""
    chance, generator = Random(1), torch.Generator().manual_seed(1)
    plain = torch.zeros(2, 3, 4, 64, 32, dtype=dtype)
    tiles = tiled_slots(tuple(plain.shape), dtype, pair)[which]
    tiles[...] = plain
    for _ in range(100):
        start = chance.randrange(64)
        end = chance.randrange(start, 65)
        layer, b = chance.randrange(2), chance.randrange(3)
        new = torch.randn(2, 4, end - start, 32, generator=generator).to(dtype)
        for slots in (plain, tiles):
            slots[:, b, :, start:end] = new
            slots[layer][1:, :, :start] = float(start)
            gather_path(slots, b, start // 2, [1, 3, 7])
        places = (torch.arange(4).unsqueeze(1), torch.randint(64, (4, 5), generator=generator))
        assert torch.equal(tiles[..., start:end, :], plain[..., start:end, :])
        for part in ((slice(None), slice(end)), places):
            assert torch.equal(tiles[layer, b][part], plain[layer, b][part])
    assert torch.equal(tiles[...], plain)
    assert (tiles.shape, len(tiles), tiles.nbytes) == (plain.shape, 2, plain.nbytes)
