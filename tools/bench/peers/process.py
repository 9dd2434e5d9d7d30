"""Peers in processes of their own, which `worker.py` runs: asked for one token at a time, they
compute only in their turns and leave no memory or threads."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minitri.core.errors import InputError, shorten
from tools.bench.peers import StartPeer

WORKER = Path(__file__).with_name("worker.py")


class Worker(Iterator[int]):
    """A process that has a peer's package; once it is told what to run, an iterator over tokens.

    Raises `InputError` if it cannot be started, reports an error or ends too early.
    """

    def __init__(self, python: str, program: str) -> None:
        self._program, command, pipe = program, [python, str(WORKER), program], subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            raise InputError(f"cannot run {python}: {error.strerror}") from None
        self.version: str = self._answer()

    def ask(self, message: object) -> Any:
        """Sends one line and waits for the answer to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_answer` says why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise InputError(f"{self._program} ended with exit code {code}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = {"error": f"what runs {self._program} says {line!r}"}
        if isinstance(answer, dict):
            raise InputError(shorten(answer["error"]))
        return answer

    def __next__(self) -> int:
        return self.ask("next")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass  # closes the pipes and waits

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


def worker_peer(python: str, program: str, settings: dict[str, Any]) -> StartPeer:
    """A peer that a new process runs after every prompt."""

    def start(prompt: list[int], num_new: int) -> Worker:
        worker = Worker(python, program)
        worker.ask({**settings, "prompt": prompt, "num_new": num_new})
        return worker

    return start
