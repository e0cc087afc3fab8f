"""One worker's leases, between the thread that trains and the client's threads, which hear of leases and tell of them.
No call waits for anything."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from shoal.data.leases import Extent, Lease, Said


class Borrowed:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extent: Extent | None = None
        self._held: dict[int, Lease] = {}  # in the order of their numbers, which is that of their use
        self._ended: set[int] = set()
        self._new: deque[Lease] = deque()  # granted, and not taken by the training thread yet
        self._heard = 0
        self._wants = 0
        self._over = self._complete = False

    # The client's threads.

    def said(self) -> Said | None:
        """All there is to tell; None while there is nothing."""
        with self._lock:
            if self._extent is None and not self._heard:
                return None
            held, ended = tuple(self._held.values()), tuple(sorted(self._ended))
            return Said(self._extent, held, ended, self._heard, self._wants)

    def on_granted(self, lease: Lease) -> bool:
        """False: it is of a pass that this worker has left, and ended at once; that is to be told."""
        with self._lock:
            if lease.number <= self._heard:
                return True
            self._heard = lease.number
            self._held[lease.number] = lease
            wanted = self._extent is not None and lease.shard.pass_index == self._extent.pass_index
            if wanted:
                self._wants = 0
                self._new.append(lease)
            else:
                self._ended.add(lease.number)
            return wanted

    def on_settled(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in self._ended.intersection(numbers):
                self._ended.discard(number)
                del self._held[number]

    def on_pass_over(self, pass_index: int, complete: bool) -> None:
        with self._lock:
            if self._extent is not None and self._extent.pass_index == pass_index:
                self._over, self._complete, self._wants = True, complete, 0

    # The training thread.

    def begin(self, extent: Extent) -> None:
        with self._lock:
            self._extent, self._over, self._complete = extent, False, False

    def leave(self) -> None:
        """The pass is left, at its end or before: what is not used of it goes back."""
        with self._lock:
            self._extent, self._wants = None, 0
            self._new.clear()
            self._ended.update(self._held)

    def ask(self, steps: int) -> bool:
        """Want another lease. False: that was wanted already, or the pass is over."""
        with self._lock:
            if self._wants or self._over or self._new:
                return False
            self._wants = steps
            return True

    def take(self) -> list[Lease]:
        """What was granted since the last time."""
        with self._lock:
            taken = list(self._new)
            self._new.clear()
            return taken

    def use(self, number: int, to: int) -> bool:
        """The lease is used up to there. True: that was the rest of it."""
        with self._lock:
            lease = self._held[number] = replace(self._held[number], used=to)
            if lease.used < lease.shard.hi:
                return False
            self._ended.add(number)
            return True

    @property
    def over(self) -> bool:
        """Whether there will be no more of the pass: it is complete, or the others have left it early."""
        return self._over

    @property
    def complete(self) -> bool:
        """Whether all of the pass is used, by all workers together."""
        return self._complete

    @property
    def heard(self) -> int:
        """The highest number of a lease that this worker was ever given."""
        return self._heard

    @property
    def has_news(self) -> bool:
        """Whether a worker that has nothing to do can go on."""
        return self._over or bool(self._new)
