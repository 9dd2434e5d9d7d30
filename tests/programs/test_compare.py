"""`bench --compare`: every method behind the same prompts, in turns, with figures that fit
together."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
import torch

from minitri import GenerationConfig, SamplingParams, SpeculationConfig, bench, load, memory
from minitri.benchmarks.compare import (
    Method,
    Score,
    num_same,
    read_prompt_once,
    summarise,
    take_turns,
)
from minitri.benchmarks.peers.in_transformers import (
    prompt_lookup_peer,
    transformers_model,
    transformers_peer,
)
from minitri.gpu.offload.offloaded_cache import RING
from minitri.requests import Request
from minitri.settings import METHODS
from tests.cascades import random_prompt, tiny_engine
from tests.gpu_twins.test_offloaded_cache import offloaded
from tests.programs.test_tools import texts  # noqa: F401 (a fixture)

FLAGS = ("--compare", "--dtype", "float32", "--device", "cpu", "--prompt-tokens", "150",
    "--new-tokens", "24",
         "--quiet", "--budget", "64", "--num-recent-tokens", "40")  # fmt: skip


def run(capsys, *flags: str) -> tuple[list[str], dict]:
    with pytest.raises(SystemExit) as exit_:
        bench.main([*FLAGS, *flags])
    *table, last = capsys.readouterr().out.splitlines()
    assert exit_.value.code == 0
    return table, json.loads(last)


def test_all_methods_take_turns_on_several_prompts_and_seeds(folder, texts, capsys, tmp_path):  # noqa: F811
    plot = tmp_path / "speedups.png"
    files = [flag for file in texts for flag in ("--prompt-file", file)]
    table, result = run(
        capsys, "--model", str(folder), *files, "--temperature", "0.8", "--plot", str(plot)
    )
    rows = result["contestants"]
    assert set(rows) == set(METHODS)
    assert [line.split()[0] for line in table[2:] if not line.startswith(" ")] == list(rows)
    for row in rows.values():
        for key in ("ms_per_token", "speedup", "end_to_end_seconds", "end_to_end_speedup"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
    assert rows["autoregressive"]["speedup"] == {"median": 1, "min": 1, "max": 1}
    assert rows["autoregressive"]["acceptance"] == {}
    assert rows["naive"]["same_tokens"] == []  # drawn independently
    assert list(rows["triforce"]["acceptance"])[-1] == "target"
    assert all(0 <= rate <= 1 for row in rows.values() for rate in row["acceptance"].values())
    assert sum(rows["auto"]["steps_per_plan"].values()) > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_compares_at_every_length_and_draws_lines(folder, texts, capsys, tmp_path):  # noqa: F811
    plot = tmp_path / "sweep.png"
    with pytest.raises(SystemExit) as exit_:
        bench.main([*FLAGS, "--model", str(folder), "--prompt-file", texts[0], "--seeds", "1",
            "--method", "retrieval",
                    "--sweep-tokens", "90", "--sweep-tokens", "150", "--plot",
                    str(plot)])  # fmt: skip
    results = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert exit_.value.code == 0
    assert [result["num_prompt_tokens"] for result in results] == [[90], [150]]
    assert all(set(result["contestants"]) == {"autoregressive", "retrieval"} for result in results)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [("--temperature", "0"), ("--temperature", "0.9", "--coupled")])
def test_where_all_write_the_same_text_it_says_so(folder, capsys, draw):
    table, result = run(
        capsys, "--model", str(folder), "--seeds", "2", "--method", "triforce", *draw
    )
    assert result["contestants"]["triforce"]["same_tokens"] == [24, 24]
    assert any("the text of autoregressive for 24, 24 of 24 tokens" in line for line in table)


def test_texts_are_the_same_up_to_the_first_difference():
    assert num_same([1, 2, 3, 4, 9], [1, 2, 3, 5], 4) == 3
    assert num_same([1, 2, 3, 4, 9], [1, 2, 3, 4], 4) == 4
    assert num_same([7, 2, 3, 4], [1, 2, 3, 4], 4) == 0


def test_trees_take_part(folder, capsys):
    flags = ("--seeds", "1", "--method", "naive", "--method", "naive:2x2", "--method", "naive:5")
    table, result = run(capsys, "--model", str(folder), "--draft", str(folder), *flags)
    rows = result["contestants"]
    assert list(rows) == ["autoregressive", "naive", "naive:2x2", "naive:5"]
    assert rows["autoregressive"]["tokens_per_step"] == 1
    assert all(rows[name]["same_tokens"] == [24] for name in rows)
    assert "tree 2x2" in str(rows["naive:2x2"]["steps_per_plan"])
    assert "a step" in str(table)


@pytest.mark.parametrize("method", ["naives", "naive:0", "naive:8x9", "naive:4x"])
def test_an_unknown_contestant_is_refused(method, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--compare", "--method", method])
    assert "argument --method" in capsys.readouterr().err


@pytest.mark.slow
def test_peers_take_part(folder, capsys):
    rows = run(capsys, "--model", str(folder), "--peers", "--seeds", "1", "--method", "naive")[1][
        "contestants"
    ]
    assert {"autoregressive", "naive", "transformers"} <= set(rows)
    assert all(row["ms_per_token"]["median"] > 0 for row in rows.values())


def request_of(prompt: list[int]) -> Request:
    return Request(prompt, 0, SamplingParams(), GenerationConfig(80))


@torch.inference_mode()
def test_taking_turns_changes_no_text():
    engine = tiny_engine()
    prompt = random_prompt(engine.config, 90)
    full, queries_LTHD, _ = read_prompt_once(engine, prompt, 16, chunk=32)
    contestants = {
        name: Method(engine, request_of(prompt), SpeculationConfig(name, budget=64,
            num_recent_tokens=40), full,
                     queries_LTHD) for name in METHODS
    }  # fmt: skip
    take_turns(contestants, 50, 8)
    said = [method.text[:50] for method in contestants.values()]
    assert all(text == said[0] for text in said)
    alone = engine.complete(
        prompt,
        generation=GenerationConfig(50, ignore_eos=True),
        speculation=SpeculationConfig("autoregressive"),
    )
    assert said[0] == list(alone.token_ids)


@torch.inference_mode()
def test_methods_over_kv_in_host_memory_say_the_same(monkeypatch):
    """As they would on a GPU: each method's copy of the cache that has read the prompt is an
    offloaded one."""
    engine = tiny_engine()
    prompt = random_prompt(engine.config, 2 * RING)
    full, queries_LTHD, _ = read_prompt_once(engine, prompt, 16)
    said = []
    for name in METHODS:
        for on_chip in (None, 0, 1):
            with monkeypatch.context() as patching:
                if on_chip is not None:
                    hosted = offloaded(on_chip, batch_size=1, config=engine.config)
                    patching.setattr(
                        memory, "allocate_full_cache", lambda *settings, hosted=hosted: hosted
                    )
                speculation = SpeculationConfig(
                    name, budget=64, chunk_size=4, num_recent_tokens=40, rebuild_stride=6
                )
                method = Method(engine, request_of(prompt), speculation, full, queries_LTHD)
                take_turns({name: method}, 50, 8)
                said.append(method._cascade.sequences[0][: len(prompt) + 50])
    assert len(said[0]) == len(prompt) + 50
    assert all(text == said[0] for text in said)


def test_speedups_are_taken_prompt_by_prompt():
    """Of two prompts, of which one is four times as slow for everybody; the peer ran once per
    prompt, of two seeds."""
    ours = {
        "autoregressive": Score([10.0, 10.0, 40.0, 40.0], [1.0, 1.0, 4.0, 4.0]),
        "naive": Score([5.0, 4.0, 20.0, 20.0], [1.0, 1.0, 4.0, 4.0], {"target": (60, 100)}),
        "peer": Score([20.0, 160.0], [1.0, 8.0]),
    }
    result = summarise(ours, 100)
    assert result["naive"]["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.5}
    assert result["naive"]["acceptance"] == {"target": 0.6}
    assert result["peer"]["speedup"] == {"median": pytest.approx(0.375), "min": 0.25, "max": 0.5}
    assert result["peer"]["end_to_end_seconds"]["max"] == pytest.approx(8 + 16)
    assert result["peer"]["end_to_end_speedup"]["min"] == pytest.approx((4 + 4) / (8 + 16))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--prompt-file", "a", "--prompt-file", "b"],
            "several --prompt-file need --compare; give one",
        ),
        (["--coupled"], "need --compare; add it"),
        (["--sweep-tokens", "100"], "need --compare; add it"),
        (["--compare", "--seeds", "0"], "not a whole number from 1 to"),
        (
            ["--compare", "--prompt-file", "no-such-file"],
            "cannot read the prompt from no-such-file",
        ),
        (["--compare", "--offload", "--model", "no-such-model"], "needs --on-chip N"),
    ],
)
def test_bad_flags_are_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(flags)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_prompt_lookup_says_what_plain_transformers_says(folder):
    """Both are greedy. Ended early, it leaves no thread behind that computes."""
    pytest.importorskip("transformers")
    engine = load(str(folder), dtype="float32")
    model = transformers_model(folder, engine)
    prompt = random_prompt(engine.config, 40) * 3
    plain = list(transformers_peer(model)(prompt, 30))
    assert list(itertools.islice(prompt_lookup_peer(model)(prompt, 40), 30)) == plain
    tokens = prompt_lookup_peer(model)(prompt, 40)
    assert [next(tokens), next(tokens)] == plain[:2]
    tokens.close()
    workers = [thread for thread in threading.enumerate() if thread.name == "prompt lookup"]
    for thread in workers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in workers)
