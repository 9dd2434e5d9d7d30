"""The benchmark: every method after the same prompts, interleaved; figures that fit together."""

from types import SimpleNamespace

import pytest

from minitri.apps import bench
from minitri.apps.bench import Run, summarise, table
from minitri.core.settings import METHODS
from minitri.engine import Engine


@pytest.fixture
def run(folder, call):
    """Runs the benchmark on the tiny model; gives the figures, which are all that it prints."""

    def run(*flags: str) -> dict:
        always = "--dtype float32 --device cpu --prompt-tokens 150 --new-tokens 24 --quiet --json"
        done = call(bench.main, "--model", folder, *always.split(), "--budget", "64", *flags)
        assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)
        return done.json

    return run


@pytest.fixture
def files(tmp_path, long_text) -> list[str]:
    """Flags that name two texts with a common beginning."""
    flags = []
    for start in (900, 3000):
        file = tmp_path / f"{start}.txt"
        file.write_text(long_text[:300] + long_text[start : start + 1000], encoding="utf-8")
        flags += ["--prompt-file", str(file)]
    return flags


def test_all_methods_and_trees_are_compared_on_several_prompts_and_seeds(run, files):
    names = [*METHODS, "naive:2x2"]
    flags = [flag for name in names for flag in ("--method", name)]
    rows = run("--compare", *files, *flags, "--temperature", "0.8")["contestants"]
    assert set(rows) == set(names)
    assert "tree 2x2" in str(rows["naive:2x2"]["steps_per_plan"])
    lines = table(rows).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(rows)
    for row in rows.values():
        for key in ("ms_per_token", "speedup", "prefill_seconds"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
        assert all(0 <= rate <= 1 for rate in row["acceptance"].values())
    assert rows["autoregressive"]["speedup"] == {"median": 1, "min": 1, "max": 1}


def test_a_prompt_is_read_cold_and_once(run, files, monkeypatch):
    """Else a second prompt, or a second seed, would seem to take no time to read."""
    runs, stream = [], Engine.stream
    spy = lambda *args, **settings: runs.append(stream(*args, **settings)) or runs[-1]  # noqa: E731
    monkeypatch.setattr(Engine, "stream", spy)
    rows = run("--compare", *files, "--method", "retrieval")["contestants"]
    read = [run.stats.num_prefilled_tokens for run in runs]
    assert (read[5:], read[0]) == (read[:5], 150)
    assert set(read[1:5]) == {1, 17}  # all but what a method must see again
    least = min(run.stats.prefill_seconds for run in runs if run.stats.num_prefilled_tokens < 150)
    assert all(row["prefill_seconds"]["min"] > least for row in rows.values())


def test_speedups_are_taken_prompt_by_prompt():
    """Two prompts with two seeds, one of which is four times as slow for all methods."""
    level = SimpleNamespace(name="target", num_accepted_tokens=60, num_tested_tokens=100)
    stats = SimpleNamespace(levels=[level], steps_per_plan={"naive": 40})
    result = summarise(
        {
            "autoregressive": [Run(1.0, ms) for ms in (10, 10, 40, 40)],
            "naive": [Run(1.0, ms, stats) for ms in (5, 4, 20, 20)],
            "peer": [Run(ms / 20, ms) for ms in (20, 20, 160, 160)],
        }
    )
    assert result["naive"]["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.5}
    assert result["naive"]["acceptance"] == {"target": 0.6}
    assert result["naive"]["tokens_per_step"] == 2.5
    assert result["peer"]["speedup"] == {"median": pytest.approx(0.375), "min": 0.25, "max": 0.5}
    assert result["peer"]["prefill_seconds"]["max"] == 8
