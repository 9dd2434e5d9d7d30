"""The benchmark: every method after the same prompts, in turns, with figures that fit together."""

import json
from types import SimpleNamespace

import pytest
import torch

from minitri import GenerationConfig, SamplingParams, SpeculationConfig, memory
from minitri.bench import __main__ as bench
from minitri.bench.compare import Contestant, num_same, read_once, start_method, summarise
from minitri.bench.compare import take_turns as decode_in_turns
from minitri.gpu.offload.offloaded_cache import RING
from minitri.requests import Request
from minitri.settings import METHODS
from tests.cascades import random_prompt, tiny_engine
from tests.gpu_twins.test_offloaded_cache import offloaded
from tests.programs.test_tools import texts  # noqa: F401 (a fixture)
from tools.bench import __main__ as tools_bench


@pytest.fixture
def run(folder, capsys):
    """Runs the benchmark on the tiny model; gives lines for people, and objects."""

    def run(*flags: str, program=bench) -> tuple[list[str], list[dict]]:
        always = "--dtype float32 --device cpu --prompt-tokens 150 --new-tokens 24 --quiet"
        sizes = "--budget 64 --num-recent-tokens 40"
        with pytest.raises(SystemExit) as exit_:
            program.main(["--model", str(folder), *always.split(), *sizes.split(), *flags])
        assert exit_.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        objects = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in lines if not line.startswith("{")], objects

    return run


def test_all_methods_take_turns_on_several_prompts_and_seeds(run, texts, tmp_path):  # noqa: F811
    plot = tmp_path / "speedups.png"
    files = [flag for file in texts for flag in ("--prompt-file", file)]
    flags = ("--compare", *files, "--temperature", "0.8", "--plot", str(plot))
    table, [result] = run(*flags, program=tools_bench)
    rows = result["contestants"]
    assert set(rows) == set(METHODS)
    assert [line.split()[0] for line in table[2:] if not line.startswith(" ")] == list(rows)
    for row in rows.values():
        for key in ("ms_per_token", "speedup", "end_to_end_seconds", "end_to_end_speedup"):
            assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
        assert all(0 <= rate <= 1 for rate in row["acceptance"].values())
    assert rows["autoregressive"]["speedup"] == {"median": 1, "min": 1, "max": 1}
    assert rows["autoregressive"]["acceptance"] == {}
    assert rows["naive"]["same_tokens"] == []  # drawn independently
    assert list(rows["triforce"]["acceptance"])[-1] == "target"
    assert sum(rows["auto"]["steps_per_plan"].values()) > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_compares_at_every_length_and_draws_lines(run, texts, tmp_path):  # noqa: F811
    plot = tmp_path / "sweep.png"
    flags = "--compare --seeds 1 --method retrieval --sweep-tokens 90 --sweep-tokens 150"
    files = ("--prompt-file", texts[0], "--plot", str(plot))
    results = run(*flags.split(), *files, program=tools_bench)[1]
    assert [result["num_prompt_tokens"] for result in results] == [[90], [150]]
    assert all(set(result["contestants"]) == {"autoregressive", "retrieval"} for result in results)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_one_method_is_measured_alone(run):
    _, [result] = run("--method", "triforce", "--seeds", "3")
    assert set(result["contestants"]) == {"triforce"}
    assert result["contestants"]["triforce"]["same_tokens"] == [24, 24, 24]
    assert result["peak_bytes"] > 0


@pytest.mark.parametrize("draw", [("--temperature", "0"), ("--temperature", "0.9", "--coupled")])
def test_where_all_write_the_same_text_it_says_so(run, draw):
    table, [result] = run("--compare", "--method", "triforce", *draw)
    assert result["contestants"]["triforce"]["same_tokens"] == [24, 24]
    assert any("the text of autoregressive for 24, 24 of 24 tokens" in line for line in table)


def test_texts_are_the_same_up_to_the_first_difference():
    assert num_same([1, 2, 3, 4, 9], [1, 2, 3, 5], 4) == 3
    assert num_same([1, 2, 3, 4, 9], [1, 2, 3, 4], 4) == 4
    assert num_same([7, 2, 3, 4], [1, 2, 3, 4], 4) == 0


def test_trees_take_part(run, folder):
    flags = "--compare --seeds 1 --method naive --method naive:2x2 --method naive:5"
    rows = run(*flags.split(), "--draft", str(folder))[1][0]["contestants"]
    assert list(rows) == ["autoregressive", "naive", "naive:2x2", "naive:5"]
    assert rows["autoregressive"]["tokens_per_step"] == 1
    assert all(rows[name]["same_tokens"] == [24] for name in rows)
    assert "tree 2x2" in str(rows["naive:2x2"]["steps_per_plan"])


@torch.inference_mode()
def test_taking_turns_changes_no_text_with_kv_in_host_memory_either(monkeypatch):
    """As on a GPU: each method's copy of the cache that has read the prompt is an offloaded one."""
    engine = tiny_engine()
    prompt = random_prompt(engine.config, 2 * RING)
    request = Request(prompt, 0, SamplingParams(), GenerationConfig(80))
    read, _ = read_once(engine, request)
    alone = engine.complete(
        prompt,
        generation=GenerationConfig(50, ignore_eos=True),
        speculation=SpeculationConfig("autoregressive"),
    )
    for on_chip in (None, 0, 1):
        contestants = []
        for name in METHODS:
            speculation = SpeculationConfig(
                name, budget=64, chunk_size=4, num_recent_tokens=40, rebuild_stride=6
            )
            with monkeypatch.context() as patching:
                if on_chip is not None:
                    hosted = offloaded(on_chip, batch_size=1, config=engine.config)
                    patching.setattr(memory, "allocate_full_cache", lambda *_, it=hosted: it)
                contestants.append(start_method(engine, request, speculation, read, 0.0))
        decode_in_turns(contestants, 50, 8)
        assert {tuple(it.text[:50]) for it in contestants} == {alone.token_ids}


def test_speedups_are_taken_prompt_by_prompt():
    """Of two prompts, of which one is four times as slow for everybody; the peer ran once per
    prompt, of two seeds."""
    level = SimpleNamespace(name="target", num_accepted_tokens=60, num_tested_tokens=100)

    def ran(ms: float, seconds: float, stats=None) -> Contestant:
        it = Contestant(iter([[1], [2] * 100]), should_repeat=False, stats=stats)
        it.burst(100)
        it.prefill_seconds, it.decode_seconds = seconds, ms / 10
        return it

    stats = SimpleNamespace(levels=[level], steps_per_plan={})
    times = [(5, 1), (4, 1), (20, 4), (20, 4)]
    result = summarise(
        {
            "autoregressive": [ran(10, 1), ran(10, 1), ran(40, 4), ran(40, 4)],
            "naive": [ran(*time, stats=stats) for time in times],
            "peer": [ran(20, 1), ran(160, 8)],
        },
        100,
    )
    assert result["naive"]["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.5}
    assert result["naive"]["acceptance"] == {"target": 0.6}
    assert result["peer"]["speedup"] == {"median": pytest.approx(0.375), "min": 0.25, "max": 0.5}
    assert result["peer"]["end_to_end_seconds"]["max"] == pytest.approx(8 + 16)
    assert result["peer"]["end_to_end_speedup"]["min"] == pytest.approx((4 + 4) / (8 + 16))


@pytest.mark.parametrize(
    ("program", "flags", "named"),
    [
        (tools_bench, "--prompt-file a --prompt-file b", "--prompt-file"),
        (tools_bench, "--coupled", "--coupled"),
        (tools_bench, "--sweep-tokens 100", "--sweep-tokens"),
        (tools_bench, "--peer openvino", "--peer"),
        (tools_bench, "--compare --peer vllm", "vllm"),
        (tools_bench, "--compare --peer-python openvino=/no/python", "--peer-python"),
        (tools_bench, "--compare --peer-python python", "--peer-python"),
        (tools_bench, "--repeats x", "--repeats"),
        (bench, "--new-tokens 3", "--new-tokens"),
        (bench, "--prompt-tokens 0", "--prompt-tokens"),
        (bench, "--seeds 0", "--seeds"),
        (bench, "--prompt-file no-such-file", "no-such-file"),
        (bench, "--compare --offload --model no-such-model", "--on-chip"),
        *((bench, f"--method {it}", "--method") for it in ("naives", "naive:0", "naive:8x9")),
        (bench, "--method naive:4x", "--method"),
    ],
)
def test_bad_flags_are_one_line(program, flags, named, capsys):
    with pytest.raises(SystemExit) as exit_:
        program.main(flags.split())
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert named in err
    assert err.count("\n") == 1
