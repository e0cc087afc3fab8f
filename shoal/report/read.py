"""A run directory, read: what happened when, what was committed, and where every worker's time went.

Works while the job trains, after it, and on what a killed one has left.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.control.rundir import RunDir
from shoal.data.progress import leased
from shoal.metrics import read_events
from shoal.seconds import CATEGORIES, GOOD
from shoal.view.state import how_it_ended

if TYPE_CHECKING:
    from shoal.data.audit import AuditReport


@dataclass(frozen=True)
class Steps:
    """Committed steps that one line tells of: the last of them, and means over all."""

    time_s: float
    generation: int
    step: int
    steps: int
    epoch: int
    workers: int
    samples: int
    skipped: int
    loss: float | None
    metrics: dict[str, float]
    learning_rate: float | None
    gradient_norm: float | None

    @property
    def first(self) -> int:
        return self.step - self.steps + 1


@dataclass(frozen=True)
class Cost:
    """What one worker lost by one reconfiguration."""

    took_s: float  # between the generations
    waited_s: float  # for somebody who had died
    redone_s: float  # work that came again

    @property
    def total_s(self) -> float:
        return self.took_s + self.waited_s + self.redone_s


@dataclass(frozen=True)
class Change:
    """From one generation to the next."""

    time_s: float
    generation: int
    cause: str
    fault: bool
    paused: bool
    before: int  # workers
    after: int
    step: int | None  # the newest that was committed then; None if nobody went on
    redone_steps: int
    costs: dict[str, Cost]  # of those who were in before and went on, by worker


@dataclass(frozen=True)
class WorkerTime:
    worker_id: str
    seconds: dict[str, float]  # by category; up to its last line, if it was killed
    ended: str  # "" while it runs

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Run:
    path: Path
    settings: dict[str, Any]
    phase: str  # running, or how it ended, as `shoal status` says it
    reason: str
    began_s: float
    trained_from_s: float | None  # when the first generation began
    ended_s: float
    lines: list[Steps]
    changes: list[Change]
    sizes: list[tuple[float, int]]  # workers from that moment on
    workers: list[WorkerTime]
    events: list[dict[str, Any]]
    audit: AuditReport | None
    leased: bool = False  # without lockstep, the lines are of one worker's own steps, and the audit knows all workers'

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def steps(self) -> int:
        if self.leased and self.audit is not None:
            return self.audit.steps
        return self.lines[-1].step if self.lines else 0

    @property
    def trained_s(self) -> float:
        """From the first generation to the last commit that is known."""
        if self.trained_from_s is None or not self.lines:
            return 0.0
        return max(0.0, self.lines[-1].time_s - self.trained_from_s)

    @property
    def samples_per_s(self) -> float | None:
        """None where nothing was trained for long enough to tell."""
        samples = sum(line.samples for line in self.lines)
        if self.leased and self.audit is not None:
            samples = self.audit.samples
        return samples / self.trained_s if self.trained_s and samples else None

    @property
    def seconds(self) -> dict[str, float]:
        """Of all workers, by category."""
        return {name: sum(worker.seconds.get(name, 0.0) for worker in self.workers) for name in CATEGORIES}

    @property
    def goodput(self) -> float | None:
        """The share of all workers' time that went into steps that were kept."""
        seconds = self.seconds
        total_s = sum(seconds.values())
        return sum(seconds[name] for name in GOOD) / total_s if total_s else None

    def count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    @property
    def metric_names(self) -> list[str]:
        return sorted({name for line in self.lines for name in line.metrics})

    def rate(self, bins: int) -> list[tuple[float, float]]:
        """Steps a second, in at most so many equal stretches from the first generation to the last commit: the middle
        of each and the rate in it."""
        if self.trained_from_s is None or not self.trained_s:
            return []
        times = [self.trained_from_s, *(line.time_s for line in self.lines)]
        steps = [self.lines[0].first - 1.0, *(float(line.step) for line in self.lines)]
        usual_s = statistics.median(after - before for before, after in itertools.pairwise(times))
        bins = max(1, min(bins, int(self.trained_s / max(2 * usual_s, 1e-6))))
        width_s = self.trained_s / bins
        edges = [times[0] + width_s * index for index in range(bins + 1)]
        at = [_interpolate(times, steps, edge) for edge in edges]
        return [(edges[index] + width_s / 2, (at[index + 1] - at[index]) / width_s) for index in range(bins)]


def read(run_dir: RunDir, status: Mapping[str, Any] | None = None, now_s: float | None = None) -> Run:
    """`status` is what the job's coordinator says, if one answers."""
    events = read_events(run_dir.events)
    settings = run_dir.settings()
    files = {path.stem: read_events(path) for path in sorted(run_dir.metrics.glob("*.jsonl"), key=_by_number)}
    generations = [event for event in events if event["event"] == "generation"]
    lines = merge(_steps(line) for told in files.values() for line in told if line["event"] == "steps")
    phase, reason = ("running", str(status.get("reason", ""))) if status else how_it_ended(events)
    last_s = max((line[-1]["time"] for line in (events, *files.values()) if line), default=settings["created"])
    return Run(
        path=run_dir.path,
        settings=settings,
        phase=phase,
        reason=reason,
        began_s=settings["created"],
        trained_from_s=generations[0]["time"] if generations else None,
        ended_s=(time.time() if now_s is None else now_s) if phase == "running" else last_s,
        lines=lines,
        changes=_changes(generations, files),
        sizes=_sizes(events, files),
        workers=_workers(files, events, status),
        events=events,
        audit=_audit(run_dir, status),
        leased=leased(run_dir.audit),
    )


def _sizes(events: Sequence[dict[str, Any]], files: Mapping[str, list[dict[str, Any]]]) -> list[tuple[float, int]]:
    """How many workers from when on; none after everything was killed, until the job went on."""
    sizes = []
    for event in events:
        if event["event"] == "generation":
            sizes.append((event["time"], 0 if event["paused"] else len(event["members"])))
        elif event["event"] == "resumed" and sizes and sizes[-1][1]:
            seen = [line["time"] for told in files.values() for line in told if line["time"] < event["time"]]
            sizes.append((max([*seen, sizes[-1][0]]), 0))
    return sizes


def merge(lines: Iterable[Steps]) -> list[Steps]:
    """Each step once, in order. Where two lines tell of the same, that of the later generation counts."""
    kept: list[Steps] = []
    for line in sorted(lines, key=lambda line: (line.generation, line.step)):
        while kept and kept[-1].first >= line.first:
            kept.pop()
        if kept and kept[-1].step >= line.first:
            last = kept[-1]
            kept[-1] = replace(last, step=line.first - 1, steps=line.first - last.first)
        kept.append(line)
    return kept


def _steps(line: Mapping[str, Any]) -> Steps:
    return Steps(line["time"], **{name: value for name, value in line.items() if name not in ("time", "event")})


def _changes(generations: Sequence[dict[str, Any]], files: Mapping[str, list[dict[str, Any]]]) -> list[Change]:
    told: dict[int, dict[str, dict[str, Any]]] = {}
    for worker_id, lines in files.items():
        for line in lines:
            if line["event"] == "reconfigured":
                told.setdefault(line["generation"], {})[worker_id] = line
    changes = []
    for before, event in itertools.pairwise(generations):
        entered = told.get(event["number"], {})
        costs = {name: Cost(line["took_s"], line["waited_s"], line["redone_s"]) for name, line in entered.items()}
        changes.append(
            Change(
                time_s=event["time"],
                generation=event["number"],
                cause=event["cause"],
                fault=event["fault"],
                paused=event["paused"],
                before=len(before["members"]),
                after=len(event["members"]),
                step=max((line["step"] for line in entered.values()), default=None),
                redone_steps=int(any(line["redone"] for line in entered.values())),
                costs=costs,
            )
        )
    return changes


def _workers(
    files: Mapping[str, list[dict[str, Any]]], events: Sequence[dict[str, Any]], status: Mapping[str, Any] | None
) -> list[WorkerTime]:
    live = {worker["worker_id"]: worker.get("seconds", {}) for worker in (status or {}).get("workers", ())}
    ended: dict[str, str] = {}
    for event in events:
        if event["event"] in ("left", "lost", "finished", "failed", "refused"):
            known = ended.get(event["worker_id"])
            # The exit that follows says less than why.
            if known not in ("finished", "failed", "refused"):
                killed = event["event"] == "lost"
                ended[event["worker_id"]] = f"lost ({event['text']})" if killed else event["event"]
    found = []
    for worker_id, lines in files.items():
        newest: dict[str, float] = next((line["seconds"] for line in reversed(lines) if line["event"] == "seconds"), {})
        seconds = max(newest, live.get(worker_id, {}), key=lambda sums: sum(sums.values()))
        found.append(
            WorkerTime(worker_id, {name: seconds.get(name, 0.0) for name in CATEGORIES}, ended.get(worker_id, ""))
        )
    return found


def _audit(run_dir: RunDir, status: Mapping[str, Any] | None) -> AuditReport | None:
    # numpy costs a tenth of a second, and a run without steps has nothing to audit
    if not any(run_dir.audit.glob("*.bin")):
        return None
    from shoal.data.audit import audit

    committed = run_dir.committed()
    seq = committed.seq if committed is not None else (status or {}).get("seq")
    return audit(run_dir.audit, seq or None)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    index = min(max(bisect.bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[index - 1], xs[index], ys[index - 1], ys[index]
    return y1 if x1 <= x0 else y0 + (y1 - y0) * min(max((x - x0) / (x1 - x0), 0.0), 1.0)


def _by_number(path: Path) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, path.stem)) or 0), path.stem
