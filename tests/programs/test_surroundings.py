"""What a user's shell may do to a program: close its streams, fill its disk, press Ctrl-C, feed it
files without end."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitri.cli import exits, inputs
from minitri.cli.boot import sampling_of
from minitri.errors import InputError
from minitri.settings import SamplingParams


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, check=False, text=True, capture_output=True)


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


def test_a_folder_that_has_gone_is_one_line(tmp_path):
    search = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))  # noqa: PTH109
    program = f"PYTHONPATH={search} {sys.executable} -m minitri.plan"
    done = shell(f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; {program}")
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


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_file_without_end_is_read_up_to_a_bound():
    with pytest.raises(InputError, match="/dev/zero .*more than 16 MB"):
        inputs.read_prompt("/dev/zero")


@pytest.mark.parametrize(("seed", "temperature"), [(None, 0.8), (None, 0.0), (5, 0.8)])
def test_a_seed_that_is_drawn_is_told_where_it_matters(caplog, engine, seed, temperature):
    is_drawn = seed is None and temperature > 0
    filters = {**vars(SamplingParams()), "temperature": temperature}
    args = SimpleNamespace(seed=seed, **filters)
    with caplog.at_level("INFO", "minitri"):
        seeds = [sampling_of(args, engine)[1] for _ in range(3)]
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
