"""Answers of the server, by the real `openai` client, against the engine itself."""

import math

from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from tests.conftest import SENTENCES

PROMPT = "She had been forced into prudence"


def own_text(engine, prompt=PROMPT, *, seed=7, num=24, temperature=1.0) -> str:
    """What the engine says by itself."""
    return engine.complete(
        prompt,
        seed=seed,
        sampling=SamplingParams(temperature=temperature),
        generation=GenerationConfig(num),
        speculation=SpeculationConfig("autoregressive", coupled=True),
    ).text


def complete(server, **fields):
    defaults = {"model": "tiny", "prompt": PROMPT, "seed": 7, "max_tokens": 24}
    return server.openai.completions.create(**{**defaults, **fields})


def test_a_text_is_the_engines_own(server, engine):
    answer = complete(server)
    assert answer.choices[0].text == own_text(engine)
    assert complete(server, temperature=0).choices[0].text == own_text(engine, temperature=0.0)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(PROMPT))
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_gives_the_same_text_and_ends_with_usage(server):
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(c.choices[0].text for c in pieces) == complete(server).choices[0].text
    reasons = [c.choices[0].finish_reason for c in pieces]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    raw = server.post(prompt=PROMPT, stream=True, max_tokens=2).text
    assert raw.endswith("\n\ndata: [DONE]\n\n")


def test_a_text_ends_before_a_stop_string(server):
    text = complete(server).choices[0].text
    stop = text[10:13]
    choice = complete(server, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    streamed = "".join(c.choices[0].text for c in complete(server, stop=stop, stream=True))
    assert streamed == choice.text


def test_a_seed_that_was_drawn_is_told_and_repeats_the_text(server):
    fields = {"prompt": PROMPT, "max_tokens": 20}
    first, second = (server.post(**fields).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.post(**fields, seed=first["seed"]).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_prompt_may_be_token_ids(server, engine):
    ids = engine.tokenizer.encode(PROMPT)
    texts = {complete(server, prompt=p).choices[0].text for p in (PROMPT, ids, [ids], [PROMPT])}
    assert len(texts) == 1


def test_logprobs_are_of_the_tokens_of_the_text(server):
    fields = {"logprobs": 3, "temperature": 0}
    found = complete(server, **fields).choices[0].logprobs
    assert len(found.tokens) == len(found.text_offset) == 24
    for name, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[name] == logprob == max(top.values())  # greedy
        assert sum(map(math.exp, top.values())) < 1
    chunks = list(complete(server, **fields, stream=True))
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [name for part in streamed for name in part.tokens] == found.tokens
    assert [n for part in streamed for n in part.text_offset] == found.text_offset


def test_a_call_without_speculation_says_the_same(server):
    answers = complete(server), complete(server, extra_body={"speculation": False})
    assert answers[0].choices[0].text == answers[1].choices[0].text
    guessed = [it.usage.completion_tokens_details.accepted_prediction_tokens for it in answers]
    assert guessed[0] > guessed[1] == 0


def test_a_longer_prompt_is_read_from_where_it_was_left(server):
    long = " ".join(SENTENCES[:2] * 3)
    complete(server, prompt=long)
    answer = complete(server, prompt=long + " And so")
    assert answer.usage.prompt_tokens_details.cached_tokens > 200


def test_models_and_health(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    server.wait_until_free()
    assert server.http.get("/health").json() == {"status": "ok", "requests": 0}
