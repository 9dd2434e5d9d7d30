"""A thread that runs requests of other threads, and of asyncio, as rows of one open run.

They leave their requests, which it takes between two events. One of another kind waits until the
others have ended. When a run fails, its requests get the error, and the next ones a new run.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minitri.errors import InputError
from minitri.generation import Generation
from minitri.log import log
from minitri.requests import End, Event, Idle, Request


class Job:
    """A request on its way, and its events for the asyncio loop in which it is made."""

    def __init__(self, request: Request, kind: Any = None) -> None:
        """Only jobs of an equal `kind` run next to each other."""
        self.request = request
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
        """Those of the request; raises what went wrong."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, End):
                break


class Worker:
    """Runs jobs, next to each other where they are of one kind."""

    def __init__(
        self, open_run: Callable[[Any], Generation], run: Generation | None = None
    ) -> None:
        """`open_run` opens a run for jobs of a kind. With a `run`, for jobs of the kind None, the
        one at hand stays open without jobs, too; else it ends."""
        self._open = open_run
        self._stays_open = run is not None
        self._run = run
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._next: Job | None = None
        self._jobs: dict[int, Job] = {}  # by their numbers in the run
        self._kind: Any = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1)

    def submit(self, job: Job) -> None:
        """Its events are told until it is cancelled. Raises `InputError`."""
        if self._is_closed:
            raise InputError("the engine is closed; load it again")
        self._inbox.put(job)
        self._thread.submit(self._work)

    def close(self) -> None:
        """Ends the run; whoever waits gets an error."""
        self._is_closed = True
        self._thread.shutdown()
        self._end_run()

    def _work(self) -> None:
        """Goes on until no job is left."""
        while self._next is not None or self._jobs or not self._inbox.empty():
            try:
                self._advance()
            except Exception as error:
                if not isinstance(error, InputError):
                    log.exception("the run failed: %s", error)
                self._fail(error)
        if not self._stays_open:
            self._end_run()

    def _advance(self) -> None:
        """Takes a job, or makes a step of those that run."""
        if self._next is None and not self._inbox.empty():
            self._next = self._inbox.get()
        if self._is_closed:
            raise InputError("the engine was closed meanwhile; load it again")
        job = self._next
        if job is not None and not self._jobs and (self._run is None or job.kind != self._kind):
            self._end_run()
            self._run = self._open(job.kind)
            self._kind = job.kind
        if job is None or job.kind != self._kind:
            self._step()
            return
        self._next = None
        if self._run is not None and not job.is_cancelled:
            try:
                self._jobs[self._run.submit(job.request)] = job
            except InputError as error:
                job.tell(error)

    def _step(self) -> None:
        assert self._run is not None
        for number in [number for number, job in self._jobs.items() if job.is_cancelled]:
            self._run.cancel(number)
            del self._jobs[number]
        event = next(self._run)
        if not isinstance(event, Idle) and (job := self._jobs.get(event.row)):
            if isinstance(event, End):
                del self._jobs[event.row]
            job.tell(event)

    def _fail(self, error: Exception) -> None:
        """Tells the jobs of the run, or the one for which there is none."""
        failed = [*self._jobs.values()]
        if not failed and self._next is not None:
            failed = [self._next]
            self._next = None
        for job in failed:
            job.tell(error)
        self._jobs.clear()
        self._end_run()

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None
