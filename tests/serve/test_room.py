"""A server takes no more memory than it may, and of that only what texts have reached."""

import contextlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.gpu.placement import GIB, MemoryShape
from minitri.serve.room import SHARE, choose_size
from tests.conftest import write_hf_folder

SHAPE = MemoryShape((1,) * 8, SamplingParams(), GenerationConfig(reserve=512), SpeculationConfig())
KIB = 1 / (1 << 20)


def choose(engine, gib, *, may_drop=True, may_cut=True):
    return choose_size(engine.models, SHAPE, gib, may_drop=may_drop, may_cut=may_cut)


def test_less_memory_is_first_fewer_rows_and_then_shorter_texts(engine):
    """Down to one row of 64 tokens; what is planned covers all that a run allocates."""
    sizes = [choose(engine, 9.0)]
    with contextlib.suppress(InputError):
        while True:
            sizes.append(choose(engine, sizes[-1].gib - KIB))
    assert all(below.gib <= size.gib - KIB for size, below in itertools.pairwise(sizes))
    rows = [size.num_rows for size in sizes]
    assert rows == [8, 7, 6, 5, 4, 3, 2] + [1] * (len(rows) - 7)
    contexts = [size.context for size in sizes]
    assert contexts[:8] == [512] * 8
    assert contexts[7:] == sorted({*contexts}, reverse=True)
    assert contexts[-1] < 128
    with pytest.raises(InputError, match=r"^1 x 64 tokens of tiny take .*; give more memory=$"):
        choose(engine, sizes[-1].gib - KIB)
    taken = []
    for num_rows, context, _ in (sizes[0], sizes[7], sizes[-1]):
        with engine.open(batch_size=num_rows, reserve=context) as run:
            taken.append(run.stats.kv_cache_bytes)
        engine.release()
    assert taken[0] - taken[2] <= GIB * (sizes[0].gib - sizes[-1].gib)
    assert taken[0] > 4 * taken[1] > 4 * taken[2]


def test_by_default_it_is_a_share_of_what_was_free_before_the_weights(engine, monkeypatch):
    whole = choose(engine, 9.0).gib
    weights = {engine.models.target, engine.models.retrieval}
    free = whole / SHARE - sum(it.num_bytes for it in weights) / GIB
    for gib, num_rows in ((free + KIB, 8), (free - KIB, 7)):
        monkeypatch.setenv("MINITRI_HOST_GIB", str(gib))
        assert choose(engine, None).num_rows == num_rows


def test_what_is_given_stays_or_the_error_says_what_fits(engine):
    gib = choose(engine, 9.0).gib - KIB
    assert choose(engine, gib, may_drop=False)[0] == 8
    assert choose(engine, gib, may_cut=False)[:2] == (7, 512)
    problem = r"^8 x 512 tokens of tiny take 0\.\d\d GiB with the weights and memory= is 0\.\d\d; "
    advice = "batch_size=7 with context=512 fits or give more memory=$"
    with pytest.raises(InputError, match=problem + advice):
        choose(engine, gib, may_drop=False, may_cut=False)
    for nonsense in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="; give more memory=$"):
            choose(engine, nonsense)


def test_slots_that_no_text_has_reached_take_no_memory(tmp_path):
    """Of 8 rows of a million tokens, 2 GB, as the line at the start says."""
    folder = write_hf_folder(tmp_path / "long", max_position_embeddings=1_000_000)
    command = [sys.executable, "-m", "minitri.serve", "--model", str(folder), "--port", "0"]
    command += ["--context", "1000000", "--memory", "2.6", "--dtype", "bfloat16"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        found = r"(http://\S+/v1): (\d) requests .* 1000000 tokens each, in at most (\S+) GiB"
        [url, num_rows, gib] = next(
            filter(None, (re.search(found, it) for it in program.stderr))
        ).groups()
        for _ in range(2):
            fields = {"prompt": "She had been forced. " * 99, "max_tokens": 64}
            assert httpx.post(f"{url}/completions", json=fields, timeout=60).status_code == 200
        resident = 4096 * int(Path(f"/proc/{program.pid}/statm").read_text().split()[1])
        program.terminate()
    print(url, num_rows, gib, resident / 1e6)
    assert (num_rows, 2.2 < float(gib) <= 2.6) == ("8", True)
    assert resident < 1.0e9
