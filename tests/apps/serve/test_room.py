"""A server takes no more memory than it may, and of that only what texts have reached."""

import re
import subprocess
import sys

import httpx
import pytest

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.apps.serve.__main__ import build_parser, open_worker
from minitri.apps.serve.room import SHARE, choose_rows
from minitri.core.offload.placement import GIB
from minitri.core.shape import MemoryShape
from tests.conftest import resident_bytes, write_hf_folder

GENERATION = GenerationConfig(reserve=512).for_run(512)
SHAPE = MemoryShape((1,) * 8, SamplingParams(), GENERATION, SpeculationConfig())
KIB = 1 / (1 << 20)


def choose(engine, gib, *, fewest=1):
    return choose_rows(engine.models, SHAPE, gib, fewest=fewest)


def test_less_memory_is_fewer_rows_and_never_more_than_is_asked_for(engine):
    sizes = [choose(engine, 9.0)]
    for _ in range(7):
        sizes.append(choose(engine, sizes[-1][1] - KIB))
        assert sizes[-1][1] <= sizes[-2][1] - KIB
    assert [num_rows for num_rows, _ in sizes] == [*range(8, 0, -1)]
    with pytest.raises(InputError, match=r"^1 x 512 tokens of tiny take .*; lower .* memory=$"):
        choose(engine, sizes[-1][1] - KIB)


def test_by_default_it_is_a_share_of_what_was_free_before_the_weights(engine, monkeypatch):
    weights = sum(it.num_bytes for it in {engine.models.target, engine.models.retrieval}) / GIB
    for change, num_rows in ((KIB, 8), (-KIB, 7)):
        monkeypatch.setenv(
            "MINITRI_HOST_GIB", str(choose(engine, 9.0)[1] / SHARE - weights + change)
        )
        assert choose(engine, None)[0] == num_rows


def test_rows_that_do_not_fit_are_an_error_with_the_memory_that_they_take(engine):
    gib = choose(engine, 9.0)[1] - KIB
    problem = (
        r"^8 x 512 tokens of tiny take 0.5\d+ GiB with the weights, and there are 0.5\d+ to take; "
    )
    with pytest.raises(InputError, match=problem + "lower batch_size=, lower context= or give"):
        choose(engine, gib, fewest=8)
    for nonsense in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="or give more memory=$"):
            choose(engine, nonsense)


def test_slots_that_no_text_has_reached_take_no_memory(tmp_path):
    """Of 8 rows of a million tokens, 2 GB, as the line at the start says."""
    folder = write_hf_folder(tmp_path / "long", max_position_embeddings=1_000_000)
    command = f"{sys.executable} -m minitri serve --port 0 --context 1000000 --memory 2.6"
    command += f" --dtype bfloat16 --model {folder}"
    with subprocess.Popen(command.split(), stderr=subprocess.PIPE, text=True) as program:
        found = r"(http\S+/v1): 8 requests at a time, of 1000000 tokens each, in (\S+) GiB; Ctrl-C"
        lines = (re.search(found, line) for line in program.stderr)
        url, gib = next(filter(None, lines)).groups()
        fields = {"prompt": "She had been forced. " * 99, "max_tokens": 64}
        assert httpx.post(f"{url}/completions", json=fields, timeout=60).status_code == 200
        resident = resident_bytes(program.pid)
        program.terminate()
    assert resident < 1.0 * GIB < 2.2 * GIB < float(gib) * GIB <= 2.6 * GIB


def test_the_shortest_context_has_room_for_the_text_that_warms_up(engine):
    args = build_parser().parse_args(["--context", "2", "--batch-size", "1"])
    worker, *size = open_worker(args, engine, SamplingParams(), SpeculationConfig())
    worker.close()
    assert size[:2] == [1, 2]
