"""What a worker's training thread must know of generations while it waits, told by other threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from shoal.control.generation import Generation
from shoal.sync.words import Words

# No wake-up is known to get lost; if one ever does, it costs this much and not the job.
NET_S = 0.2


class Notice:
    """The client's thread and the wire's write it, the training thread reads it."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.newest = 0  # number of the newest generation
        self.fault = 0  # number of the newest generation that followed a death
        self.broken = 0  # number of the newest generation of which a connection has ended
        self.awaited: int | None = None  # slot the training thread waits for
        self.awaited_id = ""  # and who has it, in the generation that the wait belongs to
        self.awaited_since_s = 0.0
        self.entering = False
        self._ends_at = 0  # the wait ends when `fault` (or, while entering, `newest`) is above this
        self._wake: Callable[[], None] | None = None  # of the wait that goes on
        self.watchers: list[Callable[[], None]] = []  # called when something is told; they must not block

    def tell(self, generation: Generation) -> None:
        """Called on the client's thread: remember the generation and end the waits that it ends."""
        if generation.fault:
            self.fault = max(self.fault, generation.number)
        self.newest = max(self.newest, generation.number)
        self._tell_watchers()
        # The training thread may be between its last look and its sleep: wake it until it has noticed.
        deadline_s = time.monotonic() + 1.0
        while self.over() and self._wake is not None and time.monotonic() < deadline_s:
            self.wake()
            time.sleep(0.001)

    def tell_broken(self, generation: int) -> None:
        """A connection of the generation has ended. With a newer one known, that ends waits: who was at its other end
        may have moved on."""
        self.broken = max(self.broken, generation)
        self._tell_watchers()
        self.wake()

    def _tell_watchers(self) -> None:
        for watch in (*self.watchers,):
            watch()

    def wake(self) -> None:
        """Let whoever waits look again at what ends its wait."""
        if (wake := self._wake) is not None:
            wake()

    def over(self) -> bool:
        if self.entering or self.broken == self._ends_at:
            return self.newest > self._ends_at
        return self.fault > self._ends_at

    @contextlib.contextmanager
    def waits(
        self, number: int, slot: int | None, worker_id: str, wake: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """While the training thread waits, in generation `number`, for the slot's worker, or for nobody by name. `wake`
        ends its sleep; without one it sleeps on the slot's bell."""
        self._ends_at, self.awaited_since_s = number, time.monotonic()
        self.awaited_id, self.awaited = worker_id, slot
        if wake is None:
            assert slot is not None

            def wake() -> None:
                self._words.stir(slot)

        self._wake = wake
        try:
            yield
        finally:
            self.awaited = self._wake = None
