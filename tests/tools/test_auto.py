"""`tools.bench auto`: a table of passes and one of settings."""

from tools.bench import __main__ as bench
from tools.bench import auto


def test_every_setting_and_pass_has_a_row(call, folder, monkeypatch):
    monkeypatch.setattr(auto, "WEIGHTS", ("dense",))
    flags = "auto --context 30 --context 60 --repeats 1 --new-tokens 6 -q --model"
    code, out, _ = call(bench.main, *flags.split(), str(folder))
    assert code == 0
    assert out.count("| dense, 60") == 1 + len(auto.SAMPLING)
    assert f"over {2 * len(auto.SAMPLING)} settings" in out
