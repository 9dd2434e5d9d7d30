"""Made-up weights and verdicts: labelled as such everywhere, at the rates asked for, through the
real cascade."""

from __future__ import annotations

import json

import pytest
import torch

from minitri import generate
from minitri.decoding.verification import Proposal
from minitri.roofline import kv_bytes_per_token, weights_per_pass
from minitri.settings import GenerationConfig, SpeculationConfig
from tests.conftest import CPU, new_cache, tiny_config
from tests.gpu_twins.test_offloaded_cache import offloaded
from tools.bench import __main__ as bench
from tools.bench.bandwidth import covered
from tools.bench.synthetic import (
    Setup,
    SyntheticSource,
    decode,
    fill,
    fill_cache,
    random_model,
    sweep_contexts,
)  # fmt: skip

CONFIG = tiny_config()
TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=3, budget=32, num_recent_tokens=40)


def test_tensors_larger_than_a_block_are_filled_to_the_end():
    tensor = torch.zeros((1 << 22) + 5, dtype=torch.bfloat16)
    fill(tensor, 0.5)
    assert torch.equal(tensor[-5:], tensor[:5])
    assert float(tensor.float().std()) == pytest.approx(0.5, rel=0.01)


def test_every_slot_of_a_cache_is_filled_in_host_memory_too():
    for full in (new_cache(CONFIG), offloaded(1)):
        fill_cache(full)
        tensors = [full.keys, full.values]
        tensors += [full._staging.host_PLBKSD] if hasattr(full, "_staging") else []
        assert all(float(tensor.std()) == pytest.approx(1, rel=0.05) for tensor in tensors)


@pytest.mark.parametrize("rate", [0.0, 0.46, 0.92, 1.0])
def test_guesses_are_accepted_at_the_rate_asked_for(rate):
    """Of 4,000 first guesses: within 4 standard deviations, at odds of 1 : 15,000."""
    source, probs = SyntheticSource(rate, 3), torch.full((1, 4, 8), 1 / 8)
    proposal = Proposal.of([[1, 2, 3]], probs[:, :3], [["draft"] * 3])
    counts = [source.verify(proposal, probs, [0], [True]).num_accepted[0] for _ in range(4000)]
    first = sum(count > 0 for count in counts) / 4000
    assert abs(first - rate) <= 4 * (rate * (1 - rate) / 4000) ** 0.5
    second = sum(count > 1 for count in counts) / max(1, sum(count > 0 for count in counts))
    assert abs(second - rate) <= 0.06


@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_shape_decodes_by_every_method(method):
    """With certain guesses of both levels a step makes as many tokens as a block can hold, and one
    more."""
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=40)
    setup = Setup(
        CONFIG,
        CONFIG,
        speculation,
        GenerationConfig(24, ignore_eos=True),
        (1.0, 1.0),
        torch.float32,
        CPU,
    )
    target, draft = (random_model(CONFIG, setup) for _ in range(2))
    result = decode(target, draft, 100, setup, method)
    wanted = {"autoregressive": 1, "naive": 3, "retrieval": 4, "triforce": 4}[method]
    assert result["tokens_per_step"] == wanted
    assert result["synthetic"] is True
    assert result["ms_per_token"] > 0


def test_time_at_work_counts_what_overlaps_once():
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (6.0, 7.5)]) == 3 + 2.5


def test_bytes_are_weights_and_kv():
    weights, slot = weights_per_pass(CONFIG) * 4, kv_bytes_per_token(CONFIG, 4)
    model = random_model(
        CONFIG, Setup(CONFIG, None, TRIFORCE, GenerationConfig(), (1.0, 1.0), torch.float32, CPU)
    )
    untied = CONFIG.vocab_size * CONFIG.hidden_size * 4
    assert weights == model.num_bytes - untied
    assert 100 * slot == new_cache(CONFIG, capacity=100).num_bytes * 100 // 128


def test_a_sweep_says_synthetic_in_every_row():
    generation = GenerationConfig(8, ignore_eos=True)
    setup = Setup(CONFIG, None, TRIFORCE, generation, (0.5, 0.9), torch.float32, CPU)
    result = sweep_contexts(setup, [64, 128])
    assert result["synthetic"]
    assert [row["context"] for row in result["rows"]] == [64, 128]
    assert all(
        row[method]["synthetic"]
        for row in result["rows"]
        for method in ("autoregressive", "cascade")
    )


def run(capsys, *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--load", "dummy", "--quiet", *flags])
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


@pytest.mark.slow
def test_the_command_sweeps_contexts_and_draws_them(capsys, tmp_path):
    plot = tmp_path / "sweep.png"
    code, out, _ = run(
        capsys, "--shape", "smollm2-135m", "--draft", "ngram", "--context", "300", "--context",
        "600", "--new-tokens",
        "8", "--budget", "64", "--plot", str(plot), "--synthetic-acceptance", "0.3,0.8",
    )  # fmt: skip
    assert code == 0
    assert out.startswith("SYNTHETIC")
    result = json.loads(out.splitlines()[-1])
    assert result["acceptance"] == [0.3, 0.8]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "lama2"), "unknown model 'lama2'"),
        (("--compare",), "--load dummy goes with none of --compare"),
        (("--method", "auto"), "give one --method, not auto"),
        (("--method", "naive", "--method", "triforce"), "give one --method, not auto"),
        (("--synthetic-acceptance", "2,1"), "is not two rates"),
        (
            ("--plot", "/nowhere/x.png", "--shape", "smollm2-135m"),
            "is not a .png file in a folder that is there",
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, flags, message):
    code, out, error = run(capsys, *flags)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert out == ""


def test_generate_cannot_reach_made_up_verdicts(capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main(["--prompt", "x", "--accept=0.9,0.9"])
    assert exit_.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
