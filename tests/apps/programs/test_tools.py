"""The measuring tools run on a tiny model, print a table, and end in a JSON line of figures."""

import json

import pytest
import torch

from minitri.core.decoding.verification import Proposal
from minitri.core.roofline import weights_per_pass
from minitri.core.settings import GenerationConfig, SpeculationConfig
from tests.core.rigs import CPU, tiny_config
from tools import serve_load
from tools.bench import __main__ as bench
from tools.bench import auto, floor
from tools.bench.synthetic import Setup, SyntheticSource, decode, random_model


def test_the_floor_is_measured_by_runs_that_read_the_whole_prompt(folder, call, monkeypatch):
    """A run that finds its prompt in the cache would take no time for the prefill."""
    runs, decoding = [], floor.plain_decoding
    spy = lambda *args: runs.append(decoding(*args)) or runs[-1]  # noqa: E731
    monkeypatch.setattr(floor, "plain_decoding", spy)
    flags = (
        f"--model {folder} --dtype float32 --max-prompt-tokens 60 --max-new-tokens 8 --repeats 2"
    )
    done = call(bench.main, *flags.split(), "--profile", "--quiet", "--json")
    assert done.json["repeats"] == 2
    assert [run.stats.num_prefilled_tokens for run in runs] == [60] * 3


def test_every_setting_and_pass_has_a_row(call, folder, monkeypatch):
    monkeypatch.setattr(auto, "WEIGHTS", ("dense",))
    flags = "auto --context 30 --context 60 --repeats 1 --new-tokens 6 -q --model"
    code, out, _ = call(bench.main, *flags.split(), folder)
    assert code == 0
    assert out.count("| dense, 60") == 1 + len(auto.SAMPLING)
    assert f"over {2 * len(auto.SAMPLING)} settings" in out


def test_guesses_are_accepted_at_the_rate_asked_for():
    """Rates differ by 4 standard deviations at most, at odds of 1 : 15,000."""
    source, probs = SyntheticSource(0.46, 3), torch.full((1, 4, 8), 1 / 8)
    proposal = Proposal.of([[1, 2, 3]], probs[:, :3], [["draft"] * 3])
    counts = [len(source.verify(proposal, probs, [0], [True])[0]) - 1 for _ in range(250)]
    num_tested = 250
    for n in range(3):
        num_accepted = sum(count > n for count in counts)
        deviation = (0.46 * 0.54 / num_tested) ** 0.5
        assert num_accepted / num_tested == pytest.approx(0.46, abs=4 * deviation)
        num_tested = num_accepted


@pytest.mark.parametrize(
    ("method", "wanted"), [("autoregressive", 1), ("naive", 3), ("retrieval", 4), ("triforce", 4)]
)
def test_a_shape_decodes_by_every_method(method, wanted):
    """A step of certain guesses makes as many tokens as a block can hold, and one more."""
    config = tiny_config()
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=40)
    generation = GenerationConfig(24, ignore_eos=True)
    setup = Setup(config, config, speculation, generation, (1.0, 1.0), torch.float32, CPU)
    target, draft = (random_model(config, setup) for _ in range(2))
    untied = config.vocab_size * config.hidden_size * 4
    assert 4 * weights_per_pass(config) == target.num_bytes - untied
    result = decode(target, draft, 100, setup, method)
    assert (result["tokens_per_step"], result["synthetic"]) == (wanted, True)


@pytest.mark.slow
def test_a_load_loses_no_request_and_changes_no_text(call):
    """One client in ten leaves, one reads slowly; every answer is asked for again. One request has
    a grammar, and one a grammar that nothing can compile."""
    flags = "--requests 20 --clients 10 --longest 300 --new-tokens 12 --check 20 --json -q"
    code, out, err = call(serve_load.main, *flags.split())
    assert code == 0, err
    result = json.loads(out)
    assert result["answered"] + result["left"] == result["asked_again"] == 19
    assert result["refused"] == 1
    assert result["left"] >= 1
    assert result["lost"] == result["texts_that_differ"] == result["busy_at_the_end"] == 0
    assert result["gap_ms_p50"] <= result["gap_ms_p95"] <= result["gap_ms_p99"]
    assert result["mib_at_the_end"] > 0
