"""Prefix reuse: a text that begins like an earlier one is what a fresh run writes."""

import functools
import itertools
import math

import pytest
import torch

import minitri
from minitri import GenerationConfig, Request, SamplingParams, SpeculationConfig
from minitri.core.caches.prefixes import PrefixCache
from minitri.core.requests import End, PrefillProgress, Token
from tests.cascades import ends_of, tiny_engine
from tests.core.policies import policy_of
from tests.core.rigs import new_cache, random_prompt, tiny_config
from tests.devices.gpu_twins.offload import offloaded

WARM = SamplingParams(0.9, 30)
SIZES = {"budget": 32, "num_recent_tokens": 16, "observation_window": 4}
TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=3, **SIZES)


def say(engine, prompts, speculation=TRIFORCE, num_new=20, sampling=WARM, seed=0, **settings):
    """Texts of a run, and how many tokens of each prompt were not read."""
    generation = GenerationConfig(num_new, ignore_eos=True, prefill_chunk=16, **settings)
    how = {"sampling": sampling, "generation": generation, "speculation": speculation}
    ends = ends_of(engine.generate(prompts, seed=seed, **how))
    return [list(end.token_ids) for end in ends], [e.row_stats.num_cached_tokens for e in ends]


def fresh(engine, *arguments, **settings):
    """Texts of a run of an engine that holds no text."""
    engine.release()
    return say(engine, *arguments, **settings)


@pytest.fixture(scope="module")
def document(engine):
    return random_prompt(engine.config, 150, seed=1)


@pytest.mark.parametrize(
    ("method", "policy", "window"),
    [
        ("autoregressive", "retrieval", 0),
        ("auto", "retrieval", 4),
        ("triforce", "retrieval", 4),
        ("triforce", "received", 1000),  # a policy that must see all queries of a prompt
    ],
)
def test_a_second_question_gets_the_answer_of_a_fresh_run(engine, document, method, policy, window):
    speculation = SpeculationConfig(method, policy=policy_of(policy), **SIZES)
    first, cached = fresh(engine, [document], speculation)
    assert cached == [0]
    for prompt in ([*document, *first[0], 9, 8, 7], document[:90], document[1:]):
        again, cached = say(engine, [prompt], speculation, seed=4)
        assert fresh(engine, [prompt], speculation, seed=4) == (again, [0])
        is_alike = prompt[0] == document[0]
        assert cached[0] >= is_alike * min(len(document) - 1, len(prompt) - 1 - window)
        assert cached == [0] or (is_alike and window < 1000)
        say(engine, [document], speculation)


@pytest.mark.parametrize(
    ("num_other", "length", "num_rows", "num_cached"),
    [(30, 150, 3, 145), (100, 60, 4, 55)],
    ids=["in its row", "for another"],
)
def test_idle_rows_are_restored(engine, document, num_other, length, num_rows, num_cached):
    """Passes of the rows before and after write to the first slots of one that has ended."""
    before, after = (random_prompt(engine.config, n, seed=n) for n in (40, 200))
    prompt = document[:length]  # if short, too short to take the place of the first

    def submit(seed: int, prompt: list[int], num_new: int) -> int:
        return run.submit(Request(prompt, seed, WARM, GenerationConfig(num_new, ignore_eos=True)))

    engine.release()
    generation = GenerationConfig(reserve=256, shared_chunk=256)
    with engine.open(generation=generation, speculation=TRIFORCE, batch_size=num_rows) as run:
        for seed, (text, num_new) in enumerate(((before, num_other), (document, 2), (after, 50))):
            submit(seed, text, num_new)
        tokens = (event for event in run if isinstance(event, Token))
        next(itertools.islice(tokens, 19, None))
        number = submit(0, prompt, 8)
        end = next(event for event in run if isinstance(event, End) and event.row == number)
    assert end.row_stats.num_cached_tokens >= num_cached
    assert fresh(engine, [prompt], TRIFORCE, 8)[0] == [list(end.token_ids)]


@pytest.mark.parametrize("event", [PrefillProgress, Token])
def test_a_run_that_is_left_leaves_what_it_has_read(engine, document, event):
    engine.release()
    generation = GenerationConfig(20, prefill_chunk=16)
    with engine.generate(document, speculation=TRIFORCE, generation=generation) as run:
        next(n for n, given in enumerate(run) if isinstance(given, event) and n > 4)
    held = engine.held_tokens
    assert len(held) >= (149 if event is Token else 48)
    assert held[:149] == document[: len(held)][:149]


def interrupt(engine, document, monkeypatch, **settings):
    """A run that ends by Ctrl-C in a step: guesses and rejected tokens are in the caches."""
    how = {"generation": GenerationConfig(30, ignore_eos=True, **settings), "sampling": WARM}
    run = engine.generate(document, speculation=TRIFORCE, seed=2, **how)
    next(event for event in run if isinstance(event, Token))
    session = run._stack
    target = session.cascade._target

    def crop(lengths):
        if session.memory.full.lengths > lengths:
            raise KeyboardInterrupt
        type(target).crop(target, lengths)

    monkeypatch.setattr(target, "crop", crop)
    with pytest.raises(KeyboardInterrupt):
        list(run)


def test_ctrl_c_in_the_middle_of_a_step_loses_nothing_that_was_certain(
    engine, document, monkeypatch
):
    engine.release()
    interrupt(engine, document, monkeypatch)
    prompt = [*engine.held_tokens, *range(20)]  # the last are always read
    assert prompt[:149] == document[:149]
    again, cached = say(engine, [prompt], TRIFORCE, num_new=40)
    assert cached[0] > 140
    assert fresh(engine, [prompt], TRIFORCE, num_new=40)[0] == again


@pytest.mark.parametrize("taken_by", [0, 1])
@pytest.mark.parametrize("adopted", ["", "in place", "in a larger cache"])
def test_slots_that_passes_of_others_wrote_over_are_put_back(adopted, taken_by):
    """All that are guarded, once, and again after another prefix cache has taken the text over."""
    full, text = new_cache(tiny_config(), 2, 64), list(range(30))
    for slots in (full.keys, full.values):
        slots.normal_(generator=torch.Generator().manual_seed(0))
    exact = [slots.clone() for slots in full.tokens(0, 0, 30)]
    full.advance([30, 0])
    prefix = PrefixCache(full, 5, reuses_generated=True)
    prefix.keep(0, text)
    full.reset(0)
    full.keys[..., :5, :] = full.values[..., :5, :] = math.nan
    if adopted:
        old, full = prefix, full if adopted == "in place" else new_cache(tiny_config(), 2, 128)
        prefix = PrefixCache(full, 5, reuses_generated=True)
        prefix.adopt(old)
        full.keys[..., :5, :] = full.values[..., :5, :] = math.nan
    texts = [text if b == taken_by else [] for b in range(2)]
    assert prefix.take(taken_by, texts, 40) == 30
    for ours, wanted in zip(full.tokens(taken_by, 0, 30), exact, strict=True):
        assert torch.equal(ours, wanted)


def test_nothing_of_other_texts_is_read():
    """All that earlier texts left is NaN but for the tokens in common."""
    engine = tiny_engine()
    document = random_prompt(engine.config, 100, seed=1)
    say(engine, [document])
    full = engine._pool._kept.full
    with torch.inference_mode():
        full.keys[..., 60:, :] = full.values[..., 60:, :] = math.nan
    prompt = [*document[:60], *random_prompt(engine.config, 40, seed=2)]
    again, cached = say(engine, [prompt])
    assert cached[0] == 60 + (prompt[60] == document[60])
    assert fresh(engine, [prompt])[0] == again


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_compiled_kernels_texts_are_equal_to_the_bit(folder, dtype, tmp_path):
    """So tokens that were generated are read again: decoding rounds otherwise than a prefill."""
    engine = minitri.load(folder, dtype=dtype, device="cpu")
    if not engine.model.execution.is_row_invariant:
        pytest.skip("no compiled kernels here")
    document = random_prompt(engine.config, 150, seed=1)
    first, _ = say(engine, [document])
    prompt = [*document, *first[0], 9, 8, 7]
    held = []
    for ask in (say, fresh):
        ask(engine, [prompt])
        engine.save_kv(tmp_path / "kv")
        held.append((tmp_path / "kv").read_bytes())
    assert held[0] == held[1]


@pytest.fixture
def hosted(monkeypatch):
    """An engine whose K and V are in host memory, and the settings of its runs."""
    engine = tiny_engine()
    full = functools.partial(offloaded, 1, batch_size=2, config=engine.config)
    monkeypatch.setattr("minitri.core.memory.allocate_full_cache", lambda *_: full())
    return engine, {"offload": True, "on_chip": 1}


def test_a_cache_in_host_memory_serves_too(hosted):
    engine, settings = hosted
    document = random_prompt(engine.config, 200, seed=1)  # more than the ring holds
    say(engine, [document, document[:50]], **settings)
    prompts = [[*document, 5, 6], [*document, 7]]
    again, cached = say(engine, prompts, **settings)
    assert cached == [197, 196]
    assert fresh(engine, prompts, **settings) == (again, [0, 196])


def test_k_and_v_in_host_memory_are_not_kept_after_ctrl_c_in_a_step(document, hosted, monkeypatch):
    """Buffers and ring may be half written; a run that is left between two steps keeps them."""
    engine, settings = hosted
    prompts = [document, document[1:51]]
    first, _ = say(engine, prompts, **settings)
    assert engine.held_tokens
    interrupt(engine, prompts, monkeypatch, **settings)
    assert engine.held_tokens == []
    assert say(engine, prompts, **settings) == (first, [0, 0])
