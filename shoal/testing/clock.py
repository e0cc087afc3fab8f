"""A clock for tests of code that takes `now` as an argument."""

from __future__ import annotations


class Clock:
    """Stands still until it is told to move. Call it to read it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock does not go back by {-seconds} s")
        self._now_s += seconds
        return self._now_s
