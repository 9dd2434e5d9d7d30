"""Hostile command lines: any flags of a program with any values give exit code 0, or 2 and a line.
`MINITRI_FUZZ_EXAMPLES=1000 pytest tests/programs/test_fuzz_flags.py` tries more of them."""

import io
import logging
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitri import generate, plan
from minitri.bench import __main__ as minitri_bench
from minitri.cli import boot
from tests.cascades import tiny_engine
from tools.bench import __main__ as bench
from tools.bench import floor, synthetic

EXAMPLES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "60"))
PLAIN = """0 1 2 3 8 16 64 100 256 -1 2147483647 2147483648 １２ 1_000 +7 0x10 1e3 1e-7
0.0 -0.0 0.5 0.9 1.5 nan inf -inf 1e400 -1e3 auto none ngram cpu cuda:99 yarn:2 yarn:1e9 0.5,0.5
1,nan - -- --- -h é🙂 \udcff \0 \x1b[31m smollm2-135m llama2-7b-128k llama-68m ORG/NAME ../.. / ~
/dev/null /dev/full /nowhere/x.png"""
VALUES = ["", " ", " 7 ", "%s %(prog)s {}", "a\nb\rc\u2028d", *PLAIN.split(), __file__]
VALUES += ["9" * 23, "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "A" * 10000, "x" * 300]
COUNTS = (*("1", "2", "4", "8", "16", "32", "64") * 2, "2147483647")
SHARES = dict.fromkeys(("temperature", "top_p", "min_p"), ("0", "0.5", "1"))
FINE = {"N": COUNTS, **SHARES, "X": ("0.1", "24", "1000"), "DRAFT,RETRIEVAL": ("0.5,0.5", "0,1")}
"""Values that most flags take, by what their help calls the value, or by their names."""


def command_lines(program) -> st.SearchStrategy[list[str]]:
    """Up to six flags of a program with values that often make sense, and two that rarely do."""
    hostile = st.sampled_from(VALUES) | st.text(max_size=9)
    often, rarely = [], [hostile.map(lambda value: [value])]
    for action in program.build_parser()._actions[1:]:  # without --help
        name = (action.option_strings or ["--"])[-1]
        if action.nargs == 0:
            often += [st.just([name]) for name in action.option_strings]
            continue
        rarely += [hostile.map(lambda value, name=name: [name, value])]
        rarely += [hostile.map(lambda value, name=name: [f"{name}={value}"])]
        known = action.choices or FINE.get(action.metavar or action.dest, VALUES)
        often.append(st.sampled_from([*known]).map(lambda value, name=name: [name, value]))
    words = st.lists(st.one_of(often), max_size=6), st.lists(st.one_of(rarely), max_size=2)
    return st.tuples(*words).map(lambda parts: [it for part in parts for two in part for it in two])


@pytest.fixture(autouse=True, scope="module")
def tiny_models():
    """Instead of the model that is asked for: a tiny one; the benchmark ends where it begins."""
    engine = tiny_engine()

    def load(*_, before_weights, **__):
        before_weights(engine.tokenizer, engine.config)
        return engine

    def end(*_, **__):
        sys.exit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "load", load)
        patch.setattr(bench, "find_peers", lambda *_: {})
        patch.setattr(minitri_bench, "compare", end)
        patch.setattr(floor, "plain_decoding", end)
        patch.setattr(synthetic, "sweep_contexts", end)
        yield
    logging.getLogger("minitri").handlers = []


SHORT = ["--max-new-tokens=4", "--max-prompt-tokens=40", "--quiet"]


@pytest.mark.parametrize(
    ("program", "fixed"), [(generate, SHORT), (bench, ["--prompt-tokens", "40"]), (plan, [])]
)
def test_any_flags_run_or_are_refused_in_one_line(program, fixed):
    @settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)
    @given(command_lines(program))
    def check(argv):
        out, err, stdin = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(b"She had"))
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", stdin)
            with pytest.raises(SystemExit) as ended:
                program.main([*fixed, *argv])
        lines = [line for line in err.getvalue().splitlines() if line.startswith("minitri: ")]
        assert ended.value.code in (0, 2)
        assert lines == err.getvalue().splitlines()[-1:] * (ended.value.code == 2)
        assert all(len(line) < 1000 for line in lines)

    check()
