"""The engine's promises: the same tokens however they are asked for, and every way in which a row
can end."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import minitri
from minitri import (
    End,
    GenerationConfig,
    InputError,
    PrefillProgress,
    SamplingParams,
    SpeculationConfig,
    Token,
)
from minitri.decoding.sampling import probs_from_logits
from minitri.loading.devices import choose_dtype
from minitri.loading.text_stream import StopScanner
from minitri.requests import Request, Row
from tests.conftest import CPU, new_cache

PROMPTS = [[5, 6, 7], list(range(10, 60)), [9], [4] * 20]
NOISY = SamplingParams(temperature=0.9, top_k=50, top_p=0.95)


def run(engine, prompts, *, n=12, sampling=SamplingParams(), seed=0, **settings):  # noqa: B008
    """The End events of all rows, in row order, of the model alone."""
    generation = GenerationConfig(max_new_tokens=n, **settings)
    speculation = SpeculationConfig("autoregressive")
    run = engine.generate(
        prompts, sampling=sampling, generation=generation, speculation=speculation, seed=seed
    )
    events = list(run)
    ends = sorted((event for event in events if isinstance(event, End)), key=lambda end: end.row)
    for end in ends:
        tokens = [event for event in events if isinstance(event, Token) and event.row == end.row]
        assert "".join(token.text for token in tokens) == end.text
        assert tuple(token.token_id for token in tokens) == end.token_ids
    return ends


def ids(ends) -> list[tuple[int, ...]]:
    return [end.token_ids for end in ends]


def with_eos(engine, monkeypatch, *tokens):
    monkeypatch.setattr(engine.model, "config", engine.config.with_eos(tokens))


def without_eos(engine, monkeypatch):
    with_eos(engine, monkeypatch)


def test_greedy_tokens_equal_those_of_the_naive_loop(engine):
    """The oracle: the whole sequence through the model again for every token, no cache kept."""
    model, sequence = engine.model, list(PROMPTS[1])
    for _ in range(12):
        block = torch.tensor([sequence])
        hidden = model(
            block, torch.arange(len(sequence)).unsqueeze(0), new_cache(engine.config, capacity=100)
        )
        sequence.append(int(model.logits(hidden[0, -1]).argmax()))
    assert (
        list(run(engine, PROMPTS[1], ignore_eos=True)[0].token_ids) == sequence[len(PROMPTS[1]) :]
    )


@pytest.mark.parametrize("sampling", [SamplingParams(), NOISY])
def test_a_ragged_batch_gives_every_row_what_it_gets_alone(engine, sampling):
    together = run(engine, PROMPTS, sampling=sampling, seed=[7, 8, 9, 10])
    alone = [
        run(engine, prompt, sampling=sampling, seed=7 + b)[0] for b, prompt in enumerate(PROMPTS)
    ]
    assert ids(together) == ids(alone)
    assert [end.text for end in together] == [end.text for end in alone]


def test_rows_that_end_early_do_not_disturb_the_others(engine, monkeypatch):
    without_eos(engine, monkeypatch)
    free = run(engine, PROMPTS)
    with_eos(engine, monkeypatch, free[0].token_ids[3], free[2].token_ids[0])
    ended = run(engine, PROMPTS)
    assert len(ended[0].token_ids) <= 4
    assert len(ended[2].token_ids) == 1
    for end, whole in zip(ended, free, strict=True):
        assert end.token_ids == whole.token_ids[: len(end.token_ids)]
        assert end.finish_reason == ("length" if len(end.token_ids) == 12 else "eos")


@pytest.mark.parametrize("chunk", [1, 7, 17, 50, 1000])
def test_the_prefill_chunk_changes_nothing(engine, chunk):
    assert ids(run(engine, PROMPTS, prefill_chunk=chunk)) == ids(run(engine, PROMPTS))


def test_one_engine_serves_many_runs_as_fresh_engines_do(engine, folder):
    first, second = run(engine, PROMPTS[1]), run(engine, PROMPTS[0])
    fresh = [
        run(minitri.load(str(folder), dtype="float32", device="cpu"), prompt)
        for prompt in PROMPTS[1::-1]
    ]
    assert [ids(first), ids(second)] == [ids(ends) for ends in fresh]


@pytest.mark.parametrize("num_events", range(0, 9, 2))
def test_a_caller_may_stop_at_any_moment(engine, num_events):
    generation = engine.generate(
        PROMPTS[1], generation=GenerationConfig(max_new_tokens=12, prefill_chunk=16)
    )
    seen = list(itertools.islice(generation, num_events))
    assert len(seen) == num_events
    assert generation.stats.num_generated_tokens == sum(isinstance(event, Token) for event in seen)
    generation.close()
    generation.close()
    assert list(generation) == []
    assert ids(run(engine, PROMPTS[1])) == ids(run(engine, PROMPTS[1]))


def test_events_come_in_order_and_count_right(engine):
    generation = engine.generate(
        PROMPTS, generation=GenerationConfig(max_new_tokens=3, prefill_chunk=16, ignore_eos=True)
    )
    events = list(generation)
    prefill = [event for event in events if isinstance(event, PrefillProgress)]
    assert [(event.row, event.num_done) for event in prefill] == [
        (0, 3),
        (1, 16),
        (1, 32),
        (1, 48),
        (1, 50),
        (2, 1),
        (3, 16),
        (3, 20),
    ]
    assert events[: len(prefill)] == prefill
    stats = generation.stats
    assert (stats.num_prompt_tokens, stats.num_prefilled_tokens) == (74, 74)
    assert (stats.num_generated_tokens, stats.num_decoded_tokens) == (12, 8)
    assert stats.ms_per_token > 0


def test_finished_rows_are_not_counted_as_decoded(engine, monkeypatch):
    without_eos(engine, monkeypatch)
    free = run(engine, PROMPTS)
    with_eos(engine, monkeypatch, free[0].token_ids[0])
    ends = run(engine, PROMPTS)
    lengths = [len(end.token_ids) for end in ends]
    assert lengths[0] == 1
    assert ends[0].stats.num_generated_tokens == sum(lengths)
    assert ends[0].stats.num_decoded_tokens == sum(lengths) - len(lengths)


def test_text_held_back_for_a_stop_string_appears_when_the_row_ends(engine):
    free = run(engine, PROMPTS[0], ignore_eos=True)[0]
    end = run(engine, PROMPTS[0], ignore_eos=True, stop=(free.text[-2:] + "never",))[0]
    assert (end.text, end.finish_reason) == (free.text, "length")


def test_what_waits_for_more_appears_when_an_end_token_comes(engine, monkeypatch):
    """Held back: half of a character in the decoder, the start of a stop string in the scanner."""
    half = engine.tokenizer.encode("🦥")[:2]
    begun = engine.tokenizer.encode("EN")
    for tokens, shown in ((half, "\ufffd"), (begun, "EN")):
        request = Request([5], generation=GenerationConfig(stop=("END",)))
        row = Row(0, request, [5], engine.tokenizer)
        text = "".join(row.push(token, "bonus", (2,)) for token in [*tokens, 2])
        assert (text, row.finish_reason) == (shown, "eos")


@pytest.mark.parametrize(
    "pieces", [["abcSTOPdef"], ["abcS", "TOPdef"], ["abc", "S", "T", "O", "P", "def"]]
)
def test_stop_strings_do_not_care_how_text_is_cut(pieces):
    scanner = StopScanner(("STOP", "STAY"))
    assert "".join(scanner.push(piece) for piece in pieces) == "abc"
    assert scanner.found
    assert scanner.flush() == ""


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (("abcd", "bc"), "xabcdy", "xa"),  # the one that is complete first
        (("bc", "abc"), "xabcd", "x"),  # of two that end together the longer one
        (("aab", "ab"), "aaab", "a"),
        (("late", "a"), "xlate", "xl"),  # the earliest in the text, not the first in the list
        (("abcd", "zz"), "abcabcd", "abc"),
        (("aba",), "ababa", ""),
        (("abcd", "bc"), "xabdbd", "xabdbd"),
    ],
)
def test_overlapping_stop_strings_end_a_text_at_the_same_place_however_it_is_cut(stop, text, shown):
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        scanner = StopScanner(stop)
        pieces = [text[start:end] for start, end in itertools.pairwise(starts)]
        assert "".join(scanner.push(piece) for piece in pieces) + scanner.flush() == shown
        assert scanner.found == (shown != text)


def test_a_false_alarm_of_a_stop_string_loses_nothing():
    scanner = StopScanner(("aab",))
    assert [scanner.push(piece) for piece in ("xa", "a", "a", "c")] == ["x", "", "a", "aac"]
    assert not scanner.found


def test_seeds_decide_and_belong_to_rows(engine):
    same = run(engine, [PROMPTS[0]] * 3, sampling=NOISY, seed=5)
    assert len(set(ids(same))) == 3
    assert ids(same) == ids(run(engine, [PROMPTS[0]] * 3, sampling=NOISY, seed=[5, 6, 7]))
    assert ids(run(engine, PROMPTS[0], sampling=NOISY, seed=6)) == [same[1].token_ids]


@pytest.mark.slow
def test_the_engine_draws_from_the_distribution_of_its_model(engine, monkeypatch):
    """First and second token of 3,000 rows, chi-square against the exact joint distribution, cells
    of at least 8 expected.

    A false alarm has odds below 10^-5 (6 standard deviations of the chi-square distribution) and
    the seeds are fixed.
    """
    without_eos(engine, monkeypatch)
    model, sampling, num_rows = engine.model, SamplingParams(temperature=0.7, top_k=5), 3000
    prompt = PROMPTS[0]

    def distribution(sequence):
        hidden = model(
            torch.tensor([sequence]),
            torch.arange(len(sequence)).unsqueeze(0),
            new_cache(engine.config),
        )
        return probs_from_logits(model.logits(hidden[:, -1]), sampling)[0].double()

    joint = {}
    for first, p in enumerate(distribution(prompt).tolist()):
        if p > 0:
            for second, q in enumerate(distribution([*prompt, first]).tolist()):
                if q > 0:
                    joint[first, second] = p * q
    assert sum(joint.values()) == pytest.approx(1)
    counts = dict.fromkeys(joint, 0)
    for end in run(engine, [prompt] * num_rows, n=2, sampling=sampling, seed=100):
        counts[end.token_ids] += 1  # a KeyError here is a token of probability 0
    cells = [(counts[pair], num_rows * p) for pair, p in joint.items() if num_rows * p >= 8]
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert chi_square < len(cells) + 6 * (2 * len(cells)) ** 0.5


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ("", "the prompt is empty"),
        ([], "there is no prompt"),
        ([[]], "the prompt is empty"),
        (["fine", ""], "the prompt is empty"),
        ([3, 320], "token id 320; .* from 0 to 319"),
        ([[3], [-1]], "token id -1"),
        (
            [7] * 501,
            "prompt has 501 tokens but .* holds 512 minus max_new_tokens=12; keep at most 500 ",
        ),
    ],
)
def test_bad_prompts_are_refused_before_any_work(engine, prompts, match):
    with pytest.raises(InputError, match=match):
        engine.generate(prompts, generation=GenerationConfig(max_new_tokens=12))


def test_prompts_may_be_tensors_and_arrays(engine):
    wanted = ids(run(engine, PROMPTS[0]))
    assert ids(run(engine, torch.tensor(PROMPTS[0]))) == wanted
    assert ids(run(engine, torch.tensor([PROMPTS[0]]).numpy())) == wanted


def test_a_run_may_begin_inside_inference_mode(engine):
    with torch.inference_mode():
        generation = engine.generate(PROMPTS[0], generation=GenerationConfig(max_new_tokens=3))
        next(generation)
    assert sum(isinstance(event, Token) for event in generation) == 3


@pytest.mark.parametrize("prompt", [b"She had", ["a", 3], [1.5], "a\udcff", [None]])
def test_prompts_of_the_wrong_kind_are_refused(engine, prompt):
    with pytest.raises(InputError, match="the prompt is"):
        engine.generate(prompt)


@pytest.mark.parametrize("seed", [-1, 2**32, [1], [1, 2, 3], [0, None], 1.5, None])
def test_bad_seeds_are_refused(engine, seed):
    with pytest.raises(InputError, match="seed is"):
        engine.generate(PROMPTS[:2], seed=seed)


def test_integers_of_other_libraries_are_seeds(engine):
    assert ids(run(engine, PROMPTS[0], sampling=NOISY, seed=np.int64(3))) == ids(
        run(engine, PROMPTS[0], sampling=NOISY, seed=[3])
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 8 * 10**18},
        {"budget": 10**20, "chunk_size": 1},
        {"chunk_size": 1024},
        {"budget": 4096},
    ],
)
def test_a_budget_beyond_all_measure_is_clipped(engine, settings):
    """Clipped to what the texts can fill; no more memory is reserved than for them."""
    speculation, generation = (
        minitri.SpeculationConfig("retrieval", **settings),
        GenerationConfig(4, ignore_eos=True),
    )
    end = list(engine.generate(PROMPTS[0], generation=generation, speculation=speculation))[-1]
    assert end.token_ids == run(engine, PROMPTS[0], n=4, ignore_eos=True)[0].token_ids
    assert end.stats.kv_cache_bytes < 1 << 20


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 8.0},
        {"prefill_chunk": 0},
        {"stop": ("",)},
        {"max_new_tokens": True},
        {"max_new_tokens": 2**31},
        {"stop": 3},
        {"stop": (3,)},
        {"stop": {"END"}},
        {"stop": ("\udcff",)},
        {"ignore_eos": "yes"},
        {"offload": 1},
        {"on_chip": 1.5, "offload": True},
    ],
)
def test_bad_limits_are_refused(bad):
    words = "whole number|it must be strings|a stop string|one of True, False|means nothing without"
    with pytest.raises(InputError, match=words):
        GenerationConfig(**bad)


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_stop_strings_may_be_any_sequence_or_one_text(stop):
    assert GenerationConfig(stop=stop).stop == ("END",)


@pytest.mark.parametrize(
    ("settings", "bad"),
    [
        (SamplingParams, {"temperature": "1"}),
        (SamplingParams, {"temperature": True}),
        (SamplingParams, {"temperature": float("nan")}),
        (SamplingParams, {"top_p": None}),
        (SamplingParams, {"top_k": 1.5}),
        (SamplingParams, {"min_p": "0.1"}),
        (SpeculationConfig, {"method": None}),
        (SpeculationConfig, {"gamma1": "2"}),
        (SpeculationConfig, {"budget": "many"}),
        (SpeculationConfig, {"coupled": 1}),
        (SpeculationConfig, {"rebuild_threshold": "0.9"}),
        (SpeculationConfig, {"gamma2": False}),
        (SpeculationConfig, {"num_recent_tokens": 10**30}),
        (SpeculationConfig, {"policy": ["h2o"]}),
        (SpeculationConfig, {"observation_window": 10**9}),
    ],
)
def test_values_of_a_wrong_kind_are_refused_by_name(settings, bad):
    [(name, value)] = bad.items()
    with pytest.raises(InputError, match=name) as caught:
        settings(**bad)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("bad", [{"sampling": {}}, {"speculation": "triforce"}, {"generation": 3}])
def test_settings_of_a_wrong_kind_are_refused(engine, bad):
    with pytest.raises(InputError, match=r"where a \w+ belongs"):
        engine.generate(PROMPTS[0], **bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"model": None},
        {"draft": 3},
        {"dtype": torch.float32},
        {"device": Path("cpu")},
        {"rope_scaling": 4},
    ],
)
def test_load_says_which_argument_is_no_text(folder, bad):
    [name] = bad
    with pytest.raises(InputError, match=f"^{name} is .*; it must be a text"):
        minitri.load(**{"model": folder, **bad})


def test_a_run_closes_itself_and_reads_well(engine):
    with engine.generate(PROMPTS[0], generation=GenerationConfig(8, ignore_eos=True)) as run:
        next(event for event in run if isinstance(event, Token))
        assert repr(run) == f"<Generation of {engine.config.name}: 1 tokens, open>"
    assert next(run, None) is None
    assert repr(engine) == f"<Engine {engine.config.name}, drafter suffix, float32 on cpu>"


def test_complete_gives_the_whole_output_at_once(engine):
    settings = {"sampling": NOISY, "seed": 3, "generation": GenerationConfig(8, ignore_eos=True)}
    done = engine.complete(PROMPTS[0], **settings)
    [end] = run(engine, PROMPTS[0], n=8, ignore_eos=True, sampling=NOISY, seed=3)
    assert (done.text, done.token_ids, done.finish_reason) == (end.text, end.token_ids, "length")
    assert "stats" not in repr(done)
    with pytest.raises(InputError, match="complete takes one prompt, got 2; use generate"):
        engine.complete([[1, 2], [3]])


@pytest.mark.parametrize("bad", [5, None, True, {"a": 1}, {3, 4}, torch.tensor(3), Path("x")])
def test_what_is_no_prompt_is_refused(engine, bad):
    for run_it in (engine.generate, engine.complete):
        with pytest.raises(InputError, match="the prompt is .*; give a text, a list of token ids"):
            run_it(bad)


def test_prompts_can_be_checked_before_weights_are_read(folder):
    class EnoughError(Exception):
        pass

    def look(tokenizer, config):
        assert tokenizer.encode("a")
        assert config.vocab_size == 320
        raise EnoughError

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("minitri.loading.open_models.load_model", None)
        with pytest.raises(EnoughError):
            minitri.load(folder, before_weights=look)


def test_weights_that_are_not_numbers_give_an_error_and_no_text(folder):
    broken = minitri.load(str(folder), dtype="float32", device="cpu")
    broken.model.norm.weight[3] = torch.nan
    with pytest.raises(InputError, match="logits that are not finite"):
        run(broken, PROMPTS[0])


def test_a_prompt_that_fills_the_context_to_the_last_token_runs(engine):
    assert len(run(engine, [7] * 500, n=12, ignore_eos=True)[0].token_ids) == 12


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"device": "abacus"}, "device 'abacus'"),
        ({"device": "mps"}, "device 'mps'"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"rope_scaling": "magic:4"}, "is not KIND:FACTOR"),
    ],
)
def test_bad_settings_of_load_are_refused(folder, settings, match):
    with pytest.raises(InputError, match=match):
        minitri.load(str(folder), **settings)


@pytest.mark.parametrize("has_it", [True, False])
def test_a_dtype_without_instructions_is_warned_of(has_it, monkeypatch, caplog):
    monkeypatch.setattr("minitri.loading.devices.can_pack", lambda dtype, device: has_it)
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert ("no instructions for bfloat16" in caplog.text) == (not has_it)


def test_a_default_drafter_that_cannot_be_had_gives_way_to_ngrams(folder, monkeypatch, caplog):
    monkeypatch.setattr(
        "minitri.loading.open_models.default_draft", lambda model: "no-such-drafter"
    )
    engine = minitri.load(str(folder), dtype="float32", device="cpu")
    assert engine.draft is None
    assert "suffix lookup takes its place" in caplog.text
    with pytest.raises(InputError, match="no-such-drafter"):
        minitri.load(str(folder), draft="no-such-drafter", dtype="float32", device="cpu")


def test_a_cache_that_does_not_fit_says_how_large_it_is(engine, monkeypatch):
    def out_of_memory(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    engine.release()
    monkeypatch.setattr("minitri.memory.FullCache.allocate", out_of_memory)
    with pytest.raises(InputError, match=r"KV cache for 1 x 35 tokens needs .* GB"):
        engine.generate([1, 2, 3], generation=GenerationConfig(max_new_tokens=12))
