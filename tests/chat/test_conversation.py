"""A conversation grows at its end only, and reads as the model's template wants it."""

import pytest

from minitri import InputError
from minitri.chat.conversation import Conversation
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer
from tests.loading.test_chat_template import CHATML, LLAMA3

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")


def tokenizer(template: str | None) -> Tokenizer:
    pipeline = byte_level_tokenizer()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"]
    pipeline.add_special_tokens(marks)
    return Tokenizer(TokenizersBackend(pipeline), None, template, SPECIAL)


def spelled(tokens: Tokenizer, ids: list[int]) -> str:
    return tokens._backend._pipeline.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("documents", [(), ("One.\n", "Two.")])
@pytest.mark.parametrize("template", [CHATML, LLAMA3])
@pytest.mark.parametrize("ends", [True, False])
def test_it_reads_as_if_the_template_had_written_all_of_it(template, documents, system, ends):
    tokens = tokenizer(template)
    end = "<|im_end|>" if template is CHATML else "<|eot_id|>"
    talk = Conversation(tokens, system=system, documents=documents)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = "".join(document.strip() + "\n\n" for document in documents)
    before = talk.beginning
    for question, answer in (("Who is Anne?", "A woman."), ("Really?", "Yes."), ("Sure?", "!")):
        messages.append({"role": "user", "content": text + question})
        text = ""
        prompt = talk.ask(question)
        assert prompt[: len(before)] == before
        assert spelled(tokens, prompt) == tokens.chat_template.render(messages)
        ids = tokens.encode_marked(answer + end * ends)
        talk.answered(prompt, ids, end if ends else "")
        messages.append({"role": "assistant", "content": answer})
        before = talk.tokens
        assert before == prompt + ids


def test_what_is_forgotten_leaves_the_documents():
    talk = Conversation(tokenizer(CHATML), documents=["One."])
    first = talk.ask("Who?")
    talk.answered(first, [5])
    talk.tokens = []
    assert talk.ask("Who?") == first


def test_it_goes_on_where_it_was_saved():
    talk, other = (Conversation(tokenizer(CHATML), documents=[name]) for name in ("One.", "Two."))
    talk.answered(talk.ask("Who?"), [5, 6], "<|im_end|>")
    other.restore(talk.as_note())
    assert other.ask("Why?") == talk.ask("Why?")
    assert other.beginning == talk.beginning


@pytest.mark.parametrize("note", ["", "[1]", '{"documents": 5}'])
def test_a_snapshot_of_something_else_is_refused(note):
    talk = Conversation(tokenizer(CHATML))
    before = talk.ask("Who?")
    with pytest.raises(InputError, match="the snapshot holds no conversation"):
        talk.restore(note)
    assert talk.ask("Who?") == before


def test_a_template_that_is_missing_refuses_or_leaves_out_is_named():
    with pytest.raises(InputError, match="has no chat template"):
        Conversation(tokenizer(None))
    with pytest.raises(InputError, match="leaves questions out"):
        Conversation(tokenizer("always the same"))
    with pytest.raises(InputError, match="no, thanks"):
        Conversation(tokenizer("{{ raise_exception('no, thanks') }}"))
