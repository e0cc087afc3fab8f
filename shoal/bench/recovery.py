"""What a membership change cost, read from the times at which workers completed their steps. Pure functions.

All times are CLOCK_MONOTONIC, which the processes of one machine share. Workers are known by names that outlive their
processes: a system that restarts a worker to recover has the same worker with another pid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from shoal.bench.load import Load


@dataclass(frozen=True)
class StepDone:
    """A worker completed a step, in a group of so many."""

    time_s: float
    worker: str
    pid: int
    group_size: int


@dataclass(frozen=True)
class Trial:
    """One kill and one join. None where it did not happen before the deadline; `failure` then says what.

    `load` is the machine's during the trial.
    """

    kill_to_step_s: float | None
    join_to_step_s: float | None
    stall_s: float | None
    survivors_restarted: bool
    load: Load
    failure: str | None = None


@dataclass(frozen=True)
class Recovery:
    """A system's trials; without any, `skipped` says why."""

    system: str
    settings: str
    trials: tuple[Trial, ...]
    skipped: str | None = None


@dataclass(frozen=True)
class Typical:
    median_s: float
    worst_s: float
    count: int


def typical(values: Sequence[float | None]) -> Typical | None:
    """Over those that happened; None when none did."""
    happened = [value for value in values if value is not None]
    return Typical(median(happened), max(happened), len(happened)) if happened else None


def all_stepped_at(
    steps: Sequence[StepDone], workers: Collection[str], group_size: int, after_s: float
) -> float | None:
    """When the last of these workers had completed its first step in a group of that size; None if one has not.

    The step that was in flight when the change came may still end, in the old group: the size tells them apart.
    """
    firsts = [
        next(
            (s.time_s for s in steps if s.worker == worker and s.time_s > after_s and s.group_size == group_size), None
        )
        for worker in workers
    ]
    times = [time_s for time_s in firsts if time_s is not None]
    return max(times) if len(times) == len(firsts) else None


def longest_gap_s(steps: Sequence[StepDone], workers: Collection[str], begin_s: float, end_s: float) -> float | None:
    """The longest time any of these workers went without completing a step, over gaps that touch the window."""
    gaps = [
        later - earlier
        for worker in workers
        for earlier, later in pairwise(s.time_s for s in steps if s.worker == worker)
        if later > begin_s and earlier < end_s
    ]
    return max(gaps, default=None)


def usual_step_s(steps: Sequence[StepDone], workers: Collection[str], begin_s: float, end_s: float) -> float:
    """The median time between two steps of these workers in the window."""
    gaps = [
        later - earlier
        for worker in workers
        for earlier, later in pairwise(s.time_s for s in steps if s.worker == worker and begin_s <= s.time_s <= end_s)
    ]
    return median(gaps) if gaps else 0.0


def lost_to_kill_s(
    steps: Sequence[StepDone], workers: Collection[str], killed_s: float, resumed_s: float, usual_s: float
) -> float:
    """From the kill to the next step of the survivors, less one usual step of theirs and less what had been done of the
    step that the kill interrupted."""
    last_s = max((step.time_s for step in steps if step.time_s < killed_s and step.worker in workers), default=killed_s)
    return max(0.0, resumed_s - killed_s - usual_s - min(killed_s - last_s, usual_s))


def restarted(steps: Sequence[StepDone], workers: Collection[str]) -> bool:
    """Whether any of these workers stepped in more than one process."""
    return any(len({step.pid for step in steps if step.worker == worker}) > 1 for worker in workers)
