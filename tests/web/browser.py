"""A real Chromium without a window, driven over a pipe: pages are opened, clicked and read as a person does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")

# Chromium speaks on descriptors 3 and 4: there is no port for others to find, and no websocket to write.
_BECOME = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
_ANSWER_S = 60.0
_POLL_S = 0.05


class Browser:
    """One page. Messages are JSON, each ended by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, address: str) -> None:
        self._events.clear()
        self._call("Page.navigate", url=address)
        self._event("Page.loadEventFired")

    def value(self, script: str) -> Any:
        """What this expression is in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def wait_until(self, script: str) -> None:
        """Until this expression is true in the page. TimeoutError with all that it shows."""
        deadline_s = time.monotonic() + _ANSWER_S
        while not self.value(script):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{script}; the page shows {self.text('body')[:2000]!r}")
            time.sleep(_POLL_S)

    def click(self, selector: str, times: int = 1, accept: bool | None = None) -> None:
        """With the mouse, in the middle of the element. `accept`: what to answer to the question that comes up then."""
        box = self.value(
            f"(one => {{ one.scrollIntoView(); const {{x, y, width, height}} = one.getBoundingClientRect(); "
            f"return [x + width / 2, y + height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        sent = [
            self._send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=times)
            for kind in ("mousePressed", "mouseReleased")
        ]
        if accept is not None:
            self._event("Page.javascriptDialogOpening")
            self._call("Page.handleJavaScriptDialog", accept=accept)
        for number in sent:
            self._answer(number)

    def write(self, selector: str, text: str) -> None:
        """In place of what the field holds."""
        self.click(selector, times=3)
        self._call("Input.insertText", text=text)

    # ---- messages

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._answer(self._send(method, **params))

    def _send(self, method: str, **params: Any) -> int:
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        packet = json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0"
        while packet:
            packet = packet[os.write(self._to, packet) :]
        return self._number

    def _answer(self, number: int) -> dict[str, Any]:
        self._read_until(lambda: number in self._answers, f"answer {number}")
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _event(self, method: str) -> None:
        self._read_until(lambda: any(event["method"] == method for event in self._events), method)
        self._events = [event for event in self._events if event["method"] != method]

    def _read_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _ANSWER_S
        while not holds():
            if not select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError(f"no {what} from the browser within {_ANSWER_S:g} s")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise EOFError(f"the browser ended before {what}")
            *packets, self._unread = (self._unread + read).split(b"\0")
            for packet in map(json.loads, packets):
                if "id" in packet:
                    self._answers[packet["id"]] = packet
                else:
                    self._events.append(packet)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in this directory, which ends with the block."""
    assert PROGRAM is not None
    pairs = os.pipe(), os.pipe()
    (reads, to_browser), (from_browser, writes) = pairs
    # Above those that they become, or one would be overwritten before it is copied.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (reads, writes)]
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME, *map(str, theirs), *command], pass_fds=theirs, stderr=subprocess.DEVNULL
    )
    for fd in (reads, writes, *theirs):
        os.close(fd)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(_ANSWER_S)
        os.close(to_browser)
        os.close(from_browser)
