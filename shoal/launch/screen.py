"""What `shoal run` shows: the workers' output, transitions, and one line of progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.control.membership import counted

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_READ_BYTES = 1 << 20


class Tail:
    """The lines that come to a file, each once and whole, up to where it is cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._rest = b""
        self._end_bytes: int | None = None

    def cut(self, end_bytes: int | None) -> None:
        """Leave out what lies behind."""
        self._end_bytes = end_bytes

    def lines(self, last: bool = False) -> list[str]:
        """What is new. With `last`, also a line that has no end."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb")  # noqa: SIM115
            except FileNotFoundError:
                return []
        if not last and os.fstat(self._file.fileno()).st_size == self._file.tell():
            return []  # asked ten times a second for each worker: it must cost less than a read
        size_bytes = -1 if last else _READ_BYTES
        if self._end_bytes is not None:
            size_bytes = max(0, self._end_bytes - self._file.tell())
        *whole, self._rest = (self._rest + self._file.read(size_bytes)).split(b"\n")
        if last and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def progress_line(status: Mapping[str, Any]) -> str:
    """One line for the status of a coordinator."""
    members = sum(1 for worker in status["workers"] if worker["rank"] is not None)
    parts = [f"step {status['step']:,}", f"epoch {status['epoch']}", f"{status['rate']:,.0f} samples/s"]
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4f}")
    parts.append(f"{members} of {counted(status['target'], 'worker')}")
    if status["phase"] != "running":
        parts.append(str(status["phase"]))
    return "  ".join(parts)


def transition_line(event: Mapping[str, Any]) -> str | None:
    """The line for an event of the log; None for one that only the log tells."""
    if event["event"] == "generation":
        workers = counted(len(event["members"]), "worker") + (", paused" if event["paused"] else "")
        return f"generation {event['number'] - 1} → {event['number']}: {event['cause']}, {workers}"
    if event["event"] in ("suspect", "fenced", "refused"):
        return f"{event['worker_id']} {event['event']}: {event['text']}"
    if event["event"] == "scaled":
        return f"scaled: {event['text']}"
    return None


class Screen:
    """The workers' lines go to standard output, shoal's own to standard error. On a terminal the progress stays in the
    last line; elsewhere it is a line like the others. A reader that went away (`| head`) is no reason to stop."""

    def __init__(self, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._quiet = quiet
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._console = Console(file=self._err, highlight=False, markup=False, soft_wrap=True)
        self.live = self._console.is_terminal and not quiet
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self.live else None
        if self._live is not None:
            self._live.start()

    def say(self, line: str) -> None:
        """A transition, an error, a summary."""
        self._print(Text(line))

    def show(self, traceback: str) -> None:
        self._print(Text(traceback.rstrip("\n")))

    def tell(self, line: str) -> None:
        """What a quiet job leaves out."""
        if not self._quiet:
            self._print(Text(line, style="dim"))

    def echo(self, worker_id: str, line: str) -> None:
        if self._quiet:
            return
        if self._live is not None and self._out.isatty():
            number = int("".join(filter(str.isdigit, worker_id)) or 0)
            prefix = Text(f"{worker_id} | ", style=_COLORS[number % len(_COLORS)])
            self._print(prefix + Text.from_ansi(line))
            return
        try:
            print(f"{worker_id} | {line}", file=self._out, flush=True)
        except (OSError, ValueError):  # the reader went away
            self._out = open(os.devnull, "w")  # noqa: SIM115

    def progress(self, status: Mapping[str, Any]) -> None:
        line = progress_line(status)
        if self._live is None:
            self.tell(line)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Later lines are plain ones."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: Text) -> None:
        try:
            self._console.print(text)
        except OSError:  # the terminal went away
            self._console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
