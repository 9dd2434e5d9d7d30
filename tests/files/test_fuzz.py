"""Files changed at random give one line, or the model that is written in them.

What a config says is computed again by `transformers`. Nothing may hang, or need half as much
memory again as a good file. MINITRI_FUZZ_EXAMPLES=1000 tries more of each kind.
"""

import json
import os
import resource
import signal
import struct
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import minitri
from minitri.core.errors import InputError
from tests.conftest import check_parts, load
from tests.files.test_checkpoint import TOKENS, as_gguf, copy_of, logits

NUM_EXAMPLES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "60"))
SETTINGS = {"max_examples": NUM_EXAMPLES, "derandomize": True, "deadline": None, "database": None}
examples = settings(**SETTINGS, suppress_health_check=list(HealthCheck))


def loaded(path: Path) -> minitri.Engine | None:
    """The model, or None if it was refused in one line."""
    signal.alarm(60)
    try:
        return load(path)
    except InputError as error:
        check_parts(str(error))
        return None
    finally:
        signal.alarm(0)


def assert_same(engine: minitri.Engine, config: dict, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    keys = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        wanted = model(TOKENS).logits
    assert torch.allclose(logits(engine), wanted, atol=1e-3, rtol=1e-3, equal_nan=True)


@pytest.fixture(scope="module")
def work(folder, tmp_path_factory) -> Path:
    """A copy of the tiny model, whose config the examples write over."""
    return copy_of(folder, tmp_path_factory.mktemp("fuzz") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def memory_of_a_good_run(work):
    from transformers import logging

    logging.set_verbosity_error()
    config = json.loads((work / "config.json").read_text())
    assert_same(load(work), config, work)
    good = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    yield
    signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.5 * good


VALUES = """[null, true, false, 0, 1, 2, 2.0, 2.5, -1, "2", "", "a\\nb", [], {}, [2], {"a": 1},
1e-30, 1e30, Infinity, -Infinity, NaN, 100000000000000000000, "\\ud800"]"""
JUNK = st.sampled_from([*json.loads(VALUES), 10**400, "x" * 3000])
JUNK |= st.integers(-3, 70) | st.floats() | st.text(max_size=5)


def or_junk(*good) -> st.SearchStrategy:
    return st.one_of(st.sampled_from(good), st.sampled_from(good), JUNK)


COUNTS = or_junk(1, 2, 4, 8, 16, 64, 320)
NUMBERS = or_junk(1, 1.0, 0.5, 2, 2.5, 8.0, 32.0)
TRAINED = "original_max_position_embeddings"
OF_ROPE = "factor low_freq_factor attention_factor mscale high_freq_factor beta_fast beta_slow "
OF_ROPE += "surprise rope_theta partial_rotary_factor"
MORE = {TRAINED: COUNTS, "truncate": or_junk(True, False), "type": or_junk("linear")}
KINDS = {"rope_type": or_junk("default", "linear", "llama3", "yarn", "yarn")}
ROPE = st.fixed_dictionaries(KINDS, optional=dict.fromkeys(OF_ROPE.split(), NUMBERS) | MORE)
GOOD = json.loads("""{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, "head_dim": 8,
"hidden_act": "silu", "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
"model_type": "llama", "draft_of": null, "head_size": null, "partial_rotary_factor": 1,
"num_hidden_layers": 2, "rope_theta": 2e5, "rms_norm_eps": 1e-3, "bos_token_id": 1,
"eos_token_id": [2, 7]}""")
HEADS = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", TRAINED)
CONFIG = {key: or_junk(value) for key, value in GOOD.items()} | dict.fromkeys(HEADS, COUNTS)
CONFIG |= dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE | ROPE | JUNK)
CHANGES = st.lists(st.sampled_from(sorted(CONFIG)), min_size=1, max_size=3).flatmap(
    lambda keys: st.fixed_dictionaries({key: CONFIG[key] for key in keys})
)
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def without_null(entries: dict) -> dict:
    """Null is as good as absent, which `transformers` knows of some keys only."""
    return {key: value for key, value in entries.items() if value is not None}


@examples
@given(CHANGES)
@example({"rope_parameters": YARN, TRAINED: 64})
@example({"rope_parameters": LLAMA3, TRAINED: 64})
@example({"rope_parameters": YARN | {TRAINED: 128}, TRAINED: 64})
@example({"rope_parameters": YARN | {TRAINED: 4}})  # whose ramp has no width
@example({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}})
@example({"rope_parameters": {}, "rope_scaling": YARN, "rope_theta": 5e3})
@example({"rope_parameters": YARN | {"rope_theta": 7000.0, "type": "linear"}, "rope_theta": 5e3})
@example({"rope_parameters": YARN | {TRAINED: 4, "beta_slow": 2.0, "truncate": False}})
@example({"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 4})
def test_a_config_is_refused_or_means_what_it_says(folder, work, changes):
    text = json.dumps(json.loads((folder / "config.json").read_text()) | changes)
    (work / "config.json").write_text(text)
    engine = loaded(work)
    if engine is not None:
        config = json.loads(text, object_hook=without_null)
        for key in ("bos_token_id", "eos_token_id"):  # several, or of no use to logits
            config.pop(key, None)
        rope = engine.config.rope
        stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
        trained = config.get("max_position_embeddings", 2048)
        assert engine.config.context_length == max(trained, stretched)
        assert_same(engine, config, work)


WORDS = st.sampled_from([0, 1, 2, 8, 9, 255, 2**31, 2**63, 2**64 - 1])


def damaged(content: bytes, places: st.SearchStrategy, data) -> bytes:
    """The content with up to four of its bits flipped or words written over, or cut short."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(places)
        if data.draw(st.integers(0, 2)):
            changed[place] ^= 1 << data.draw(st.integers(0, 7))
        else:
            changed[place : place + 8] = struct.pack("<Q", data.draw(WORDS))
    is_cut = data.draw(st.integers(0, 9)) == 9
    return bytes(changed[: data.draw(places) if is_cut else None])


@pytest.fixture(scope="module")
def good_gguf(folder, tmp_path_factory) -> Path:
    return as_gguf(folder, tmp_path_factory.mktemp("fuzz") / "good.gguf", kind="Q8_0")


@examples
@given(data=st.data())
def test_a_gguf_header_is_refused_or_runs(good_gguf, data):
    content = good_gguf.read_bytes()
    header = gguf.GGUFReader(good_gguf).data_offset
    # Most of the header is the vocabulary.
    start = content.index(b"tokenizer.ggml.token_type")
    ranges = (0, 900), (start, header - 1), (0, header - 1)
    path = good_gguf.with_name("fuzz.gguf")
    path.write_bytes(damaged(content, st.one_of(st.integers(*span) for span in ranges), data))
    engine = loaded(path)
    if engine is not None:
        assert logits(engine).shape == (1, 20, engine.config.vocab_size)
