"""Chromium without a window, driven over a pipe: opens a page, presses keys, evaluates, takes pictures.

Used by the tests of pages. Chromium comes with the system (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0


def chromium() -> str | None:
    """The installed browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Use it as a context manager.

    Args:
        width, height: of the page, in pixels.
        dark: whether the reader prefers dark colours.

    Attributes:
        problems: errors and warnings of the console, uncaught exceptions, refusals of the content security policy.
        requests: addresses that the page asked for, itself included.
    """

    def __init__(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._rest = b""
        self._size = width, height
        self._dark = dark

    def __enter__(self) -> Browser:
        program = chromium()
        if program is None:
            raise FileNotFoundError("no Chromium is installed")
        self._home = tempfile.TemporaryDirectory(prefix="headless-", ignore_cleanup_errors=True)
        low_read, self._write = os.pipe()
        self._read, low_write = os.pipe()
        # Above all that the shell uses itself.
        to_read, to_write = (fcntl.fcntl(low, fcntl.F_DUPFD, 100) for low in (low_read, low_write))
        os.close(low_read)
        os.close(low_write)
        # The browser reads commands from descriptor 3 and answers on 4.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--remote-debugging-pipe", f"--user-data-dir={self._home.name}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *arguments],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self._send("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        self._session: str | None = self._send(
            "Target.attachToTarget", {"targetId": target, "flatten": True}, session=None
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        width, height = self._size
        self._send(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self._send("Emulation.setEmulatedMedia", {"features": [scheme]})
        return self

    def __exit__(self, *ignored: object) -> None:
        try:
            self._send("Browser.close", session=None)
        except (OSError, RuntimeError, TimeoutError):
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()

    def open(self, page: Path) -> float:
        """Loads a file and waits until it is drawn; returns the milliseconds from its start to its load event."""
        self._send("Page.navigate", {"url": page.resolve().as_uri()})
        self.wait("document.readyState === 'complete' && performance.timing.loadEventEnd > 0")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return float(self.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart"))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for.

        Raises:
            RuntimeError: it throws.
        """
        found = self._send("Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True})
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true.

        Raises:
            TimeoutError: it never is.
        """
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses a key, such as ``Enter``, ``Escape``, ``Tab`` or ``ArrowRight``."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        values = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._send("Input.dispatchKeyEvent", {"type": "keyDown", **values, **text})
        self._send("Input.dispatchKeyEvent", {"type": "keyUp", **values})

    def picture(self, path: Path) -> None:
        """Writes a PNG of what is on the screen."""
        data = self._send("Page.captureScreenshot", {"format": "png"})["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(
        self, method: str, values: dict[str, Any] | None = None, *, session: str | None = "own"
    ) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            found = self._receive(end)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found.get("result", {})
            self._note(found)

    def _receive(self, end: float) -> dict[str, Any]:
        poll = select.poll()  # select() takes no number of a file beyond 1023
        poll.register(self._read, select.POLLIN)
        while b"\0" not in self._rest:
            ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {values['message']}")
            self._number += 1
            answer = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
            os.write(self._write, json.dumps({**answer, "sessionId": self._session}).encode() + b"\0")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
