"""What a user's shell may do to a program: close its streams, fill its disk, press Ctrl-C, feed it
files without end."""

import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minitri.cli import exits, inputs
from minitri.cli.boot import seed_of
from minitri.config import RopeConfig
from minitri.errors import InputError
from minitri.loading.hf_config import stretch_rope
from minitri.loading.prompt_ids import check_prompt
from minitri.settings import SamplingParams
from tests.conftest import tiny_config

HEAVY = {"argparse", "json", "logging", "typing", "dataclasses", "threading", "torch", "numpy"}
"""Of these none is imported before Ctrl-C is guarded; each would take milliseconds at least."""


def shell(command: str) -> subprocess.CompletedProcess[str]:
    options = {"shell": True, "check": False, "text": True, "capture_output": True, "timeout": 120}
    return subprocess.run(command, **options)


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 2, "No space left on device"),
        ("1</dev/null", 2, "Bad file descriptor"),
    ],
)
def test_closed_and_full_streams_are_at_most_one_line(streams, code, said):
    done = shell(f"{sys.executable} -m minitri.plan --gpu-memory 999 {streams}")
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(said))
    assert said in done.stderr


def test_a_reader_that_leaves_is_no_error():
    done = shell(f"{{ sleep 0.1; {sys.executable} -m minitri.plan; echo $? >&2; }} | true")
    assert done.stderr == "0\n"


def test_next_to_nothing_is_imported_before_ctrl_c_is_guarded():
    """With `-S -E` nothing else has imported it before."""
    program = "import sys, minitri.cli.exits; print(*sys.modules)"
    loaded = shell(f"{sys.executable} -S -E -c '{program}'").stdout.split()
    assert "minitri.cli.exits" in loaded
    assert not HEAVY & set(loaded)


def test_a_folder_that_has_gone_is_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    search = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))  # noqa: PTH109
    program = f"PYTHONPATH={search} {sys.executable} -m minitri.plan"
    done = shell(f"cd {tmp_path}/gone; rmdir ../gone; {program}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_names_of_the_package_are_imported_when_they_are_asked_for():
    import minitri

    assert set(minitri.__all__) <= set(dir(minitri))
    assert all(getattr(minitri, name) is not None for name in minitri.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        minitri.Lama  # noqa: B018


@pytest.mark.parametrize("from_stdin", [False, True])
@pytest.mark.parametrize("content", [b"caf\xff", b"ab\0", b"a" * 65, b""])
def test_files_that_are_no_prompt_are_refused(tmp_path, monkeypatch, content, from_stdin):
    file = tmp_path / "prompt"
    file.write_bytes(content)
    monkeypatch.setattr(inputs, "MAX_PROMPT_BYTES", 64)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    with pytest.raises(InputError):
        inputs.read_prompt("-" if from_stdin else str(file))


KEEP, LOWER, STRETCH = "--max-prompt-tokens", "--max-new-tokens", "--rope-scaling"
LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, original_context=64)
LONGROPE = RopeConfig(frequency_divisors=(1.0, 2.0))
TOO_LONG = [  # prompt, new tokens, RoPE, what is advised
    (300, 20, RopeConfig(), {KEEP, STRETCH}),
    (250, 20, RopeConfig(), {KEEP, LOWER, STRETCH}),
    (9000, 20, RopeConfig(), {KEEP, STRETCH}),
    (10, 256, RopeConfig(), {LOWER, STRETCH}),
    (300, 20, LLAMA3, {KEEP, STRETCH}),
    (300, 256, LONGROPE, set()),
    (300, 2**20, RopeConfig(), set()),
]


@pytest.mark.parametrize(("num_tokens", "num_new", "rope", "advised"), TOO_LONG)
def test_each_advice_against_a_prompt_too_long_works(num_tokens, num_new, rope, advised):
    config = tiny_config(rope=rope)
    with pytest.raises(InputError, match=f"{num_tokens} tokens .* holds 256 minus .*") as error:
        check_prompt([0] * num_tokens, config, num_new)
    line = str(error.value)
    assert {flag for flag in (KEEP, LOWER, STRETCH) if flag in line} == advised
    if keep := re.search(rf"keep at most (\d+) \({KEEP}\)", line):
        check_prompt([0] * int(keep[1]), config, num_new)
    if lower := re.search(rf"lower {LOWER} to (\d+)", line):
        check_prompt([0] * num_tokens, config, int(lower[1]))
    if stretch := re.search(rf"{STRETCH} (\w+):(\d+)", line):
        kind, factor = stretch[1], int(stretch[2])
        check_prompt([0] * num_tokens, stretch_rope(config, f"{kind}:{factor}"), num_new)
        with pytest.raises(InputError):
            check_prompt([0] * num_tokens, stretch_rope(config, f"{kind}:{factor - 1}"), num_new)


@pytest.mark.parametrize(("seed", "temperature"), [(None, 0.8), (None, 0.0), (5, 0.8)])
def test_a_seed_that_is_drawn_is_told_where_it_matters(caplog, seed, temperature):
    is_drawn = seed is None and temperature > 0
    with caplog.at_level("INFO", "minitri"):
        args = SimpleNamespace(seed=seed)
        seeds = [seed_of(args, SamplingParams(temperature)) for _ in range(3)]
    assert len({*seeds}) == (3 if is_drawn else 1)
    told = [int(message.split(";")[0].split()[1]) for message in caplog.messages]
    assert told == (seeds if is_drawn else [])


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"MINITRI_KERNELS": "off"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_waiting_threads_of_pytorch_sleep_next_to_compiled_kernels(given, found, monkeypatch):
    """Unless there are none, or somebody has decided otherwise."""
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr("shutil.which", lambda _: "c++")
    with exits.clean_imports():
        assert os.environ.get("GOMP_SPINCOUNT") == found
