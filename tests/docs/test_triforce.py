"""docs/triforce.py, the paper in one file: the engine's tokens, and the target's distribution."""

import importlib.util
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import minitri
from minitri.core.decoding.verification import Proposal, verify, verify_block
from tests.conftest import edit_json
from tests.core.exactness import PROMPT, Table, add_up, outcomes

SPEC = importlib.util.spec_from_file_location(
    "one_file", Path(__file__).parents[2] / "docs/triforce.py"
)
one_file = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(one_file)
TEXTBOOK = {"token": verify, "block": verify_block}
GAMMAS = [(1, 1), (2, 6), (3, 4), (5, 2)]
RULES = {"block": 0, "token": 0, "coupled": 0.8}  # and their temperatures


def check_equality(engine, prompts, count, *words):
    """The file's tokens, greedy by both rules and coupled, are those of two methods of minitri."""
    model = one_file.load(one_file.parse(["text", *words]).model, torch.device("cpu"), {})
    for prompt, gammas, rule in itertools.product(prompts, GAMMAS, RULES):
        how = one_file.parse(["text", "--rule", rule, "--seed", "3", *words])
        how.gamma1, how.gamma2, how.temperature = *gammas, RULES[rule]
        stages = one_file.make_stages(model, how, len(prompt) + count)
        run = one_file.triforce(prompt, stages, *gammas)
        tokens = [token for token, _ in itertools.islice(run, count)]
        settings = {"gamma1": gammas[0], "gamma2": gammas[1], "temperature": RULES[rule], "seed": 3}
        settings |= {"coupled": rule == "coupled", "top_p": 1.0, "ignore_eos": True}
        for method in ("autoregressive", "triforce"):
            done = engine.complete(prompt, method=method, max_new_tokens=count, **settings)
            assert tokens == [*done.token_ids], (len(prompt), gammas, rule, method)


@pytest.mark.parametrize("words", [["--draft", "lookup"], ["--offload"]])
def test_tokens_are_the_engines(engine, folder, words):
    """By lookup, and with the full cache in host memory and the model itself as drafter; a budget
    far below two of the prompts."""
    words = [*words, "--model", str(folder), "--budget", "64"]
    if "--draft" not in words:
        words += ["--draft", str(folder)]
    prompts = [[(7 * i) % 300 + 3 for i in range(length)] for length in (1, 30, 150)]
    check_equality(engine, prompts, 16, *words)


class Toy(one_file.Stage):
    """A stage over a table; `script` has the random numbers of all decisions, and at the first that
    it lacks, `found` gets all outcomes, each with its probability."""

    def __init__(self, table: Table, rule: str, script: Iterator, found: list) -> None:
        self.table, self.rule, self.script, self.found = table, rule, script, found

    def verify(self, text, guesses, q_NV):
        texts = (tuple(text + guesses[:i]) for i in range(len(guesses) + 1))
        p_NV = torch.stack([self.table.row(tokens) for tokens in texts])
        if (numbers := next(self.script, None)) is None:
            proposal = Proposal.of([guesses], q_NV[None] if guesses else p_NV[None, :0], [[]])
            self.found += outcomes(proposal, p_NV[None], 0, rule=TEXTBOOK[self.rule])
            raise EOFError
        u_N = torch.tensor(numbers, dtype=torch.float64)
        accept = getattr(one_file, f"accept_by_{self.rule}")
        tokens = one_file.verify(guesses, q_NV, p_NV, u_N, accept)
        return tokens, p_NV[: len(tokens)]

    def follow(self, *_):
        """A table holds everything."""


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_text_follows_the_targets_distribution(rule):
    """Two steps, for every outcome of all random numbers; after them the target goes on."""
    target = Table(2, 0)
    tables = Table(2, 2, near=target), Table(2, 1, near=target), target
    total, wanted = (torch.zeros((2,) * 4, dtype=torch.float64) for _ in range(2))
    add_up(wanted, (), 1.0, target, 4)
    paths = [(1.0, [])]
    for weight, numbers in paths:  # grows meanwhile
        script, found, tokens = iter(numbers), [], []
        stages = [Toy(table, rule, script, found) for table in tables]
        num_steps = 0
        try:
            for token, origin in one_file.triforce(PROMPT, stages, 2, 2):
                tokens.append(token)
                num_steps += origin == "target"
                if num_steps == 2:
                    break
            add_up(total, tuple(tokens), weight, target, 4)
        except EOFError:
            paths += [(weight * share, [*numbers, more]) for share, more in found]
    assert float((total - wanted).abs().max()) < 1e-12


def test_a_short_text_is_continued(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("She")
    one_file.main([str(tmp_path / "text"), "--model", str(folder), "--new-tokens", "9"])
    assert "ms/token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "qwen2"}, "qwen2"),
        ({"quantization_config": {"bits": 4}}, "bits"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_other_models_are_refused(folder, tmp_path, change, word):
    path = shutil.copytree(folder, tmp_path / "other")
    edit_json(path / "config.json", **change)
    with pytest.raises(ValueError, match=word) as error:
        one_file.load(path, torch.device("cpu"), {})
    assert str(error.value).isprintable()


@pytest.mark.slow
@pytest.mark.usefixtures("real_weights")
def test_real_weights_give_the_engines_tokens(long_text):
    """SmolLM2 and its drafter, after three parts of a text."""
    engine = minitri.load("smollm2-135m", dtype="float32", device="cpu")
    ids = engine.tokenizer.encode(long_text)
    check_equality(engine, [ids[:3], ids[:400], ids[700:1500]], 20, "--budget", "128")
