"""Clients that people use with tools, and requests as they send them."""

import json
from pathlib import Path

import pytest

from minitri.text.chat_template import ChatTemplate
from tests.apps.serve.conftest import serving
from tests.apps.serve.scripted import ScriptedRun
from tests.apps.serve.templates import QWEN

RECORDED = json.loads(Path(__file__).with_name("recorded_requests.json").read_text("utf-8"))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
WANTED = {"a": 2, "b": 3}


@pytest.fixture(scope="module")
def run(roomy):
    return ScriptedRun(roomy)


@pytest.fixture(scope="module")
def server(roomy, run):
    with pytest.MonkeyPatch.context() as patch, serving(roomy, run=run, context=4096) as running:
        patch.setitem(vars(roomy.tokenizer), "chat_template", ChatTemplate(QWEN, {}))
        yield running


@pytest.mark.parametrize("sent", RECORDED, ids=lambda it: it["client"])
def test_a_recorded_request_is_answered_or_refused_by_name(server, run, sent):
    run.texts.append(sent.get("says", ""))
    response = server.http.post("/v1/chat/completions", json=sent["body"])
    if "refused" in sent:
        run.texts.clear()
        assert response.status_code == 400
        assert sent["refused"] in response.json()["error"]["message"]
        return
    assert response.status_code == 200
    events = [it.removeprefix("data: ") for it in response.text.split("\n\n") if it]
    assert events.pop() == "[DONE]"
    choices = [choice for it in map(json.loads, events) for choice in it["choices"]]
    assert choices[-1]["finish_reason"] == sent["finish"]
    calls = [call for it in choices for call in it["delta"].get("tool_calls", ())]
    said = "".join(it["delta"].get("content") or "" for it in choices)
    assert said == sent["says"].partition("<tool_call>")[0]
    if calls:
        text = "".join(call["function"]["arguments"] for call in calls)
        assert json.loads(text) == json.loads(sent["says"].split("\n")[-2])["arguments"]


def test_langchain_binds_tools(server, run):
    """The answer with the calls goes back as langchain spells it."""
    models = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    core = pytest.importorskip("langchain_core.messages")
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    chat = models.ChatOpenAI(base_url=server.url + "/v1", api_key="x", model="tiny").bind_tools(
        [add]
    )
    question = core.HumanMessage("2 + 3?")
    run.texts += [CALL, CALL, "It is 5."]
    first = len(run.prompts)
    answer = chat.invoke([question])
    assert [(it["name"], it["args"]) for it in answer.tool_calls] == [("add", WANTED)]
    *_, last = pieces = [*chat.stream([question])]
    whole = sum(pieces[1:], pieces[0])
    assert [(it["name"], it["args"]) for it in whole.tool_calls] == [("add", WANTED)]
    assert last is not None
    said = run.prompts[first]
    result = add.invoke(answer.tool_calls[0])
    final = chat.invoke([question, answer, result])
    assert final.content == "It is 5."
    ids = run._engine.tokenizer.encode_marked(CALL)
    assert run.prompts[-1][: len(said) + len(ids)] == said + ids


@pytest.mark.filterwarnings("ignore")
def test_litellm_passes_tools_on(server, run):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    fields = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "x"}
    fields |= {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": tools}
    run.texts += [CALL, CALL]
    [call] = litellm.completion(**fields).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", WANTED)
    chunks = [*litellm.completion(**fields, stream=True)]
    whole = litellm.stream_chunk_builder(chunks)
    [call] = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", WANTED)
    assert whole.choices[0].finish_reason == "tool_calls"
