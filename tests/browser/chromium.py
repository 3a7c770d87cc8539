"""Headless Chromium, spoken to through a pair of pipes: the DevTools protocol, one JSON text and a
zero byte for each message. Needs nothing but Chromium itself.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Chromium:
    """One tab. `complaints` are errors and violations of the policy that the page caused."""

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        assert program, "needs Chromium: apt-get install chromium"
        self._profile = tempfile.TemporaryDirectory(prefix="wc-chromium-")
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # Its sandbox refuses root.
        flags = [*_FLAGS, *(["--no-sandbox"] if os.getuid() == 0 else [])]
        # Chromium reads descriptor 3 and writes to 4.
        shell = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, str(command_read), str(answer_write), program, *flags,
             f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(command_read, answer_write), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        targets = self._ask("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        return message

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "result" in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._events.append(message)

    def _until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._receive())

    def open(self, address: str, *, width: int, dark: bool = False) -> None:
        """Load a page in a window of this width, in CSS pixels, and wait until it is there."""
        self._ask("Emulation.setDeviceMetricsOverride",
                  width=width, height=900, deviceScaleFactor=1, mobile=width < 800)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", url=address)
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        answer = self._ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()
