"""Answers of both endpoints, by the real `openai` client, against the engine itself."""

import json
import math

import openai
import pytest

from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from tests.apps.serve.conftest import CONTEXT
from tests.conftest import SENTENCES

PROMPT = "She had been forced into prudence"


def own_text(engine, prompt=PROMPT, *, seed=7, num=24, temperature=1.0) -> str:
    """What the engine says by itself."""
    speculation = SpeculationConfig("autoregressive", coupled=True)
    how = {"sampling": SamplingParams(temperature), "generation": GenerationConfig(num)}
    return engine.complete(prompt, seed=seed, speculation=speculation, **how).text


def complete(server, **fields):
    defaults = {"model": "tiny", "prompt": PROMPT, "seed": 7, "max_tokens": 24}
    return server.openai.completions.create(**{**defaults, **fields})


def test_a_text_is_the_engines_own_and_so_is_a_stream(server, engine):
    answer = complete(server)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (own_text(engine), "length")
    assert complete(server, temperature=0).choices[0].text == own_text(engine, temperature=0.0)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(PROMPT))
    *pieces, last = complete(server, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    reasons = [piece.choices[0].finish_reason for piece in pieces]
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


def test_a_prompt_may_be_token_ids(server, engine):
    ids = engine.tokenizer.encode(PROMPT)
    texts = {complete(server, prompt=p).choices[0].text for p in (PROMPT, ids, [ids], [PROMPT])}
    assert len(texts) == 1


def test_logprobs_are_of_the_tokens_of_the_text(server):
    fields = {"logprobs": 3, "temperature": 0}
    found = complete(server, **fields).choices[0].logprobs
    assert len(found.tokens) == 24
    for name, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[name] == logprob == max(top.values())  # greedy
        assert sum(map(math.exp, top.values())) < 1
    chunks = list(complete(server, **fields, stream=True))
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [name for part in streamed for name in part.tokens] == found.tokens


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


def test_a_seed_that_was_drawn_is_told_and_repeats_the_text(server):
    fields = {"prompt": PROMPT, "max_tokens": 20}
    first, second = (server.post(**fields).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.post(**fields, seed=first["seed"]).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_models_and_health(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    server.wait_until_free()
    assert server.http.get("/health").json() == {"status": "ok", "requests": 0}


PARTS = [{"type": "text", "text": "Who "}, {"type": "text", "text": "is?"}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
PLAIN = [MESSAGES[0], {"role": "user", "content": "Who is?"}]


@pytest.fixture
def ask(server, template):
    def ask(**fields):
        defaults = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_completion_tokens": 16}
        return server.openai.chat.completions.create(**{**defaults, **fields})

    return ask


def test_an_answer_goes_on_after_the_rendered_messages(ask, engine, template):
    prompt = engine.tokenizer.encode_marked(template.render(PLAIN))
    answer = ask()
    [choice] = answer.choices
    assert choice.message.content == own_text(engine, prompt, seed=5, num=16)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.prompt_tokens == len(prompt)
    *pieces, last = ask(stream=True, stream_options={"include_usage": True})
    deltas = [piece.choices[0].delta for piece in pieces]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 16


def test_a_stream_tells_who_guessed_each_token_if_it_is_asked_for(ask, server):
    fields = {"stream": True, "extra_body": {"details": True}}
    first, *chunks, last = ask(**fields)
    progress = first.prompt_progress
    assert first.choices == []
    assert progress["processed"] == progress["total"] > progress["cache"]
    origins = [chunk.choices[0].origin for chunk in chunks]
    assert len(origins) == 16
    assert {"draft", "retrieval"} & {*origins}
    assert {*origins} <= {"draft", "retrieval", "recovered", "bonus"}
    assert last.choices[0].finish_reason == "length"
    plain = [chunk.to_dict() for chunk in ask(stream=True)]
    assert not any("prompt_progress" in it or "origin" in it["choices"][0] for it in plain)
    assert "origin" not in ask(extra_body={"details": True}).choices[0].to_dict()


def test_an_answer_that_was_cut_goes_on(ask, engine, template):
    prompt = engine.tokenizer.encode_marked(template.render(PLAIN) + "It is")
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    answer = ask(messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == own_text(engine, prompt, seed=5, num=16)
    assert answer.usage.prompt_tokens == len(prompt)


def test_logprobs_have_the_bytes_of_whole_characters(ask):
    answer = ask(logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    known = [entry.token for entry in entries if entry.bytes]
    assert all(token in answer.choices[0].message.content for token in known)
    assert len(entries) == 16 > len(known) > 4
    for entry in entries:
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
        first, second = (top.logprob for top in entry.top_logprobs)
        assert max(entry.logprob, second) <= first <= 0
    chunks = [c for c in ask(logprobs=True, stream=True) if c.choices[0].logprobs]
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


def test_a_chat_without_max_tokens_may_fill_the_context(ask):
    usage = ask(max_completion_tokens=None, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == CONTEXT


def test_a_model_without_a_template_is_a_bad_request(server):
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES)


def test_penalties_bias_and_bad_words_are_those_of_the_engine(server, engine):
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"71": -100}}
    more = {"repetition_penalty": 1.2, "bad_words": ["the"], "min_tokens": 24}
    choice = complete(server, **fields, extra_body=more).choices[0]
    how = {"speculation": SpeculationConfig("autoregressive", coupled=True), "temperature": 1.0}
    fields |= {**more, "logit_bias": {71: -100}, "max_new_tokens": 24, "seed": 7}
    assert choice.text == engine.complete(PROMPT, **fields, **how).text


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA |= {"additionalProperties": False}


def test_answers_have_the_form_that_is_asked_for(server, template):
    messages = [{"role": "user", "content": "How many?"}]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    ask = server.openai.chat.completions.create
    for seed in range(4):
        settings = {"model": "tiny", "messages": messages, "seed": seed, "max_tokens": 200}
        for given in (form, {"type": "json_object"}):
            [choice] = ask(**settings, response_format=given).choices
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
                if given is form:
                    assert {*json.loads(choice.message.content)} == {"n"}
        pieces = ask(**settings, response_format=form, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert streamed == ask(**settings, response_format=form).choices[0].message.content
    one = complete(server, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert (one.choices[0].finish_reason, one.choices[0].text in ("yes", "no")) == ("stop", True)
    plain = complete(server, extra_body={"response_format": {"type": "text"}})
    assert plain.choices[0].text == complete(server).choices[0].text
