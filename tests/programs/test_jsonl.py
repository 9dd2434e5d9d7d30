"""`generate --prompts`: a line of JSON for every line, whatever the others are."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.cli import jsonl
from minitri.generate import main


@pytest.fixture
def answers(folder, capsys, tmp_path):
    """Runs the command on lines; gives exit code, answers by id, and standard error."""

    def run(*lines: object, flags: tuple[str, ...] = ()):
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        common = ["--model", str(folder), "--dtype", "float32", "--max-new-tokens", "6"]
        with pytest.raises(SystemExit) as ended:
            main([*common, "--prompts", str(file), *flags])
        out, err = capsys.readouterr()
        given = [json.loads(line) for line in out.splitlines()]
        assert len({answer["id"] for answer in given}) == len(given) or ended.value.code == 2
        return ended.value.code, {answer["line"]: answer for answer in given}, err

    return run


def test_every_line_gets_what_it_gets_alone(answers, engine):
    code, given, err = answers(
        {"prompt": "She had been", "id": "a"},
        {"token_ids": [5, 6, 7], "temperature": 0.9, "top_k": 8, "seed": 3, "max_new_tokens": 4},
        "",
        {"prompt": "The sea", "stop": ["e"], "ignore_eos": True},
        flags=("--batch-size", "2", "--temperature", "0.5", "--seed", "10", "--method", "naive"),
    )
    assert code == 0
    assert [(given[n]["id"], given[n]["seed"]) for n in (1, 2, 4)] == [("a", 10), (2, 3), (4, 12)]
    half = SamplingParams(temperature=0.5)
    for number, prompt, sampling, generation in (
        (1, "She had been", half, GenerationConfig(6)),
        (2, [5, 6, 7], SamplingParams(temperature=0.9, top_k=8), GenerationConfig(4)),
        (4, "The sea", half, GenerationConfig(6, stop=("e",), ignore_eos=True)),
    ):
        wanted = engine.complete(
            prompt, sampling=sampling, generation=generation, seed=given[number]["seed"],
            speculation=SpeculationConfig("naive"),
        )  # fmt: skip
        answer = given[number]
        assert tuple(answer["token_ids"]) == wanted.token_ids
        assert (answer["text"], answer["finish_reason"]) == (wanted.text, wanted.finish_reason)
        assert answer["num_prompt_tokens"] > 1
    assert "decoded at" in err


WRONG = [
    ("nonsense", "it is no JSON: .*; write one object a line"),
    ("[" * 100_000, "it is no JSON"),
    ("[1, 2]", r"it is \[1, 2\]; write an object"),
    ({"text": "x"}, "'text' is unknown; known are prompt, token_ids"),
    ({}, "it has prompt and token_ids, or neither"),
    ({"prompt": "x", "token_ids": [1]}, "it has prompt and token_ids, or neither"),
    ({"prompt": 3}, "prompt is 3; give a text"),
    ({"prompt": None}, "prompt is None; give a text"),
    ({"token_ids": "abc"}, "token_ids is 'abc'; give a list of whole numbers"),
    ({"token_ids": [1, 2.5]}, r"token_ids is \[1, 2.5\]"),
    ({"token_ids": [1, 10**9]}, "prompt has token id 1000000000"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "word " * 5000}, "prompt has .* tokens"),
    ({"prompt": "x", "seed": -1}, "seed is -1"),
    ({"prompt": "x", "seed": "one"}, "seed is one"),
    ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
    ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"prompt": "x", "stop": ["ok", ""]}, "a stop string is empty"),
    ({"prompt": "x", "stop": 3}, "stop is 3"),
    ({"prompt": "x", "id": [1]}, r"id is \[1\]; give a text or number"),
    ({"prompt": "x", "id": "taken"}, "id 'taken' was there before; give another"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_line_is_named_and_the_others_run(answers, line, message):
    fine = {"prompt": "The sea", "id": "taken"}, {"prompt": "She"}
    code, given, err = answers(fine[0], line, fine[1])
    assert code == 2
    assert re.search(message, given[2]["error"])
    assert re.search("line 2: " + message, err)
    assert err.strip().endswith("1 of 3 lines were wrong, the others are written")
    assert given[1]["text"]
    assert given[3]["text"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [((), "has no lines"), (("", " "), "has no lines"), (("x", "y"), "all 2 lines are wrong")],
)
def test_a_file_without_a_prompt_is_refused(answers, lines, message):
    code, _, err = answers(*lines)
    assert code == 2
    assert message in err


def test_ctrl_c_leaves_every_finished_text_written(answers, monkeypatch):
    start = Engine.stream

    def interrupted(self, *args, **settings):
        run = start(self, *args, **settings)
        events, ends = run._events, 0

        def cut():
            nonlocal ends
            for event in events:
                yield event
                ends += isinstance(event, jsonl.End)
                if ends == 3:
                    raise KeyboardInterrupt

        run._events = cut()
        return run

    monkeypatch.setattr(Engine, "stream", interrupted)
    code, given, err = answers(*[{"prompt": "The sea"}] * 9, flags=("--batch-size", "2"))
    assert code == 130
    assert len(given) == 3
    assert "interrupted: 3 of 9 prompts are written" in err


def test_seeds_count_up_by_lines_and_wrap_around():
    lines = [jsonl.Line(7 + i, i, 7 + i) for i in range(10)]
    requests = [line.request(SamplingParams(), GenerationConfig(), 2**32 - 5) for line in lines]
    assert [request.seed for request in requests] == [*range(2**32 - 5, 2**32), *range(5)]


def test_prompts_may_come_from_standard_input(folder, capsys, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt": "The sea"}\n'))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(folder), "--max-new-tokens", "3", "--prompts", "-"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["line"] == 1
