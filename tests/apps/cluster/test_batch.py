"""Prompts on replicas, and the file of answers: all without Ray."""

import fcntl
import sys
from types import SimpleNamespace

import pytest

from minitri import generate
from minitri.apps.cluster import batch
from tests.apps.cluster.conftest import write_questions


class DiedError(Exception):
    pass


class FakePool:
    """Replicas that work one after the other."""

    def __init__(self, replicas):
        self.replicas = replicas

    def map_unordered(self, answer, groups):
        return [answer(self.replicas[n % len(self.replicas)], g) for n, g in enumerate(groups)]


class FakeRay:
    """Ray with replicas in this process, which answer a line with its id, or always die."""

    exceptions = SimpleNamespace(RayActorError=DiedError)
    util = SimpleNamespace(ActorPool=FakePool)

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies
        self.groups: list[list] = []

    def remote(self, **share):
        return lambda _: SimpleNamespace(remote=self.start)

    def start(self, *settings):
        def answers(lines):
            if self.dies:
                raise DiedError
            self.groups.append(lines)
            return [{"id": line.id, "line": line.number} for line in lines]

        return SimpleNamespace(answers=SimpleNamespace(remote=answers))


@pytest.fixture
def run(tmp_path, folder, call, monkeypatch):
    """Runs the program with the replicas of a `FakeRay`; the answers go to `run.file`."""

    def run(ray: FakeRay):
        monkeypatch.setattr(batch, "connect", lambda args: (ray, {}))
        words = ["--prompts", tmp_path / "in.jsonl", "-m", folder, "--output", run.file]
        return call(generate.main, *words, "--ray", "local", "--replicas", "2")

    run.file = tmp_path / "out.jsonl"
    write_questions(tmp_path / "in.jsonl", 12, 2)
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


@pytest.mark.parametrize("content", ["precious notes", '{"id": 1, "prompt": "a"}', '{"id": 1}\n'])
def test_a_file_of_something_else_stays_as_it_is(run, content):
    run.file.write_text(content)
    done = run(FakeRay())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "cannot be continued" in done.err
    assert run.file.read_text() == content


def test_two_programs_do_not_write_to_one_file(run):
    with run.file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(FakeRay())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "cannot be continued" in done.err


def test_an_id_that_two_lines_have_is_named(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 2, "prompt": "x"}\n{"prompt": "y"}\n')
    done = run(FakeRay())
    assert (done.code, "two lines of --prompts have the id 2" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts IN --ray local --output OUT", "--ray needs Ray; install it: pip install"),
        ("--prompts IN --ray local", "--ray needs --output FILE"),
        ("Once --ray local", "--ray is for many prompts; give --prompts"),
        ("Once --output OUT", "are for --ray; add it"),
        ("Once --replicas 2", "are for --ray; add it"),
    ],
)
def test_flags_of_ray_that_do_not_fit_are_one_line(tmp_path, call, monkeypatch, flags, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "IN").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    done = call(generate.main, *flags.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err
