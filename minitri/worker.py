"""A thread that runs requests of other threads, and of asyncio, as rows of one open run.

They leave their requests, which it takes between two events. One of another kind waits until the
others have ended. When a run fails, its requests get the error, and the next ones a new run.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minitri.core.errors import FaultError, InputError, shorten
from minitri.core.generation import CLOSED, Generation
from minitri.core.log import log
from minitri.core.requests import End, Event, Idle, Request

NUM_TICKS = 10
"""Equal times without an event, after which the thread counts as stuck."""


class Job:
    """Requests on their way, and their events for the asyncio loop in which it is made."""

    def __init__(self, requests: Sequence[Request], kind: Any = None) -> None:
        """Only jobs of an equal `kind` run next to each other."""
        self.requests = requests
        self.numbers: list[int] = []
        """Of the requests, by which events name them."""
        self.kind = kind
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    def tell(self, event: Event | Exception | None) -> None:
        """Passes an event on, from any thread; None is the last."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended
            self.is_cancelled = True

    async def events(self) -> AsyncIterator[Event]:
        """Those of the requests; raises what went wrong with one."""
        num_left = len(self.requests)
        while num_left and (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
            num_left -= isinstance(event, End)


class Worker:
    """Runs jobs, next to each other where they are of one kind."""

    def __init__(
        self, open_run: Callable[[Any], Generation], run: Generation | None = None
    ) -> None:
        """`open_run` opens a run for jobs of a kind, which ends with them; that of the kind None,
        which may be open already, stays open."""
        self.problem = ""  # why requests fail now, if they do
        self._open = open_run
        self._run = run
        self._kind: Any = None
        self._waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}  # by their numbers in the run
        self._process = os.getpid()
        self._num_quiet = 0  # ticks since the last event
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1)

    def submit(self, job: Job) -> None:
        """Its events are told until it is cancelled. Raises `FaultError`."""
        if os.getpid() != self._process:
            raise FaultError("this process was forked without the thread that computes; spawn it")
        if self._num_quiet >= NUM_TICKS:
            raise FaultError(self.problem)
        self._waiting.append(job)
        try:
            self._thread.submit(self._work)
        except RuntimeError as error:  # no thread takes it any more
            raise FaultError(CLOSED) from error

    def give_up(self, problem: str) -> None:
        """Tells all who wait that there is one."""
        log.error("%s", problem)
        self.problem = problem
        tell_of(FaultError(problem), *self._jobs.values(), *self._waiting)

    def tick(self) -> None:
        """Is called from time to time: `NUM_TICKS` without an event are too many."""
        self._num_quiet = self._num_quiet + 1 if self._jobs or self._waiting else 0
        if self._num_quiet == NUM_TICKS:
            self.give_up("the model makes no progress; ask again later")

    def close(self) -> None:
        """Ends the run; whoever waits gets an error."""
        self._is_closed = True
        self._thread.shutdown()
        tell_of(FaultError(CLOSED), *self._jobs.values(), *self._waiting)
        self._end_run()

    def _work(self) -> None:
        """Goes on until no job is left."""
        while (self._waiting or self._jobs) and not self._is_closed:
            job = self._waiting[0] if self._waiting else None
            if job and (job.is_cancelled or job.kind == self._kind or not self._jobs):
                self._start(job)
                self._waiting.popleft()
            else:
                self._step()
        if self._kind is not None:
            self._end_run()

    def _start(self, job: Job) -> None:
        """Adds a job to the run, or to a new one if that is of another kind."""
        if job.is_cancelled:
            return
        try:
            run = self._run if job.kind == self._kind else None
            run = run or self._renew(job.kind)
            for request in job.requests:
                job.numbers.append(run.submit(request))
                self._jobs[job.numbers[-1]] = job
        except BaseException as error:
            tell_of(error, job)

    def _renew(self, kind: Any) -> Generation:
        """Opens a run of a kind in the place of another."""
        self._end_run()
        self._run = self._open(kind)
        self._kind = kind
        self.problem = ""
        return self._run

    def _step(self) -> None:
        """Takes the next event of the run; if that fails, so do its jobs."""
        assert self._run is not None
        try:
            for number, job in [*self._jobs.items()]:
                if job.is_cancelled:
                    self._run.cancel(number)
                    del self._jobs[number]
            event = next(self._run)
            self._num_quiet = 0
            self.problem = ""
            if not isinstance(event, Idle) and event.row in self._jobs:
                self._jobs[event.row].tell(getattr(event, "error", None) or event)
                if isinstance(event, End):
                    del self._jobs[event.row]
        except BaseException as error:
            self.problem = f"the run has failed, and no other is open: {shorten(repr(error))}"
            tell_of(error, *self._jobs.values())
            self._jobs.clear()
            with contextlib.suppress(BaseException):  # of which the next request is told
                self._renew(self._kind)

    def _end_run(self) -> None:
        if (run := self._run) is not None:
            self._run = None
            run.close()


def tell_of(error: BaseException, *jobs: Job) -> None:
    """Tells jobs what went wrong, and if it is a bug the log."""
    if not isinstance(error, InputError):
        log.exception("the run failed: %s", error)
    if not isinstance(error, Exception):  # it would end the thread of whoever asks
        error = FaultError(f"the run was stopped by {shorten(repr(error))}; ask again")
    for job in dict.fromkeys(jobs):
        job.tell(error)
