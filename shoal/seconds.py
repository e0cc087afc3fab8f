"""Where a worker's time goes: at every instant its training thread is in exactly one category, so the sums add up to
the life of the process. Goodput is the part that is compute and exchange: work of steps that were kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Indices of the sums, in the order in which they are named and drawn.
COMPUTE, EXCHANGE, INPUT, WAIT, RECONFIGURE, REDONE, STARTUP, CHECKPOINT = range(8)
CATEGORIES = ("compute", "exchange", "input", "wait", "reconfigure", "redone", "startup", "checkpoint")

GOOD = ("compute", "exchange")
MEANING = {
    "compute": "the script's own code: forward, backward, callbacks",
    "exchange": "gradients to the lane, reduce, optimizer, commit",
    "input": "waiting for the loader",
    "wait": "waiting for the slowest worker of the step",
    "reconfigure": "between two generations",
    "redone": "compute and exchange of steps that were given up and came again",
    "startup": "from the start of the process to its first batch",
    "checkpoint": "writing or reading checkpoints",
}


class Seconds:
    """One worker's sums. Only the training thread switches; any thread may take a snapshot."""

    __slots__ = ("_attempt", "_clock", "_since_s", "_sums", "category", "starting")

    def __init__(self, age_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        """`age_s`: how old the process is already."""
        self._clock = clock
        self._sums = [0.0] * len(CATEGORIES)
        self._sums[STARTUP] = age_s
        self.category = STARTUP
        self.starting = True  # until the first batch
        self._since_s = clock()
        self._attempt = (0.0, 0.0, 0.0)

    def switch(self, category: int) -> int:
        """From now on the time is `category`'s. The one before."""
        now_s = self._clock()
        was = self.category
        self._sums[was] += now_s - self._since_s
        self._since_s = now_s
        self.category = category
        return was

    @contextmanager
    def during(self, category: int) -> Iterator[None]:
        was = self.switch(category)
        try:
            yield
        finally:
            self.switch(was)

    def started(self) -> None:
        """The first batch is there: everything so far was start-up."""
        self.switch(self.category)
        sums = [0.0] * len(CATEGORIES)
        sums[CHECKPOINT] = self._sums[CHECKPOINT]
        sums[STARTUP] = sum(self._sums) - sums[CHECKPOINT]
        self.starting = False
        self._sums = sums  # one assignment: a snapshot sees the time in the one place or in the other

    def begin_attempt(self) -> None:
        """What `give_up` takes back counts from here."""
        self.switch(self.category)
        self._attempt = self._sums[COMPUTE], self._sums[EXCHANGE], self._sums[WAIT]

    def give_up(self) -> tuple[float, float]:
        """The attempt comes again: its compute and exchange are redone work. How much that is, and how long the attempt
        had waited for others, which stays `wait`."""
        self.switch(self.category)
        compute_s, exchange_s, wait_s = self._attempt
        redone_s = self._sums[COMPUTE] - compute_s + self._sums[EXCHANGE] - exchange_s
        waited_s = self._sums[WAIT] - wait_s
        sums = self._sums[:]
        sums[COMPUTE], sums[EXCHANGE] = compute_s, exchange_s
        sums[REDONE] += redone_s
        self._sums = sums
        self._attempt = compute_s, exchange_s, self._sums[WAIT]
        return redone_s, waited_s

    def snapshot(self) -> dict[str, float]:
        """The sums at this moment, by name."""
        while True:
            since_s = self._since_s
            sums, category = self._sums[:], self.category
            if since_s == self._since_s:  # if not, a switch fell between the two reads
                break
        sums[category] += self._clock() - since_s
        return dict(zip(CATEGORIES, sums, strict=True))
