"""/v1/chat/completions by the real `openai` client; most tests have a stand-in for the template."""

import openai
import pytest

from minitri.loading.chat_template import ChatTemplate
from tests.loading.test_chat_template import CHATML
from tests.serve.test_completions import own_text

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is?"}],
    },
]
RENDERED = "<system>Be brief.<user>Who is?<assistant>"


@pytest.fixture
def chat(server, engine, monkeypatch):
    def encode_chat(messages):
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return engine.tokenizer.encode(f"{turns}<assistant>")

    monkeypatch.setattr(engine.tokenizer, "encode_chat", encode_chat, raising=False)

    def ask(**fields):
        defaults = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_completion_tokens": 16}
        return server.openai.chat.completions.create(**{**defaults, **fields})

    return ask


def test_an_answer_goes_on_after_the_rendered_messages(chat, engine):
    answer = chat()
    assert answer.choices[0].message.content == own_text(engine, RENDERED, seed=5, num=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(RENDERED))


def test_a_stream_says_who_speaks_and_then_the_same_text(chat):
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == chat().choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 16


def test_logprobs_have_the_bytes_of_the_text(chat):
    answer = chat(logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content
    assert len(entries) == 16
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    chunks = [c for c in chat(logprobs=True, stream=True) if c.choices[0].logprobs]
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


def test_a_token_that_ends_the_text_is_not_in_its_logprobs(chat, engine):
    """Of some seeds the text ends by itself."""
    fields = {"max_completion_tokens": 300, "logprobs": True}
    answers = (chat(seed=seed, **fields) for seed in range(100))
    ended = next(it for it in answers if it.choices[0].finish_reason == "stop")
    entries = ended.choices[0].logprobs.content
    assert len(entries) == ended.usage.completion_tokens - 1
    assert "</s>" not in [entry.token for entry in entries]


def test_a_chat_without_max_tokens_may_fill_the_context(chat, server):
    from tests.serve.conftest import CONTEXT

    usage = chat(max_completion_tokens=None, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == CONTEXT
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_the_models_own_template_is_used(server, engine, monkeypatch):
    template, tokenizer = ChatTemplate(CHATML, {}), engine.tokenizer
    monkeypatch.setitem(vars(tokenizer), "chat_template", template)
    answer = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Who?"}], seed=5, max_tokens=4
    )
    wanted = template.render([{"role": "user", "content": "Who?"}])
    assert answer.usage.prompt_tokens == len(tokenizer.encode_marked(wanted))


def test_a_model_without_a_template_is_a_bad_request(server):
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES)
