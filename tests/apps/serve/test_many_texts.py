"""Several answers to one prompt, and several prompts."""

import threading

import openai
import pytest

from minitri.core.settings import SpeculationConfig
from tests.apps.serve.conftest import serving
from tests.apps.serve.test_answers import MESSAGES, PROMPT, complete, own_text
from tests.conftest import SENTENCES

LONG = " ".join(SENTENCES[:2] * 3)
INDEPENDENT = SpeculationConfig("triforce", gamma1=2, gamma2=4)


def by_index(chunks) -> list[str]:
    """The texts of a stream."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num", [2, 8])
def test_each_answer_is_what_its_seed_gives_alone(server, engine, temperature, num):
    """Whole and in a stream; of eight only four run at a time."""
    texts = [own_text(engine, seed=7 + i, temperature=temperature) for i in range(num)]
    answer = complete(server, n=num, temperature=temperature)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [*range(num)]
    assert by_index(complete(server, n=num, temperature=temperature, stream=True)) == texts


def test_by_default_too_a_seed_gives_one_text_alone_and_among_others(engine):
    """With independent random numbers and a fixed plan."""
    with serving(engine, speculation=INDEPENDENT) as server:
        alone = [complete(server, seed=7 + i).choices[0].text for i in range(4)]
        together = [choice.text for choice in complete(server, n=4).choices]
    assert alone == together
    assert len({*alone}) == 4


def test_a_prompt_is_read_once_for_all_its_answers(engine):
    """Of the others only the last tokens, which select what is retrieved; usage counts it once."""
    engine.release()
    with serving(engine) as server:
        stats = server.service.worker._run.stats
        answer = complete(server, prompt=LONG, n=4)
        size = len(engine.tokenizer.encode(LONG))
        assert size - 1 <= stats.num_prefilled_tokens < 1.5 * size
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (size, 4 * 24)
        assert usage.prompt_tokens_details.cached_tokens == 0
        *_, last = complete(
            server, prompt=LONG, n=4, stream=True, stream_options={"include_usage": True}
        )
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (size, 4 * 24)
        assert last.usage.prompt_tokens_details.cached_tokens > size // 2


def test_answers_of_one_key_take_nothing_from_a_prompt_of_another(engine):
    with serving(engine, num_rows=8, api_key="alice bob") as server:
        fields = {"model": "tiny", "prompt": LONG, "max_tokens": 4, "n": 3, "seed": 3}
        cached = []
        for key in ("alice", "bob", "alice"):
            answer = server.openai.copy(api_key=key).completions.create(**fields)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0] < [cached[2]] * 2


def test_a_client_that_leaves_cancels_all_answers(engine):
    gate, turns = threading.Event(), iter(range(3))
    before = lambda: next(turns, None) is None and gate.wait(20)  # noqa: E731
    fields = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 3}
    with serving(engine, before=before, num_rows=2) as server:
        with server.raw(**fields) as reader:
            assert reader.recv(12) == b"HTTP/1.1 200"
            server.wait(lambda: server.service.num_open == 3)
        server.wait(lambda: server.service.num_open == 0)
        gate.set()
        server.wait_until_free()
        assert server.service.worker._run.stats.num_generated_tokens < 100
        assert complete(server, max_tokens=2).choices[0].text == own_text(engine, num=2)


def test_a_request_asks_for_no_more_texts_than_a_client_may_have(engine):
    with serving(engine, num_rows=1, max_queue=3) as server:
        assert len(complete(server, n=4, max_tokens=1).choices) == 4
        for fields in ({"n": 5}, {"prompt": ["She"] * 5}, {"prompt": ["She"] * 3, "n": 2}):
            with pytest.raises(openai.BadRequestError, match=r"asks for [56] texts, and 4 may"):
                complete(server, **fields)
        assert server.service.num_open == 0


def test_prompts_of_a_list_have_their_answers_in_its_order(server, engine):
    prompts = [PROMPT, engine.tokenizer.encode("The harbour wind"), "She"]
    for given in (prompts, prompts[:1], [prompts[1]]):
        answer = complete(server, prompt=given, n=2)
        texts = [
            own_text(engine, prompt, seed=7 + 2 * i + j)
            for i, prompt in enumerate(given)
            for j in range(2)
        ]
        assert [choice.text for choice in answer.choices] == texts
        assert by_index(complete(server, prompt=given, n=2, stream=True)) == texts
        sizes = [len(it if isinstance(it, list) else engine.tokenizer.encode(it)) for it in given]
        assert answer.usage.prompt_tokens == sum(sizes)


def test_chats_have_several_answers_too(server, template, engine):
    prompt = engine.tokenizer.encode_chat([MESSAGES[0], {"role": "user", "content": "Who is?"}])
    fields = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 16, "n": 3}
    texts = [own_text(engine, prompt, seed=5 + i, num=16) for i in range(3)]
    whole = server.openai.chat.completions.create(**fields)
    assert [choice.message.content for choice in whole.choices] == texts
    found = [""] * 3
    for chunk in server.openai.chat.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        found[choice.index] += choice.delta.content or ""
    assert found == texts


def test_seeds_of_64_bits_are_folded(server):
    """A seed of 32 bits is itself; -1 is that of all bits."""
    texts = {
        seed: server.post(prompt=PROMPT, max_tokens=9, seed=seed).json()
        for seed in (5, 5 << 32, (1 << 64) - 1, -1, (1 << 32) - 1)
    }
    assert [it["seed"] for it in texts.values()] == [5, 5, 0, 0, (1 << 32) - 1]
    assert texts[5]["choices"][0]["text"] == texts[5 << 32]["choices"][0]["text"]
