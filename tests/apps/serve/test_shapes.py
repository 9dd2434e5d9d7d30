"""Answers in a form that is asked for: by the `openai` package, a pydantic class, or a grammar."""

import json
import re
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llguidance")


class Person(BaseModel):
    name: Literal["Anne", "Frederick"]
    age: Annotated[int, Field(ge=0, le=99)]
    is_here: bool | None


QUESTION = [{"role": "user", "content": "Who is it?"}]
SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(autouse=True)
def with_template(template) -> None:
    """For chats."""


def test_a_pydantic_class_is_what_the_answer_holds(server):
    """In a chat, and in a response."""
    fields = {"model": "tiny", "extra_body": {"seed": 3}}
    chat = server.openai.chat.completions.parse(
        messages=QUESTION, response_format=Person, max_tokens=200, **fields
    )
    assert isinstance(chat.choices[0].message.parsed, Person)
    response = server.openai.responses.parse(input="Who?", text_format=Person, **fields)
    assert isinstance(response.output_parsed, Person)


def test_a_schema_a_form_and_a_grammar_hold_at_all_endpoints(server):
    chat = server.openai.chat.completions.create(
        model="tiny", messages=QUESTION, response_format=FORM, max_tokens=100, seed=1
    )
    assert json.loads(chat.choices[0].message.content) == {"a": None}
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    response = server.openai.responses.create(
        model="tiny", input="Who?", text={"format": form}, extra_body={"seed": 1}
    )
    assert json.loads(response.output_text) == {"a": None}
    regex = "(ab|cd){2,3}"
    fields = {"prompt": "She", "max_tokens": 30, "n": 4, "seed": 1}
    answer = server.post(**fields, structured_outputs={"regex": regex}).json()
    texts = [it["text"] for it in answer["choices"]]
    assert all(re.fullmatch(regex, text) for text in texts)
    assert len({*texts}) > 1


def test_any_object_is_one_unless_it_is_cut(server):
    answer = server.openai.chat.completions.create(
        model="tiny", messages=QUESTION, response_format={"type": "json_object"}, n=4, seed=1
    )
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.lstrip().startswith("{")


def test_a_form_of_a_response_that_is_none_is_refused_by_name(server):
    for form in ({"type": "grammar"}, {"type": "json_schema", "name": "a"}, 3):
        response = server.post("/v1/responses", input="Who?", text={"format": form})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("text")
