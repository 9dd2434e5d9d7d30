"""Made-up weights and verdicts: labelled as such everywhere, at the rates asked for, through the
real cascade."""

import pytest
import torch

from minitri.decoding.verification import Proposal
from minitri.roofline import weights_per_pass
from minitri.settings import GenerationConfig, SpeculationConfig
from tests.conftest import CPU, new_cache, tiny_config
from tests.gpu_twins.test_offloaded_cache import offloaded
from tools.bench.synthetic import (
    Setup,
    SyntheticSource,
    decode,
    fill,
    fill_cache,
    random_model,
    sweep_contexts,
)

CONFIG = tiny_config()


def setup_of(method: str, rates: tuple[float, float], draft=CONFIG) -> Setup:
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=40)
    generation = GenerationConfig(24, ignore_eos=True)
    return Setup(CONFIG, draft, speculation, generation, rates, torch.float32, CPU)


def test_tensors_larger_than_a_block_and_caches_in_host_memory_are_filled():
    tensor = torch.zeros((1 << 22) + 5, dtype=torch.bfloat16)
    fill(tensor, 0.5)
    assert torch.equal(tensor[-5:], tensor[:5])
    assert float(tensor.float().std()) == pytest.approx(0.5, rel=0.01)
    for full in (new_cache(CONFIG), offloaded(1)):
        fill_cache(full)
        tensors = [full.keys, full.values]
        tensors += [full.host_LBSPKD, full.ring_LBTPKD] if full.on_chip < 2 else []
        assert all(float(tensor.std()) == pytest.approx(1, rel=0.05) for tensor in tensors)


@pytest.mark.parametrize("rate", [0.0, 0.46, 0.92, 1.0])
def test_guesses_are_accepted_at_the_rate_asked_for(rate):
    """Of 4,000 first guesses: within 4 standard deviations, at odds of 1 : 15,000."""
    source, probs = SyntheticSource(rate, 3), torch.full((1, 4, 8), 1 / 8)
    proposal = Proposal.of([[1, 2, 3]], probs[:, :3], [["draft"] * 3])
    counts = [len(source.verify(proposal, probs, [0], [True])[0]) - 1 for _ in range(4000)]
    first = sum(count > 0 for count in counts) / 4000
    assert abs(first - rate) <= 4 * (rate * (1 - rate) / 4000) ** 0.5
    second = sum(count > 1 for count in counts) / max(1, sum(count > 0 for count in counts))
    assert abs(second - rate) <= 0.06


@pytest.mark.parametrize(
    ("method", "wanted"), [("autoregressive", 1), ("naive", 3), ("retrieval", 4), ("triforce", 4)]
)
def test_a_shape_decodes_by_every_method(method, wanted):
    """With certain guesses of both levels a step makes as many tokens as a block can hold, and one
    more."""
    setup = setup_of(method, (1.0, 1.0))
    target, draft = (random_model(CONFIG, setup) for _ in range(2))
    untied = CONFIG.vocab_size * CONFIG.hidden_size * 4
    assert 4 * weights_per_pass(CONFIG) == target.num_bytes - untied
    result = decode(target, draft, 100, setup, method)
    assert result["tokens_per_step"] == wanted
    assert result["synthetic"] is True
    assert result["ms_per_token"] > 0


def test_a_sweep_says_synthetic_in_every_row_and_what_was_predicted(capsys):
    result = sweep_contexts(setup_of("triforce", (0.5, 0.9), draft=None), [64, 128])
    assert [row["context"] for row in result["rows"]] == [64, 128]
    runs = [row[name] for row in result["rows"] for name in ("autoregressive", "cascade")]
    assert all(run["synthetic"] for run in [result, *runs])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("measured") for line in lines)
    assert sum(line.startswith("target  ") for line in lines) == 2
