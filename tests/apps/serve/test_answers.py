"""Answers of the endpoints, by the real `openai` client, against the engine itself."""

import math
import re
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.apps.serve.conftest import CONTEXT, ENDLESS, PROMPT, complete, own_text, serving
from tests.conftest import SENTENCES

LONG = " ".join(SENTENCES[:2] * 3)
PARTS = [{"type": "text", "text": "Who "}, {"type": "text", "text": "is?"}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
PLAIN = [MESSAGES[0], {"role": "user", "content": "Who is?"}]
USAGE = {"stream_options": {"include_usage": True}, "stream": True}


def by_index(chunks) -> list[str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        part = choice.delta.content if hasattr(choice, "delta") else choice.text
        texts[choice.index] = texts.get(choice.index, "") + (part or "")
    return [texts[index] for index in range(len(texts))]


def test_a_text_is_the_engines_own_up_to_a_stop_string_and_so_is_a_stream(server, engine):
    ids = engine.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids, [ids]):
        answer = complete(server, prompt=prompt)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason) == (own_text(engine), "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    *pieces, last = complete(server, **USAGE)
    assert by_index(pieces) == [choice.text]
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    stop = choice.text[10:13]
    wanted = choice.text[: choice.text.index(stop)]
    [choice] = complete(server, stop=[stop]).choices
    assert (choice.text, choice.finish_reason) == (wanted, "stop")
    assert by_index(complete(server, stop=stop, stream=True)) == [wanted]
    assert server.post(**ENDLESS | {"max_tokens": 2}).text.endswith("\n\ndata: [DONE]\n\n")


@pytest.fixture
def ask(server, render):
    def ask(**fields):
        defaults = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_completion_tokens": 16}
        return server.openai.chat.completions.create(**defaults | fields)

    return ask


def test_a_chat_goes_on_after_the_rendered_messages(ask, server, engine, render):
    prompt = engine.tokenizer.encode_marked(render(PLAIN))
    answer = ask()
    [choice] = answer.choices
    assert choice.message.content == own_text(engine, prompt, seed=5, num=16)
    assert answer.usage.prompt_tokens == len(prompt)
    first, *pieces, last = ask(**USAGE, extra_body={"details": True})
    progress = first.prompt_progress
    assert progress["processed"] == progress["total"] == len(prompt) > progress["cache"]
    assert [it.choices[0].delta.role for it in pieces] == ["assistant"] + [None] * 16
    assert by_index(pieces) == [choice.message.content]
    origins = {it.choices[0].origin for it in pieces[:-1]}
    assert {"bonus"} < origins <= {"draft", "retrieval", "recovered", "bonus"}
    assert (pieces[-1].choices[0].finish_reason, last.usage.completion_tokens) == ("length", 16)
    question = {"role": "user", "content": "?" * 260}
    longest = ask(messages=[question], max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert longest.usage.total_tokens == CONTEXT
    begun = engine.tokenizer.encode_marked(render(PLAIN) + "It is")
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    answer = ask(messages=messages, extra_body={"continue_final_message": True})
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert answer.choices[0].message.content == own_text(engine, begun, seed=5, num=16)


def test_a_seed_repeats_its_text_also_one_that_was_drawn(server):
    """The upper half of a 64-bit seed is folded into the lower one."""
    drawn = [server.post(prompt=PROMPT).json() for _ in range(2)]
    assert drawn[0]["seed"] != drawn[1]["seed"]
    seeds = [drawn[0]["seed"], 5, 5 << 32, (1 << 64) - 1, -1, (1 << 32) - 1]
    answers = [server.post(prompt=PROMPT, seed=seed).json() for seed in seeds]
    assert [it["seed"] for it in answers] == [seeds[0], 5, 5, 0, 0, (1 << 32) - 1]
    texts = [it["choices"][0]["text"] for it in (drawn[0], *answers)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3] != texts[4] == texts[5]


def test_each_of_many_answers_is_what_its_seed_gives_alone(server, engine, ask, render):
    """Whole answers and streams are in the order of the prompts; four texts run at a time."""
    prompts = [PROMPT, engine.tokenizer.encode("The harbour wind"), "She"]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 12}
    choices = complete(server, **fields).choices
    seeded = enumerate(prompt for prompt in prompts for _ in range(2))
    texts = [own_text(engine, prompt, seed=7 + i, num=12) for i, prompt in seeded]
    assert [(it.index, it.text) for it in choices] == [*enumerate(texts)]
    assert by_index(complete(server, **fields, stream=True)) == texts
    prompt = engine.tokenizer.encode_marked(render(PLAIN))
    texts = [own_text(engine, prompt, seed=5 + i, num=16) for i in range(3)]
    assert [choice.message.content for choice in ask(n=3).choices] == texts
    assert by_index(ask(n=3, stream=True)) == texts


def test_a_prompt_is_read_and_counted_once_for_all_its_answers(engine):
    """The other answers read only the last tokens, which select what is retrieved."""
    engine.release()
    size = len(engine.tokenizer.encode(LONG))
    with serving(engine) as server:
        usage = complete(server, prompt=LONG, n=4).usage
        assert size - 1 <= server.runs[-1].run.stats.num_prefilled_tokens < 1.5 * size
    assert (usage.prompt_tokens, usage.completion_tokens) == (size, 4 * 24)


def test_log_probabilities_are_of_the_tokens_of_the_text(server, engine, ask):
    fields = {"logprobs": 3, "temperature": 0}
    [choice] = complete(server, **fields).choices
    scores = choice.logprobs
    assert choice.text == own_text(engine, temperature=0.0)
    for number, top in enumerate(scores.top_logprobs):
        assert top[scores.tokens[number]] == scores.token_logprobs[number] == max(top.values())
        assert (len(top), sum(map(math.exp, top.values())) < 1) == (3, True)
    [choice] = ask(logprobs=True, top_logprobs=2).choices
    entries = choice.logprobs.content
    utf8 = b"".join(bytes(entry.bytes) for entry in entries)  # of parts of characters, too
    assert utf8.decode("utf-8", "replace") == choice.message.content
    for entry in entries:
        first, second = (top.logprob for top in entry.top_logprobs)
        assert max(entry.logprob, second) <= first <= 0
    parts = [chunk.choices[0].logprobs for chunk in ask(logprobs=True, stream=True)]
    streamed = [entry.bytes for part in parts if part for entry in part.content]
    assert streamed == [entry.bytes for entry in entries]


class Person(BaseModel):
    name: Literal["Anne", "Frederick"]
    age: Annotated[int, Field(ge=0, le=99)]
    is_here: bool | None


def test_answers_have_the_form_that_is_asked_for(server, ask):
    """A pydantic class, any object of JSON, or a regular expression."""
    pytest.importorskip("llguidance")
    fields = {"model": "tiny", "extra_body": {"seed": 3}}
    parse = server.openai.chat.completions.parse
    chat = parse(messages=MESSAGES, response_format=Person, max_tokens=200, **fields)
    assert isinstance(chat.choices[0].message.parsed, Person)
    response = server.openai.responses.parse(input="Who?", text_format=Person, **fields)
    assert isinstance(response.output_parsed, Person)
    for choice in ask(response_format={"type": "json_object"}, n=4).choices:
        assert choice.message.content.lstrip().startswith("{")
    regex = {"structured_outputs": {"regex": "(ab|cd){2,3}"}}
    texts = [choice.text for choice in complete(server, n=4, extra_body=regex).choices]
    assert all(re.fullmatch("(ab|cd){2,3}", text) for text in texts)
    assert len({*texts}) > 1


def test_a_model_is_known_by_all_its_names(server, engine):
    names = ["tiny", "org/tiny"]
    models = server.openai.models
    assert [it.id for it in models.list()] == names == [models.retrieve(it).id for it in names]
    assert complete(server, model="org/tiny").choices[0].text == own_text(engine)
    for ask in (models.retrieve, lambda name: complete(server, model=name)):
        with pytest.raises(openai.NotFoundError, match="'gpt-9'"):
            ask("gpt-9")
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES)


def test_metrics_count_tokens_and_waits(server):
    def counts() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(count) for name, count in pairs}

    before = counts()
    size = complete(server, n=2).usage.prompt_tokens
    after = counts()
    wanted = {'tokens_total{kind="prompt"}': 2 * size, 'tokens_total{kind="generated"}': 48}
    wanted |= {'seconds_count{of="first"}': 2, 'seconds_count{of="next"}': 46}
    for name, count in wanted.items():
        assert after[f"minitri_{name}"] - before.get(f"minitri_{name}", 0) == count, name
