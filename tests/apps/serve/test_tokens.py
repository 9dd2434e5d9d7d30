"""/tokenize, /detokenize and the list of models."""

import pytest

from tests.apps.serve.test_answers import MESSAGES, PROMPT


@pytest.fixture
def post(server):
    return lambda path, **fields: server.post(f"/{path}", **fields).json()


def test_a_text_and_its_tokens(post, server, engine):
    ids = engine.tokenizer.encode(PROMPT)
    found = post("tokenize", model="tiny", prompt=PROMPT)
    assert found == {"count": len(ids), "max_model_len": 400, "tokens": ids}
    assert post("detokenize", tokens=ids) == {"prompt": PROMPT}
    long = "She had " * 3000
    assert post("tokenize", prompt=long)["tokens"] == engine.tokenizer.encode(long)
    assert post("tokenize", prompt="")["count"] == len(engine.tokenizer.encode(""))


def test_without_special_tokens_a_text_has_no_bos(post, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "bos_token_id", 1)
    plain = post("tokenize", prompt=PROMPT, add_special_tokens=False)["tokens"]
    assert post("tokenize", prompt=PROMPT)["tokens"] == [1, *plain]


def test_messages_have_the_tokens_of_the_chat(post, server, template):
    found = post("tokenize", messages=MESSAGES)
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert found["count"] == answer.usage.prompt_tokens == len(found["tokens"])


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("tokenize", "prompt", {"prompt": 3}),
        (
            "tokenize",
            "add_generation_prompt",
            {"messages": MESSAGES, "add_generation_prompt": False},
        ),
        ("tokenize", "chat_template", {"prompt": "a", "chat_template": "x"}),
        ("detokenize", "tokens", {"tokens": [5, 320]}),
        ("detokenize", "tokens", {"tokens": [-1]}),
        ("detokenize", "tokens", {"tokens": "abc"}),
        ("detokenize", "prompt", {"prompt": "abc"}),
    ],
)
def test_a_wrong_field_is_named(post, path, name, fields):
    error = post(path, **fields)["error"]
    assert name in error["message"]
    assert error["code"] == "invalid_request"


def test_a_model_is_found_by_its_name(server):
    """Also one with slashes."""
    server.service.protocol.names.append("org/tiny")
    try:
        for name in ("tiny", "org/tiny"):
            assert server.openai.models.retrieve(name).id == name
    finally:
        server.service.protocol.names.pop()
    other = server.http.get("/v1/models/org/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
