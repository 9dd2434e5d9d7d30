"""Models that are nearly Llamas: Mistral, Qwen2, Qwen3. What they say is in `test_parity.py`."""

import json

import pytest
import torch

import minitri
from minitri import InputError
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_config import read_config
from minitri.files.hf_folder import Folder
from minitri.files.tokenizer_config import load_tokenizer
from tests.cascades import settings_of
from tests.conftest import byte_level_tokenizer, write_hf_folder
from tests.core.rigs import WARM
from tests.files.gguf_writer import write_gguf

RELATIVES = {
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "attention_bias": True},
}
TEXT = [17, 40, 33, 90, 12, 51] * 20


@pytest.fixture(scope="module", params=RELATIVES)
def relative(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return write_hf_folder(folder, model_type=request.param, **RELATIVES[request.param])


def test_triforce_writes_the_same_text(relative):
    """With itself as its drafter, over all three kinds of caches."""
    engine = minitri.load(relative, draft=str(relative), dtype="float32", device="cpu")
    sizes = {"budget": 32, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3, "coupled": True}
    ways = [settings_of(method, 40, WARM, **sizes) for method in ("autoregressive", "triforce")]
    texts = [engine.complete(TEXT, **way).token_ids for way in ways]
    assert texts[0] == texts[1]


def test_a_gguf_file_is_the_same_model(relative, tmp_path):
    """Those of Qwen keep the halves of a rotated head where they are."""
    ours = minitri.load(relative, dtype="float32", device="cpu")
    kind = next(kind for kind in RELATIVES if relative.name.startswith(kind))
    weights = dict(Folder(relative).tensors(ours.config))
    options = {"weights": weights, "architecture": "llama" if kind == "mistral" else kind}
    path = write_gguf(tmp_path / "it.gguf", ours.config, byte_level_tokenizer(), **options)
    theirs = minitri.load(path, dtype="float32", device="cpu")
    torch.testing.assert_close(
        dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()), rtol=0, atol=0
    )
    assert theirs.config.head_norm == ours.config.head_norm == (kind == "qwen3")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4096}, "has sliding_window=4096"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "has sliding_window=64"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3", {"layer_types": 7}, "wrong value"),
        ("qwen2", {"num_key_value_heads": None}, "num_kv_heads"),
        ("qwen2", {"max_position_embeddings": None}, "context_length"),
        ("smollm3", {}, "a 'smollm3' model; use one of a kind that minitri runs: llama"),
    ],
)
def test_what_is_not_run_is_refused_by_name(kind, changes, message, folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind, **changes}
    with pytest.raises(InputError, match=message):
        read_config(config, "it")


def test_qwen_cuts_numbers_into_digits_and_composes_characters(tmp_path, engine):
    """As its tokenizer.json does."""
    found = {}
    for pre in ("qwen2", "llama-bpe"):
        path = write_gguf(tmp_path / f"{pre}.gguf", engine.config, byte_level_tokenizer(), pre=pre)
        tokenizer = load_tokenizer(GgufFile(path), engine.config)
        words = tokenizer._backend._pipeline.pre_tokenizer.pre_tokenize_str("in 1234")
        found[pre] = [word for word, _ in words], tokenizer.decode(tokenizer.encode("e\u0301"))
    assert found["qwen2"] == (["in", "\u0120", "1", "2", "3", "4"], "\u00e9")
    assert found["llama-bpe"] == (["in", "\u0120", "123", "4"], "e\u0301")
