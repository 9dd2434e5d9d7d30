"""A headless Chromium, driven over a pipe by its DevTools protocol: nothing to install but it."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
FLAGS += "--disable-background-networking --remote-debugging-pipe"


class Page:
    """One tab."""

    def __init__(self, to_browser, from_browser) -> None:
        self._write = to_browser
        self._read = from_browser
        self._session = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params) -> dict:
        """The result of a method; events that come before it are left out."""
        message = {"id": 1, "method": method, "params": params, **self._session}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        answer = {}
        while "id" not in answer:
            text = b""
            while not text.endswith(b"\0"):
                text += self._read.read(1) or pytest.fail("Chromium has ended")
            answer = json.loads(text[:-1])
        return answer["result"]

    def run(self, script: str):
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def type_line(self, place: str, text: str) -> None:
        """Types into the element with this id, and then Enter."""
        self.run(f"$('{place}').focus()")
        self.call("Input.insertText", text=text)
        self.press("Enter", 13, text="\r")

    def press(self, key: str, code: int, **more) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """A tab of a fresh browser; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", program]
    command += [*FLAGS.split(), f"--user-data-dir={profile}"]
    pipes = {"pass_fds": (their_in, their_out), "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as process:
        os.close(their_in)
        os.close(their_out)
        limit = threading.Timer(180, process.kill)  # if it hangs
        limit.start()
        try:
            with open(our_out, "wb") as writer, open(our_in, "rb") as reader:  # noqa: PTH123
                yield Page(writer, reader)
        finally:
            limit.cancel()
            process.terminate()
