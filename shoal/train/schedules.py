"""Learning rates that follow the number of workers.

A schedule is a function of the situation of a step; what it needs to know of the past is in the record of the commit,
so a newcomer computes the same factor as everybody else. It multiplies whatever learning rate the optimizer and
torch's schedulers have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shoal.sync.record import Record


@dataclass(frozen=True)
class Situation:
    step: int
    epoch: int
    size: int
    size_before: int  # of the group before the size last changed; 0 if it never has
    steps_since_change: int


def last_change(record: Record, size: int, step: int) -> tuple[int, int]:
    """The step at which the number of workers last changed, and the number before, when `size` of them make the step
    that follows the record."""
    if size != record.size:
        return step, record.size
    return record.changed_at, record.size_before


class Schedule(ABC):
    @abstractmethod
    def factor(self, at: Situation) -> float:
        """What the learning rate is multiplied with in this step."""


@dataclass(frozen=True)
class _Scaling(Schedule):
    """`base_size` workers train at the optimizer's own learning rate. After a change of size, and at the start, the
    factor moves there in a straight line over `warmup_steps` steps."""

    base_size: int = 1
    warmup_steps: int = 0

    def factor(self, at: Situation) -> float:
        there = self._scale(at.size / self.base_size)
        if at.steps_since_change >= self.warmup_steps:
            return there
        start = self._scale(at.size_before / self.base_size) if at.size_before else min(1.0, there)
        return start + (there - start) * (at.steps_since_change + 1) / (self.warmup_steps + 1)

    @abstractmethod
    def _scale(self, ratio: float) -> float:
        """The factor for a group of `ratio` × base_size workers."""


class LinearScaling(_Scaling):
    """Learning rate × workers: for SGD."""

    def _scale(self, ratio: float) -> float:
        return ratio


class SqrtScaling(_Scaling):
    """Learning rate × √workers: for Adam and its kin."""

    def _scale(self, ratio: float) -> float:
        return math.sqrt(ratio)
