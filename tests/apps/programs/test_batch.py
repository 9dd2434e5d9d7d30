"""Prompts on replicas, and the file of answers: all without Ray."""

import fcntl
import json
import random
import sys
from types import SimpleNamespace

import pytest

from minitri import generate
from tests.conftest import SENTENCES


class FakeRay:
    """Ray, its pool and all replicas, which answer a line with its id, or always die."""

    exceptions = SimpleNamespace(RayActorError=ConnectionError)

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies
        self.groups: list[list] = []
        self.util = SimpleNamespace(ActorPool=lambda replicas: self)
        self.answers = SimpleNamespace(remote=self.answer)

    def init(self, address, **settings):
        pass

    def cluster_resources(self):
        return {"CPU": 2}

    def remote(self, **share):
        return lambda _: SimpleNamespace(remote=lambda *settings: self)

    def map_unordered(self, ask, groups):
        return [ask(self, group) for group in groups]

    def answer(self, lines):
        if self.dies:
            raise ConnectionError
        self.groups.append(lines)
        return [{"id": line.id, "line": line.number} for line in lines]


@pytest.fixture
def run(tmp_path, folder, call, monkeypatch):
    """Asks replicas of a `FakeRay` about two documents, in random order; `run.file`: answers."""

    def run(ray: FakeRay):
        monkeypatch.setitem(sys.modules, "ray", ray)
        words = ["--prompts", tmp_path / "in.jsonl", "-m", folder, "--output", run.file]
        return call(generate.main, *words, "--ray", "local", "--replicas", "2")

    run.file = tmp_path / "out.jsonl"
    rng, words = random.Random(1), " ".join(SENTENCES).split()
    texts = [" ".join(rng.choices(words, k=70)) for _ in range(2)]
    lines = [{"id": f"q{i}", "prompt": f"{texts[i % 2]} {i}?"} for i in range(12)]
    rng.shuffle(lines)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_each_line_is_answered_once_next_to_those_that_begin_alike(run):
    ray = FakeRay()
    assert run(ray).code == 0
    assert sorted(line.number for group in ray.groups for line in group) == [*range(1, 13)]
    for group in ray.groups:
        assert len({line.fields["prompt"][:20] for line in group}) == 1


def test_replicas_that_only_die_end_the_run(run):
    done = run(FakeRay(dies=True))
    assert (done.code, "replicas keep dying" in done.err) == (2, True)


def test_a_torn_line_is_dropped_and_only_the_rest_is_answered(run):
    kept = '{"id": "q3", "line": 4, "text": "é"}\n'
    run.file.write_bytes((kept + '{"id": "q1", "text": "é').encode()[:-1])  # inside a character
    ray = FakeRay()
    done = run(ray)
    assert done.code == 0, done.err
    content = run.file.read_text(encoding="utf-8")
    assert content.startswith(kept)
    assert content.count("\n") == 12
    assert sum(map(len, ray.groups)) == 11
    assert run(FakeRay()).code == 0
    assert run.file.read_text(encoding="utf-8") == content


CONTENTS = ["precious notes", '{"id": 1, "prompt": "a"}', '{"id": 1}\n', ""]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_of_something_else_or_of_another_program_stays_as_it_is(run, content):
    run.file.write_text(content)
    with run.file.open() as file:
        if not content:
            fcntl.flock(file, fcntl.LOCK_EX)
        done = run(FakeRay())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "cannot be continued" in done.err
    assert run.file.read_text() == content
