"""Whatever is wrong on a command line is one line that names it, and exit code 2."""

import importlib
import re
import shlex
import sys

import pytest

MODULES = {
    "generate": "minitri.generate",
    "plan": "minitri.plan",
    **{name: f"minitri.{name}.__main__" for name in ("bench", "chat", "selftest", "serve")},
    "peers": "tools.bench.__main__",
    "tour": "tools.tour",
}
BAD = """
generate --model no-such-model | 'no-such-model'
generate --model smollm2-135 | unknown model
generate --prompt '' | prompt is empty
generate --prompt-file /nowhere/x.txt | /nowhere/x.txt
generate --prompt-file / | cannot read /
generate --prompt LONG | holds 512 minus max_new_tokens=8
generate --prompt LONE | not valid Unicode (character 1)
generate --prompt=-- | --prompt: expected one argument
generate --prompt x --demo | --demo: not allowed with argument
generate --prompt x y | prompt
generate --system Short! | --system
generate --fit both | --fit: invalid choice: 'both'
generate --fit last -n 600 | max_new_tokens=600
generate --temperature -1 | temperature is -1.0
generate --temperature nan | temperature is nan
generate --top-p 0 | top_p is 0.0
generate --min-p 7 | min_p is 7
generate --top-k -3 | --top-k: '-3'
generate --top-k １２ | --top-k: '１２'
generate --max-prompt-tokens 1_000 | --max-prompt-tokens: '1_000'
generate -n many | --max-new-tokens: 'many'
generate --seed -1 | --seed: '-1'
generate --budget 9999999999 | budget is 9999999999
generate --budget NINES | --budget: '99999999
generate --method retrieval --budget 30 | multiple of the chunk size, 8
generate --gamma2 100 | --gamma2: '100'
generate --method magic | --method: invalid choice: 'magic'
generate --method triforce --draft none | --draft none
generate --method naive --draft no-such | 'no-such'
generate --stop '' | stop is
generate --stop LONE | stop string is not valid Unicode
generate --device abacus | device 'abacus'
generate --device cpu --offload | offload is for GPUs
generate --device cpu --attention math | math is for GPUs
generate --on-chip 2 | on_chip is 2
generate --rope-scaling yarn | is not KIND:FACTOR
generate --save-kv /nowhere/x | --save-kv: cannot write /nowhere/x
generate --load-kv /nowhere/x | /nowhere/x
generate --warp | unrecognized arguments: --warp
chat --document /nowhere/x.txt | /nowhere/x.txt
chat --document BINARY | is not UTF-8 text
chat --document LONGFILE | prompt has
chat --temperature -1 | temperature
chat --load missing.kv | missing.kv
serve --port 70000 | --port: '70000'
serve --host no.such.host | cannot listen at no.such.host
selftest --method autoregressive | --method
selftest --draft none | --draft
selftest --temperature -1 | temperature
selftest --budget 33 | budget
selftest --max-prompt-tokens 600 --max-new-tokens 40 | max_new_tokens=40
bench --new-tokens 3 | --new-tokens
bench --prompt-tokens 0 | --prompt-tokens
bench --seeds x | --seeds
bench --prompt-file no-such-file | no-such-file
bench --compare --offload --model no-such-model | --on-chip
bench --method naive:0 | tree
bench --method naive:8x9 | tree
bench --method naive:4x | tree
bench --method naives | method
peers --prompt-file a --prompt-file b | --prompt-file
peers --coupled | --coupled
peers --peer openvino | --peer
peers --compare --peer vllm | vllm
peers --compare --peer-python openvino=/no/python | --peer-python
peers --compare --peer-python python | --peer-python
peers --repeats x | --repeats
peers --load dummy --shape lama2 | lama2
peers --load dummy --compare | --compare
peers --load dummy --method auto | --method
peers --load dummy --method naive --method triforce | --method
peers --load dummy --synthetic-acceptance 2,1 | --synthetic-acceptance
tour --max-prompt-tokens 300 | 300 tokens
tour --out nowhere/tour.png | nowhere/tour.png
"""
MODEL = {"generate": "-n 8 --prompt x", "chat": "", "selftest": "", "tour": "--device cpu"}
"""Programs that get the tiny model, and these flags, unless a line gives them."""


@pytest.fixture
def odd_values(tmp_path) -> dict[str, str]:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.txt").write_text("word " * 5000)
    values = {"NINES": "9" * 5000, "LONG": "word " * 600, "LONE": "a\udcff"}
    return {**values, "BINARY": str(tmp_path / "binary"), "LONGFILE": str(tmp_path / "long.txt")}


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_one_line_and_exit_code_2(folder, odd_values, capsys, line):
    flags, message = line.split(" | ")
    name, *words = shlex.split(flags)
    if name in MODEL:
        words += [] if "--model" in words else ["--model", str(folder)]
        for flag, value in re.findall(r"(-\S+) (\S+)", MODEL[name]):
            is_given = any(re.match(rf"{flag}(=|$)|--prompt-file", word) for word in words)
            words += [] if is_given else [flag, value]
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(MODULES[name]).main(
            ["--quiet", *(odd_values.get(word, word) for word in words)]
        )
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("minitri: ")
    assert message in err


def test_a_missing_package_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(MODULES["serve"]).main([])
    assert ended.value.code == 2
    assert "pip install 'minitri[serve]'" in capsys.readouterr().err
