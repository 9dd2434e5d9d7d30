"""Filters that look at the text, through the real engine: next to `transformers`, in batches, on
compiled kernels, in open runs, in captured ones; texts of schemas."""

import itertools
import json

import pytest
import torch

import minitri
from minitri import End, Grammar, InputError, Request, SamplingParams, SpeculationConfig
from minitri.core.decoding.text_filters import TextFilters
from minitri.core.model.block import read_block
from tests.cascades import texts_of
from tests.chi_square import (
    FALSE_ALARM,
    NUM_TOKENS,
    PROMPT,
    SMALL,
    V,
    costs_that_change,
    count_texts,
    other_model,
    p_value,
    target_model,
)
from tests.core.rigs import new_cache, random_prompt
from tests.strategies import GRAMMARS
from tests.text.test_grammars import END, TEXTS, is_allowed, make_matcher
from tests.text.test_text_filters import Shaped

METHODS = {
    "auto": {},
    "naive": {"method": "naive", "gamma1": 3},
    "retrieval": {"method": "retrieval", "gamma2": 4, "budget": 32},
    "triforce": {"method": "triforce", "gamma1": 2, "gamma2": 4, "budget": 32},
    "by token": {"method": "triforce", "gamma1": 2, "gamma2": 4, "verification": "token"},
    "tree": {"method": "retrieval", "tree": "8", "budget": 32},
}
SHAPES = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "counts": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
    "bias": SamplingParams(logit_bias={7: 5.0, 30: -100}, min_tokens=9),
    "words": SamplingParams(bad_words=["She", "e", " had been"], min_tokens=20),
    **{grammar.kind: SamplingParams(grammar=grammar, presence_penalty=0.5) for grammar in GRAMMARS},
}


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


BIAS = {5: 4.0, 40: -20.0, 99: 2.5}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["autoregressive", "triforce"])
@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"logit_bias": BIAS}, {"sequence_bias": [[[it], bias] for it, bias in BIAS.items()]}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"bad_words": ["e", "the", "in"]}, {"bad_words_ids": ["e", "the", "in"]}),
        (
            {"repetition_penalty": 1.3, "logit_bias": BIAS, "min_tokens": 5, "bad_words": ["s"]},
            {
                "repetition_penalty": 1.3,
                "sequence_bias": [[[it], bias] for it, bias in BIAS.items()],
                "min_new_tokens": 5,
                "bad_words_ids": ["s"],
            },
        ),
    ],
    ids=["penalty", "reward", "bias", "least number", "bad words", "all"],
)
def test_greedy_texts_are_those_of_transformers(engine, theirs, ours, options, method, seed):
    prompt = random_prompt(engine.config, 40, seed=seed)
    if words := options.get("bad_words_ids"):
        spelled = [ids for word in words for ids in engine.tokenizer.spellings(word)]
        options = options | {"bad_words_ids": spelled}
    settings = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, **options}
    ids = torch.tensor([prompt])
    wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    wanted = wanted[0, len(prompt) :].tolist()
    got = engine.complete(prompt, max_new_tokens=40, method=method, **ours)
    assert list(got.token_ids) == wanted
    plain = engine.complete(prompt, max_new_tokens=40, method=method)
    assert got.token_ids != plain.token_ids or not {"logit_bias", "repetition_penalty"} & {*ours}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_compiled_kernels_texts_are_equal_to_the_bit(folder, dtype, method):
    """Greedy and coupled, for every kind of filter, as one batch."""
    engine = minitri.load(folder, dtype=dtype, device="cpu")
    if not engine.model.execution.is_row_invariant:
        pytest.skip("no compiled kernels here")
    if dtype == "bfloat16" and method == "tree":
        pytest.skip("the order of slots in a tree decides its last bits")
    for coupled in (False, True):
        found = []
        for settings in ({"method": "autoregressive"}, METHODS[method]):
            requests = [
                Request(
                    random_prompt(engine.config, 60 + b, seed=b), b, sampling, max_new_tokens=30
                )
                for b, sampling in enumerate(shapes(0.8 if coupled else 0))
            ]
            found.append(texts_of(engine.stream(requests, coupled=coupled, **settings)))
        assert found[0] == found[1]


def shapes(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(**{**vars(params), "temperature": temperature}) for params in SHAPES.values()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_filtered_by_its_own_text_whatever_its_neighbours_do(engine, method):
    """Requests that come and go in two places, by chance; each gets what it gets alone."""
    requests = [
        Request(random_prompt(engine.config, 30 + 7 * b, seed=b), b, params, max_new_tokens=12 + b)
        for b, params in enumerate([SamplingParams(0.9), *shapes(0.9)])
    ]
    settings = {"method": "autoregressive"} if method == "auto" else METHODS[method]
    together = texts_of(engine.stream(requests, batch_size=2, **settings))
    alone = [texts_of(engine.stream([it], **settings))[0] for it in requests]
    assert together == alone


def test_an_output_follows_its_grammar_and_says_so(engine):
    for grammar in GRAMMARS:
        for seed in range(5):
            end = engine.complete(
                "She", grammar=grammar, temperature=1.0, seed=seed, max_new_tokens=300
            )
            assert end.finish_reason in ("eos", "length")
            if end.finish_reason == "eos" and grammar.kind == "json_object":
                assert isinstance(json.loads(end.text), dict)
            if grammar.kind == "choice":
                assert end.finish_reason == "eos"
                assert end.text in json.loads(grammar.text)


def test_after_the_end_only_end_tokens_follow(engine):
    end = engine.complete(
        "She", grammar=Grammar("choice", '["She"]'), ignore_eos=True, max_new_tokens=12, seed=1
    )
    [eos] = engine.config.eos_token_ids
    assert end.text == "She"
    assert set(end.token_ids[-5:]) == {eos}


def test_a_bias_for_a_token_that_is_not_there_is_refused(engine):
    with pytest.raises(InputError, match="logit_bias is for token 320, but .* has 320 tokens"):
        engine.complete("She", logit_bias={320: 1.0})


def joint(shaped: Shaped) -> torch.Tensor:
    """Of three tokens after the prompt, by definition."""
    probs = torch.ones((V,) * NUM_TOKENS, dtype=torch.float64)
    for tokens in itertools.product(range(V), repeat=NUM_TOKENS):
        for i, token in enumerate(tokens):
            probs[tokens] *= shaped.row((*PROMPT, *tokens[:i]))[token]
    return probs


PENALTIES = {"presence_penalty": 1.2, "repetition_penalty": 1.4}
JOINT = {
    "penalties": (SamplingParams(0.9, top_p=0.95, **PENALTIES), None, 5_000),
    "a grammar and a penalty": (SamplingParams(1.0, presence_penalty=1.0), TEXTS, 20_000),
    "bias": (SamplingParams(0.8, top_p=0.9, logit_bias={3: -1.0}), TEXTS, 5_000),
}
HOW = {
    "triforce": {"method": "triforce"},
    "by token": {"method": "triforce", "gamma1": 2, "verification": "token"},
    "auto": {"method": "auto"},
    "coupled": {"method": "triforce", "coupled": True},
    "tree": {"method": "naive", "gamma1": 2, "tree": "4"},
    "tree below": {"method": "triforce", "gamma1": None, "tree": "2x2"},
    "lookup": {"method": "naive", "gamma1": 2},
    "smaller vocabulary": {"method": "triforce"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", JOINT)
def test_three_tokens_follow_the_joint_distribution(case, how, monkeypatch):
    """A false alarm has odds of 1 in 100,000 per test, had the seeds been drawn again."""
    params, texts, num_seeds = JOINT[case]
    target = target_model()
    draft = {"lookup": None, "smaller vocabulary": other_model(V - 1)}.get(how, other_model())

    def scores(text):
        hidden_1TE = read_block(target, [[*text]], new_cache(target.config))
        return target.logits(hidden_1TE[0, -1:])[0, :V].double().tolist()

    def make_filters(request):
        matcher = make_matcher() if texts else None
        return TextFilters(params, PROMPT, V, end_tokens=[END], matcher=matcher)

    with torch.inference_mode():
        shaped = Shaped(V, scores, params, (), texts and is_allowed, len(PROMPT))
        probs = joint(shaped)
    monkeypatch.setattr("minitri.core.stack.prior_seconds", costs_that_change)
    speculation = SpeculationConfig(**{"gamma1": 1, "gamma2": 2, **SMALL, **HOW[how]})
    counts, _ = count_texts(target, draft, params, speculation, num_seeds, make_filters)
    found = p_value(counts, probs)
    print(f"\n  {case}, {how}: p-value {found:.3g} over {int((probs > 0).sum())} texts")
    assert found > FALSE_ALARM


EXPLODING = Grammar("regex", "(.*a){40}.*b.{200}c")


def test_a_row_whose_grammar_gives_up_ends_alone_and_says_why(engine):
    """A pattern with more states than memory has room for is refused step by step."""
    run = engine.open(batch_size=2, reserve=400)
    other = Request([5] * 9, 1, SamplingParams(1.0), max_new_tokens=20, ignore_eos=True)
    run.submit(Request([7] * 9, 1, SamplingParams(1.0, grammar=EXPLODING), max_new_tokens=300))
    run.submit(other)
    ends = {}
    for event in run:
        if isinstance(event, End):
            ends[event.row] = event
        if len(ends) == 2:
            break
    run.close()
    assert ends[1].token_ids == engine.stream([other], method="auto").results()[0].token_ids
    assert ends[0].finish_reason in ("failed", "length")
    if ends[0].error is not None:
        assert "too complex" in str(ends[0].error)
