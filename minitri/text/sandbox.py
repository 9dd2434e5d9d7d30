"""Sandboxes: processes with limits for chat templates, grammars and documents of strangers.

A process runs `sandbox_program.py` and waits for questions; after a fork a child starts its own."""

import json
import os
import sys
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from minitri.core.errors import InputError

PROGRAM = str(Path(__file__).with_name("sandbox_program.py"))


class Sandbox:
    """Processes that answer questions of several threads, each within limits."""

    def __init__(self, kind: str, seconds: float, num_bytes: int, max_idle: int = 1) -> None:
        """Limits each answer to `seconds` of CPU time, and a process to `num_bytes` of memory.
        `kind` names a function of sandbox_program.py that answers, or a module with a function
        `answer`. At most `max_idle` processes wait for later questions."""
        self._command = [sys.executable, "-P", PROGRAM, kind, str(seconds), str(num_bytes)]
        self._excess = f"it takes more than {seconds:g} s, or too much memory"
        self.idle: list[Popen[str]] = []  # processes that wait
        self._max_idle = max_idle
        self._owner = os.getpid()
        weakref.finalize(self, stop, self.idle)

    def ask(self, question: object) -> str:
        """Returns a process's answer to a question, which JSON can hold. Raises `ValueError` if it
        fails or exceeds the limits, `InputError` on a system without limits."""
        if not find_spec("resource"):
            problem = "templates, grammars and files run within limits, which this system lacks"
            raise InputError(f"{problem}; do without them, or use Linux, macOS or WSL")
        if self._owner != os.getpid():  # after a fork the processes are the parent's
            self._owner = os.getpid()
            self.idle.clear()
        text = json.dumps(question)
        child = None
        with suppress(IndexError):  # none is idle: it is the first question, or others use all
            child = self.idle.pop()
        # An idle process may have died, or have little memory left.
        line = (child and self._ask(text, child)) or self._ask(text)
        if not line:
            raise ValueError(self._excess)
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"].removeprefix("ValueError: "))
        return answer["text"]

    def _ask(self, text: str, child: Popen[str] | None = None) -> str:
        """Sends a question `text` to `child` or a new process; returns the answer's line, or ""."""
        child = child or Popen(
            self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C ends minitri, not an answer
        )
        line = ""
        with suppress(BrokenPipeError):
            print(text, file=child.stdin, flush=True)
            line = child.stdout.readline() if child.stdout else ""
        is_whole = line.endswith("\n")
        if is_whole and len(self.idle) < self._max_idle:
            self.idle.append(child)
        else:
            stop([child])
        return line if is_whole else ""


def stop(children: list[Popen[str]]) -> None:
    """Ends processes; after a fork, not those of the parent process."""
    for child in children:
        with suppress(OSError), child:
            child.kill()
