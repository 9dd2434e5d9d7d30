"""Groups of prompts, and the file of answers: all without Ray."""

import argparse
import json
from types import SimpleNamespace

import pytest

from minitri import generate
from minitri.apps.cli.jsonl import Line
from minitri.apps.cluster import batch
from tests.apps.cluster.conftest import documents, write_questions


class DiedError(Exception):
    pass


class FakePool:
    """Replicas of this process that answer a line with its id; some always die."""

    def __init__(self, replicas):
        [self.replica, *_] = replicas

    def map_unordered(self, answer, groups):
        return [answer(self.replica, group) for group in groups]


class FakeRay:
    """Ray with replicas that live, or die whenever they start."""

    exceptions = SimpleNamespace(RayActorError=DiedError)
    util = SimpleNamespace(ActorPool=FakePool)

    def __init__(self, *, dies=False):
        self.dies = dies
        self.given: list[list] = []

    def remote(self, **share):
        return lambda _: SimpleNamespace(remote=self.start)

    def start(self, *settings):
        def answers(lines):
            if self.dies:
                raise DiedError
            self.given.append(lines)
            fields = [json.loads(line.text) for line in lines]
            return [
                {"id": field.get("id", line.number), "line": line.number}
                for field, line in zip(fields, lines, strict=True)
            ]

        return SimpleNamespace(answers=SimpleNamespace(remote=answers))


def lines_of(prompts):
    lines = [Line(i, i + 1, json.dumps({"prompt": it})) for i, it in enumerate(prompts)]
    return [(prompt, line) for prompt, line in zip(prompts, lines, strict=True)]


def gathered(ray, asked, monkeypatch):
    monkeypatch.setattr(batch, "connect", lambda args: (ray, {}))
    args = argparse.Namespace(replicas=2)
    return [*batch.gathered(asked, args)]


def test_prompts_that_begin_alike_are_a_group_and_the_longest_is_first():
    short, long = documents(2, num_words=20)
    long = long * 3
    prompts = [f"{text} {i}?" for i in range(3) for text in (short, long)]
    groups = batch.grouped(lines_of(prompts), 3)
    assert [{prompt[:20] for prompt, _ in group} for group in groups] == [{long[:20]}, {short[:20]}]
    assert [len(group) for group in batch.grouped(lines_of(["the same"] * 7), 3)] == [3, 3, 1]


def test_each_line_is_answered_once(monkeypatch):
    ray = FakeRay()
    told = gathered(ray, lines_of([f"{text} {i}" for i in range(4) for text in "xyz"]), monkeypatch)
    assert sorted(answer["line"] for answer in told) == [*range(1, 13)]


def test_replicas_that_only_die_end_the_run(monkeypatch):
    with pytest.raises(batch.InputError, match="died again and again"):
        gathered(FakeRay(dies=True), lines_of(["x"]), monkeypatch)


@pytest.fixture
def run(tmp_path, folder, call, monkeypatch):
    """The program with replicas of this process."""
    file = tmp_path / "out.jsonl"

    def run(*words, ray=None):
        monkeypatch.setattr(batch, "connect", lambda args: (ray or FakeRay(), {}))
        given = ["--prompts", tmp_path / "in.jsonl", "-m", folder, "--ray", "local"]
        return call(generate.main, *given, "--output", file, *words)

    run.file = file
    write_questions(tmp_path / "in.jsonl", 6, 2)
    return run


def test_a_torn_line_is_dropped_and_only_the_rest_is_answered(run):
    kept = '{"id": "q3", "line": 4, "text": "é"}\n'
    run.file.write_bytes((kept + '{"id": "q1", "text": "é').encode()[:-1])  # inside a character
    ray = FakeRay()
    done = run(ray=ray)
    assert done.code == 0, done.err
    content = run.file.read_text(encoding="utf-8")
    assert content.startswith(kept)
    assert content.count("\n") == 6
    assert len([line for lines in ray.given for line in lines]) == 5
    assert run(ray=FakeRay()).code == 0
    assert run.file.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    "content", ["precious notes", "one\ntwo", '{"id": 1, "prompt": "a"}', '{"id": 1}\n{"id": 2}\n']
)
def test_a_file_of_something_else_stays_as_it_is(run, content):
    run.file.write_text(content)
    done = run()
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "cannot be continued" in done.err
    assert run.file.read_text() == content


def test_two_programs_do_not_write_to_one_file(run):
    import fcntl

    with run.file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run()
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "cannot be continued" in done.err


def test_an_id_that_two_lines_have_is_named(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 2, "prompt": "x"}\n{"prompt": "y"}\n')
    done = run()
    assert (done.code, "two lines of --prompts have the id 2" in done.err) == (2, True)


def test_without_ray_a_line_says_what_to_install(tmp_path, call, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    write_questions(tmp_path / "in.jsonl", 2, 1)
    words = ["--prompts", tmp_path / "in.jsonl", "--ray", "local"]
    done = call(generate.main, *words, "--output", tmp_path / "out.jsonl")
    assert (done.code, done.out) == (2, "")
    assert done.err == "minitri: --ray needs Ray; install it: pip install 'minitri[ray]'\n"
    assert "needs --output" in call(generate.main, *words).err
    assert "give --prompts" in call(generate.main, "Once", "--ray", "local").err
