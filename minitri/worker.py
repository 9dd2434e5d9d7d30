"""A thread that runs requests of other threads, and of asyncio, as rows of one open run.

They leave their requests, which it takes between two events. One that needs another kind of run
waits until the others have ended. When a run fails, its requests get the error, and a new run is
opened for the next ones.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from minitri.errors import InputError
from minitri.generation import Generation
from minitri.log import log
from minitri.requests import End, Event, Idle, Request
from minitri.settings import SpeculationConfig

Deliver = Callable[[Event | Exception], None]


@dataclass(eq=False)
class Job:
    """A request on its way, and who is told of its events."""

    request: Request
    deliver: Deliver
    speculation: SpeculationConfig | None = None
    """Of the run that it needs, if it needs a certain one."""
    is_cancelled: bool = False


class Worker:
    """Runs requests of any thread, next to each other where one run can."""

    def __init__(
        self,
        open_run: Callable[[Job], Generation],
        suits: Callable[[Generation, Job], bool] = lambda *_: True,
        *,
        run: Generation | None = None,
        linger: float | None = 0.0,
    ) -> None:
        """`open_run` opens a run for a job, `suits` says whether another may join it; `run` is open
        already. A run without jobs stays open for `linger` seconds; None: until it is needed."""
        self._open = open_run
        self._suits = suits
        self._run = run
        self._linger = linger
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: wake up and stop
        self._next: Job | None = None
        self._jobs: dict[int, Job] = {}  # by their numbers in the run
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """`job.deliver` is called in the worker's thread."""
        with self._lock:
            if self._is_closed:
                raise InputError("the engine is closed; load it again")
            self._inbox.put(job)
            if self._thread is None:
                is_daemon = self._linger is None  # which `close` ends
                self._thread = threading.Thread(target=self._work, daemon=is_daemon)
                self._thread.start()

    async def events(
        self, request: Request, speculation: SpeculationConfig
    ) -> AsyncGenerator[Event, None]:
        """Those of a request, for asyncio; leaving the loop over them, or a cancelled task, ends
        it."""
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[Event | Exception] = asyncio.Queue()

        def deliver(event: Event | Exception) -> None:
            try:
                loop.call_soon_threadsafe(found.put_nowait, event)
            except RuntimeError:  # the loop has ended
                job.is_cancelled = True

        job = Job(request, deliver, speculation)
        self.submit(job)
        try:
            while True:
                event = await found.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, End):
                    break
        finally:
            job.is_cancelled = True  # nothing happens if it has ended

    def close(self) -> None:
        """Ends the run; whoever waits gets an error."""
        with self._lock:
            self._is_closed = True
            self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._run is not None:
            self._run.close()
        error = InputError("the engine was closed meanwhile; load it again")
        self._fail(error)
        while not self._inbox.empty():
            self._next = self._inbox.get()
            self._fail(error)

    def _work(self) -> None:
        while self._has_next():
            try:
                assert self._next is not None
                run = self._run or self._open(self._next)
                self._run = None
                with run:
                    self._serve(run)
            except Exception as error:
                if not isinstance(error, InputError):
                    log.exception("the run failed: %s", error)
                self._fail(error)

    def _has_next(self) -> bool:
        """Whether there is a job, which is the next one then; else the thread ends."""
        with self._lock:
            if self._next is None and not self._inbox.empty():
                self._next = self._inbox.get()
            if self._next is None or self._is_closed:
                self._thread = None
                return False
            return True

    def _fail(self, error: Exception) -> None:
        """Tells all jobs of the run, and the next one."""
        for job in (*self._jobs.values(), self._next):
            if job is not None:
                job.deliver(error)
        self._jobs.clear()
        self._next = None

    def _serve(self, run: Generation) -> None:
        """Runs the next job, and all that may join it."""
        self._take(run)
        may_join = False
        while not self._is_closed:
            if self._next is None and not (self._jobs and self._inbox.empty()):
                with contextlib.suppress(queue.Empty):
                    self._next = self._inbox.get(timeout=self._linger)
                may_join = self._next is not None and self._suits(run, self._next)
            if self._next is not None and may_join:
                self._take(run)
            elif self._jobs:
                self._step(run)
            else:
                return

    def _take(self, run: Generation) -> None:
        job, self._next = self._next, None
        if job is not None and not job.is_cancelled:
            try:
                self._jobs[run.submit(job.request)] = job
            except InputError as error:
                job.deliver(error)

    def _step(self, run: Generation) -> None:
        for number in [number for number, job in self._jobs.items() if job.is_cancelled]:
            run.cancel(number)
            del self._jobs[number]
        event = next(run)
        if not isinstance(event, Idle) and (job := self._jobs.get(event.row)):
            if isinstance(event, End):
                del self._jobs[event.row]
            job.deliver(event)
