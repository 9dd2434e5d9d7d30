"""The measuring tools run on a tiny model, print a table, and end in a JSON line of figures."""

import json

import pytest

from tools import serve_load
from tools.bench import __main__ as bench
from tools.bench import auto


def test_every_setting_and_pass_has_a_row(call, folder, monkeypatch):
    monkeypatch.setattr(auto, "WEIGHTS", ("dense",))
    flags = "auto --context 30 --context 60 --repeats 1 --new-tokens 6 -q --model"
    code, out, _ = call(bench.main, *flags.split(), folder)
    assert code == 0
    assert out.count("| dense, 60") == 1 + len(auto.SAMPLING)
    assert f"over {2 * len(auto.SAMPLING)} settings" in out


@pytest.mark.slow
def test_a_load_loses_no_request_and_changes_no_text(call):
    """One client in ten leaves, one reads slowly; every answer is asked for again. One request has
    a grammar, and one a grammar that nothing can compile."""
    flags = "--requests 20 --clients 10 --longest 300 --new-tokens 12 --check 20 --json -q"
    code, out, err = call(serve_load.main, *flags.split())
    assert code == 0, err
    result = json.loads(out)
    assert result["answered"] + result["left"] == result["asked_again"] == 19
    assert result["refused"] == 1
    assert result["left"] >= 1
    assert result["lost"] == result["texts_that_differ"] == result["busy_at_the_end"] == 0
    assert result["gap_ms_p50"] <= result["gap_ms_p95"] <= result["gap_ms_p99"]
    assert result["mib_at_the_end"] > 0
