"""Worker: a thread that computes for many asyncio tasks, whose requests are rows of one batch.

The thread takes new jobs between two events of a run. A job that needs a run of another kind
waits until all others end. When a run fails, its jobs get the error, and later jobs a new run."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minitri.core.errors import FaultError, InputError, shorten
from minitri.core.generation import CLOSED, Generation
from minitri.core.log import log
from minitri.core.requests import End, Event, Idle, Request

NUM_TICKS = 10
"""Calls of `Worker.tick` without an event after which the computing thread counts as stuck."""


class Job:
    """Requests of one caller, with a queue of their events for the asyncio loop of the caller."""

    def __init__(self, requests: Sequence[Request], kind: Any = None) -> None:
        """Makes a job. Jobs of equal `kind` (of any type that `Worker.open_run` takes, such as a
        memory shape) share a run; those of another kind wait until it has ended."""
        self.requests = requests
        self.kind = kind
        self.numbers: list[int] = []  # numbers of the requests in the run, as in its events
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events = asyncio.Queue[Event | Exception]()

    def put(self, event: Event | Exception) -> None:
        """Queues an event, or an error, for the caller; may be called by any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended
            self.is_cancelled = True

    async def events(self, patience: float | None = None) -> AsyncIterator[Event]:
        """Yields a job's events, `Idle` after `patience` seconds of none; raises queued errors."""
        num_left = len(self.requests)
        while num_left:
            try:
                async with asyncio.timeout(patience):
                    event = await self._events.get()
            except TimeoutError:
                event = Idle()
            if isinstance(event, Exception):
                raise event
            yield event
            num_left -= isinstance(event, End)


class Worker:
    """Runs jobs in its own thread; jobs of equal `kind` run at the same time, in one batch."""

    def __init__(self, open_run: Callable[[Any], Generation], run: Generation | None = None):
        """Makes a worker. `open_run(kind)` opens a run for jobs of this `Job.kind`; `run`, if
        given, is open already, for jobs of kind None."""
        self.problem = ""  # why requests fail at present; empty if they do not
        self._open = open_run
        self._run = run
        self._kind: Any = None
        self._waiting = deque[Job]()
        self._jobs: dict[int, Job] = {}  # by the numbers of their requests in the run
        self._num_quiet = 0  # ticks since the last event
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1)

    def submit(self, job: Job) -> None:
        """Queues a job for the thread. Raises `FaultError` after `close`, or if `tick` gave up."""
        if self._num_quiet >= NUM_TICKS:
            raise FaultError(self.problem)
        self._waiting.append(job)
        try:
            self._thread.submit(self._work)
        except RuntimeError as error:  # the thread was shut down
            raise FaultError(CLOSED) from error

    def give_up(self, problem: str) -> None:
        """Ends all jobs with the error `problem`, although the thread may still compute."""
        log.error("%s", problem)
        self.problem = problem
        report(FaultError(problem), *self._jobs.values(), *self._waiting)

    def tick(self) -> None:
        """To be called at equal intervals; after `NUM_TICKS` calls with no event all jobs fail."""
        self._num_quiet = self._num_quiet + 1 if self._jobs or self._waiting else 0
        if self._num_quiet == NUM_TICKS:
            self.give_up("the model makes no progress; ask again later")

    def close(self) -> None:
        """Ends the run; jobs that have not ended get an error."""
        self._is_closed = True
        self._thread.shutdown()
        del self._open  # frees the models that it refers to
        report(FaultError(CLOSED), *self._jobs.values(), *self._waiting)
        self._end_run()

    def _work(self) -> None:
        while (self._waiting or self._jobs) and not self._is_closed:
            job = self._waiting[0] if self._waiting else None
            if job and (job.is_cancelled or job.kind == self._kind or not self._jobs):
                if not job.is_cancelled:
                    self._start(job)
                self._waiting.popleft()
            else:
                self._step()
        if self._kind:  # the run for kind None stays open
            self._end_run()

    def _start(self, job: Job) -> None:
        """Submits a job's requests to the current run, or to a new one if that has another kind."""
        try:
            run = (job.kind == self._kind and self._run) or self._renew(job.kind)
            for request in job.requests:
                job.numbers.append(run.submit(request))
                self._jobs[job.numbers[-1]] = job
        except BaseException as error:
            report(error, job)

    def _renew(self, kind: Any) -> Generation:
        self._end_run()
        self._run = self._open(kind)
        self._kind = kind
        self.problem = ""
        return self._run

    def _step(self) -> None:
        """Queues the run's next event for its job; if the run fails, so do its jobs."""
        assert self._run
        jobs = self._jobs
        try:
            for number, job in [*jobs.items()]:
                if job.is_cancelled:
                    self._run.cancel(number)
                    del jobs[number]
            event = next(self._run)
            self._num_quiet = 0
            self.problem = ""
            if not isinstance(event, Idle) and event.row in jobs:
                jobs[event.row].put(getattr(event, "error", None) or event)
                if isinstance(event, End):
                    del jobs[event.row]
        except BaseException as error:
            self.problem = f"the run has failed, and no other is open: {shorten(repr(error))}"
            report(error, *jobs.values())
            jobs.clear()
            with contextlib.suppress(BaseException):  # if it fails, the next job opens a run
                self._renew(self._kind)

    def _end_run(self) -> None:
        run = self._run
        self._run = None  # first: a run that cannot be closed must not come back
        if run:
            run.close()


def report(error: BaseException, *jobs: Job) -> None:
    """Ends jobs with an error, which is logged unless it is an `InputError`."""
    if not isinstance(error, InputError):
        log.exception("the run failed: %s", error)
    if not isinstance(error, Exception):  # such as SystemExit, which would end the caller's thread
        error = FaultError(f"the run was stopped by {shorten(repr(error))}; ask again")
    for job in dict.fromkeys(jobs):
        job.put(error)
