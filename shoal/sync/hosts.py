"""Other hosts, as one worker deals with them: its words go there, theirs come here, and what is larger than words.

The lowest rank of a host *leads* it: workers of other hosts tell it their words, and its wire writes them into the
words of its host, where the far ones then look like near ones. What belongs together is told in order.
"""

from __future__ import annotations

import queue
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from shoal import errors
from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.sync.notice import NET_S, Notice
from shoal.sync.wire import Address, Wire, listen
from shoal.sync.words import LINE_BYTES, MAX_MARKS_BYTES, STATEMENT, Words

T = TypeVar("T")

# Kinds of frames. PART and SUM are those of `sums`, the last three those of `following`.
PART, SUM, NOTE, BUFFERS, STATE, RECORD, COMMIT, ASKED, PIECE = range(9)
# Kinds of notes.
_LINE, _STATEMENT, _NAMES, _GREETING, _MARKS = range(5)
_MOST_NOTE_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20


def frame_tag(step: int, kind: int, index: int) -> int:
    return (step & 0xFFFFFFFF) << 32 | kind << 28 | index & 0xFFFFFFF


@dataclass(frozen=True)
class Places:
    """Where the workers of a generation are: hosts in the order of their lowest ranks, then those with followers or
    leavers only."""

    generation: Generation

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.host for member in self.generation.all))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each host's members, in rank order, of the hosts that have some."""
        by_host = {host: tuple(it.slot for it in self.generation.members if it.host == host) for host in self.hosts}
        return tuple(slots for slots in by_host.values() if slots)

    def on(self, host: str) -> list[Member]:
        """Members, then the others."""
        return [member for member in self.generation.all if member.host == host]

    def off(self, host: str) -> list[Member]:
        return [member for member in self.generation.all if member.host != host]

    @cached_property
    def leaders(self) -> dict[str, int]:
        """By host, the slot of who leads it, of the hosts with members or a follower. Where nobody is left, the first
        leaver alone is to hear the others: nobody else may wait for one that was let go."""
        of = (*self.generation.members, *self.generation.followers) or self.generation.leavers[:1]
        return {member.host: member.slot for member in reversed(of)}

    def connects(self, slot: int) -> dict[int, Address]:
        """The addresses of the workers that this one has connections to: leaders of other hosts, if it leads everybody
        there, and those whose share of the model overlaps its own."""
        mine = next(member for member in self.generation.all if member.slot == slot)
        leads = self.leaders.get(mine.host) == slot
        others = [it for it in self.off(mine.host) if leads or self.leaders.get(it.host) == it.slot]
        others += [it for it in self.off(mine.host) if self._overlaps(slot, it.slot)]
        return {it.slot: parse_address(it.address) for it in others}

    def _overlaps(self, one: int, other: int) -> bool:
        parts = [(slots.index(slot), len(slots)) for slot in (one, other) for slots in self.members if slot in slots]
        if len(parts) < 2:
            return False  # a leaver has no share
        (k, n), (j, m) = parts
        return k * m < (j + 1) * n and j * n < (k + 1) * m


LOOPBACK = "127.0.0.1"


def host_of(member: Member) -> str:
    """The address of its host: that of this one, where there are no others."""
    return parse_address(member.address)[0] if member.address else LOOPBACK


def parse_address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class Relay:
    """A worker's end of all connections to other hosts, from generation to generation."""

    def __init__(
        self,
        words: Words,
        notice: Notice,
        address: str,
        on_broken: Callable[[int, int, str], None],
        on_unreached: Callable[[int, int], None] = lambda generation, slot: None,
        patience_s: float = 5.0,
    ) -> None:
        """`address`: that of this host to listen at. `on_broken` is called on the wire's thread, with a generation, the
        slot of whom is not heard any more, and why; `on_unreached` when there was no connection for `patience_s`."""
        self._words, self._notice, self.on_broken = words, notice, on_broken
        self.on_unreached, self.patience_s = on_unreached, patience_s
        self.problem: Exception | None = None
        self.connected_to = 0  # the generation whose workers have all been reached
        self._mirrored: list[int] = []
        self.wire = Wire(-1, listen(address), self, patience_s)

    @property
    def address(self) -> str:
        host, port = self.wire.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def enter(self, slot: int, generation: Generation) -> None:
        """Leave older generations: when this returns, nothing of them is written here any more."""
        self.wire.slot = slot
        places = Places(generation)
        self.wire.enter(generation.number, generation.key, places.connects(slot) if len(places.hosts) > 1 else {})

    def ring_mirrored(self) -> None:
        """This worker has moved on: who waits for words of other hosts looks whether it is still there to hear them."""
        for far in self._mirrored:
            self._words.ring(far)
        self._mirrored = []

    def mirrors(self, slots: Sequence[int]) -> None:
        self._mirrored = list(slots)

    def close(self) -> None:
        self.wire.close()

    def close_in_child(self) -> None:
        self.wire.close_in_child()

    # What the wire tells, on its thread.

    def connected(self, generation: int) -> None:
        self.connected_to = generation
        self._notice.wake()

    def broken(self, generation: int, slot: int, why: str) -> None:
        self._notice.tell_broken(generation)
        self.on_broken(generation, slot, why)

    def failed(self, problem: Exception) -> None:
        self.problem = problem
        self._notice.wake()


class Far:
    """The other hosts in one generation. Every wait here ends with Changed when the generation is over."""

    def __init__(self, relay: Relay, words: Words, notice: Notice, places: Places, mine: Member) -> None:
        self._relay, self._words, self._notice, self._places, self._mine = relay, words, notice, places, mine
        self.number = places.generation.number
        self.workers = places.off(mine.host)  # members, then leavers
        self.slots = frozenset(member.slot for member in self.workers)
        self.leaders = [slot for host, slot in places.leaders.items() if host != mine.host]
        self._sent: dict[int, int] = {}  # notes so far, by slot
        self._heard: dict[int, int] = {}
        self._statement = -1
        self._names: bytes | None = None
        self._ids = {member.slot: member.worker_id for member in self.workers}
        self.wire = relay.wire

    # Words.

    def connect(self) -> None:
        """Until every worker is reached that this one has to do with."""
        arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        began_s = time.monotonic()
        while not self._is_connected():
            self._sleep(None, arrived, self._is_connected)
            if time.monotonic() - began_s > self._relay.patience_s and (missing := self.wire.unreached()):
                began_s = time.monotonic()
                self._relay.on_unreached(self.number, missing[0])

    def _is_connected(self) -> bool:
        return self._relay.connected_to >= self.number

    def listen(self) -> None:
        """For whoever leads its host, once its workers have parked: from now on words of other hosts are written
        here."""
        self._relay.mirrors(sorted(self.slots))
        for slot in self.slots:
            self._expect_note(slot)

    def tell(self) -> None:
        """Tell my words to the other hosts, after whatever was told before."""
        statement = self._words.get(self._mine.slot, STATEMENT)
        if statement != self._statement:
            self._statement = statement
            self._note(_STATEMENT, self._words.statement(self._mine.slot))
        self._note(_LINE, self._words.line(self._mine.slot))

    def tell_names(self, names: bytes) -> None:
        if names != self._names:
            self._names = names
            self._note(_NAMES, names)

    def tell_greeting(self, text: bytes) -> None:
        self._note(_GREETING, text)

    def tell_marks(self, marks: bytes) -> None:
        """Which tensors have a gradient."""
        self._note(_MARKS, marks)

    def _note(self, kind: int, body: bytes) -> None:
        for slot in self.leaders:
            count = self._sent[slot] = self._sent.get(slot, 0) + 1
            self.wire.post(self.number, slot, frame_tag(0, NOTE, count), memoryview(bytes([kind]) + body))

    def _expect_note(self, slot: int) -> None:
        count = self._heard[slot] = self._heard.get(slot, 0) + 1
        self.wire.expect_up_to(
            self.number, slot, frame_tag(0, NOTE, count), _MOST_NOTE_BYTES, partial(self._hear, slot)
        )

    def _hear(self, slot: int, note: memoryview) -> None:
        kind, body = note[0], note[1:]
        if kind == _LINE and body.nbytes == LINE_BYTES:
            self._words.mirror(slot, body)
        elif kind == _STATEMENT:
            self._words.set_statement(slot, bytes(body))
        elif kind == _NAMES:
            self._words.names = bytes(body)
        elif kind == _GREETING:
            self._words.greet(self.number, bytes(body))
        elif kind == _MARKS:
            self._words.set_marks(slot, bytes(body[:MAX_MARKS_BYTES]))
        self._expect_note(slot)

    def renew(self, why: str) -> None:
        """As if a connection had ended: the coordinator has the generation begin again."""
        self._relay.on_broken(self.number, self.leaders[0], why)

    # What is larger.

    def post(self, slot: int, step: int, kind: int, views: Sequence[memoryview]) -> None:
        """Send these to a worker. They must stay as they are until it has them."""
        for index, view in enumerate(views):
            self.wire.post(self.number, slot, frame_tag(step, kind, index), view)

    def take(self, slot: int, step: int, kind: int, into: Sequence[memoryview]) -> None:
        """Receive what `post` sends."""
        arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for index, view in enumerate(into):
            self.wire.expect(self.number, slot, frame_tag(step, kind, index), view, partial(arrived.put, index))
        for _ in into:
            self.wait(slot, arrived)

    def post_checked(self, slot: int, step: int, kind: int, views: Sequence[memoryview]) -> None:
        """As `post`, with checksums."""
        pieces = pieces_of(views)
        self.post(slot, step, kind, [*pieces, memoryview(_checksums(pieces))])

    def take_checked(self, slot: int, step: int, kind: int, into: Sequence[memoryview]) -> None:
        pieces = pieces_of(into)
        sums = bytearray(4 * len(pieces))
        self.take(slot, step, kind, [*pieces, memoryview(sums)])
        if _checksums(pieces) != bytes(sums):
            raise errors.ShoalError(f"the state that {self._ids[slot]} sent has other checksums than it says")

    def wait(self, slot: int | None, arrived: queue.SimpleQueue[T | None]) -> T:
        """What arrives next, from that worker or whomever. None in the queue: look whether the wait is over."""
        while True:
            item = arrived.get() if not arrived.empty() else self._sleep(slot, arrived)
            if item is not None:
                return item

    def look(self) -> None:
        """Changed, if the wait that goes on is over."""
        if self._notice.over():
            raise Changed
        if self._relay.problem is not None:
            raise errors.ShoalError(f"the connections to other hosts failed: {self._relay.problem}")

    def _sleep(
        self, slot: int | None, arrived: queue.SimpleQueue[T | None], come: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Until something arrives, or it is to look again. `come`: what else it waits for, of which it is woken."""
        worker_id = "" if slot is None else self._ids[slot]
        with self._notice.waits(self.number, slot, worker_id, wake=partial(arrived.put, None)):
            self.look()
            try:
                return None if come() else arrived.get(timeout=NET_S)
            except queue.Empty:
                return None


def pieces_of(views: Sequence[memoryview], size_bytes: int = _PIECE_BYTES) -> list[memoryview]:
    return [view[at : at + size_bytes] for view in views for at in range(0, max(1, view.nbytes), size_bytes)]


def _checksums(pieces: Sequence[memoryview]) -> bytes:
    return b"".join(zlib.crc32(piece).to_bytes(4, "little") for piece in pieces)
