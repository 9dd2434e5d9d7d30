"""The benchmark: methods after the same prompts, interleaved, with figures that fit together."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from minitri.core.settings import METHODS
from minitri.engine import Engine
from tools.bench import __main__ as bench
from tools.bench.compare import Run, summarise, table


@pytest.fixture
def run(folder, call):
    """Runs the benchmark on the tiny model; gives the figures, which are all that it prints."""

    def run(flags: str) -> Any:
        always = f"--model {folder} --dtype float32 --device cpu --max-prompt-tokens 150 --quiet"
        sizes = "--max-new-tokens 24 --budget 64 --num-recent-tokens 40"
        done = call(bench.main, "compare", *f"{always} {sizes} --json {flags}".split())
        assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)
        return done.json

    return run


@pytest.fixture
def files(tmp_path, long_text) -> str:
    paths = [tmp_path / "900", tmp_path / "3000"]
    for path in paths:
        path.write_text(long_text[:300] + long_text[int(path.name) :][:1000], encoding="utf-8")
    return " ".join(f"--prompt-file {path}" for path in paths)


def test_all_methods_are_measured_on_several_prompts_and_seeds(run, files):
    rows = run(f"{files} --temperature 0.8")["contestants"]
    assert set(rows) == set(METHODS)
    assert [line.split()[0] for line in table(rows).splitlines()] == list(rows)
    for row in rows.values():
        for key in ("ms_per_token", "speedup", "prefill_seconds"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
        assert all(0 <= rate <= 1 for rate in row["acceptance"].values())
    assert rows["autoregressive"]["speedup"] == {"median": 1, "min": 1, "max": 1}


def test_a_prompt_is_read_cold_and_once(run, files, monkeypatch):
    """A cached prompt, of a second text or seed, would seem to take no time to read."""
    runs, stream = [], Engine.stream
    spy = lambda *args, **settings: runs.append(stream(*args, **settings)) or runs[-1]  # noqa: E731
    monkeypatch.setattr(Engine, "stream", spy)
    run(f"{files} --method retrieval")
    read = [run.stats.num_prefilled_tokens for run in runs]
    assert (read[5:], read[0]) == (read[:5], 150)
    assert set(read[1:5]) == {1, 17}  # all but what a method must see again


def test_speedups_are_taken_prompt_by_prompt():
    level = SimpleNamespace(name="target", num_accepted_tokens=60, num_tested_tokens=100)
    stats = SimpleNamespace(levels=[level], steps_per_plan=Counter(naive=40))
    result = summarise(
        {
            "autoregressive": [Run(1.0, ms, stats) for ms in (10, 10, 40, 40)],
            "naive": [Run(1.0, ms, stats) for ms in (5, 4, 20, 20)],
        }
    )
    assert result["naive"]["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.5}
    assert result["naive"]["acceptance"] == {"target": 0.6}
    assert result["naive"]["tokens_per_step"] == 2.5
