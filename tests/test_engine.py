"""The engine's promises: the same tokens however they are asked for, and what it refuses."""

import itertools
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import minitri
from minitri import GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig, Token
from minitri.core.model.block import read_block
from minitri.core.requests import Row
from minitri.text.text_stream import TextReader
from tests.cascades import texts_of
from tests.core.rigs import new_cache
from tests.strategies import WRONG

PROMPTS = [[5, 6, 7], list(range(10, 60)), [9], [4] * 20]
NOISY = SamplingParams(temperature=0.9, top_k=50, top_p=0.95)


def texts(engine, prompts, *, n=12, **settings):
    """Of all rows, by the model alone."""
    return texts_of(engine.generate(prompts, max_new_tokens=n, speculation=False, **settings))


def test_greedy_tokens_equal_those_of_the_naive_loop(engine):
    """The oracle: the whole sequence through the model again for every token, no cache kept."""
    model, prompt, sequence = engine.model, PROMPTS[1], list(PROMPTS[1])
    for _ in range(12):
        hidden = read_block(model, [sequence], new_cache(engine.config, capacity=100))
        sequence.append(int(model.logits(hidden[0, -1]).argmax()))
    for given in (prompt, torch.tensor(prompt), np.array([prompt])):
        [text] = texts(engine, given, ignore_eos=True)
        assert [*prompt, *text] == sequence


@pytest.mark.parametrize("num_events", [0, 2, 8])
def test_a_caller_may_stop_at_any_moment(engine, num_events):
    with engine.generate(PROMPTS[1], max_new_tokens=12, prefill_chunk=16) as left:
        seen = list(itertools.islice(left, num_events))
    assert left.stats.num_generated_tokens == sum(isinstance(event, Token) for event in seen)
    left.close()
    assert list(left) == []


def test_text_that_waits_for_more_appears_when_the_row_ends(engine):
    """Half of a character in the decoder, the start of a stop string in the scanner."""
    half = engine.tokenizer.encode("🦥")[:2]
    begun = engine.tokenizer.encode("EN")
    waiting, ends = ((half, "\ufffd"), (begun, "EN")), (([2], "eos"), ([], "length"))
    for (tokens, shown), (last, reason) in itertools.product(waiting, ends):
        generation = GenerationConfig(len(tokens + last), stop=("END",))
        reader = TextReader(engine.tokenizer, [5], stop=generation.stop)
        row = Row(0, Request([5], generation=generation), [5], reader)
        text = "".join(row.push(token, "bonus", (2,)).text for token in tokens + last)
        assert (text, row.text, row.finish_reason) == (shown, shown, reason)


def test_seeds_decide_and_belong_to_rows(engine):
    same = texts(engine, [PROMPTS[0]] * 3, sampling=NOISY, seed=5)
    assert len(set(same)) == 3
    assert same == texts(engine, [PROMPTS[0]] * 3, sampling=NOISY, seed=[5, 6, 7])
    assert texts(engine, PROMPTS[0], sampling=NOISY, seed=np.int64(6)) == [same[1]]


NO_PROMPTS = [5, None, True, {"a": 1}, {3, 4}, torch.tensor(3), Path("x"), b"She had", [None]]
BAD_PROMPTS = [["a", 3], [1.5], [True, 5], "a\udcff", "", [], [[]], ["fine", ""], [3, 320]]


@pytest.mark.parametrize("prompts", [*NO_PROMPTS, *BAD_PROMPTS, [[3], [-1]], [7] * 501])
def test_bad_prompts_are_refused_before_any_work(engine, prompts):
    for start in (engine.generate, engine.complete):
        with pytest.raises(InputError, match="prompt"):
            start(prompts, max_new_tokens=12)


@pytest.mark.parametrize("seed", [-1, 2**32, [1], [1, 2, 3], [0, None], 1.5, True, [1, True]])
def test_bad_seeds_are_refused(engine, seed):
    with pytest.raises(InputError, match="seed is"):
        engine.generate(PROMPTS[:2], seed=seed)


STRETCH = "or stretch the context with rope_scaling=yarn:2"
LONG = [(501, 12, f"500 tokens {STRETCH}"), (20, 10**9, "lower max_new_tokens=$")]
LONG += [(20, 512, f"lower max_new_tokens= {STRETCH}")]


@pytest.mark.parametrize(("num_tokens", "num_new", "advice"), LONG)
def test_a_prompt_that_is_too_long_has_plausible_ways_out(engine, num_tokens, num_new, advice):
    with pytest.raises(InputError, match=advice):
        engine.generate([7] * num_tokens, max_new_tokens=num_new)


@pytest.mark.parametrize("settings", [{"budget": 10**20, "chunk_size": 1}, {"chunk_size": 1024}])
def test_a_budget_beyond_all_measure_is_clipped(engine, settings):
    """Clipped to what the texts can fill; no more memory is reserved than for them."""
    speculation = SpeculationConfig("retrieval", **settings)
    how = {"max_new_tokens": 4, "ignore_eos": True, "speculation": speculation}
    end = engine.complete(PROMPTS[0], **how)
    assert [end.token_ids] == texts(engine, PROMPTS[0], n=4, ignore_eos=True)
    assert end.stats.kv_cache_bytes < 1 << 20


@pytest.mark.parametrize("name", WRONG)
def test_bad_settings_are_refused_by_name(engine, name):
    for value in WRONG[name]:
        with pytest.raises(InputError, match=name):
            engine.generate(PROMPTS[0], **{name: value})


@pytest.mark.parametrize("kind", ["sampling", "generation", "speculation"])
def test_settings_of_another_kind_are_refused(engine, kind):
    with pytest.raises(InputError, match=r"give a \w+"):
        engine.generate(PROMPTS[0], **{kind: "triforce"})


BAD = {"model": [None], "draft": [3], "dtype": [torch.float32, "int3"]}
BAD |= {"rope_scaling": [4, "magic"], "device": [Path("cpu"), "abacus", "mps", "cuda:99"]}


@pytest.mark.parametrize(("name", "value"), [(name, it) for name in BAD for it in BAD[name]])
def test_bad_settings_of_load_are_refused(folder, name, value):
    with pytest.raises(InputError, match=value if isinstance(value, str) else f"^{name} is"):
        minitri.load(**{"model": folder, name: value})


def test_a_default_drafter_that_cannot_be_had_gives_way_to_ngrams(folder, monkeypatch, caplog):
    missing = "no-such-drafter"
    monkeypatch.setattr("minitri.files.open_models.default_draft", lambda model: missing)
    engine = minitri.load(str(folder), dtype="float32", device="cpu")
    assert engine.models.draft is None
    assert "suffix lookup takes its place" in caplog.text
    with pytest.raises(InputError, match=missing):
        minitri.load(str(folder), draft=missing, dtype="float32", device="cpu")


def test_a_cache_that_does_not_fit_says_how_large_it_is(engine, monkeypatch):
    engine.release()
    no_memory = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    monkeypatch.setattr("minitri.core.memory.FullCache.allocate", no_memory)
    with pytest.raises(InputError, match=r"KV cache for 1 x 35 tokens needs .* GB"):
        engine.generate([1, 2, 3], max_new_tokens=12)
