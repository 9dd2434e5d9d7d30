"""A headless Chromium, driven over a pipe by its DevTools protocol: nothing to install but it."""

import base64
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
LIMIT = 180
"""Seconds after which a browser that hangs is ended."""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
FLAGS += ("--no-first-run", "--disable-background-networking", "--remote-debugging-pipe")


class Page:
    """One tab."""

    def __init__(self, to_browser, from_browser) -> None:
        self._write, self._read = to_browser, from_browser
        self._number, self._session = 0, {}
        self.log: list[str] = []  # errors, also those of the content security policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.log.append(json.dumps(answer["params"]))

    def _receive(self) -> dict:
        message = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            message += byte
        return json.loads(message)

    def run(self, script: str):
        """The value of an expression of JavaScript in the page."""
        how = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 30
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def shoot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """A tab of a fresh browser; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", program, *FLAGS]
    pipes = {"pass_fds": (their_in, their_out), "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, f"--user-data-dir={profile}"], **pipes) as process:
        os.close(their_in)
        os.close(their_out)
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        try:
            with open(our_out, "wb") as writer, open(our_in, "rb") as reader:  # noqa: PTH123
                yield Page(writer, reader)
        finally:
            limit.cancel()
            process.terminate()
