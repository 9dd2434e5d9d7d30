"""The measuring tools run on a tiny model, print a table, and end in one JSON line of plausible
figures."""

from __future__ import annotations

import importlib
import json

import pytest

from minitri.errors import InputError
from tools.paper.baselines.policies import NAMES


def tool(name: str):
    return importlib.import_module(f"tools.paper.{name}")


@pytest.fixture(scope="session")
def texts(tmp_path_factory, long_text) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(long_text[1000 * len(name) :][:8000], encoding="utf-8")
    return [str(folder / "one.txt"), str(folder / "two.txt")]


def test_acceptance_of_every_policy_over_several_texts(folder, texts, capsys):
    files = [flag for file in texts for flag in ("--prompt-file", file)]
    tool("acceptance").main(["--model", str(folder), "--dtype", "float32", *files,
        "--prompt-tokens", "200",
                             "--new-tokens", "24", "--budget", "64", "--gamma2", "4"])  # fmt: skip
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [line.split()[0] for line in table[2:]] == list(NAMES)
    assert table[1].split() == ["policy", "mean", "one", "two"]
    assert (
        set(result["acceptance"])
        == set(result["mean"])
        == set(result["standard_error"])
        == set(NAMES)
    )
    for name, rates in result["acceptance"].items():
        assert all(0 < rate < 1 for rate in rates)
        assert all(0 < error < 0.2 for error in result["standard_error"][name])
        assert result["mean"][name] == pytest.approx(sum(rates) / 2)


def test_a_budget_that_holds_everything_is_always_accepted(folder, texts, capsys):
    tool("acceptance").main(["--model", str(folder), "--dtype", "float32", "--prompt-file",
        texts[0], "--budget", "256",
                             "--prompt-tokens", "200", "--new-tokens", "24", "--policy",
                             "retrieval"])  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean"][
        "retrieval"
    ] == pytest.approx(1, abs=1e-4)


def test_a_drafter_that_is_the_target_is_always_accepted_by_it(folder, texts, capsys):
    """Its window holds the whole text; by a small retrieval cache it is accepted as that is by the
    target, nearly."""
    tool("acceptance").main(["--model", str(folder), "--draft", str(folder), "--dtype", "float32",
        "--prompt-file",
                             texts[0], "--budget", "64", "--prompt-tokens", "200", "--new-tokens",
                             "24",
                             "--num-recent-tokens", "230", "--policy", "streaming"])  # fmt: skip
    last = capsys.readouterr().out.splitlines()[-1]
    mean = json.loads(last)["mean"]
    assert list(mean) == ["streaming", "draft", "draft streaming"]
    assert mean["draft"] == pytest.approx(1, abs=1e-4)
    assert mean["draft streaming"] == pytest.approx(mean["streaming"], abs=0.1)


def test_a_finer_copy_of_the_weights_overlaps_more_and_changes_no_other_rate(folder, texts, capsys):
    flags = ["--model", str(folder), "--dtype", "float32", "--prompt-file", texts[0]]
    flags += ["--budget", "64", "--prompt-tokens", "200", "--new-tokens", "24"]
    flags += ["--policy", "streaming", "--policy", "retrieval"]
    means = []
    for copies in ((), ("--copy", "int4", "--copy", "int8")):
        tool("acceptance").main([*flags, *copies])
        means.append(json.loads(capsys.readouterr().out.splitlines()[-1])["mean"])
    for policy in ("streaming", "retrieval"):
        int4, int8 = (means[1][f"{policy} {name} overlap"] for name in ("int4", "int8"))
        assert 0.5 < int4 < int8 < 1
        assert means[1][policy] == means[0][policy] != means[1][f"{policy} int8"]


def test_a_rate_does_not_depend_on_the_policies_beside_it(folder, texts, capsys):
    """They share the prompt's full cache; h2o watches the prompt being read, the others its last
    tokens."""
    rates = []
    for names in (NAMES, ("h2o",), ("topk",)):
        flags = [flag for name in names for flag in ("--policy", name)]
        tool("acceptance").main(["--model", str(folder), "--dtype", "float32", "--prompt-file",
            texts[0], "--budget",
                                 "32", "--prompt-tokens", "200", "--new-tokens", "24",
                                 *flags])  # fmt: skip
        rates.append(json.loads(capsys.readouterr().out.splitlines()[-1])["mean"])
    assert rates[0]["h2o"] == rates[1]["h2o"] != rates[0]["topk"] == rates[2]["topk"]


def test_needle_tables_every_length_depth_and_policy(folder, texts, capsys):
    tool("needle").main(["--model", str(folder), "--dtype", "float32", "--prompt-file", texts[0],
        "--budget", "64",
                         "--prompt-tokens", "700", "--prompt-tokens", "800", "--depth", "0",
                         "--depth", "0.7",
                         "--new-tokens", "12", "--rope-scaling", "linear:2"])  # fmt: skip
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [line.split()[:2] for line in table[2:-1]] == [
        [n, name] for n in ("700", "800") for name in NAMES
    ]
    assert table[-1].startswith("mean ")
    assert len(result["runs"]) == 2 * 2 * len(NAMES)
    assert all(0 <= run["agreement"] <= 1 for run in result["runs"])
    assert all(0 <= mean <= 1 for mean in result["mean"].values())
    answers = {(run["prompt_tokens"], run["depth"], run["answer"]) for run in result["runs"]}
    assert len(answers) == 4  # lossless: one answer for all policies


@pytest.mark.parametrize("depth", [0.0, 0.2, 0.5, 1.0])
def test_the_needle_is_hidden_in_a_prompt_of_just_the_length_asked_for(engine, long_text, depth):
    needle = tool("needle")
    tokenizer = engine.tokenizer
    text_ids = tokenizer.encode(long_text[:9000])
    prompt = needle.hide(tokenizer, text_ids, 1000, depth, 1234567)
    sentence = needle.NEEDLE.format(number=1234567)
    text = tokenizer.decode(prompt)
    assert len(prompt) == 1000
    assert text.count(sentence) == 1
    assert text.index(sentence) / len(text) == pytest.approx(depth, abs=0.35)
    assert text.endswith("assistant\n" + needle.BEGINNING)
    whole = tokenizer.decode(needle.hide(tokenizer, text_ids, 1000, depth, 1234567, ""))
    assert whole.endswith("assistant\n")


def test_a_needle_without_enough_hay_is_refused(engine):
    with pytest.raises(InputError, match="a prompt of 1000 tokens needs .* tokens of text"):
        tool("needle").hide(engine.tokenizer, [5] * 100, 1000, 0.5, 1234567)
