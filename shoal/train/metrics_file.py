"""What one worker measured, as JSON lines in the run directory: where its seconds went, every reconfiguration and, by
rank 0, the committed steps.

A file has one writer and is only appended to. It stays small because a line stands for more steps the longer the job
is: never for less than a tenth of a second, nor for less than a 4,000th of the job's age. A month is 40,000 lines, and
a plot of it is as fine as one of its first hour.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.control.rundir import finite
from shoal.metrics import EventLog
from shoal.train.reconfigure import Reconfiguration
from shoal.train.step import StepReport

STEPS_EVERY_S = 0.1
STEPS_LINES = 4000
SECONDS_EVERY_S = 0.5
SECONDS_LINES = 1000

_log = logging.getLogger("shoal.metrics")


class Means:
    """Committed steps of one generation that become one line."""

    def __init__(self) -> None:
        self.steps = 0

    def add(self, report: StepReport) -> None:
        if not self.steps:
            self.samples = self.skipped = self._losses = self._norms = 0
            self._loss = self._norm = 0.0
            self._metrics: dict[str, tuple[float, int]] = {}
        self.steps += 1
        self.last = report
        self.samples += report.samples
        self.skipped += report.skipped
        if math.isfinite(report.loss):
            self._loss += report.loss
            self._losses += 1
        if report.gradient_norm is not None and math.isfinite(report.gradient_norm):
            self._norm += report.gradient_norm
            self._norms += 1
        for name, value in report.metrics.items():
            if math.isfinite(value):
                total, count = self._metrics.get(name, (0.0, 0))
                self._metrics[name] = total + value, count + 1

    def take(self) -> dict[str, Any]:
        """The line, with means over the values that are finite; begins anew."""
        last, steps, self.steps = self.last, self.steps, 0
        return {
            "generation": last.generation,
            "step": last.step,
            "steps": steps,
            "epoch": last.epoch,
            "workers": last.workers,
            "samples": self.samples,
            "skipped": self.skipped,
            "loss": self._loss / self._losses if self._losses else None,
            "metrics": {name: total / count for name, (total, count) in self._metrics.items()},
            "learning_rate": finite(last.learning_rate),
            "gradient_norm": self._norm / self._norms if self._norms else None,
        }


class MetricsFile:
    """A disk that is full ends the file, not the training."""

    def __init__(self, path: Path, job_began_s: float, wall: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._path, self._job_began_s, self._wall = path, job_began_s, wall
        self._file: EventLog | None = EventLog(path)
        self._means = Means()
        self._steps_due_s = self._seconds_due_s = 0.0

    def step(self, report: StepReport) -> None:
        """A committed step, told by the worker that was rank 0 in it."""
        if self._means.steps and self._means.last.generation != report.generation:
            self._write("steps", **self._means.take())
        self._means.add(report)
        now_s = self._wall()
        if now_s >= self._steps_due_s:
            self._steps_due_s = now_s + max(STEPS_EVERY_S, (now_s - self._job_began_s) / STEPS_LINES)
            self._write("steps", **self._means.take())

    def seconds(self, generation: int, step: int, seconds: Mapping[str, float]) -> None:
        """Called with every beat, on the client's thread: a worker that waits for long is still told of."""
        now_s = self._wall()
        if now_s >= self._seconds_due_s:
            self._seconds_due_s = now_s + max(SECONDS_EVERY_S, (now_s - self._job_began_s) / SECONDS_LINES)
            self._write_seconds(generation, step, seconds)

    def reconfigured(self, change: Reconfiguration) -> None:
        self.flush()
        self._write("reconfigured", **vars(change))

    def flush(self) -> None:
        if self._means.steps:
            self._write("steps", **self._means.take())

    def close(self, generation: int, step: int, seconds: Mapping[str, float]) -> None:
        self.flush()
        self._write_seconds(generation, step, seconds)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_seconds(self, generation: int, step: int, seconds: Mapping[str, float]) -> None:
        rounded = {name: round(value, 4) for name, value in seconds.items()}
        self._write("seconds", generation=generation, step=step, seconds=rounded)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._wall(), kind, **fields)
        except OSError as problem:
            _log.warning("%s is not written any more: %s", self._path, problem.strerror)
            self._file = None
