"""A terminal as a screen to draw on: taken, given back however the program ends, and asked for keys."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Mapping
from enum import Enum
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

_HOME = "\x1b[H"
_ESCAPE, _QUITTING = b"\x1b", b"qQ\x03\x04"


class Wish(Enum):
    """What somebody at the terminal wants."""

    QUIT = "quit"
    REDRAW = "redraw"


def takes_a_screen(console: Console) -> bool:
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal


class Terminal:
    """Use it as a context. Signals that would end the program in between end it by `Wish.QUIT`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: Any = None  # of the keyboard before
        self.exit_code = 0  # for a program that quits now

    def __enter__(self) -> Terminal:
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._handlers: Mapping[int, Any] = {
            signum: signal.signal(signum, _noted)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
        }
        self._wake_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(OSError, termios.error):  # it went away
                self._give_back()
        finally:
            signal.set_wakeup_fd(self._wake_before)
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            os.close(self._awake)
            os.close(self._wake)

    def draw(self, lines: Text) -> None:
        """Lines that fill the screen, in one write."""
        with self._console.capture() as drawn:
            self._console.print(lines, end="", soft_wrap=True)
        self._console.file.write(_HOME + drawn.get().replace("\n", "\r\n"))
        self._console.file.flush()

    def wait(self, timeout_s: float) -> Wish | None:
        """What somebody wants before the time is over; None if nothing."""
        due_s = time.monotonic() + timeout_s
        watched = [self._awake] if self._keyboard is None else [self._awake, self._keyboard]
        while True:
            ready, _, _ = select.select(watched, [], [], max(0.0, due_s - time.monotonic()))
            if not ready:
                return None
            if self._keyboard in ready and (wish := self._pressed(os.read(self._keyboard, 64))):
                return wish
            if self._awake in ready and (wish := self._signalled(os.read(self._awake, 64))):
                return wish

    def _pressed(self, keys: bytes) -> Wish | None:
        """Nothing at all: the terminal has gone. More after an escape: a key that is none of ours, as an arrow."""
        if keys.startswith(_ESCAPE):
            return Wish.QUIT if keys == _ESCAPE else None
        return Wish.QUIT if not keys or any(key in _QUITTING for key in keys) else None

    def _signalled(self, numbers: bytes) -> Wish | None:
        for signum in numbers:
            if signum == signal.SIGTSTP:
                self._give_back()
                signal.raise_signal(signal.SIGSTOP)
                self._take()
            elif signum != signal.SIGWINCH:
                self.exit_code = 0 if signum == signal.SIGINT else 128 + signum
                return Wish.QUIT
        return Wish.REDRAW

    def _take(self) -> None:
        if self._keyboard is not None:
            self._modes = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _give_back(self) -> None:
        try:
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
        finally:
            if self._modes is not None:
                termios.tcsetattr(self._keyboard or 0, termios.TCSADRAIN, self._modes)


def _noted(signum: int, frame: FrameType | None) -> None:
    """Its number is in the pipe already."""
