"""Files changed at random give one line, or exactly the model that is written in them.

What is accepted is computed again by `transformers`, from weights that the packages safetensors and
gguf read. Nothing may hang, or need half as much memory again as a good file. More of each kind are
tried by `MINITRI_FUZZ_EXAMPLES=1000 pytest tests/files/test_fuzz.py`.
"""

import json
import os
import resource
import signal
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import minitri
from minitri.core.errors import InputError
from tests.files.gguf_writer import stored_name
from tests.files.test_checkpoint import TOKENS, as_gguf, copy_of, load, logits

NUM_EXAMPLES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "150"))
SETTINGS = {"max_examples": NUM_EXAMPLES, "derandomize": True, "deadline": None, "database": None}
examples = settings(**SETTINGS, suppress_health_check=list(HealthCheck))


def stop(*_):
    raise TimeoutError("it hangs")


def loaded(path: Path) -> minitri.Engine | None:
    """The model, or None if it was refused in one line."""
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        return load(path)
    except InputError as error:
        message = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert message.isprintable(), message
    assert len(message) < 1000, message
    return None


def expected_logits(config: dict, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    keys = model.load_state_dict(weights, strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same(engine: minitri.Engine, config: dict, weights: dict[str, torch.Tensor]) -> None:
    ours, theirs = logits(engine), expected_logits(config, weights)
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3, equal_nan=True)


@pytest.fixture(scope="module", autouse=True)
def memory_of_a_good_run(folder):
    import transformers

    transformers.logging.set_verbosity_error()
    config = json.loads((folder / "config.json").read_text())
    assert_same(load(folder), config, load_file(folder / "model.safetensors"))
    good = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.5 * good


@pytest.fixture(scope="module")
def work(folder, tmp_path_factory) -> Path:
    """A copy of the tiny model, whose config the examples write over."""
    return copy_of(folder, tmp_path_factory.mktemp("fuzz") / "tiny")


def written(folder: Path, work: Path, changes: dict) -> dict:
    """The changed config, which the copy has from now on."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (work / "config.json").write_text(json.dumps(config))
    return config


VALUES = """[null, true, false, 0, 1, 2, 2.0, 2.5, -1, "2", "", "a\\nb", [], {}, [2], {"a": 1},
1e-30, 1e30, Infinity, -Infinity, NaN, 100000000000000000000, "\\ud800"]"""
JUNK = st.one_of(
    st.sampled_from([*json.loads(VALUES), 10**400, "x" * 3000]),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=5),
)


def or_junk(*good) -> st.SearchStrategy:
    """Mostly a value that makes sense."""
    return st.one_of(st.sampled_from(good), st.sampled_from(good), JUNK)


COUNTS = or_junk(1, 2, 4, 8, 16, 64, 320)
NUMBERS = or_junk(1, 1.0, 0.5, 2, 2.5, 8.0, 32.0)
TRAINED = "original_max_position_embeddings"
ROPE = st.fixed_dictionaries(
    {"rope_type": or_junk("default", "linear", "llama3", "yarn", "yarn")},
    optional={
        **dict.fromkeys(("factor", "low_freq_factor", "attention_factor", "mscale"), NUMBERS),
        **dict.fromkeys(("high_freq_factor", "beta_fast", "beta_slow", "surprise"), NUMBERS),
        **{"rope_theta": NUMBERS, "partial_rotary_factor": NUMBERS, TRAINED: COUNTS},
        **{"truncate": or_junk(True, False), "type": or_junk("linear", "default")},
    },
)
CONFIG = {
    "num_hidden_layers": or_junk(2, 1, 3),
    "num_attention_heads": COUNTS,
    "num_key_value_heads": COUNTS,
    "head_dim": or_junk(16, 8, 32),
    "max_position_embeddings": COUNTS,
    "rms_norm_eps": or_junk(1e-6, 1e-3, 0.1),
    "rope_theta": or_junk(10000.0, 2e5),
    "rope_scaling": st.one_of(ROPE, ROPE, JUNK),
    "rope_parameters": st.one_of(ROPE, ROPE, ROPE, JUNK),
    "bos_token_id": or_junk(1, [1]),
    "eos_token_id": or_junk(2, [2, 7]),
    TRAINED: COUNTS,
}
OTHERS = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, "hidden_act": "silu"}
OTHERS |= {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
OTHERS |= {"model_type": "llama", "draft_of": None, "head_size": None, "partial_rotary_factor": 1}
CONFIG |= {key: or_junk(value) for key, value in OTHERS.items()}


def without_null(config: dict) -> dict:
    """Null is as good as absent, which `transformers` knows of some keys only."""
    return {
        key: without_null(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None
    }


@examples
@given(data=st.data())
def test_a_config_is_refused_or_means_what_it_says(folder, work, data):
    keys = data.draw(st.lists(st.sampled_from(sorted(CONFIG)), min_size=1, max_size=3))
    config = written(folder, work, {key: data.draw(CONFIG[key], key) for key in keys})
    engine = loaded(work)
    if engine is not None:
        config = without_null(config)
        for key in ("bos_token_id", "eos_token_id"):  # several, or of no use to logits
            config.pop(key, None)
        assert engine.config.context_length == config.get("max_position_embeddings", 2048)
        assert_same(engine, config, load_file(work / "model.safetensors"))


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": YARN},
        {"rope_parameters": YARN, TRAINED: 64},
        {"rope_parameters": YARN | {TRAINED: 128}, TRAINED: 64},
        {"rope_parameters": LLAMA3, TRAINED: 64},
        {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {}, "rope_scaling": YARN | {"rope_type": "linear"}, "rope_theta": 5e3},
        {"rope_parameters": YARN | {"rope_theta": 7000.0}, "rope_theta": 5000.0},
        {"rope_parameters": YARN | {"type": "linear", "truncate": False}},
        {"rope_parameters": YARN | {TRAINED: 4, "beta_slow": 2.0}},
        {"rope_parameters": YARN | {"attention_factor": 0.5, "beta_fast": 2, "beta_slow": 2}},
        {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    ],
    ids=str,
)
def test_unusual_forms_of_a_config_mean_what_they_mean_to_others(folder, work, change):
    config = written(folder, work, change)
    assert_same(load(work), config, load_file(work / "model.safetensors"))


BITS = st.integers(0, 7).map(lambda bit: 1 << bit)
WORDS = st.sampled_from([0, 1, 2, 8, 9, 255, 2**31, 2**63, 2**64 - 1])


def damaged(content: bytes, places: st.SearchStrategy, data) -> bytes:
    """The content with up to four of these bits flipped or words written over, or cut short."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(places)
        if data.draw(st.integers(0, 2)):
            changed[at] ^= data.draw(BITS)
        else:
            changed[at : at + 8] = struct.pack("<Q", data.draw(WORDS))
    is_cut = data.draw(st.integers(0, 9)) == 9
    return bytes(changed[: data.draw(places) if is_cut else None])


KEYS = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}
KEYS |= {"hidden_size": "embedding_length", "num_key_value_heads": "attention.head_count_kv"}
KEYS |= {"intermediate_size": "feed_forward_length", "head_dim": "attention.key_length"}
KEYS |= {"max_position_embeddings": "context_length", "rope_theta": "rope.freq_base"}
KEYS |= {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}


def read_gguf(path: Path, names: dict) -> tuple[dict, dict[str, torch.Tensor], gguf.GGUFReader]:
    """Config and weights by the `gguf` package, which is used for files that were accepted only."""
    reader = gguf.GGUFReader(path)
    found = {name: reader.get_field(f"llama.{key}") for name, key in KEYS.items()}
    config = {name: field.contents() for name, field in found.items() if field is not None}
    weights = {}
    for tensor in reader.tensors:
        name = names[tensor.name]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            count = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            pairs = values.reshape(count, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.from_numpy(values)
    tied = "lm_head.weight" not in weights
    return config | {"vocab_size": 320, "tie_word_embeddings": tied}, weights, reader


@examples
@given(data=st.data())
def test_a_gguf_header_is_refused_or_followed(folder, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    original = path.with_suffix(".original")
    if not original.exists():
        as_gguf(folder, original, kind="Q8_0")
    content = original.read_bytes()
    header = gguf.GGUFReader(original).data_offset
    # Most of the header is the vocabulary; the rest, where more can go wrong, gets its share.
    start = content.index(b"tokenizer.ggml.token_type")
    ranges = (0, 900), (start, header - 1), (0, header - 1)
    path.write_bytes(damaged(content, st.one_of(st.integers(*it) for it in ranges), data))
    engine = loaded(path)
    if engine is None:
        return
    names = {stored_name(name): name for name in load_file(folder / "model.safetensors")}
    config, weights, reader = read_gguf(path, names)
    assert_same(engine, config, weights)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert [engine.tokenizer.token(number) for number in range(len(tokens))] == tokens
