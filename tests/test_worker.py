"""The thread of asyncio's requests: whatever happens to it, nobody waits for ever."""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from minitri import Generation, InputError, Request
from minitri.worker import Job, Worker
from tests.cascades import tiny_engine
from tests.test_library import collect

SHORT = {"max_new_tokens": 2, "ignore_eos": True}


async def ask(engine):
    """How a text ends, within seconds."""
    task = asyncio.create_task(collect(engine.agenerate("She had", **SHORT)))
    assert (await asyncio.wait([task], timeout=60))[0], "still waiting"
    _, [end] = await task
    return end


@pytest.mark.parametrize("method", ["submit", "__next__"])
def test_a_request_that_fails_is_told_why_and_the_next_one_runs(method, caplog):
    broken = patch.object(Generation, method, side_effect=RuntimeError("broken"))
    with tiny_engine() as engine:
        with broken, pytest.raises(RuntimeError, match="broken"):
            asyncio.run(ask(engine))
        assert "the run failed: broken" in caplog.text
        assert asyncio.run(ask(engine)).finish_reason == "length"


def test_a_request_that_leaves_opens_no_run(engine):
    opened = []

    async def run():
        worker = Worker(lambda kind: opened.append(kind) or engine.open(reserve=400))
        first, other, last = (Job([Request("She had", **SHORT)], kind) for kind in "aba")
        other.is_cancelled = True
        worker.submit(first)
        worker.submit(other)
        await collect(first.events())
        worker.submit(last)
        await collect(last.events())
        worker.close()

    asyncio.run(run())
    assert "b" not in opened


def test_threads_that_ask_first_at_once_share_a_worker(monkeypatch):
    made, init, meeting = [], Worker.__init__, threading.Barrier(2)

    def wait_for_another(worker, *args):
        made.append(worker)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=0.3)
        init(worker, *args)

    monkeypatch.setattr(Worker, "__init__", wait_for_another)
    with tiny_engine() as engine, ThreadPoolExecutor(2) as threads:
        ends = [*threads.map(lambda _: asyncio.run(ask(engine)), range(2))]
    assert (len(made), len(ends)) == (1, 2)


def test_a_forked_process_is_told_so_and_does_not_wait():
    with tiny_engine() as engine:
        asyncio.run(ask(engine))
        if (child := os.fork()) == 0:
            try:
                asyncio.run(ask(engine))
            except InputError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
