"""Filters that look at the text, through the real engine: next to `transformers`, in batches, on
compiled kernels, in open runs."""

import dataclasses
import json
import re

import pytest
import torch

import minitri
from minitri import End, Grammar, Request, SamplingParams
from tests.cascades import texts_of
from tests.core.rigs import random_prompt
from tests.strategies import GRAMMARS

METHODS = {
    "auto": {},
    "naive": {"method": "naive", "gamma1": 3},
    "triforce": {"method": "triforce", "gamma1": 2, "gamma2": 4, "budget": 32},
    "by token": {"method": "triforce", "gamma1": 2, "gamma2": 4, "verification": "token"},
    "tree": {"method": "retrieval", "tree": "8", "budget": 32},
}
SHAPES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(logit_bias={7: 5.0, 30: -100}, min_tokens=9),
    SamplingParams(bad_words=["She", "e", " had been"], min_tokens=20),
    *(SamplingParams(grammar=grammar, presence_penalty=0.5) for grammar in GRAMMARS),
]


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


BIAS = {5: 4.0, 40: -20.0, 99: 2.5}
ALL = {"repetition_penalty": 1.3, "logit_bias": BIAS, "min_tokens": 12, "bad_words": ["s", "the"]}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["autoregressive", "triforce"])
@pytest.mark.parametrize("settings", [{"repetition_penalty": 0.7}, ALL], ids=["reward", "all"])
def test_greedy_texts_are_those_of_transformers(engine, theirs, settings, method, seed):
    prompt = torch.tensor([random_prompt(engine.config, 40, seed=seed)])
    words = settings.get("bad_words", [])
    ids = [ids for word in words for ids in engine.tokenizer.spellings(word)]
    bias = [[[token], bias] for token, bias in settings.get("logit_bias", {}).items()]
    wanted = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=40,
        pad_token_id=0,
        repetition_penalty=settings["repetition_penalty"],
        min_new_tokens=settings.get("min_tokens"),
        sequence_bias=bias or None,
        bad_words_ids=ids or None,
    )
    got = engine.complete(prompt[0], max_new_tokens=40, method=method, **settings)
    assert list(got.token_ids) == wanted[0, prompt.shape[1] :].tolist()
    assert got.token_ids != engine.complete(prompt[0], max_new_tokens=40, method=method).token_ids


def requests_of(engine, temperature: float, num_new: int) -> list[Request]:
    """One for every kind of filter."""
    return [
        Request(
            random_prompt(engine.config, 30 + 7 * b, seed=b),
            b,
            dataclasses.replace(params, temperature=temperature),
            max_new_tokens=num_new + b,
        )
        for b, params in enumerate([SamplingParams(), *SHAPES])
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_compiled_kernels_texts_are_equal_to_the_bit(folder, dtype, method):
    """Greedy and coupled, as one batch."""
    engine = minitri.load(folder, dtype=dtype, device="cpu")
    if not engine.model.execution.is_row_invariant:
        pytest.skip("no compiled kernels here")
    if dtype == "bfloat16" and method == "tree":
        pytest.skip("the order of slots in a tree decides its last bits")
    for coupled in (False, True):
        requests = requests_of(engine, 0.8 if coupled else 0, 30)
        wanted, got = (
            texts_of(engine.stream(requests, coupled=coupled, **settings))
            for settings in ({"method": "autoregressive"}, METHODS[method])
        )
        assert got == wanted


@pytest.mark.parametrize("method", ["naive", "triforce", "tree"])
def test_a_row_is_filtered_by_its_own_text_whatever_its_neighbours_do(engine, method):
    """Requests that come and go in two places, by chance; each gets what it gets alone."""
    requests = requests_of(engine, 0.9, 12)
    together = texts_of(engine.stream(requests, batch_size=2, **METHODS[method]))
    alone = [texts_of(engine.stream([request], **METHODS[method]))[0] for request in requests]
    assert together == alone


@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
def test_an_output_follows_its_grammar_and_says_so(engine, grammar):
    settings = {"temperature": 1.0, "seed": 1, "max_new_tokens": 200}
    end = engine.complete("She", grammar=grammar, **settings)
    is_whole = end.finish_reason == "eos"
    assert is_whole or end.finish_reason == "length"
    if grammar.kind == "choice":
        assert is_whole
        assert end.text in json.loads(grammar.text)
    elif grammar.kind.startswith("json") and is_whole:
        assert isinstance(json.loads(end.text), dict)
    elif is_whole:
        pattern = grammar.text if grammar.kind == "regex" else "[a-z]{1,9}( [a-z]{1,9})*"
        assert re.fullmatch(pattern, end.text)


EXPLODING = Grammar("regex", "(.*a){40}.*b.{200}c")


def test_a_row_whose_grammar_gives_up_ends_alone_and_says_why(engine):
    """A pattern with more states than memory has room for is refused step by step."""
    exploding = SamplingParams(1.0, grammar=EXPLODING)
    other = Request([5] * 9, 1, SamplingParams(1.0), max_new_tokens=20, ignore_eos=True)
    wanted = [Request([7] * 9, 1, exploding, max_new_tokens=300), other]
    events = engine.stream(wanted, batch_size=2)
    ends = {event.row: event for event in events if isinstance(event, End)}
    assert ends[1].token_ids == engine.stream([other], method="auto").results()[0].token_ids
    assert ends[0].finish_reason in ("failed", "length")
