"""A headless Chromium for tests of pages: it opens files, runs scripts in them, and takes pictures.

It is driven by the DevTools protocol over a pipe, so nothing but the browser is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
_TIMEOUT_S = 60.0


def find_browser() -> str:
    """Return the path of Chromium (``$CHROMIUM``, or the first on the path); skip the test where there is none."""
    for name in (os.environ.get("CHROMIUM", ""), *_NAMES):
        if name and (path := shutil.which(name)):
            return path
    pytest.skip(f"needs a Chromium on the path, or in $CHROMIUM, got none of {', '.join(_NAMES)}: install chromium")


class Browser:
    """One tab of a headless Chromium.

    Attributes:
        errors: what pages raised or logged as an error so far.
        requests: addresses that pages asked for so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], write_fd: int, read_fd: int) -> None:
        self._process, self._write_fd, self._read_fd = process, write_fd, read_fd
        self._buffer, self._number, self._session = b"", 0, ""
        self._loads = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, in light or dark colours; return when it has loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        loads = self._loads
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._wait(lambda: self._loads > loads, f"{page} to load")

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page, wait for it if it is a promise, and return its value."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"the script {script!r} must run, got {_words(done['exceptionDetails'])}")
        return done["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until a JavaScript expression is true in the page."""
        self._wait(lambda: bool(self.run(script)), script)

    def screenshot(self, file: Path, *, whole: bool = True) -> Path:
        """Write a picture of the page, of the whole of it or of what the window shows, as a PNG."""
        given: dict[str, Any] = {"captureBeyondViewport": True}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            given["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self._call("Page.captureScreenshot", format="png", **(given if whole else {}))["data"]
        file.write_bytes(base64.b64decode(picture))
        return file

    def _wait(self, condition: Any, what: str) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {_TIMEOUT_S:.0f} s for {what}; errors of the page: {self.errors}")
            self._receive(0.02)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_fd, data) :]
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            for answer in self._receive(1.0):
                if answer.get("id") == self._number:
                    if "error" in answer:
                        raise RuntimeError(f"{method} must succeed, got {answer['error']}")
                    result: dict[str, Any] = answer["result"]
                    return result
        raise TimeoutError(f"{method} was not answered within {_TIMEOUT_S:.0f} s")

    def _receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Read what has come, note events, and return answers."""
        if select.select([self._read_fd], [], [], timeout_s)[0]:
            data = os.read(self._read_fd, 1 << 20)
            if not data:
                raise RuntimeError(f"the browser must run on, got its end with status {self._process.poll()}")
            self._buffer += data
        *whole, self._buffer = self._buffer.split(b"\0")
        messages = [json.loads(text) for text in whole]
        for message in messages:
            self._note(message.get("method"), message.get("params", {}))
        return [message for message in messages if "id" in message]

    def _note(self, event: str | None, given: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loads += 1
        elif event == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(_words(given["exceptionDetails"]))
        elif event == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])


def _words(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser that keeps its files in ``folder``, and end it with the scope; skip the test where there is none."""
    path = find_browser()
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    # No sandbox: in containers tests run as root, and pages are our own. What pages store lies in the folder.
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
    quiet = "--hide-scrollbars --disable-background-networking --mute-audio"
    # The browser's ends must be its descriptors 3 and 4, which a shell can say.
    command = f'exec "$@" 3<&{to_browser} 4>&{to_us}'
    with open(folder / "browser.log", "wb") as log:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                command,
                "bash",
                path,
                *flags.split(),
                *quiet.split(),
                f"--user-data-dir={folder / 'browser'}",
            ],
            pass_fds=(to_browser, to_us),
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(to_browser)
    os.close(to_us)
    try:
        yield Browser(process, from_us, from_browser)
    finally:
        os.close(from_us)
        os.close(from_browser)
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
