"""/v1/chat/completions by the real `openai` client."""

import openai
import pytest

from tests.serve.conftest import CONTEXT
from tests.serve.test_completions import own_text

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
    assert answer.choices[0].message.content == own_text(engine, prompt, seed=5, num=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_stream_says_who_speaks_and_then_the_same_text(ask):
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    roles = [chunk.choices[0].delta.role for chunk in chunks[:-1]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == ask().choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 16


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


def test_a_token_that_ends_the_text_is_not_in_its_logprobs(ask):
    """Of some seeds the text ends by itself."""
    fields = {"max_completion_tokens": 300, "logprobs": True}
    answers = (ask(seed=seed, **fields) for seed in range(100))
    ended = next(it for it in answers if it.choices[0].finish_reason == "stop")
    entries = ended.choices[0].logprobs.content
    assert len(entries) == ended.usage.completion_tokens - 1
    assert "</s>" not in [entry.token for entry in entries]


def test_a_chat_without_max_tokens_may_fill_the_context(ask):
    usage = ask(max_completion_tokens=None, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == CONTEXT


def test_a_model_without_a_template_is_a_bad_request(server):
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES)
