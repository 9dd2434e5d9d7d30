"""An audit finds nothing in sound servers, and names the fault of each that is not.

Sound servers fail with odds of 1e-6; a fault is far beyond what is noticed.
"""

import contextlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from minitri.apps.selftest.martingale import Martingale
from tests.apps.serve.conftest import COUPLED, PROMPT, serving
from tests.conftest import Done
from tests.tools.audit.toy import Toy
from tools.audit import __main__ as audit
from tools.audit.client import NEUTRAL, NUM_NEW, Client, connect

CHECKS = ["logprobs", "greedy", "independence", *(f"texts, T={T}" for T in ("1", "0.5", "1.5"))]


@pytest.fixture
def run(call, monkeypatch):

    def run(name: str, *flags: object, num_tokens: int = 3072) -> Done:
        toy = Toy(name)
        with monkeypatch.context() as patch:
            patch.setattr(Client, "call", lambda client, *asked: toy.call(*asked))
            return call(audit.main, "http://toy/v1/", "-q", "--num-tokens", num_tokens, *flags)

    return run


COPIED, DEPARTED = "concurrent answers copy each other", "texts do not follow"
TOYS = {  # how many tokens are asked for, and what must be said of some checks
    "chat": (3072, {}),
    "reported after temperature": (3072, {}),
    "one random number": (3072, {"independence": COPIED}),
    "recovered": (6144, {"texts, T=1": DEPARTED}),
    "zeros": (1, {"logprobs": "all log-probabilities are 0"}),
}


@pytest.mark.parametrize("name", TOYS)
def test_a_sound_server_passes_and_a_fault_is_found_and_named(run, name):
    num_tokens, faults = TOYS[name]
    done = run(name, "--json", num_tokens=num_tokens)
    rows = {row["check"]: row for row in done.json["checks"]}
    found = {name: row["says"] for name, row in rows.items() if row["verdict"] == "FAULT"}
    assert (done.code, done.json["lossless"]) == (len(faults), not faults)
    assert faults.keys() <= found.keys()
    assert all(text in says for text in faults.values() for says in found.values())
    if not faults:
        assert ([*rows], found) == (CHECKS, {})
        assert min(rows[name]["p_value"] for name in CHECKS[3:]) > 1e-4


def test_the_table_says_what_was_found(run):
    done = run("greedy")
    assert done.out.split()[:6] == ["check", "verdict", "statistic", "p", "value", "tokens"]
    assert all(name in done.out for name in CHECKS)
    assert re.search(r"\nFAULT greedy: a token is [\d.]+ nats below the argmax\n", done.out)
    assert (done.code, done.err) == (1, "")


@pytest.mark.slow
def test_our_own_server_passes(call, engine):
    with serving(engine, speculation=replace(COUPLED, coupled=False)) as server:
        done = call(audit.main, server.url, "--json", "--num-tokens", "3072")
    assert (done.code, [row["check"] for row in done.json["checks"]]) == (0, CHECKS)


class Moved(BaseHTTPRequestHandler):
    """Leads to another server, which says what key it got."""

    def do_GET(self) -> None:
        content = json.dumps({"key": self.headers["Authorization"]}).encode()
        self.send_response(403 if self.path == "/other" else 302)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/other")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_key_is_for_the_server_alone(call):
    with HTTPServer(("127.0.0.1", 0), Moved) as moved, ThreadPoolExecutor(1) as thread:
        thread.submit(moved.serve_forever, 0.01)
        url = f"http://127.0.0.1:{moved.server_port}"
        done = call(audit.main, url, "--api-key", "clé", "-q")
        moved.shutdown()
    assert (done.code, done.err.count("\n"), '403, {"key": null}' in done.err) == (2, 1, True)


def test_a_client_asks_our_server_for_all_that_it_has(engine):
    with serving(engine) as server:
        client = connect(f"{server.url}/v1/", None, None)
        assert (client.endpoint, client.num_top) == ("/completions", 20)
        assert client.fields == {"model": "tiny", **NEUTRAL}
        with contextlib.closing(client.http):
            assert len(client.ask(PROMPT)) == NUM_NEW


@pytest.mark.parametrize("num_heads", [500, 530, 600, 700, 300])
def test_a_p_value_bounds_the_odds_of_a_thousand_coins(num_heads):
    test = Martingale()
    for number in range(1000):
        test.add(int(number >= num_heads), np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    distance = abs(num_heads - 500)
    odds = 2 * sum(math.comb(1000, n) for n in range(500 + distance, 1001)) / 2**1000
    assert test.mean == pytest.approx((num_heads - 500) / 1000)
    assert min(1, odds) <= test.p_value <= min(1, 100 * odds**0.65)
