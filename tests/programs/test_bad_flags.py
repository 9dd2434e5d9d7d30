"""Whatever is wrong on a command line is one line that names it: cases, and any flags."""

import importlib
import io
import logging
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from minitri import generate, loader, plan
from minitri.bench import __main__ as minitri_bench
from tests.cascades import tiny_engine
from tools.bench import __main__ as bench
from tools.bench import floor, synthetic

MODULES = {"generate": "minitri.generate", "peers": "tools.bench.__main__", "tour": "tools.tour"}
MODULES |= {"plan": "minitri.plan", "minitri": "minitri.__main__"}
MODULES |= {name: f"minitri.{name}.__main__" for name in ("bench", "chat", "selftest", "serve")}
BAD = """
generate --model no-such-model | 'no-such-model'
generate --model smollm2-135 | unknown model
generate --prompt '' | prompt is empty
generate --prompt-file /nowhere/x.txt | /nowhere/x.txt
generate --prompt LONG | holds 512 minus max_new_tokens=8
generate --prompt LONE | not valid Unicode (character 1)
generate --prompt=-- | --prompt: expected one argument
generate --prompt x --demo | --demo: not allowed with argument
generate --system Short! | --system
generate -n 600 | max_new_tokens=600
generate --top-k １２ | --top-k: '１２'
generate --budget NINES | --budget: '99999999
generate --method retrieval --budget 30 | multiple of the chunk size, 8
generate --method triforce --draft none | 'none'
generate --method naive --draft no-such | 'no-such'
generate --device cpu --offload | offload is for GPUs
generate --device cpu --attention math | math is for GPUs
generate --rope-scaling yarn | is not KIND:FACTOR
generate --save-kv /nowhere/x | --save-kv: cannot write /nowhere/x
generate --load-kv /nowhere/x | /nowhere/x
generate --warp | unrecognized arguments: --warp
chat --document BINARY | cannot read the document
serve --port 70000 | --port: '70000'
serve --host no.such.host | cannot listen at no.such.host
selftest --max-prompt-tokens 600 --max-new-tokens 40 | max_new_tokens=40
bench --compare --offload --model no-such-model | --on-chip
bench --method naive:0 | tree
bench --method naives | method
peers --prompt-file a --prompt-file b | --prompt-file
peers --peer openvino | --peer
peers --compare --peer vllm | vllm
peers --compare --peer-python openvino=/no/python | --peer-python
peers --compare --peer-python python | --peer-python
peers --load dummy --shape lama2 | lama2
peers --load dummy --compare | --compare
peers --load dummy --method naive --method triforce | --method
peers --load dummy --synthetic-acceptance 2,1 | --synthetic-acceptance
plan --gpu rtx490 | invalid choice: 'rtx490'
plan --gpu h100 --cpu | two machines
plan --gpu m4-max --gpus 2 | needs GPUs, not m4-max
plan --model /nowhere/x | unknown model
plan --model lwm-text-1m --gpu h200 --host-memory 99 | in host memory, got 99.00
plan --model llama3.1-8b --gpu m1 --context 9999 | on m1, got 15.20
minitri pull no-such-model | unknown model
minitri pull | required: model
minitri remove no/model | 'no/model'
minitri list x | unrecognized arguments: x
tour --max-prompt-tokens 300 | 300 tokens
tour --out nowhere/tour.png | nowhere/tour.png
"""
MODEL = {"generate": "-n 8 --prompt x", "chat": "", "selftest": "", "tour": "--device cpu"}
"""Programs that get the tiny model, and these flags, unless a line gives them."""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_one_line_and_exit_code_2(folder, tmp_path, call, line):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    values = {"NINES": "9" * 5000, "LONG": "word " * 600, "LONE": "a\udcff"}
    values["BINARY"] = str(tmp_path / "binary")
    flags, message = line.split(" | ")
    name, *words = shlex.split(flags)
    if name in MODEL:
        words += [] if "--model" in words else ["--model", str(folder)]
        for flag, value in re.findall(r"(-\S+) (\S+)", MODEL[name]):
            is_given = any(re.match(rf"{flag}(=|$)|--prompt-file", word) for word in words)
            words += [] if is_given else [flag, value]
    program = importlib.import_module(MODULES[name]).main
    words.insert(name == "minitri", "--quiet")
    code, out, err = call(program, *(values.get(word, word) for word in words))
    assert (code, "" if name == "plan" else out, err.count("\n")) == (2, "", 1)
    assert err.startswith("minitri: ")
    assert message in err


def test_a_missing_package_is_one_line(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = call(importlib.import_module(MODULES["serve"]).main)
    assert done.code == 2
    assert "pip install" in done.err


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


@pytest.fixture
def tiny_models():
    """Instead of the model that is asked for: a tiny one; the benchmark ends where it begins."""
    engine = tiny_engine()

    def load(*_, before_weights, **__):
        before_weights(engine.tokenizer, engine.config)
        return engine

    ends = ((minitri_bench, "compare"), (floor, "plain_decoding"), (synthetic, "sweep_contexts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", load)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(bench, "find_peers", lambda *_: {})
        for module, name in ends:
            patch.setattr(module, name, lambda *_, **__: sys.exit(0))
        yield
    logging.getLogger("minitri").handlers = []


SHORT = ["--max-new-tokens=4", "--max-prompt-tokens=40", "--quiet"]


@pytest.mark.parametrize(
    ("program", "fixed"), [(generate, SHORT), (bench, ["--prompt-tokens", "40"]), (plan, [])]
)
@pytest.mark.usefixtures("tiny_models")
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
