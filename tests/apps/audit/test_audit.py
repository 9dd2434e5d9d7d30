"""An audit finds nothing in sound servers, and names the fault of each that is not.

Sound servers fail with odds of 1e-6; a fault is far beyond what is noticed.
"""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from minitri import SpeculationConfig
from minitri.apps.audit import __main__ as audit
from minitri.apps.audit.checks import LEAST_P, PROMPTS
from minitri.apps.audit.client import Place
from minitri.apps.audit.scores import Departures, looked_up
from minitri.apps.selftest.distribution_test import last_logits
from minitri.apps.selftest.martingale import Martingale
from tests.apps.audit.toy_server import toy_server
from tests.apps.serve.conftest import COUPLED, serving
from tests.mutation import Mutant, mutated
from tests.test_plugins import with_drafter

TEXTS = [f"texts, T={temperature}" for temperature in ("1", "0.5", "1.5")]
CHECKS = ["logprobs", "greedy", "seed", "speculation", "independence", *TEXTS]


def audited(call, url: str, *flags: str) -> tuple[int, dict[str, dict]]:
    done = call(audit.main, url, "--json", *flags)
    report = done.json
    assert report["lossless"] == (done.code == 0)
    return done.code, {row["check"]: row for row in report["checks"]}


@pytest.mark.parametrize("kind", ["", "chat", "told after temperature", "no switch"])
def test_a_sound_server_passes(call, kind):
    with toy_server(kind) as url:
        code, rows = audited(call, url)
    assert [*rows] == CHECKS
    is_ok = {name: row["verdict"] == "ok" for name, row in rows.items()}
    assert is_ok == dict.fromkeys(CHECKS, True) | {"speculation": kind != "no switch"}
    assert code == 0
    assert min(rows[name]["p_value"] for name in TEXTS) > 1e-4


FAULTS = {
    "argmax": ("independence", "concurrent answers copy each other"),
    "temperature": ("texts, T=0.5", "texts do not follow"),
    "recovered": ("texts, T=1", "texts do not follow"),
    "zeros": ("logprobs", "all log-probabilities are 0"),
    "one random number": ("independence", "concurrent answers copy each other"),
    "temperature twice": ("texts, T=0.5", "texts do not follow"),
    "top-k": ("texts, T=1", "texts do not follow"),
    "seed": ("seed", "one seed gives 9 texts"),
    "greedy": ("greedy", "below the argmax"),
    "told by the drafter": ("speculation", "speculation changes log-probabilities"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(call, fault):
    check, words = FAULTS[fault]
    with toy_server(fault) as url:
        code, rows = audited(call, url)
    assert code == 1
    assert rows[check]["verdict"] == "FAULT"
    assert words in rows[check]["says"]
    others = [row["says"] for row in rows.values() if row["verdict"] == "FAULT"]
    assert all(words in it or words.startswith("speculation") for it in others)


def test_of_the_wrong_recovery_it_is_told_that_it_is_the_speculation(call):
    with toy_server("recovered") as url:
        rows = audited(call, url)[1]
    says = rows["texts, T=1"]["says"]
    assert float(says.rpartition(" ")[2]) > 1e-3  # the p-value without it


@pytest.mark.parametrize("coupled", [True, False])
def test_our_own_server_passes(call, engine, coupled):
    with serving(engine, speculation=replace(COUPLED, coupled=coupled)) as server:
        code, rows = audited(call, server.url, "--num-tokens", "3072")
    assert (code, [*rows]) == (0, CHECKS)
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert rows["speculation"]["statistic"] < 1e-4


class Likeliest:
    """A drafter that guesses the target's argmax."""

    def __init__(self, engine) -> None:
        self.model = engine.model

    def guess(self, tokens, row):
        return int(last_logits(self.model, tokens, 1)[-1].argmax())


def test_the_published_wrong_rule_is_found_in_our_own_server(call, engine, monkeypatch):
    monkeypatch.setattr("minitri.apps.serve.protocol.draw_seed", itertools.count().__next__)
    engine = with_drafter(engine, Likeliest(engine))
    function = "decoding.verification:_sample_next"
    old = "left_BV.where(left_BV.sum(1, keepdim=True) > 0, p_BV)"
    wrong = Mutant("recovered from p", function, old, "p_BV", killer="")
    speculation = SpeculationConfig("naive", gamma1=2)
    with mutated(wrong), serving(engine, speculation=speculation) as server:
        code, rows = audited(call, server.url, "--num-tokens", "3072")
    assert code == 1
    says = rows["texts, T=0.5"]["says"]
    assert float(says.rpartition(" ")[2]) > 1e-3  # without speculation


def test_the_table_says_what_was_found(call):
    with toy_server("temperature") as url:
        done = call(audit.main, url + "/v1/", "-q")
    head, *lines = done.out.splitlines()
    assert head.split() == ["check", "verdict", "statistic", "p", "value", "tokens"]
    assert [
        line[: line.index("ok" if " ok " in line else "FAULT")].strip() for line in lines[:8]
    ] == CHECKS
    assert any(line.startswith("FAULT texts, T=0.5: texts do not follow") for line in lines)
    assert (done.code, done.err) == (1, "")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/v1/models cannot be had .*refused"),
        ("127.0.0.1:8000", "unknown url type"),
        ("KEY", "401, .*check the URL, the key"),
    ],
)
def test_what_cannot_be_audited_is_one_line(call, url, message, engine):
    with serving(engine, api_key="secret") as server:
        done = call(audit.main, url.replace("KEY", server.url))
        assert done.code == 2
        [line] = done.err.splitlines()
        assert re.search(message, line)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("silent", 2, "answers with no tokens"),
        ("silent if greedy", 0, ""),
        ("untold", 2, "at some token it names no likely ones"),
    ],
)
def test_servers_that_say_little(call, kind, code, message):
    with toy_server(kind) as url:
        done = call(audit.main, url, "--num-tokens", "3072", "-q")
    assert done.code == code
    assert message in done.err
    assert len(done.err.splitlines()) == bool(message)


@pytest.mark.parametrize("is_faulty", [True, False])
def test_what_a_lookup_guesses_comes_too_often_if_recovered_tokens_are_from_p(is_faulty):
    """Of 1,000 tosses of a coin; what no other score sees."""
    source, top, text = random.Random(0), {" yes": math.log(0.5), " no": math.log(0.5)}, []
    for _ in range(1000):
        guess = looked_up(PROMPTS[2] + "".join(place.token for place in text), top)
        token = source.choice([*top])
        if is_faulty and token != guess:
            token = source.choice([*top])
        text.append(Place(token, top[token], top))
    found = Departures([(PROMPTS[2], [text])], 1.0)
    assert (found.repeated.p_value < LEAST_P) == is_faulty
    assert min(found.likelihood.p_value, found.learned.p_value) > 1e-3


def test_a_score_of_fair_tokens_is_no_alarm():
    test = Martingale()
    probs = {"a": 0.5, "b": 0.25, "c": 0.25}
    for token in "abacabac" * 200:
        test.add(token, probs, {"a": 1.0, "b": 0.0, "c": 0.5})
    assert test.p_value > 0.1
    assert abs(test.mean) < 0.1
