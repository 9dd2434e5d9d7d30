"""The measuring tools run on a tiny model, print a table, and end in one JSON line of plausible
figures."""

import json

import pytest

from minitri.errors import InputError
from tools.paper import acceptance, needle
from tools.paper.baselines.policies import NAMES


@pytest.fixture(scope="session")
def texts(tmp_path_factory, long_text) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(long_text[1000 * len(name) :][:8000], encoding="utf-8")
    return [str(folder / "one.txt"), str(folder / "two.txt")]


@pytest.fixture
def measure(folder, texts, capsys):
    """Runs a tool on the tiny model and the first text; gives its table and its figures."""

    def measure(program, flags: str) -> tuple[list[str], dict]:
        always = f"--model {folder} --dtype float32 --prompt-file {texts[0]} {flags}"
        program.main(always.split())
        *table, last = capsys.readouterr().out.splitlines()
        return table, json.loads(last)

    return measure


SHORT = "--prompt-tokens 200 --new-tokens 24"


def test_acceptance_of_every_policy_over_several_texts(measure, texts):
    flags = f"{SHORT} --prompt-file {texts[1]} --budget 64 --gamma2 4"
    table, result = measure(acceptance, flags)
    assert [line.split()[0] for line in table[2:]] == list(NAMES)
    assert table[1].split() == ["policy", "mean", "one", "two"]
    for key in ("acceptance", "mean", "standard_error"):
        assert set(result[key]) == set(NAMES)
    for name, rates in result["acceptance"].items():
        assert all(0 < rate < 1 for rate in rates)
        assert all(0 < error < 0.2 for error in result["standard_error"][name])
        assert result["mean"][name] == pytest.approx(sum(rates) / 2)


def test_a_budget_that_holds_everything_is_always_accepted(measure):
    _, result = measure(acceptance, f"{SHORT} --budget 256 --policy retrieval")
    assert result["mean"]["retrieval"] == pytest.approx(1, abs=1e-4)


def test_a_drafter_that_is_the_target_is_always_accepted_by_it(measure, folder):
    """Its window holds the whole text; by a small retrieval cache it is accepted as that is by the
    target, nearly."""
    sizes = f"--draft {folder} --budget 64 --num-recent-tokens 230 --policy streaming"
    mean = measure(acceptance, f"{SHORT} {sizes}")[1]["mean"]
    assert list(mean) == ["streaming", "draft", "draft streaming"]
    assert mean["draft"] == pytest.approx(1, abs=1e-4)
    assert mean["draft streaming"] == pytest.approx(mean["streaming"], abs=0.1)


def test_a_finer_copy_of_the_weights_overlaps_more_and_changes_no_other_rate(measure):
    flags = f"{SHORT} --budget 64 --policy streaming --policy retrieval"
    plain, copied = (
        measure(acceptance, f"{flags} {copies}")[1]["mean"]
        for copies in ("", "--copy int4 --copy int8")
    )
    for policy in ("streaming", "retrieval"):
        int4, int8 = (copied[f"{policy} {name} overlap"] for name in ("int4", "int8"))
        assert 0.5 < int4 < int8 < 1
        assert copied[policy] == plain[policy] != copied[f"{policy} int8"]


def test_a_rate_does_not_depend_on_the_policies_next_to_it(measure):
    """They share the prompt's full cache; h2o watches the prompt being read, the others its last
    tokens."""
    rates = []
    for names in (NAMES, ("h2o",), ("topk",)):
        policies = " ".join(f"--policy {name}" for name in names)
        rates.append(measure(acceptance, f"{SHORT} --budget 32 {policies}")[1]["mean"])
    assert rates[0]["h2o"] == rates[1]["h2o"] != rates[0]["topk"] == rates[2]["topk"]


def test_needle_tables_every_length_depth_and_policy(measure):
    flags = "--budget 64 --prompt-tokens 700 --prompt-tokens 800 --depth 0 --depth 0.7"
    table, result = measure(needle, f"{flags} --new-tokens 12 --rope-scaling linear:2")
    assert [line.split()[:2] for line in table[2:-1]] == [
        [n, name] for n in ("700", "800") for name in NAMES
    ]
    assert table[-1].startswith("mean ")
    assert len(result["runs"]) == 2 * 2 * len(NAMES)
    assert all(0 <= run["agreement"] <= 1 for run in result["runs"])
    answers = {(run["prompt_tokens"], run["depth"], run["answer"]) for run in result["runs"]}
    assert len(answers) == 4  # lossless: one answer for all policies


@pytest.mark.parametrize("depth", [0.0, 0.2, 0.5, 1.0])
def test_the_needle_is_hidden_in_a_prompt_of_just_the_length_asked_for(engine, long_text, depth):
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
    with pytest.raises(InputError, match="a prompt of 1000 tokens"):
        needle.hide(engine.tokenizer, [5] * 100, 1000, 0.5, 1234567)
