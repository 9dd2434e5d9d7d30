"""`--weights native`: a GGUF file's own 4 to 8 bits give what the dequantized model gives."""

import logging
from pathlib import Path

import gguf
import pytest
import torch

import minitri
from minitri.core.roofline import bytes_per_pass
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices import choose as devices
from minitri.devices.cpu.kernel_layers import KernelLinear, quantized_copy
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.quantized import Form
from tests.conftest import refused, write_hf_folder
from tests.core.rigs import CPU, fresh_read, random_prompt, tiny_config
from tests.files.test_checkpoint import as_gguf

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

TEXT = random_prompt(tiny_config(vocab_size=310), LONGEST_BLOCK + 71)
ROUNDING = {"float32": 2e-3, "bfloat16": 0.2}
"""Largest difference of logits, whose standard deviation is 1.2. In float32 the inputs of quantized
matrices are rounded to 16 bits; in bfloat16 the dequantized model is nearly as far away, since
blocks and prefills add in another order and round elsewhere."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """`wide` is for K-quants; numbers of blocks in a row are odd and even."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    fused = {"model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5}
    kinds = {"tied": {"tie_word_embeddings": True}, "untied": {}, "wide": wide, "fused": fused}
    kinds["narrow"] = {"head_dim": 8, "num_key_value_heads": 1}
    root = tmp_path_factory.mktemp("models")
    return {kind: write_hf_folder(root / kind, **changes) for kind, changes in kinds.items()}


PHI = {"architecture": "phi3", "changes": {"phi3.rope.dimension_count": 8}}
KINDS = {"Q4_0": "tied", "Q4_1": "untied", "Q5_0": "untied", "Q5_1": "tied", "Q8_0": "tied"}
KINDS |= dict.fromkeys(("Q4_K", "Q5_K", "Q6_K", "Q4_K_M"), "wide")


@pytest.fixture(scope="module", params=KINDS)
def file(request, folders, tmp_path_factory):
    kind, is_mixed = request.param.removesuffix("_M"), request.param.endswith("_M")
    kinds = dict.fromkeys(("v_proj", "down_proj", "embed_tokens"), "Q6_K") if is_mixed else {}
    path = tmp_path_factory.mktemp("files") / "tiny.gguf"
    return as_gguf(folders[KINDS[request.param]], path, kind=kind, **kinds)


def load(path, weights="native", dtype="float32", draft="ngram", **options):
    options |= {"dtype": dtype, "weights": weights, "draft": draft, "device": "cpu"}
    return minitri.load(str(path), **options)


@torch.inference_mode()
def logits(model, block=1 << 30):
    return fresh_read(model, TEXT, block)[1]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_logits_are_those_of_the_dequantized_model(file, dtype):
    wanted = logits(load(file, "dense").model)
    native, plain = (load(file, name, dtype).model for name in ("native", "dense"))
    for block in (7, LONGEST_BLOCK):
        error = (logits(native, block=block) - wanted).abs()
        assert error.max() < ROUNDING[dtype]
        usual = (logits(plain, block=block) - wanted).abs().mean()
        assert error.mean() < max(2 * usual, 3e-4)


def test_only_the_file_s_own_bytes_are_held(file):
    """Padding comes on top: of groups to pairs, of units to 4, of the fifth bits to 8 groups."""
    native = load(file).model
    stored = [part for part in gguf.GGUFReader(file).tensors if len(part.shape) == 2]
    num_stored = sum(int(part.n_bytes) for part in stored)
    padding = 1.7 if native.lm_head.form == Form.Q5 else 1.25
    assert num_stored < native.num_bytes < padding * num_stored + 5000
    is_tied = native.config.tie_word_embeddings
    table = 0 if is_tied else native.embed_tokens.weight.nbytes
    assert bytes_per_pass(native) == native.num_bytes - table


@pytest.mark.parametrize(
    ("folder", "others", "num_kept"),
    [
        ("untied", {"v_proj": "F16"}, "12 of 14"),
        ("untied", {"k_proj": "Q8_0", "q_proj": "Q5_0"}, "14 of 14"),
        ("untied", {"up_proj": "Q8_0"}, "8 of 10"),
        ("fused", {"down_proj": "F16", **PHI}, "8 of 10"),
        ("narrow", {}, "8 of 10"),  # of which K and V fill no panel
    ],
)
def test_matrices_stay_quantized_where_a_product_has_one_form(
    folders, tmp_path, caplog, folder, others, num_kept
):
    path = as_gguf(folders[folder], tmp_path / "mixed.gguf", kind="Q4_0", **others)
    with caplog.at_level(logging.DEBUG, "minitri"):
        model = load(path).model
    assert f"{num_kept} matrices stay quantized" in caplog.text
    error = (logits(model, block=5) - logits(load(path, "dense").model)).abs().max()
    assert error < ROUNDING["float32"]


def test_a_model_of_few_bits_guesses_itself_and_a_mixed_one_by_a_copy(folders, tmp_path):
    """Unless it is told otherwise. The copy shares the LM head, which has 8 bits in both."""
    for kind, how, has_copy in (
        ("Q4_1", {"weights": "auto"}, False),
        ("Q4_1", {"draft_weights": "int4"}, False),
        ("Q8_0", {}, False),
        ("Q8_0", {"draft_weights": "int4"}, True),
        ("Q5_0", {"weights": "dense", "draft_weights": "same"}, False),
    ):
        engine = load(as_gguf(folders["untied"], tmp_path / "it.gguf", kind=kind), **how)
        assert (engine.models.retrieval is not engine.model) == has_copy
    path = as_gguf(folders["untied"], tmp_path / "8.gguf", kind="Q8_0", v_proj="F16")
    engine = load(path)
    twin = engine.models.retrieval
    assert twin.lm_head.weight is engine.model.lm_head.weight
    forms = [layer.form for layer in twin.layers.modules() if isinstance(layer, KernelLinear)]
    assert forms == [Form.Q4] * 12


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_a_dequantized_model_guesses_by_its_blocks_or_a_copy_in_few_bits(folders, tmp_path, kind):
    path = as_gguf(folders["untied"], tmp_path / "it.gguf", kind=kind)
    engine = load(path, "dense")
    model, twin = engine.model, engine.models.retrieval
    wanted = load(path).model if kind == "Q5_0" else quantized_copy(model)
    wanted.embed_tokens = model.embed_tokens  # the twin has no table of its own
    pair = (dict(one.named_parameters()) for one in (twin, wanted))
    torch.testing.assert_close(*pair, rtol=0, atol=0)
    shared = {id(part) for part in model.parameters()}
    added = (part.nbytes for part in twin.parameters() if id(part) not in shared)
    assert twin.num_bytes == sum(added)


def test_what_cannot_stay_quantized_is_refused_in_one_line(folders, tmp_path, monkeypatch):
    for path in (folders["tied"], as_gguf(folders["tied"], tmp_path / "16.gguf", kind="F16")):
        with refused("weights=native needs a GGUF file"):
            load(path)
    fine = as_gguf(folders["tied"], tmp_path / "fine.gguf", kind="Q4_0")
    monkeypatch.setattr(devices, "load_kernels", lambda: None)
    with refused("weights=native needs", "the compiled kernels"):
        load(fine)


def test_a_head_too_wide_for_the_kernels_is_computed_without_them(tmp_path):
    assert devices.kernels_for(CPU, tiny_config(head_dim=1024)) is not None
    folder = write_hf_folder(tmp_path / "wide", head_dim=1026, num_hidden_layers=1)
    kinds = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "Q4_0")
    path = as_gguf(folder, tmp_path / "wide.gguf", kind="F16", **kinds)
    assert not load(path, "auto").model.execution.is_row_invariant
    assert logits(load(path, "auto").model).isfinite().all()
    with refused("the compiled kernels"):
        load(path)
