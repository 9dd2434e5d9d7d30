"""The thread that owns the engine and its one open run, in which all requests are rows.

Other threads leave messages, which it takes between two events. When the run itself fails, its
requests get the error, and a new run is opened for the next ones.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from minitri import End, Event, Generation, Idle, InputError, Request
from minitri.log import log

Deliver = Callable[[Event | Exception], None]
RETRY_SECONDS = 1.0
"""Before a new run is opened after one that failed, which may fail at once, too."""


@dataclass(eq=False)
class Job:
    """A request on its way, and who is told of its events."""

    request: Request
    deliver: Deliver
    number: int = -1
    """In the run; -1 before it is there."""
    is_cancelled: bool = False


class Worker:
    """Runs requests of any thread in one run."""

    def __init__(self, open_run: Callable[[], Generation]) -> None:
        self._open = open_run
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: wake up and stop
        self._jobs: dict[int, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._work, args=(open_run(),), daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Job:
        """`deliver` is called in the worker's thread."""
        job = Job(request, deliver)
        self._inbox.put(job)
        return job

    def cancel(self, job: Job) -> None:
        """Nothing happens if it has ended."""
        job.is_cancelled = True
        self._inbox.put(job)

    def close(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()

    def _work(self, run: Generation | None) -> None:
        while not self._stopping:
            try:
                with run or self._open() as run:
                    self._serve(run)
            except Exception as error:
                run = None
                log.error("the run failed: %s", error, exc_info=not isinstance(error, InputError))
                for job in self._jobs.values():
                    job.deliver(error)
                self._jobs.clear()
                time.sleep(RETRY_SECONDS)

    def _serve(self, run: Generation) -> None:
        while True:
            while not self._jobs or not self._inbox.empty():
                if (job := self._inbox.get()) is None:
                    return
                self._take(run, job)
            event = next(run)
            if not isinstance(event, Idle) and (job := self._jobs.get(event.row)):
                if isinstance(event, End):
                    del self._jobs[event.row]
                job.deliver(event)

    def _take(self, run: Generation, job: Job) -> None:
        if self._jobs.get(job.number) is job:
            run.cancel(job.number)
            del self._jobs[job.number]
        elif not job.is_cancelled:
            try:
                job.number = run.submit(job.request)
                self._jobs[job.number] = job
            except InputError as error:
                job.deliver(error)
