"""Clients that people use, as they are installed, against the server on a real port."""

import importlib
import json
import warnings

import pytest

from tests.apps.serve.test_answers import own_text

QUESTION = "Who is Anne?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def wanted(engine, template) -> str:
    """The greedy answer to the question, which no client may change."""
    return own_text(engine, engine.tokenizer.encode_chat(MESSAGES), num=16, temperature=0.0)


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another server
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("litellm")


@pytest.mark.filterwarnings("ignore")
def test_litellm_completes_and_streams(server, wanted, litellm):
    fields = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "x"}
    fields |= {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == wanted
    assert answer.usage.completion_tokens == 16
    several = litellm.completion(**fields, n=2)
    assert [choice.message.content for choice in several.choices] == [wanted] * 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*litellm.completion(**fields, **options)]
    assert "".join(it.choices[0].delta.content or "" for it in chunks if it.choices) == wanted
    assert chunks[-1].usage.completion_tokens == 16


@pytest.mark.filterwarnings("ignore")
def test_litellm_completes_texts_and_asks_for_responses(server, wanted, engine, litellm):
    fields = {"api_base": server.url + "/v1", "api_key": "x", "temperature": 0}
    text = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="She had", max_tokens=8, **fields
    )
    assert text.choices[0].text == own_text(engine, "She had", num=8, temperature=0.0)
    answer = litellm.responses(model="openai/tiny", input=QUESTION, max_output_tokens=16, **fields)
    assert answer.output[0].content[0].text == wanted


def test_langchain_invokes_and_streams(server, wanted):
    langchain = pytest.importorskip("langchain_openai")
    fields = {"base_url": server.url + "/v1", "api_key": "x", "max_tokens": 16, "temperature": 0}
    chat = langchain.ChatOpenAI(model="tiny", stream_usage=True, **fields)
    answer = chat.invoke(QUESTION)
    assert (answer.content, answer.usage_metadata["output_tokens"]) == (wanted, 16)
    pieces = [*chat.stream(QUESTION)]
    assert "".join(piece.content for piece in pieces) == wanted
    assert sum(it.usage_metadata["output_tokens"] for it in pieces if it.usage_metadata) == 16
    newer = langchain.ChatOpenAI(model="tiny", use_responses_api=True, **fields)
    assert newer.invoke(QUESTION).text == wanted
    assert "".join(piece.text for piece in newer.stream(QUESTION)) == wanted


def test_llm_prompts_and_streams(server, wanted, tmp_path, monkeypatch):
    pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    models = [{"model_id": "ours", "model_name": "tiny", "api_base": server.url + "/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    llm = importlib.import_module("llm")
    model = llm.get_model("ours")
    options = {"max_tokens": 16, "temperature": 0, "key": "x"}
    assert model.prompt(QUESTION, stream=False, **options).text() == wanted
    assert "".join(model.prompt(QUESTION, **options)) == wanted


SYSTEM = {"role": "system", "content": "You write code."}
TITLE = {"role": "user", "content": "### Task:\nGive a title of 3 to 5 words for the chat."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
CODEX = {
    "model": "tiny",
    "instructions": "You work in a terminal.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>sh"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "What is here?"}],
        },
    ],
    "tools": [{"type": "web_search"}, {"type": "local_shell"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": [],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": None,
}
RECORDED = {
    "Open WebUI: a chat": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "stream": True,
            "messages": MESSAGES,
            "temperature": 0.7,
            "top_p": 0.9,
            "stop": ["###"],
            "seed": 42,
            "max_tokens": 20,
            "stream_options": {"include_usage": True},
        },
    ),
    "Open WebUI: a title": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [TITLE], "stream": False, "max_completion_tokens": 20},
    ),
    "Continue: a chat": (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_tokens": 20,
            "stream": True,
            "top_p": None,
            "frequency_penalty": None,
            "presence_penalty": None,
            "stop": None,
        },
    ),
    "Continue: code in a gap": (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "<fim_prefix>def f(<fim_suffix>):\n    pass<fim_middle>",
            "max_tokens": 20,
            "temperature": 0.01,
            "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n", "```"],
            "stream": True,
        },
    ),
    "Codex: a turn": ("/v1/responses", CODEX),
}
REFUSED = {
    "Open WebUI: an image": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": [IMAGE]}]},
        "messages",
    ),
    "Continue: more than the context": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 4096},
        "messages",
    ),
    "Continue: a suffix": (
        "/v1/completions",
        {"model": "tiny", "prompt": "def f(", "suffix": "):\n    pass"},
        "suffix",
    ),
    "Codex: how hard to think": (
        "/v1/responses",
        CODEX | {"reasoning": {"effort": "medium", "summary": "auto"}},
        "reasoning",
    ),
}


@pytest.mark.parametrize(("path", "body"), RECORDED.values(), ids=RECORDED)
def test_a_request_of_a_client_is_answered(server, template, path, body):
    """As its documentation says that it asks."""
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    if body["stream"]:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        assert "error" not in json.loads(lines[-1])
        assert len(lines) > 3
    else:
        assert response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("path", "body", "name"), REFUSED.values(), ids=REFUSED)
def test_what_a_client_cannot_have_is_refused_by_name(server, template, path, body, name):
    response = server.post(path, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert name in error["message"] or error["code"] == "context_length_exceeded"
