"""A headless Chromium for pictures of pages and for tests of them.

It is spoken to over two pipes (--remote-debugging-pipe), which needs no library and opens no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.core.errors import ConfigError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "HOLDFAST_CHROMIUM"
MISSING = (
    "no browser is at hand: install chromium (`make browser`), or name the program in the environment's"
    f" {VARIABLE}"
)
# A program in between, because a shell knows no file beyond 9, and a fork that runs Python between two
# threads may hang.
_WIRE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3],"
    " sys.argv[3:])"
)
_PATIENCE = (
    300.0  # seconds for one answer: a busy machine is slow, and only a hung browser must not wait for ever
)


def find_browser() -> str | None:
    """The program, or none where there is none."""
    if named := os.environ.get(VARIABLE):
        return shutil.which(named)
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One page of a browser that lives as long as the `with` block."""

    def __init__(self, width: int = 1280, height: int = 900):
        program = find_browser()
        if program is None:
            raise ConfigError(MISSING)
        self.errors: list[str] = []
        """What the page complained of since it was opened: exceptions, errors on the console, refused
        requests."""
        self._events: list[dict[str, Any]] = []
        self._calls = 0
        self._session: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-browser-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        self._unread = b""
        self._start(program)
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self.resize(width, height)

    def _start(self, program: str) -> None:
        """Chromium reads its orders from file 3 and answers on file 4."""
        theirs_in, self._orders = os.pipe()
        self._answers, theirs_out = os.pipe()
        options = [
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-extensions",
        ]
        if os.geteuid() == 0:
            options.append(
                "--no-sandbox"
            )  # Chromium refuses to run as root otherwise; it is shown only pages that we wrote
        wired = [sys.executable, "-I", "-S", "-c", _WIRE, str(theirs_in), str(theirs_out), program, *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                wired,
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            self._ask("Browser.close")
            self._process.wait(_PATIENCE)
        except (ConfigError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._orders)
        os.close(self._answers)
        self._folder.cleanup()

    def open(self, page: Path) -> None:
        """Show a file, and wait until it is loaded and laid out."""
        self.errors.clear()
        self._events.clear()
        self._ask("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next(deadline))
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def run(self, script: str) -> Any:
        """The value of an expression on the page; a promise is waited for."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(
                f"{script}: {found['exceptionDetails'].get('exception', {}).get('description')}"
            )
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """A key as a person presses it: Tab, Enter, ArrowRight, or a space."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        for _ in range(times):
            which = {"key": key, "windowsVirtualKeyCode": code}
            self._ask(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else "rawKeyDown",
                **which,
                **({"text": text} if text else {}),
            )
            self._ask("Input.dispatchKeyEvent", type="keyUp", **which)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def dress(self, scheme: str = "light", media: str = "") -> None:
        """Light or dark; `media` may be print."""
        self._ask(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self, box: Sequence[float] | None = None) -> bytes:
        """The PNG of what is in view, or of a box of the page: left, top, width, height."""
        clip: dict[str, Any] = {}
        if box is not None:
            clip = {
                "clip": dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1),
                "captureBeyondViewport": True,
            }
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png", **clip)["data"])

    def print_pdf(self) -> bytes:
        return base64.b64decode(self._ask("Page.printToPDF", printBackground=True)["data"])

    def _ask(self, method: str, **given: Any) -> dict[str, Any]:
        self._calls += 1
        order = {"id": self._calls, "method": method, "params": given} | (
            {"sessionId": self._session} if self._session else {}
        )
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\0")
        except BrokenPipeError:
            raise self._gone() from None
        deadline = time.monotonic() + _PATIENCE
        while (message := self._next(deadline)).get("id") != self._calls:
            self._events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _gone(self) -> ConfigError:
        said = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return ConfigError(f"the browser did not start, or ended early{': ' + said[-1] if said else ''}")

    def _next(self, deadline: float) -> dict[str, Any]:
        """The next message, an answer or an event; what went wrong on the page is kept."""
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ConfigError(f"the browser did not answer within {_PATIENCE:.0f} s")
            if not (block := os.read(self._answers, 1 << 20)):
                raise self._gone()
            self._unread += block
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        self._complaint(message.get("method"), message.get("params", {}))
        return message

    def _complaint(self, method: str | None, given: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            told = given["exceptionDetails"]
            self.errors.append(told.get("exception", {}).get("description") or told["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.errors.append(
                " ".join(str(one.get("value", one.get("description"))) for one in given["args"])
            )
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
