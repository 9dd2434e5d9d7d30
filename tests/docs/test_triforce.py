"""docs/triforce.py, the paper in one file: the engine's tokens, and the target's distribution."""

import importlib
import itertools
import shutil
import sys
from pathlib import Path

import pytest
import torch

from minitri.core.decoding.verification import Proposal, verify, verify_block
from tests.conftest import edit_json, load
from tests.core.exactness import PROMPT, Table, add_up, outcomes

sys.path.append(str(Path(__file__).parents[2] / "docs"))
one_file = importlib.import_module("triforce")
RULES = {"block": 0, "token": 0, "coupled": 0.8}  # and their temperatures


def check_equality(engine, prompts, count, *words):
    """Greedy by both rules, and coupled: the file's tokens are those of two methods of minitri."""
    model = one_file.load(one_file.parse(["text", *words]).model, torch.device("cpu"), {})
    gammas, methods = [(1, 1), (2, 6), (3, 4), (5, 2)], ("autoregressive", "triforce")
    for prompt, (gamma1, gamma2), rule in itertools.product(prompts, gammas, RULES):
        how = one_file.parse(["text", "--rule", rule, *words])
        how.gamma1, how.gamma2, how.temperature = gamma1, gamma2, RULES[rule]
        stages = one_file.make_stages(model, how, len(prompt) + count)
        pairs = itertools.islice(one_file.triforce(prompt, stages, gamma1, gamma2), count)
        settings = {"gamma1": gamma1, "gamma2": gamma2, "temperature": RULES[rule], "top_p": 1.0}
        settings |= {"coupled": rule == "coupled", "ignore_eos": True, "max_new_tokens": count}
        runs = (engine.complete(prompt, method=name, seed=0, **settings) for name in methods)
        texts = {tuple(token for token, _ in pairs), *(run.token_ids for run in runs)}
        assert len(texts) == 1, (len(prompt), gamma1, gamma2, rule)


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_tokens_are_the_engines(engine, folder, draft):
    """With a budget far below two prompts, once offloaded, and once by a drafter that is right."""
    prompts = [[(7 * i) % 300 + 3 for i in range(length)] for length in (1, 30, 150)]
    words = ["--offload", "--draft", "lookup"] if draft == "lookup" else ["--draft", str(folder)]
    check_equality(engine, prompts, 16, "--model", str(folder), "--budget", "64", *words)


@pytest.mark.slow
def test_real_weights_give_the_engines_tokens(long_text, real_weights, monkeypatch):
    monkeypatch.setattr(one_file, "MODEL", real_weights)  # which were perhaps not there before
    monkeypatch.setitem(one_file.FLAGS, "model", real_weights)
    engine = load("smollm2-135m")
    ids = engine.tokenizer.encode(long_text)
    check_equality(engine, [ids[:3], ids[:300], ids[700:1300]], 12, "--budget", "128")


class Toy(one_file.Stage):
    """A stage over a table. A decision that `script` has no numbers for puts its outcomes there."""

    def __init__(self, table, rule, script) -> None:
        self.table, self.rule, self.script = table, rule, script
        self.follow = lambda *_: None

    def verify(self, text, guesses, q_NV):
        texts = [(*text, *guesses[:i]) for i in range(len(guesses) + 1)]
        p_NV = torch.stack([*map(self.table.row, texts)])
        if not self.script:
            proposal = Proposal.of([guesses], q_NV[None] if guesses else p_NV[None, :0], [[]])
            textbook = verify if self.rule == "token" else verify_block
            self.script += outcomes(proposal, p_NV[None], 0, rule=textbook)
            raise EOFError
        accept = getattr(one_file, f"accept_by_{self.rule}")
        u_N = torch.tensor(self.script.pop(0), dtype=torch.float64)
        tokens = one_file.verify(guesses, q_NV, p_NV, u_N, accept)
        return tokens, p_NV[: len(tokens)]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_text_follows_the_targets_distribution(rule):
    """Two steps, for every outcome of all random numbers; after them the exact target goes on."""
    target = Table(2, 0)
    tables = Table(2, 2, near=target), Table(2, 1, near=target), target
    total, wanted = torch.zeros(2, 2, 2, 2, 2).double()
    add_up(wanted, (), 1.0, target, 4)
    paths = [(1.0, [])]
    for weight, numbers in paths:  # which grows
        script, pairs = [*numbers], []
        run = one_file.triforce(PROMPT, [Toy(table, rule, script) for table in tables], 2, 2)
        try:
            while [origin for _, origin in pairs].count("target") < 2:
                pairs.append(next(run))
            add_up(total, tuple(token for token, _ in pairs), weight, target, 4)
        except EOFError:
            paths += [(weight * share, [*numbers, more]) for share, more in script]
    assert float((total - wanted).abs().max()) < 1e-12


def test_a_short_text_is_continued_and_another_family_refused(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("She")
    one_file.main([str(tmp_path / "text"), "--model", str(folder), "--new-tokens", "9"])
    assert "ms/token" in capsys.readouterr().out
    path = shutil.copytree(folder, tmp_path / "other")
    edit_json(path / "config.json", model_type="qwen2")
    with pytest.raises(ValueError, match="qwen2"):
        one_file.load(path, torch.device("cpu"), {})
