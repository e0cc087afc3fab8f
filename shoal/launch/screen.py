"""What `shoal run` shows: the workers' output, transitions, and a bar of progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.data.progress import Progress
from shoal.wording import clock, counted, rate

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_OF_THE_COORDINATOR = {
    "restarted": "coordinator restarted",
    "journal_lost": "the coordinator's journal is lost:",
    "rebuilt": "membership rebuilt:",
}


def bar(fraction: float, width: int, plain: bool = False) -> Text:
    """A bar of that width; `plain` for a terminal that knows ASCII only."""
    full = int(min(max(fraction, 0.0), 1.0) * width)  # full only when all is done
    done, left = ("#", "-") if plain else ("━", "─")
    return Text(done * full, style="green") + Text(left * (width - full), style="dim")


def progress_line(status: Mapping[str, Any], progress: Progress | None = None) -> str:
    """One line for the status of a coordinator."""
    done = [] if progress is None else [f"{progress.fraction:4.0%}"]
    return "  ".join([*done, *_parts(status, progress), *_end(status, progress)])


def live_line(status: Mapping[str, Any], progress: Progress | None, width: int, plain: bool = False) -> Text:
    """The same with a bar, for a terminal: the end first, then as much of the rest as there is room for."""
    line = Text(no_wrap=True, overflow="ellipsis")
    if progress is not None:
        line += bar(progress.fraction, max(8, width // 5), plain) + f" {progress.fraction:4.0%}"
    for part in (*_end(status, progress), *_parts(status, progress)):
        if line.cell_len + 2 + len(part) < width:
            line += f"{'  ' if line else ''}{part}"
    return line


def _parts(status: Mapping[str, Any], progress: Progress | None) -> list[str]:
    members = sum(1 for worker in status["workers"] if worker["rank"] is not None)
    parts = [epoch_of(status, progress), f"step {status['step']:,}"]
    if status["phase"] == "running":
        parts.append(f"{rate(status['rate'])} samples/s")
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4f}")
    return [*parts, f"{members} of {counted(status['target'], 'worker')}"]


def _end(status: Mapping[str, Any], progress: Progress | None) -> list[str]:
    """When it comes; for a job that does not train now, why not."""
    if status["phase"] != "running":
        return [str(status["phase"])]
    left_s = None if progress is None else progress.left_s(status["rate"])
    return [] if left_s is None else [f"ETA {clock(left_s)}"]


def epoch_of(status: Mapping[str, Any], progress: Progress | None) -> str:
    """As people count: from 1."""
    if progress is None:
        return f"epoch {status['epoch'] + 1}"
    pass_ = f"pass {progress.pass_index + 1}, " if progress.pass_index else ""
    return f"{pass_}epoch {progress.epoch + 1} of {progress.epochs:,}"


def transition_line(event: Mapping[str, Any]) -> str | None:
    """The line for an event of the log; None for one that only the log tells."""
    if event["event"] == "generation":
        workers = counted(len(event["members"]), "worker") + (", paused" if event["paused"] else "")
        return f"generation {event['number'] - 1} → {event['number']}: {event['cause']}, {workers}"
    if event["event"] in ("suspect", "fenced", "refused"):
        return f"{event['worker_id']} {event['event']}: {event['text']}"
    if event["event"] == "checkpointed":
        return f"checkpoint: {event['text']}"
    if event["event"] in ("checkpoint_failed", "drift"):
        return str(event["text"])
    if event["event"] in _OF_THE_COORDINATOR:
        return f"{_OF_THE_COORDINATOR[event['event']]} {event['text']}"
    if event["event"] == "host_lost":
        return f"host lost: {event['text']}"
    if event["event"] in ("host", "host_refused"):
        return str(event["text"])
    if event["event"] == "scaled":
        return f"scaled: {event['text']}"
    return None


def prefixed(worker_id: str, line: str) -> Text:
    """A worker's line, with a color of its own before it."""
    number = int("".join(filter(str.isdigit, worker_id)) or 0)
    return Text(f"{worker_id} | ", style=_COLORS[number % len(_COLORS)]) + Text.from_ansi(line)


class Screen:
    """The workers' lines go to standard output, shoal's own to standard error. On a terminal the progress bar stays in
    the last line; elsewhere it is a line like the others. A reader that went away (`| head`) is no reason to stop."""

    def __init__(
        self,
        quiet: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        console: Console | None = None,
    ) -> None:
        self._quiet = quiet
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._console = console or Console(file=self._err, highlight=False, markup=False, soft_wrap=True)
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
            self._print(prefixed(worker_id, line))
            return
        try:
            print(f"{worker_id} | {line}", file=self._out, flush=True)
        except (OSError, ValueError):  # the reader went away
            self._out = open(os.devnull, "w")  # noqa: SIM115

    def progress(self, status: Mapping[str, Any], progress: Progress | None = None) -> None:
        if self._live is None:
            self.tell(progress_line(status, progress))
        else:
            line = live_line(status, progress, self._console.width, self._console.options.ascii_only)
            self._live.update(line, refresh=True)

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
