"""Any greedy or seed-coupled run gives the tokens, text and reason to end of autoregressive
decoding, or is refused by a one-line `InputError` before its first token.

All is float32 on a CPU, where this is equality. The suite draws few cases, always the same. More of
them, and others, which repeat too:

    MINITRI_FUZZ_SEED=7 MINITRI_FUZZ_EXAMPLES=2000 python -m pytest tests/test_properties.py
"""

import dataclasses
import itertools
import os
import random
from unittest.mock import Mock, patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitri import End, InputError, Request, SpeculationConfig, Token
from minitri.core.decoding.autotuner import Autotuner
from minitri.text.tokenizer import StreamDetokenizer
from tests.conftest import ends_of, tiny_engine
from tests.core.rigs import policy_of
from tests.strategies import Case, case_of, engine_of

NUM_EXAMPLES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "24"))
FUZZ_SEED = int(os.environ.get("MINITRI_FUZZ_SEED", "0"))
GROUP = 4
SPECULATION = {field.name for field in dataclasses.fields(SpeculationConfig)}
Output = tuple[tuple[int, ...], str, str]
"""What is to be equal of a row: tokens, text, reason to end."""


def run(case: Case, rows: slice = slice(None), **speculation) -> list[Output] | str:
    """The outputs of a case, or of some of its rows; or the message of its error."""
    engine = engine_of(case.drafter)
    engine.release()
    events, refusal, rng = [], "", random.Random(case.number)
    fields = {**case.settings, **speculation}
    fields["policy"] = policy_of(fields["policy"])

    def choose(tuner):
        tuner.plan = rng.choice(config.plans)
        return tuner.plan

    try:
        config = SpeculationConfig(**{it: fields.pop(it) for it in SPECULATION & fields.keys()})
        with patch.object(Autotuner, "choose", choose):
            seed = case.seed + (rows.start or 0)
            for event in engine.generate(case.ids[rows], speculation=config, seed=seed, **fields):
                events.append(event)
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        assert not any(isinstance(event, Token) for event in events), refusal
        return refusal
    ends = ends_of(events)
    for end in ends:
        own = [event for event in events if event.row == end.row]
        assert own[-1] is end
        assert "".join(event.text for event in own if isinstance(event, Token)) == end.text
    check_counts(ends)
    return [(end.token_ids, end.text, end.finish_reason) for end in ends]


def check_counts(ends: list[End]) -> None:
    stats, lengths = ends[0].stats, [len(end.token_ids) for end in ends]
    assert stats.num_generated_tokens == sum(lengths)
    num_decoded = stats.num_decoded_tokens
    assert num_decoded == sum(lengths) - len(lengths)
    if num_decoded:
        speed = num_decoded / stats.decode_seconds
        assert stats.tokens_per_second == pytest.approx(speed, rel=1e-6)
    num_cached = sum(end.row_stats.num_cached_tokens for end in ends)
    assert stats.num_prefilled_tokens == stats.num_prompt_tokens - num_cached
    assert sum(stats.steps_per_plan.values()) <= max(lengths) - 1  # a token a step at least
    for level in stats.stages:
        assert 0 <= level.num_accepted_tokens <= level.num_tested_tokens <= level.num_draft_tokens
        assert level.num_tested_tokens - level.num_accepted_tokens <= level.num_rounds


@pytest.mark.parametrize("group", range(NUM_EXAMPLES // GROUP))
def test_greedy_and_coupled_runs_equal_autoregressive_ones_or_are_refused(group):
    for number in range(GROUP):
        case = case_of(1_000_000 * FUZZ_SEED + GROUP * group + number)
        print(case)  # shown where it fails
        got = run(case)
        if isinstance(got, list):
            assert got == run(case, method="autoregressive")
            row = case.number % len(got)
            assert run(case, slice(row, row + 1)) == [got[row]]


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before its first stop string, reading character by character, if there is one."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return None


def test_a_text_ends_at_every_place_of_a_block():
    """End tokens and stop strings may be guesses, recovered or bonus tokens."""
    engine = tiny_engine()
    sizes = {"budget": 16, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3, "coupled": True}
    text = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "max_new_tokens": 18}

    def ends(eos=(), stops=((),)):
        engine.model.config = dataclasses.replace(engine.model.config, eos_token_ids=eos)
        requests = [Request([*range(5, 45)], 3, stop=stop, **text) for stop in stops]
        return engine.stream(requests, method="triforce", **sizes).results()

    [free] = ends()
    origins = set()
    for place, token in enumerate(free.tokens):
        if token.token_id not in free.token_ids[:place]:
            [end] = ends((token.token_id,))
            assert (end.token_ids, end.finish_reason) == (free.token_ids[: place + 1], "eos")
            origins.add(token.origin)
    assert origins == {"draft", "retrieval", "recovered", "bonus"}
    stops = [(free.text[start : start + 3],) for start in range(0, len(free.text) - 3, 3)]
    for stop, end in zip(stops, ends(stops=stops), strict=True):
        assert (end.text, end.finish_reason) == (cut_at_stop(free.text, stop), "stop")


@settings(max_examples=100, derandomize=True, deadline=None)
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
    tokenizer = Mock(strips_space=False, control_ids=lambda _: {})
    tokenizer.text_bytes = lambda pieces, _: "".join(pieces).encode()
    reader, shown = StreamDetokenizer(tokenizer, [], stop=stops), ""
    for start, end in itertools.pairwise(sorted({0, *borders, len(text)})):
        piece, found = reader(text[start:end])
        shown += piece
        wanted = cut_at_stop(text[:end], tuple(stops))
        assert found == (wanted is not None)
        assert shown == wanted if found else text.startswith(shown)
        if found:
            return
    assert shown + reader(None)[0] == text
