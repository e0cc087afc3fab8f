"""`shoal top`: a job as it trains, on one screen.

`screen_of` makes the lines of a screen from what is known; `watch` asks the job once a second and shows them.
"""

from __future__ import annotations

import bisect
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from shoal.control.rundir import RunDir
from shoal.data.progress import Passes, Progress
from shoal.launch.screen import bar, epoch_of, progress_line
from shoal.launch.tail import Tail
from shoal.recipe import epochs_of
from shoal.view import state, terminal
from shoal.view.events import event_line
from shoal.wording import clock, counted, rate

_ASK_S = 1.0
_RATE_WINDOW_S = 10.0  # beats come once a second or so: over a shorter time a rate jumps
_SMOOTH_S = 3.0
_SPAN_S = 600.0  # shown of the past
_SILENT_S = 2.5  # an answer may be late once
_KEPT_EVENTS = 600
_LABEL, _BESIDE = 11, 18  # columns left and right of a bar
_WITH_HOST = 110
_UNTOLD = frozenset({"joined", "ready", "leaving", "left", "lost", "finished", "ended"})  # generations tell it
_EVENT_STYLES = {
    "failed": "red",
    "over": "bold",
    "suspect": "yellow",
    "fenced": "yellow",
    "refused": "yellow",
    "host_refused": "yellow",
}

# Where time goes, in the order it is drawn: a letter for a screen without colors, and a color.
CATEGORIES = {
    "compute": ("c", "green"),
    "exchange": ("x", "cyan"),
    "wait": ("w", "yellow"),
    "input": ("i", "blue"),
    "reconfigure": ("r", "magenta"),
    "redone": ("d", "red"),
    "checkpoint": ("k", "bright_blue"),
    "startup": ("s", "bright_black"),
}
_SPARKS, _PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_PHASE_STYLES = {"running": "bold green", "finished": "bold green", "failed": "bold red", "no answer": "bold red"}


@dataclass(frozen=True)
class Point:
    """What was known at one look."""

    at_s: float
    step: int
    samples: int
    worker_steps: Mapping[str, int]
    seconds: Mapping[str, Mapping[str, float]]  # worker → category → cumulative

    @classmethod
    def of(cls, status: Mapping[str, Any], at_s: float) -> Point:
        workers = status["workers"]
        return cls(
            at_s,
            status["step"],
            status["samples"],
            {worker["worker_id"]: worker["step"] for worker in workers if worker["step"] is not None},
            {worker["worker_id"]: worker["seconds"] for worker in workers if worker.get("seconds")},
        )


class History:
    """The last looks at a job, and what follows from them. What they say of each worker is kept for a shorter time."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()
        self._recent: deque[Point] = deque()

    def add(self, point: Point) -> None:
        # A coordinator that has just begun again knows less than the one before for a moment.
        if self._points and point.samples < self._points[-1].samples:
            return
        self._points.append(replace(point, worker_steps={}, seconds={}))
        self._recent.append(point)
        for points, kept_s in ((self._points, _SPAN_S), (self._recent, 3 * _RATE_WINDOW_S)):
            while point.at_s - points[0].at_s > kept_s:
                points.popleft()

    def samples_rate(self) -> float | None:
        return _rate(self._points, lambda point: point.samples)

    def step_rate(self, worker_id: str | None = None) -> float | None:
        if worker_id is None:
            return _rate(self._points, lambda point: point.step)
        return _rate(self._recent, lambda point: point.worker_steps.get(worker_id))

    def rates(self, span_s: float, columns: int) -> list[float]:
        """Samples a second in each part of the last `span_s`; 0 where nothing is known."""
        points = list(self._points)
        times = [point.at_s for point in points]
        found = []
        for column in range(columns):
            end_s = times[-1] - span_s * (columns - 1 - column) / columns if times else 0.0
            begin_s = end_s - max(span_s / columns, _SMOOTH_S)
            one, other = (bisect.bisect_right(times, at_s) - 1 for at_s in (begin_s, end_s))
            known = None if one < 0 else _slope(points[one], points[other], lambda point: point.samples)
            found.append(known or 0.0)
        return found

    def spent(self, worker_id: str) -> dict[str, float]:
        """Where the worker's time went between the last two looks that differ; empty if it does not tell."""
        told = [point.seconds[worker_id] for point in self._recent if worker_id in point.seconds]
        if not told:
            return {}
        newest = told[-1]
        before = next((seconds for seconds in reversed(told) if seconds != newest), {})
        return {name: max(0.0, newest.get(name, 0.0) - before.get(name, 0.0)) for name in CATEGORIES}


def _rate(points: Iterable[Point], value: Callable[[Point], int | None]) -> float | None:
    """Over the window; None before it can be known. The window begins with a look outside of it: a coordinator that
    was silent tells what happened meanwhile all at once."""
    known = [point for point in points if value(point) is not None]
    if not known:
        return None
    outside = [point for point in known if known[-1].at_s - point.at_s >= _RATE_WINDOW_S]
    return _slope(outside[-1] if outside else known[0], known[-1], value)


def _slope(one: Point, other: Point, value: Callable[[Point], int | None]) -> float | None:
    before, after = value(one), value(other)
    if before is None or after is None or other.at_s <= one.at_s:
        return None
    return max(0.0, (after - before) / (other.at_s - one.at_s))


@dataclass(frozen=True)
class Snapshot:
    """All that a screen shows."""

    name: str
    now_s: float  # as events tell time
    created_s: float
    status: Mapping[str, Any] | None  # the newest answer; None before there was one
    silent_s: float = 0.0  # since the coordinator answered
    progress: Progress | None = None
    sizes: Sequence[tuple[float, int]] = ()  # when the number of members became what
    events: Sequence[Mapping[str, Any]] = ()
    history: History = field(default_factory=History)


# ---- a screen --------------------------------------------------------------------------------------------------------


def screen_of(snapshot: Snapshot, width: int, height: int, plain: bool = False) -> Text:
    """Exactly `height` lines of `width`; `plain` for a terminal that knows ASCII only."""
    lines = list(_head(snapshot, width, plain))
    workers = list(_workers(snapshot, width))
    events = [_event_text(event) for event in snapshot.events]
    room = height - len(lines) - 1
    # The newest events get a third of the room, and what the workers leave.
    for_events = min(len(events) + 2, max(room // 3, room - len(workers) - 1))
    if workers:
        lines += [Text(), *_fit(workers, room - for_events - 1)]
    if events and for_events > 2:
        lines += [Text(), Text("events", style="bold"), *events[2 - for_events :]]
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text("q quits; the job goes on", style="dim"))
    for line in lines:
        line.truncate(width, overflow="crop" if plain else "ellipsis", pad=True)
    return Text("\n").join(lines)


def _head(snapshot: Snapshot, width: int, plain: bool) -> Iterator[Text]:
    status = snapshot.status
    silent = snapshot.silent_s >= _SILENT_S
    phase = "no answer" if silent else "connecting" if status is None else str(status["phase"])
    right = Text(phase, style=_PHASE_STYLES.get(phase, "bold yellow"))
    if status is not None:
        right += Text(f"   generation {status['generation']}")
    right += Text(f"   up {clock(snapshot.now_s - snapshot.created_s)}")
    name = Text(snapshot.name, style="bold")
    name.truncate(max(1, width - right.cell_len - 2), overflow="crop" if plain else "ellipsis")
    yield name + " " * (width - name.cell_len - right.cell_len) + right
    if silent:
        stale = "" if status is None else ", what follows is old"
        said = f"the coordinator has not answered for {clock(snapshot.silent_s)}; asking again{stale}"
        yield Text(said, style="bold red")
    elif status is not None and status["reason"]:
        yield Text(_clean(status["reason"]), style="red" if phase == "failed" else "yellow")
    if status is None:
        return
    yield Text()
    wide = max(8, width - _LABEL - _BESIDE)
    yield from _progress(snapshot, status, wide, plain)
    yield _labelled("speed", _speed(snapshot, status))
    span_s = min(_SPAN_S, snapshot.now_s - snapshot.created_s)
    rates = snapshot.history.rates(span_s, wide)
    if snapshot.sizes:
        drawn = Text(sparks(rates, max(rates), plain), style="cyan")
        yield _labelled("samples/s", drawn + f"  peak {rate(max(rates))}")
        drawn = Text(world(snapshot.sizes, snapshot.now_s - span_s, snapshot.now_s, wide, plain), style="magenta")
        yield _labelled("workers", drawn + f"  {_members(status)} of {status['target']}")
        ago = f"{clock(span_s)} ago"
        yield Text(" " * _LABEL + ago + "now".rjust(wide - len(ago)), style="dim")
    total = Counter[str]()
    for worker in status["workers"]:
        total.update(snapshot.history.spent(worker["worker_id"]))
    if any(total.values()):
        yield _labelled("time", _shares(total, wide))
        for line in _legend(total, width - _LABEL):
            yield _labelled("", line)


def _progress(snapshot: Snapshot, status: Mapping[str, Any], wide: int, plain: bool) -> Iterator[Text]:
    progress = snapshot.progress
    if progress is None:
        yield _labelled("progress", Text(f"{counted(status['samples'], 'sample')} so far"))
        return
    left_s = progress.left_s(snapshot.history.samples_rate() or status["rate"])
    eta = f"  ETA {clock(left_s)}" if left_s is not None and status["phase"] == "running" else ""
    yield _labelled("progress", bar(progress.fraction, wide, plain) + f" {progress.fraction:4.0%}{eta}")
    where = f"{epoch_of(status, progress)}: {progress.epoch_done:,} of {progress.epoch_samples:,} samples"
    yield _labelled("", Text(f"{where}, in all {progress.done:,} of {progress.total:,}"))


def _speed(snapshot: Snapshot, status: Mapping[str, Any]) -> Text:
    parts = [f"step {status['step']:,}"]
    steps, samples = snapshot.history.step_rate(), snapshot.history.samples_rate()
    if steps is not None and samples is not None:
        parts += [f"{rate(steps)} steps/s", f"{rate(samples)} samples/s"]
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4f}")
    return Text("   ".join(parts))


def _workers(snapshot: Snapshot, width: int) -> Iterator[Text]:
    workers = snapshot.status["workers"] if snapshot.status is not None else []
    if not workers:
        return
    spent = {worker["worker_id"]: snapshot.history.spent(worker["worker_id"]) for worker in workers}
    told = any(any(seconds.values()) for seconds in spent.values())
    host_wide = max(len(worker["host"]) for worker in workers) + 2 if width >= _WITH_HOST else 0
    header = f"{'worker':<8}{'rank':>4}  {'state':<17}{'step':>10}{'steps/s':>9}{'pid':>9}  {'host':<{host_wide}}"
    header = header if host_wide else header[: -len("host")]
    yield Text(header + "where its time goes" * told, style="bold")
    room = min(60, width - len(header))
    for worker in sorted(workers, key=lambda worker: (worker["rank"] is None, worker["rank"] or 0)):
        yield _worker(worker, snapshot.history, spent[worker["worker_id"]], host_wide, room)


def _worker(worker: Mapping[str, Any], history: History, spent: Mapping[str, float], host_wide: int, room: int) -> Text:
    rank = "" if worker["rank"] is None else worker["rank"]
    step = "" if worker["step"] is None else f"{worker['step']:,}"
    steps = history.step_rate(worker["worker_id"])
    style = "red" if worker["suspect"] else "" if worker["state"] == "member" else "yellow"
    state_ = Text(f"{worker['state']}{', suspect' * worker['suspect']}"[:16].ljust(17), style=style)
    numbers = f"{step:>10}{'' if steps is None else rate(steps):>9}{worker['pid'] or '':>9}  "
    return (
        Text(f"{worker['worker_id']:<8}{rank:>4}  ")
        + state_
        + numbers
        + Text(worker["host"].ljust(host_wide)[:host_wide])
        + _shares(spent, room)
    )


def _fit(table: Sequence[Text], room: int) -> list[Text]:
    """As many rows as fit, and how many do not."""
    if len(table) <= room:
        return list(table)
    shown = max(0, room - 1)
    return [*table[:shown], Text(f"and {counted(len(table) - shown, 'worker')} more", style="dim")][: max(0, room)]


def _event_text(event: Mapping[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    return Text(f"{at}  ", style="dim") + Text(_clean(event_line(event)), style=_EVENT_STYLES.get(event["event"], ""))


def _clean(text: str) -> str:
    """One line without control characters: an error of the user's may hold anything."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _labelled(label: str, content: Text) -> Text:
    return Text(label.ljust(_LABEL), style="bold") + content


def _members(status: Mapping[str, Any]) -> int:
    return sum(1 for worker in status["workers"] if worker["rank"] is not None)


def sparks(values: Sequence[float], highest: float, plain: bool = False) -> str:
    """A column for each value; nothing for 0."""
    levels = _PLAIN_SPARKS if plain else _SPARKS
    highest = highest or 1.0
    return "".join(
        levels[min(len(levels) - 1, int(value / highest * len(levels)))] if value > 0 else " " for value in values
    )


def world(sizes: Sequence[tuple[float, int]], begin_s: float, now_s: float, width: int, plain: bool = False) -> str:
    """The number of members from `begin_s` to now. A column shows the lowest that it became, so that a short loss is
    seen."""
    column_s = max(now_s - begin_s, 1e-9) / width
    current = next((size for at_s, size in reversed(sizes) if at_s < begin_s), 0)
    changes: list[list[int]] = [[] for _ in range(width)]
    for at_s, size in sizes:
        if at_s >= begin_s:
            changes[min(width - 1, int((at_s - begin_s) / column_s))].append(size)
    lowest: list[float] = []
    for within in changes:
        lowest.append(min(within, default=current))
        current = within[-1] if within else current
    return sparks(lowest, max(*lowest, current), plain)


def _shares(seconds: Mapping[str, float], width: int) -> Text:
    """A bar of parts in proportion, each with its letter."""
    whole = sum(seconds.values())
    drawn, upto, done = Text(), 0.0, 0
    for name, (letter, color) in CATEGORIES.items():
        upto += seconds.get(name, 0.0)
        end = round(upto / whole * width) if whole else 0
        drawn.append(letter * (end - done), style=f"black on {color}")
        done = end
    return drawn


def _legend(seconds: Mapping[str, float], width: int) -> list[Text]:
    """Two lines at most, each part of them whole; the largest first, for the others may find no room."""
    whole = sum(seconds.values())
    lines = [Text()]
    for name in sorted(CATEGORIES, key=lambda name: -seconds.get(name, 0.0)):
        letter, color = CATEGORIES[name]
        if seconds.get(name, 0.0) < whole / 200:
            continue
        part = Text(letter, style=f"black on {color}") + f" {name} {seconds[name] / whole:.0%}"
        if lines[-1] and lines[-1].cell_len + 2 + part.cell_len > width:
            if len(lines) == 2:
                break
            lines.append(Text())
        lines[-1] += Text("  " if lines[-1] else "") + part
    return lines


# ---- a loop ----------------------------------------------------------------------------------------------------------


class Watcher:
    """Looks at a job again and again."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._name = state.name_of(run_dir)
        self._created_s = float(run_dir.settings()["created"])
        self._passes = Passes(run_dir.audit, epochs_of(run_dir.settings()))
        self._tail = Tail(run_dir.events)
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self._sizes: list[tuple[float, int]] = []
        self._history = History()
        self._status: dict[str, Any] | None = None
        self._answered_s = time.monotonic()

    def look(self) -> Snapshot:
        """What is known now. It takes as long as the coordinator may take to answer."""
        if answer := state.live(self._run_dir, _ASK_S):
            self._status, self._answered_s = answer, time.monotonic()
            self._history.add(Point.of(answer, self._answered_s))
        for line in self._tail.lines():
            event = json.loads(line)
            if event["event"] == "generation":
                self._sizes.append((event["time"], len(event["members"])))
            if event["event"] not in _UNTOLD:
                self._events.append(event)
        status = self._status
        return Snapshot(
            self._name,
            time.time(),
            self._created_s,
            status,
            time.monotonic() - self._answered_s,
            None if status is None else self._passes.progress(status),
            self._sizes,
            list(self._events),
            self._history,
        )


def watch(run_dir: RunDir, console: Console, every_s: float = 1.0) -> int:
    """Show the job until it has ended or somebody quits; the exit code."""
    if not run_dir.runs():
        return _tell_end(run_dir, console)
    if not terminal.takes_a_screen(console):
        return _lines(run_dir, console, every_s)
    watcher = Watcher(run_dir)
    with terminal.Terminal(console) as shown:
        while run_dir.runs():
            due_s = time.monotonic() + every_s
            snapshot = watcher.look()
            while True:
                shown.draw(screen_of(snapshot, console.width, console.height, console.options.ascii_only))
                wish = shown.wait(due_s - time.monotonic())
                if wish is terminal.Wish.QUIT:
                    return shown.exit_code
                if wish is None:
                    break
    return _tell_end(run_dir, console)


def _lines(run_dir: RunDir, console: Console, every_s: float) -> int:
    """One line a look, where there is no screen to draw on."""
    watcher = Watcher(run_dir)
    while run_dir.runs():
        snapshot = watcher.look()
        if snapshot.status is None or snapshot.silent_s >= _SILENT_S:
            line = f"the coordinator has not answered for {clock(snapshot.silent_s)}"
        else:
            line = progress_line(snapshot.status, snapshot.progress)
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
        time.sleep(every_s)
    return _tell_end(run_dir, console)


def _tell_end(run_dir: RunDir, console: Console) -> int:
    console.print(state.line_of(state.name_of(run_dir), state.state_of(run_dir)), soft_wrap=True)
    return 0
