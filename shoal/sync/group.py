"""The group: the workers of one generation that reduce together, and the commit protocol between them.

`docs/design.md` tells the protocol, `tests/protocol/` checks it exhaustively. Every wait here ends: when the awaited
word comes, or with `Changed` when the generation is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import EXCHANGE, WAIT, Seconds
from shoal.sync import words as w
from shoal.sync.words import Words, fence, seq_of, tag

# Below a scheduler's wake-up, so that a neighbor that is nearly there costs no system call.
SPIN_S = 50e-6
# No wake-up is known to get lost; if one ever does, it costs this much and not the job.
NET_S = 0.2


class Notice:
    """What this worker knows of generations. The client's thread writes it, the training thread reads it."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.newest = 0  # number of the newest generation
        self.fault = 0  # number of the newest generation that followed a death
        self.awaited: int | None = None  # slot the training thread waits for
        self.awaited_id = ""  # and who has it, in the generation that the wait belongs to
        self.awaited_since_s = 0.0
        self.ends_at = 0  # the wait ends when `fault` (or, while entering, `newest`) is above this
        self.entering = False

    def tell(self, generation: Generation) -> None:
        """Called on the client's thread: remember the generation and end the waits that it ends."""
        if generation.fault:
            self.fault = max(self.fault, generation.number)
        self.newest = max(self.newest, generation.number)
        # The training thread may be between its last look and its sleep: stir until it has noticed.
        deadline_s = time.monotonic() + 1.0
        while self.over() and (slot := self.awaited) is not None and time.monotonic() < deadline_s:
            self._words.stir(slot)
            time.sleep(0.001)

    def over(self) -> bool:
        return (self.newest if self.entering else self.fault) > self.ends_at


class Group:
    """One worker's place in one generation."""

    def __init__(
        self,
        words: Words,
        notice: Notice,
        generation: Generation,
        worker_id: str,
        *,
        spin: bool,
        seconds: Seconds | None = None,
    ) -> None:
        self.words = words
        self.seconds = seconds or Seconds()
        self.generation = generation
        self.members: Sequence[Member] = generation.members
        self.size = len(generation.members)
        self.rank = next(rank for rank, member in enumerate(generation.members) if member.worker_id == worker_id)
        self.slots = [member.slot for member in generation.members]
        self.slot = self.slots[self.rank]
        self._others = [slot for slot in self.slots if slot != self.slot]
        self._ids = {member.slot: member.worker_id for member in (*generation.members, *generation.leavers)}
        self._notice = notice
        self._spin_s = SPIN_S if spin else 0.0
        self.seq = 0  # of the newest commit, known once entered

    def enter(self) -> None:
        """Park until every member and leaver has left the older generations; then `seq` is what is committed.
        Changed when there is a newer generation by then."""
        number = self.generation.number
        acknowledge(self.words, self.slot, number)
        fault_point("park")
        self._notice.entering = True
        try:
            for member in (*self.generation.members, *self.generation.leavers):
                if member.slot != self.slot:
                    self._wait(member.slot, w.ACK, number, at_least=True)
        finally:
            self._notice.entering = False
        if self._notice.newest > number:
            raise Changed
        fence()
        self.seq = seq_of(self.words.commit)

    @property
    def changed(self) -> bool:
        """Whether a death ended this generation: what is being computed for it is in vain."""
        return self._notice.fault > self.generation.number

    def ready(self) -> None:
        """Say that my lane is written; wait until everyone's is."""
        self._meet(w.READY, "ready")

    def reduced(self) -> None:
        """Say that my slice is reduced and my partial norm posted; wait until everyone's is."""
        self._meet(w.REDUCED, None)

    def commit(self) -> bool:
        """Commit step `seq + 1`; true if all members now move to a newer generation together. Changed: this worker does
        not know whether it was committed; the next generation's COMMIT says."""
        words, step = self.words, tag(self.generation.number, self.seq + 1)
        words.put(self.slot, w.SEEN, self._notice.newest)
        fault_point("before_done")
        self._meet(w.DONE, "after_done")
        planned = max(words.get(slot, w.SEEN) for slot in self.slots) > self.generation.number
        fault_point("before_commit")
        words.commit = step  # the commit point: the same store by every member
        fault_point("after_commit")
        self.seq += 1
        return planned

    def _meet(self, word: int, point: str | None) -> None:
        words, step = self.words, tag(self.generation.number, self.seq + 1)
        words.put(self.slot, word, step)
        words.ring(self.slot)
        if point is not None:
            fault_point(point)
        for slot in self._others:
            if words.get(slot, word) != step:
                self.seconds.switch(WAIT)
                try:
                    self._wait(slot, word, step)
                finally:
                    self.seconds.switch(EXCHANGE)
        fence()

    def _wait(self, slot: int, word: int, value: int, *, at_least: bool = False) -> None:
        """Until the slot's word is `value` (or above it). Changed when that can no longer be."""
        words, notice, number = self.words, self._notice, self.generation.number
        notice.ends_at, notice.awaited_since_s = number, time.monotonic()
        notice.awaited_id, notice.awaited = self._ids[slot], slot
        try:
            while True:
                bell = words.bell(slot)
                fence()
                seen = words.get(slot, word)
                if seen == value or (at_least and seen > value):
                    return
                if notice.over() or (not at_least and words.get(slot, w.ACK) > number):
                    raise Changed
                if time.monotonic() - notice.awaited_since_s >= self._spin_s:
                    words.sleep(slot, bell, NET_S)
        finally:
            notice.awaited = None


def acknowledge(words: Words, slot: int, number: int) -> None:
    """Promise that this worker writes nothing of a generation before `number` any more."""
    words.put(slot, w.ACK, number)
    words.ring(slot)
