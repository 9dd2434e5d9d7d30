"""Drafters without a model change the speed of an engine, and no text; the flags for them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import minitri
from minitri import generate
from minitri.drafters.datastore import Datastore, sorted_places, write_datastore
from minitri.drafters.lookup import Sources
from minitri.drafters.text import History
from minitri.loading.open_models import fingerprint
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from tests.conftest import byte_level_tokenizer

TOOL = Path(__file__).parent.parent.parent / "tools/build_datastore.py"
PROMPT = "She had been forced into prudence; she had been"
LENGTH = GenerationConfig(40, ignore_eos=True)
GREEDY, COUPLED = (SamplingParams(0.0), False), (SamplingParams(0.8, top_p=0.9), True)


def with_sources(engine: minitri.Engine, sources: Sources) -> minitri.Engine:
    return minitri.Engine(engine.model, engine.tokenizer, sources=sources)


def text_of(engine, distribution=GREEDY, method="naive", gamma1=4, prompt=PROMPT, seed=7):
    """The tokens, and how many guesses were accepted."""
    sampling, coupled = distribution
    speculation = SpeculationConfig(method, gamma1=gamma1, coupled=coupled)
    done = engine.complete(
        prompt, sampling=sampling, generation=LENGTH, speculation=speculation, seed=seed
    )
    return done.token_ids, sum(level.num_accepted_tokens for level in done.stats.levels[:1])


def datastore_with(engine, text: list[int]) -> Datastore:
    tokens = np.array([*text, engine.tokenizer.num_tokens], np.uint16)
    return Datastore(tokens, sorted_places(tokens))


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("method", ["naive", "triforce", "auto"])
@pytest.mark.parametrize("kind", ["history", "datastore", "wrong datastore", "both"])
def test_history_and_datastore_change_no_text(engine, kind, method, distribution):
    plain, _ = text_of(engine, distribution, "autoregressive")
    said = [*engine.tokenizer.encode(PROMPT), *plain]
    if kind == "wrong datastore":
        said = said[::-1]
    has_history, has_datastore = kind in ("history", "both"), kind != "history"
    sources = Sources(
        History() if has_history else None, datastore_with(engine, said) if has_datastore else None
    )
    other, accepted = with_sources(engine, sources), []
    for _ in range(3):
        text, num_accepted = text_of(other, distribution, method)
        assert text == plain
        accepted.append(num_accepted)
    if kind != "wrong datastore" and method != "auto":
        assert accepted[-1] > 20


def test_a_run_without_a_history_knows_nothing_of_earlier_ones(engine):
    other = with_sources(engine, Sources())
    first, again = text_of(other), text_of(other)
    assert first == again  # the number of accepted guesses, too
    remembering = with_sources(engine, Sources(History()))
    assert text_of(remembering) == first
    text, accepted = text_of(remembering)
    assert text == first[0]
    assert accepted > first[1]


def test_rows_of_a_batch_do_not_see_each_others_texts(engine):
    other = with_sources(engine, Sources())
    settings = {"sampling": GREEDY[0], "generation": LENGTH}
    settings["speculation"] = SpeculationConfig("naive", gamma1=4)
    alone = other.complete(PROMPT, **settings).stats.levels[0].num_rounds
    with other.generate([PROMPT, PROMPT, PROMPT], **settings) as run:
        list(run)
    assert run.stats.levels[0].num_rounds == 3 * alone


def test_guesses_from_a_history_are_not_tested_with_the_numbers_they_were_drawn_with(engine):
    """The second text of a seed, whose guesses come from the first, follows the distribution.

    Three likely tokens, twice. With the same numbers again chi-square is 55; above 40, with nine
    outcomes, it is by chance in one of 3 * 10^5 cases.
    """
    settings = {"sampling": SamplingParams(1.0, top_k=3), "generation": GenerationConfig(4)}
    settings["speculation"] = SpeculationConfig("naive", gamma1=1)
    counts: dict[tuple[int, ...], list[int]] = {}
    for seed in range(400):
        other = with_sources(engine, Sources(History()))
        for number in range(2):
            tokens = other.complete(PROMPT, seed=seed, **settings).token_ids[:2]
            counts.setdefault(tokens, [0, 0])[number] += 1
    assert len(counts) == 9
    assert sum((a - b) ** 2 / (a + b) for a, b in counts.values()) < 40


def test_a_seed_repeats_its_text_unless_a_history_is_asked_for(engine):
    sampled = (SamplingParams(1.0), False)
    other = with_sources(engine, Sources())
    assert text_of(other, sampled) == text_of(other, sampled)
    other = with_sources(engine, Sources(History()))
    assert text_of(other, sampled)[0] != text_of(other, sampled)[0]


def run_tool(capsys, *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    main = runpy.run_path(str(TOOL))["main"]
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    return (ended.value.code, *capsys.readouterr())


def run_generate(capsys, *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        generate.main(["--prompt", PROMPT, "--max-new-tokens", "12", "--dtype", "float32", *flags])
    return (ended.value.code, *capsys.readouterr())


def test_the_tool_builds_what_the_command_line_uses(folder, tmp_path, capsys):
    (tmp_path / "text").write_text(PROMPT * 3)
    flags = ("--model", str(folder), "--out", str(tmp_path / "it"), str(tmp_path / "text"))
    code, out, _ = run_tool(capsys, *flags)
    assert code == 0
    assert " tokens of 1 texts" in out
    draft = f"datastore:{tmp_path / 'it'}"
    model = ("--model", str(folder), "--method", "naive", "--json", "--temperature", "0")
    reports = [
        json.loads(run_generate(capsys, *model, "--draft", *name)[1])
        for name in (["suffix"], ["ngram"], [draft], [draft, "--draft-history"])
    ]
    assert [report["draft"] for report in reports] == [*["suffix"] * 2, *["datastore"] * 2]
    assert len({report["text"] for report in reports}) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft", "datastore:missing"], "there is no datastore missing"),
        (["--draft", "datastore:"], "there is no datastore"),
        (["--draft", "datastore:~nobody-of-this-name/it"], "there is no datastore ~nobody"),
        (["--draft", "datastore:{other}"], "built with another tokenizer"),
        (["--draft", "datastore:{folder}/config.json"], "cannot be read"),
        (["--draft", "{folder}", "--draft-history"], "use the drafter suffix"),
    ],
)
def test_bad_drafters_are_refused_in_one_line(folder, tmp_path, capsys, flags, words):
    write_datastore(tmp_path / "other", [[1, 2]], 300, "another")
    flags = [flag.format(folder=folder, other=tmp_path / "other") for flag in flags]
    code, out, err = run_generate(
        capsys, "--model", str(folder), "--method", "naive", "--quiet", *flags
    )
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["missing text"], "cannot read missing text"),
        (["{folder}/model.safetensors"], "give UTF-8 texts"),
        ([], "the following arguments are required"),
        (["{text}", "--out", "missing/it"], "cannot write missing/it"),
        (["{text}", "--model", "no such model"], "unknown model"),
    ],
)
def test_bad_input_to_the_tool_is_refused_in_one_line(folder, tmp_path, capsys, flags, words):
    (tmp_path / "text").write_text("a text")
    defaults = ["--model", str(folder), "--out", str(tmp_path / "it")]
    flags = [flag.format(folder=folder, text=tmp_path / "text") for flag in flags]
    code, out, err = run_tool(capsys, *defaults, *flags)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_a_fingerprint_is_that_of_every_token(engine):
    more = byte_level_tokenizer()
    assert fingerprint(Tokenizer(TokenizersBackend(more), 1)) == fingerprint(engine.tokenizer)
    more.add_tokens(["another token"])
    assert fingerprint(Tokenizer(TokenizersBackend(more), 1)) != fingerprint(engine.tokenizer)
