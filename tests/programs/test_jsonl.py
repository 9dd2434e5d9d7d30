"""`generate --prompts`: a line of JSON for every line, whatever the others are."""

import pytest

from minitri import End, Engine, GenerationConfig, SamplingParams, SpeculationConfig


def test_every_line_gets_what_it_gets_alone(run_lines, engine):
    done = run_lines(
        {"prompt": "She had been", "id": "a", "ignore_eos": False},
        {"prompt": "Whoever", "temperature": 0.9, "top_k": 8, "seed": 3, "max_new_tokens": 4},
        "",
        {"prompt": "The sea", "stop": ["e"], "id": [1]},
        flags=("--batch-size", "2", "--temperature", "0.5", "--seed", "10", "--method", "naive"),
    )
    assert done.code == 0
    assert "decoded at" in done.err
    told = [(done.lines[n]["id"], done.lines[n]["seed"]) for n in (1, 2, 4)]
    assert told == [("a", 10), (2, 3), ([1], 12)]
    half = SamplingParams(temperature=0.5)
    for number, prompt, sampling, generation in (
        (1, "She had been", half, GenerationConfig(8)),
        (2, "Whoever", SamplingParams(0.9, top_k=8), GenerationConfig(4, ignore_eos=True)),
        (4, "The sea", half, GenerationConfig(8, stop=("e",), ignore_eos=True)),
    ):
        answer, settings = done.lines[number], {"sampling": sampling, "generation": generation}
        settings |= {"seed": answer["seed"], "speculation": SpeculationConfig("naive")}
        wanted = engine.complete(prompt, **settings)
        assert tuple(answer["token_ids"]) == wanted.token_ids
        assert (answer["text"], answer["finish_reason"]) == (wanted.text, wanted.finish_reason)


WRONG = [
    ("nonsense", "JSON"),
    ("[" * 100_000, "JSON"),
    ("[1, 2]", "JSON"),
    ({"text": "x"}, "'text' is unknown"),
    ({}, "no prompt"),
    ({"prompt": [1]}, "no prompt"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "word " * 5000}, "prompt has"),
    ({"prompt": "x", "seed": -1}, "seed is -1"),
    ({"prompt": "x", "seed": "one"}, "seed is one"),
    ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
    ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"prompt": "x", "stop": ["ok", ""]}, "stop is"),
    ({"prompt": "x", "stop": 3}, "stop is 3"),
]


def test_wrong_lines_are_named_and_the_others_run(run_lines):
    lines = [line for line, _ in WRONG]
    code, _, err = done = run_lines({"prompt": "The sea"}, *lines, {"prompt": "She"})
    assert code == 2
    for number, (_, message) in enumerate(WRONG, 2):
        assert message in done.lines[number]["error"]
    assert f"{len(WRONG)} of {len(WRONG) + 2} lines" in err.splitlines()[-1]
    assert all(done.lines[number]["text"] for number in (1, len(WRONG) + 2))


@pytest.mark.parametrize("lines", [(), ("", " "), ("x", "y")])
def test_a_file_without_a_prompt_is_refused(run_lines, lines):
    code, _, err = run_lines(*lines)
    assert code == 2
    assert "prompts.jsonl" in err.splitlines()[-1]


def test_ctrl_c_leaves_every_finished_text_written(run_lines, monkeypatch):
    start = Engine.stream

    def interrupted(self, *args, **settings):
        run = start(self, *args, **settings)
        events, ends = run._events, 0

        def cut():
            nonlocal ends
            for event in events:
                yield event
                ends += isinstance(event, End)
                if ends == 3:
                    raise KeyboardInterrupt

        run._events = cut()
        return run

    monkeypatch.setattr(Engine, "stream", interrupted)
    done = run_lines(*[{"prompt": "The sea"}] * 9, flags=("--batch-size", "2"))
    assert (done.code, len(done.lines)) == (130, 3)
