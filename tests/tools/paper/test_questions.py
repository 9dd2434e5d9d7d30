"""Questions about a long text: the needle is where it should be, RULER's are made by its own
generators, and answers are graded as there."""

import random

import pytest

from minitri.core.errors import InputError
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer
from tools.paper import questions
from tools.paper.questions import BEGINNING, NEEDLE, Question, hide, ruler

GENERATOR = """
import argparse, json, random
from pathlib import Path
from constants import TASKS
from tokenizer import select_tokenizer
parser = argparse.ArgumentParser()
for name in ("save_dir", "save_name", "tokenizer_path", "template", "kind"):
    parser.add_argument("--" + name)
for name in ("max_seq_length", "num_samples", "tokens_to_generate"):
    parser.add_argument("--" + name, type=int)
args = parser.parse_args()
count = select_tokenizer("hf", args.tokenizer_path).text_to_tokens
rows = []
for number in range(args.num_samples):
    context = "the sea was calm. "
    make = lambda: args.template.format(context=context, query=args.kind)
    while len(count(make())) + args.tokens_to_generate + 10 < args.max_seq_length:
        context += "the sea was calm. "
    rows.append({"input": make(), "outputs": [str(number), "b"]})
print("made")
file = Path(args.save_dir) / args.save_name / "validation.jsonl"
file.parent.mkdir()
file.write_text("\\n".join(map(json.dumps, rows)))
"""
CONSTANTS = """
TASKS = {"hop": {"tokens_to_generate": 40, "template": "Read: {context} Say {query}.",
                 "answer_prefix": " Answer:"}}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands in for the published package, with its interface and one task."""
    scripts = tmp_path / "stand_in" / "data" / "synthetic"
    scripts.mkdir(parents=True)
    for folder in (scripts, scripts.parent, scripts.parent.parent):
        (folder / "__init__.py").touch()
    (scripts / "hop.py").write_text(GENERATOR)
    (scripts / "constants.py").write_text(CONSTANTS)
    tasks = "ours:\n  task: hop\n  args:\n    kind: what you know\n"
    (scripts.parent.parent / "synthetic.yaml").write_text(tasks)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(questions, "PACKAGE", "stand_in")
    return scripts


def test_rulers_questions_are_as_long_as_asked_for_by_the_models_own_tokens(package, engine, capfd):
    found = ruler("ours", engine.tokenizer, 2400, 2)
    assert [it.answers for it in found] == [["0", "b"], ["1", "b"]]
    for question in found:
        assert 2400 - 40 - 30 < len(question.prompt) <= 2400 - 40
        assert question.num_new == 40
        text = engine.tokenizer.decode(question.prompt)
        assert text.startswith("Read: the sea was calm.")
        assert text.endswith("Say what you know. Answer:")
    assert capfd.readouterr().out == ""


def test_a_model_that_converses_is_asked_in_its_own_format(package):
    """The answer is begun where its turn begins; marks are the tokens that they spell."""
    source = "<s>{% for it in messages %}[{{ it.role }}] {{ it.content }}{% endfor %} [me]"
    tokenizer = Tokenizer(TokenizersBackend(byte_level_tokenizer()), 1, template=source)
    [question] = ruler("ours", tokenizer, 2400, 1)
    assert question.prompt[0] == 1
    assert 1 not in question.prompt[1:]
    text = tokenizer.decode(question.prompt)
    assert text.startswith("[user] Read: the sea was calm.")
    assert text.endswith("Say what you know. [me] Answer:")
    assert len(question.prompt) <= 2400 - 40


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda package: (package / "hop.py").write_text("import nowhere"), "No module named"),
        (lambda package: (package / "hop.py").write_text("raise SystemExit(2)"), "SystemExit: 2"),
        (lambda package: (package.parent.parent / "synthetic.yaml").write_text("{}"), "KeyError"),
    ],
)
def test_what_is_wrong_with_the_package_is_said_in_a_line(package, engine, spoil, said):
    spoil(package)
    with pytest.raises(InputError, match=said) as raised:
        ruler("ours", engine.tokenizer, 2400, 1)
    assert "pip install" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_package_there_are_no_such_questions(engine, monkeypatch):
    monkeypatch.setattr(questions, "PACKAGE", "not_installed_at_all")
    assert not questions.has_ruler()
    with pytest.raises(InputError, match="pip install"):
        ruler("vt", engine.tokenizer, 2400, 1)
    with pytest.raises(InputError, match="at least 2000 tokens, not 300"):
        ruler("vt", engine.tokenizer, 300, 1)


def test_an_answer_is_worth_the_share_of_what_was_asked_for():
    question = Question([], ["12,345", "Abc"], 8)
    assert question.grade("They are abc and 12345.") == 1
    assert question.grade("ABC, 1234 5") == 0.5
    assert question._replace(is_any=True).grade("ABC") == 1
    assert question._replace(is_any=True).grade("none") == 0


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_is_hidden_in_a_prompt_of_just_the_length_asked_for(engine, long_text, depth):
    text_ids = engine.tokenizer.encode(long_text[:9000])
    number = random.Random(3).randint(1_000_000, 9_999_999)
    question = hide(engine.tokenizer, text_ids, 1000, depth, number)
    before, sentence, after = engine.tokenizer.decode(question.prompt).partition(
        NEEDLE.format(number=number)
    )
    assert len(question.prompt) == 1000
    assert question.answers == [str(number)]
    assert sentence
    assert sentence not in after
    assert len(before) / len(before + sentence + after) == pytest.approx(depth, abs=0.35)
    assert after.endswith("assistant\n" + BEGINNING)
    with pytest.raises(InputError, match="a prompt of 1000 tokens"):
        hide(engine.tokenizer, [5] * 100, 1000, depth, number)
