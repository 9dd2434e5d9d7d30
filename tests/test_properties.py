"""Any greedy or seed-coupled run gives the tokens, text and reason to end of autoregressive
decoding, or is refused by a one-line `InputError` before its first token.

All is float32 on a CPU, where this is equality. The suite draws few examples, always the same. More
of them, and others, which repeat too:

    MINITRI_FUZZ_SEED=7 MINITRI_FUZZ_EXAMPLES=2000 python -m pytest tests/test_properties.py
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from minitri import (
    End,
    Engine,
    GenerationConfig,
    InputError,
    SamplingParams,
    SpeculationConfig,
    Token,
)
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.decoding.noise import hashed_uniforms, noise_keys
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.stats import Stats
from minitri.text.rows import text_filters
from minitri.text.text_stream import StopScanner
from tests.core.policies import policy_of
from tests.core.rigs import fresh_read
from tests.strategies import END_TOKEN, Case, cases, make_engine

NUM_EXAMPLES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "100"))
FUZZ_SEED = int(os.environ.get("MINITRI_FUZZ_SEED", "0"))
GROUP = 9
ORIGINS = {"autoregressive": set(), "naive": {"draft"}, "retrieval": {"retrieval"}}


def examples(number: int, **options) -> hypothesis.settings:
    """Of so many examples, and one bug at a time."""
    plain = dict.fromkeys(("database", "deadline"), None)
    plain |= dict.fromkeys(("report_multiple_bugs", "print_blob"), False)
    skipped = list(HealthCheck)
    return hypothesis.settings(
        max_examples=number, suppress_health_check=skipped, **plain, **options
    )


@dataclass(frozen=True)
class Run:
    """What came out of a run: what is to be equal of each row, or the message of its error."""

    outputs: list[tuple[tuple[int, ...], str, str]]
    error: str | None = None


@contextlib.contextmanager
def chosen_plans(seed: int | None) -> Iterator[None]:
    """No clock, no warnings. With a seed, plans at random: any method, then any gammas."""
    rng = random.Random(seed)

    def choose(tuner):
        methods = sorted({plan.method for plan in tuner._plans})
        method = rng.choice(methods)
        tuner.plan = rng.choice([plan for plan in tuner._plans if plan.method == method])
        return tuner.plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitri.core.stack.may_use_clock", lambda *_, **__: False)
        patch.setattr(logging.getLogger("minitri"), "disabled", True)  # a window may be too large
        if seed is not None:
            patch.setattr(Autotuner, "choose", choose)
        yield


def run(engine: Engine, case: Case, rows: slice = slice(None), **speculation) -> Run:
    """Runs a case, or some of its rows, and checks all that can be seen in one run."""
    prompts, events = case.ids[rows], []
    seed = case.seed if rows == slice(None) else case.row_seed
    try:
        with chosen_plans(case.plan_seed):
            wanted = {**case.speculation, **speculation}
            wanted["policy"] = policy_of(wanted["policy"])
            config = SpeculationConfig(**wanted)
            generation = GenerationConfig(**{"stop": case.stop, **case.generation})
            sampling = SamplingParams(**case.sampling)
            settings = {"generation": generation, "speculation": config, "sampling": sampling}
            for event in engine.generate(prompts, seed=seed, **settings):
                events.append(event)
    except InputError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert not any(isinstance(event, Token) for event in events), message
        return Run([], error=message)
    ends = [event for event in events if isinstance(event, End)]
    ends.sort(key=lambda end: end.row)
    assert [end.row for end in ends] == list(range(len(prompts)))
    for end in ends:
        check_row(engine, [event for event in events if getattr(event, "row", -1) == end.row], end)
        check_end(engine, generation, end)
    origins = {event.origin for event in events if isinstance(event, Token)}
    assert origins <= ORIGINS.get(config.method, {"draft", "retrieval"}) | {"recovered", "bonus"}
    check_counts(ends[0].stats, ends, prompts)
    return Run([(end.token_ids, end.text, end.finish_reason) for end in ends])


def check_row(engine: Engine, events: list, end: End) -> None:
    """The events of a row tell the same as its end, which is the last of them."""
    assert events[-1] is end
    tokens = [event for event in events if isinstance(event, Token)]
    assert tuple(token.token_id for token in tokens) == end.token_ids
    assert "".join(token.text for token in tokens) == end.text
    assert all(0 <= token < engine.config.vocab_size for token in end.token_ids)


def check_end(engine: Engine, generation: GenerationConfig, end: End) -> None:
    """A text ends for a reason, as soon as there is one."""
    eos = () if generation.ignore_eos else engine.config.eos_token_ids
    *before, last = end.token_ids
    assert not set(before) & set(eos)
    assert not any(stop in end.text for stop in generation.stop)
    assert len(end.token_ids) <= generation.max_new_tokens
    if end.finish_reason == "stop":
        assert generation.stop
    else:
        assert end.finish_reason == ("eos" if last in eos else "length")
        assert last in eos or len(end.token_ids) == generation.max_new_tokens


def check_counts(stats: Stats, ends: list[End], prompts: list[list[int]]) -> None:
    lengths = [len(end.token_ids) for end in ends]
    assert stats.num_generated_tokens == sum(lengths)
    assert stats.num_decoded_tokens == sum(lengths) - len(lengths)
    num_cached = sum(end.row_stats.num_cached_tokens for end in ends)
    assert stats.num_prompt_tokens == sum(map(len, prompts))
    assert stats.num_prefilled_tokens == stats.num_prompt_tokens - num_cached
    assert sum(stats.steps_per_plan.values()) <= max(lengths) - 1  # a token a step at least
    for level in stats.stages:
        assert 0 <= level.num_accepted_tokens <= level.num_tested_tokens <= level.num_draft_tokens
        assert level.num_tested_tokens - level.num_accepted_tokens <= level.num_rounds
    assert stats.stages[-1].name == "target"


def with_ends(case: Case, free: Run) -> tuple[Case, tuple[int, ...]]:
    """The case with stop strings and end tokens from the text that goes on without them."""
    stops = list(case.stop)
    for b, start, length in case.stops_in_text:
        if text := free.outputs[b][1]:
            start %= len(text)
            stops.append(text[start : start + length])
    ids = [(free.outputs[b][0], place) for b, place in case.eos_in_text]
    eos = tuple(tokens[place % len(tokens)] for tokens, place in ids)
    return dataclasses.replace(case, stop=tuple(stops)), eos


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before its first stop string, reading character by character, if there is one."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return None


def check_stops(case: Case, eos: tuple[int, ...], free: Run, stopped: Run) -> None:
    """What ends a text takes nothing from it but its end."""
    for (whole_ids, whole, _), (ids, text, reason) in zip(
        free.outputs, stopped.outputs, strict=True
    ):
        assert whole_ids[: len(ids)] == ids
        if ids[-1] in eos and not case.generation["ignore_eos"]:
            continue  # a character may be incomplete
        cut = cut_at_stop(whole, case.stop)
        assert text == (whole if cut is None else cut)
        assert reason == ("length" if cut is None else "stop")


@torch.inference_mode()
def check_maxima(engine: Engine, case: Case, tokens: tuple[int, ...]) -> None:
    """Each token of the row is the one that a single pass over the whole text would choose."""
    prompt, sampling = case.ids[case.row], SamplingParams(**case.sampling)
    _, scores_TV = fresh_read(engine.model, prompt + list(tokens[:-1]))
    scores_TV = scores_TV[len(prompt) - 1 :]
    if own := text_filters(sampling, prompt, engine.tokenizer, engine.config):
        own.apply(scores_TV, [[*tokens[:n]] for n in range(len(tokens))])
    if case.speculation["coupled"] and sampling.temperature > 0:
        T, V = scores_TV.shape
        keys = noise_keys(case.row_seed, len(prompt) + torch.arange(T))
        uniforms_TV = hashed_uniforms(keys.unsqueeze(1), torch.arange(V))
        log_probs_TV = probs_from_logits(scores_TV, sampling).log().double()
        scores_TV = log_probs_TV - (-uniforms_TV.log()).log()
    for i, (token, scores_V) in enumerate(zip(tokens, scores_TV, strict=True)):
        best = int(scores_V.argmax())
        gap = float(scores_V[best] - scores_V[token])
        assert token == best, f"token {i} is {token}, not {best}; their scores differ by {gap:.2e}"


def check_equal(engine: Engine, case: Case, wanted: Run, got: Run) -> None:
    """The same outputs; else names the gap where a row departs."""
    for b, (old, new) in enumerate(zip(wanted.outputs, got.outputs, strict=True)):
        if old != new:
            check_maxima(engine, dataclasses.replace(case, row=b), new[0])
    assert got.outputs == wanted.outputs


@pytest.mark.parametrize("group", range(math.ceil(NUM_EXAMPLES / GROUP)))
def test_greedy_and_coupled_runs_equal_autoregressive_ones_or_are_refused(group):
    """In groups, because from the tenth example on hypothesis draws mostly variants of those that
    it has had."""
    seed = hypothesis.seed(1_000_000 * FUZZ_SEED + group)
    seed(examples(GROUP)(given(cases())(check_case)))()


@pytest.mark.slow
@pytest.mark.parametrize("group", range(math.ceil(300 / GROUP)))
def test_runs_with_filters_that_look_at_the_text_do_so_too(group):
    seed = hypothesis.seed(77_000_000 + group)
    seed(examples(GROUP)(given(cases(odds=1))(check_case)))()


def check_case(case: Case) -> None:
    free_case = dataclasses.replace(
        case, stop=(), generation={**case.generation, "ignore_eos": True}
    )
    # What forbids or demands an end token must know it from the start.
    ends = (END_TOKEN,) if case.sampling.get("grammar") or case.sampling.get("min_tokens") else ()
    engine, eos, free = make_engine(case, ends), ends, None
    if case.stop or case.stops_in_text or case.eos_in_text:
        free = run(engine, free_case, method="autoregressive")
        if free.error is None:
            case, eos = with_ends(case, free)
            eos = ends or eos
            engine = make_engine(case, eos)
    wanted = run(engine, case, method="autoregressive")
    got = run(engine, case)
    if got.error is not None:
        assert run(engine, case).error == got.error
        return
    assert wanted.error is None
    if free is not None:
        check_stops(case, eos, free, wanted)
    check_maxima(engine, case, wanted.outputs[case.row][0])
    check_equal(engine, case, wanted, got)
    if len(case.prompts) > 1:
        alone = run(engine, case, slice(case.row, case.row + 1))
        assert alone.outputs == [got.outputs[case.row]]


@examples(500, derandomize=True)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 12)),
)
@example("xlate", ["late", "a"], range(9))  # the earliest in the text, not in the list
@example("xabcd", ["bc", "abc"], range(9))  # of two that end together the longer one
@example("abcabcd", ["abcd", "zz"], range(9))
@example("xaaac", ["aab"], range(9))  # a false alarm loses nothing
def test_a_stop_string_ends_a_text_at_the_same_place_however_it_is_cut(text, stops, borders):
    scanner, shown = StopScanner(stops), ""
    places = sorted({0, *borders, len(text)})
    for start, end in itertools.pairwise(places):
        shown += scanner.push(text[start:end])
        wanted = cut_at_stop(text[:end], tuple(stops))
        assert scanner.found == (wanted is not None)
        assert shown == wanted if scanner.found else text.startswith(shown)
    wanted = cut_at_stop(text, tuple(stops))
    assert shown + scanner.flush() == (text if wanted is None else wanted)
