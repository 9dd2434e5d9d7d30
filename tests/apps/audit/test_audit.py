"""An audit finds nothing in sound servers, and names the fault of each that is not.

Sound servers fail with odds of 1e-6; a fault is far beyond what is noticed.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from minitri.apps.audit import auditing as audit
from minitri.apps.selftest.martingale import Martingale
from tests.apps.audit.toy_server import toy_server
from tests.apps.serve.conftest import COUPLED, serving

CHECKS = ["logprobs", "greedy", "independence", *(f"texts, T={T}" for T in ("1", "0.5", "1.5"))]


def audited(call, url: str, num_tokens: int = 3072) -> tuple[int, dict[str, dict]]:
    done = call(audit.main, url, "--json", "--num-tokens", num_tokens)
    report = done.json
    assert report["lossless"] == (done.code == 0)
    return done.code, {row["check"]: row for row in report["checks"]}


@pytest.mark.parametrize("names", ["chat, silent if greedy", "reported after temperature"])
def test_a_sound_server_passes(call, names):
    with toy_server(names) as url:
        code, rows = audited(call, url)
    assert (code, [*rows]) == (0, CHECKS)
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert min(rows[name]["p_value"] for name in CHECKS[3:]) > 1e-4


@pytest.mark.parametrize(
    ("fault", "num_tokens", "check", "says"),
    [
        ("one random number", 3072, "independence", "concurrent answers copy each other"),
        ("recovered", 6144, "texts, T=1", "texts do not follow"),
        ("top-k", 3072, "texts, T=1", "texts do not follow"),
        ("zeros", 1, "logprobs", "all log-probabilities are 0"),
    ],
)
def test_a_fault_is_found_and_named(call, fault, num_tokens, check, says):
    with toy_server(fault) as url:
        code, rows = audited(call, url, num_tokens)
    assert (code, rows[check]["verdict"]) == (1, "FAULT")
    assert all(says in row["says"] for row in rows.values() if row["verdict"] == "FAULT")


def test_the_table_says_what_was_found(call):
    with toy_server("temperature, greedy") as url:
        done = call(audit.main, url + "/v1/", "-q", "--num-tokens", "3072")
    assert done.out.split()[:6] == ["check", "verdict", "statistic", "p", "value", "tokens"]
    assert all(name in done.out for name in CHECKS)
    assert re.search(r"\nFAULT greedy: a token is [\d.]+ nats below the argmax\n", done.out)
    assert "\nFAULT texts, T=0.5: texts do not follow" in done.out
    assert (done.code, done.err) == (1, "")


@pytest.mark.slow
def test_our_own_server_passes(call, engine):
    with serving(engine, speculation=replace(COUPLED, coupled=False)) as server:
        code, rows = audited(call, server.url)
    assert (code, [*rows]) == (0, CHECKS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/v1/models cannot be had"),
        ("127.0.0.1:8000", "missing an 'http://'"),
        ("moved", '403, {"key": null}'),  # which another server must not get
        ("silent", "sends 0 tokens, too few"),
        ("untold", "at some token it names no likely ones"),
    ],
)
def test_what_cannot_be_audited_is_one_line(call, names, message, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which this machine needs not
    with toy_server(names) as url:
        url = names if ":" in names else url
        done = call(audit.main, url, "--api-key", "secret", "-q", "--num-tokens", "1")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


@pytest.mark.parametrize("num_heads", [500, 530, 600, 700, 300])
def test_a_p_value_bounds_the_odds_of_a_thousand_coins(num_heads):
    test = Martingale()
    for number in range(1000):
        test.add(int(number >= num_heads), np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    distance = abs(num_heads - 500)
    odds = 2 * sum(math.comb(1000, n) for n in range(500 + distance, 1001)) / 2**1000
    assert test.mean == pytest.approx((num_heads - 500) / 1000)
    assert min(1, odds) <= test.p_value <= min(1, 100 * odds**0.65)
