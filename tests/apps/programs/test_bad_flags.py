"""Whatever is wrong on a command line is one line that names it: cases, and any flags."""

import importlib
import io
import logging
import os
import pickle
import re
import shlex
import shutil
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

import minitri
from minitri import generate, loader
from minitri.apps import bench as minitri_bench
from minitri.apps import plan
from minitri.apps.cli import inputs
from tests.cascades import tiny_engine
from tests.conftest import edit_json, write_hf_folder
from tools.bench import __main__ as bench
from tools.bench import floor, synthetic

MODULES = {"generate": "minitri.generate", "peers": "tools.bench.__main__", "tour": "tools.tour"}
MODULES |= {
    "plan": "minitri.apps.plan",
    "bench": "minitri.apps.bench",
    "minitri": "minitri.__main__",
}
MODULES |= {
    name: f"minitri.apps.{name}.__main__" for name in ("audit", "chat", "selftest", "serve")
}
BAD = r"""
generate --model no-such-model | unknown model 'no-such-model'; give a folder or file
generate --model ORG/NAME | repository ORG/NAME is not on this machine
generate --model page.gguf | page.gguf is not a whole GGUF file
generate --model truncated | truncated/model.safetensors is damaged
generate --model pickle | pickle/pytorch_model.bin is damaged, or holds more than tensors
generate --model no-tokenizer | the tokenizer of no-tokenizer is missing
generate --model bad-json | bad-json/config.json is not readable JSON
generate --model mixed | mixed: .*\(320, 64\) where the config asks for .*\(320, 128\)
generate --prompt '' | prompt is empty
generate --prompt-file binary | --prompt-file binary cannot be read \(it has a NUL
generate --prompt-file /proc/self/mem | --prompt-file /proc/self/mem cannot be read
generate --prompt LONG | 1801 tokens but tiny holds 512 minus --max-new-tokens 8; keep its first 504
generate --prompt LONE | not valid Unicode \(character 1\)
generate --prompt=-- | --prompt: expected one argument
generate --prompt x --demo | --demo: not allowed with argument
generate --system Short! | --system has a text, .* add --chat
generate --chat | this model has no chat template
generate -n 1.5 | -n/--max-new-tokens: '1.5' is not a whole number from 1
generate --top-k １２ | --top-k: '１２'
generate --top-p nan | ^--top-p is nan
generate --logit-bias 320:1 | ^--logit-bias is for token 320, but tiny has 320 tokens; leave it out
generate --json-schema /nowhere/x | ^--json-schema /nowhere/x cannot be read
generate --regex '(a' | ^the regex cannot be used \(.*unclosed group\); correct it
generate --method retrieval --budget 30 | ^--budget is 30; .* multiple of the chunk size, 8
generate --tree 4x3 --gamma1 2 | ^--gamma1 is 2; but --tree 4x3; leave one
generate --method naive --draft empty-folder | ^--draft empty-folder: .* has no config
generate --method naive --draft other-words | other-words: .*vocabulary.* --draft suffix
generate --device cuda:77 | ^--device 'cuda:77' is not there .* use --device cpu
generate --rope-scaling magic:2 | ^--rope-scaling 'magic:2': RoPE kind is 'magic'
generate --save-kv /nowhere/x | ^--save-kv: cannot write /nowhere/x
generate --load-kv snapshot | no KV snapshot snapshot for tiny \(its weights is
generate --prompts empty | ^--prompts empty is empty
generate --bitwise --tree 4 | ^--bitwise needs .* no --tree
chat --document empty-folder | ^--document empty-folder is a folder
serve --port BUSY | port \d+ \(Address already in use.*; choose another --host or --port
serve --context 100000 --port 0 --model tiny | ^--context is 100000; give from 2 to 512
selftest --max-prompt-tokens 600 --max-new-tokens 40 | minus --max-new-tokens 40; .* 472
audit http://127.0.0.1:9 | ^http://127.0.0.1:9/v1/models cannot be had
bench --prompt-tokens 600 --model tiny | new-tokens 64; .* 448 tokens with --prompt-tokens 448
plan --gpus 3 | cannot be split over 3 ranks: .* use another number of GPUs
minitri remove no/model | 'no/model'
peers --compare --peer vllm | --peer: 'vllm' is no peer
tour --max-prompt-tokens 300 | 300 tokens, too few
minitri Chat --document x.txt | no program Chat; did you mean chat
"""
MODEL = {"generate": "-n 8 --prompt x", "chat": "", "selftest": "", "tour": "--device cpu"}
"""Programs that get the tiny model, and these flags, unless a line gives them."""


class Hostile:
    """A pickle of it would print this when it is opened."""

    def __reduce__(self):
        return print, ("the code of a pickle was run",)


@pytest.fixture(scope="module")
def strange(folder, tmp_path_factory) -> Path:
    """A folder with the files and models that `BAD` names."""
    here = tmp_path_factory.mktemp("strange")
    (here / "empty-folder").mkdir()
    contents = {"empty": b"", "binary": b"\xff\xfe\0", "page.gguf": b"<!DOCTYPE html>"}
    for name, content in contents.items():
        (here / name).write_bytes(content)
    models = "tiny truncated pickle no-tokenizer bad-json mixed other-words"
    for name in models.split():
        shutil.copytree(folder, here / name)
    weights = here / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (here / "pickle" / "model.safetensors").unlink()
    (here / "pickle" / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    (here / "no-tokenizer" / "tokenizer.json").unlink()
    (here / "bad-json" / "config.json").write_text("{")
    edit_json(here / "mixed" / "config.json", hidden_size=128, head_dim=16)
    words = here / "other-words" / "tokenizer.json"
    words.write_text(
        words.read_text().replace("¤", "PLACE").replace("¥", "¤").replace("PLACE", "¥")
    )
    engine = minitri.load(write_hf_folder(here / "other", seed=1), dtype="float32", device="cpu")
    engine.complete("Hello there")
    engine.save_kv(here / "snapshot")
    return here


@pytest.fixture
def values():
    """Of words that would be too long for the table, or are known only here."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        yield {"LONG": "word " * 600, "LONE": "a\udcff", "BUSY": port}


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_one_line_of_three_parts(strange, values, call, line, monkeypatch):
    """What, what was got; what to do. No flag that the program does not have or was not given."""
    monkeypatch.chdir(strange)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    flags, message = line.split(" | ")
    name, *words = shlex.split(flags)
    if name in MODEL:
        words += [] if "--model" in words else ["--model", "tiny"]
        for flag, value in re.findall(r"(-\S+) (\S+)", MODEL[name]):
            is_given = any(re.match(rf"{flag}(=|$)|--prompts|--prompt-file", it) for it in words)
            words += [] if is_given else [flag, value]
    program = importlib.import_module(MODULES[name])
    quiet = [] if name == "minitri" else ["--quiet"]
    code, out, err = call(program.main, *quiet, *(values.get(word, word) for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("minitri: ")
    assert re.search(message, err.removeprefix("minitri: ").strip()), err
    assert re.search(r"\w.*; \S", err), err
    if name != "minitri":
        known = {flag for it in program.build_parser()._actions for flag in it.option_strings}
        known |= {"--list-models", *(word.partition("=")[0] for word in words)}
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", err)} <= known


def test_a_missing_package_is_one_line(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "minitri.apps.serve.app", raising=False)
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

    class OpenEngine:
        tokenizer = engine.tokenizer
        config = engine.config

        def __init__(self, **_):
            pass

        def load(self):
            return engine

    ends = ((minitri_bench, "compare"), (floor, "plain_decoding"), (synthetic, "sweep_contexts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "OpenEngine", OpenEngine)
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
            patch.setattr(inputs, "is_piped", lambda: True)
            with pytest.raises(SystemExit) as ended:
                program.main([*fixed, *argv])
        lines = [line for line in err.getvalue().splitlines() if line.startswith("minitri: ")]
        assert ended.value.code in (0, 2)
        assert lines == err.getvalue().splitlines()[-1:] * (ended.value.code == 2)
        assert all(len(line) < 1000 for line in lines)

    check()
