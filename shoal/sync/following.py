"""How a host gets the state of the job while the others train: one of its newcomers follows.

A copy of one commit is asked for piece by piece, from a host that keeps one. Of every commit since then the follower
gets what is needed to make the same step again (the sums of the gradients, and a little more), keeps it until the copy
is whole, and then makes these steps, faster than the others train. From then on its host has the state as any other.
Members wait for a follower only where they commit, until it has received what they have sent.
"""

from __future__ import annotations

import math
import queue
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from shoal import errors
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.sync import words as w
from shoal.sync.arena import Arena
from shoal.sync.exchange import Cut, Sent
from shoal.sync.group import Following, Group, Standing
from shoal.sync.hosts import ASKED, BUFFERS, COMMIT, PIECE, RECORD, STATE, SUM, Far, frame_tag, pieces_of
from shoal.sync.notice import NET_S
from shoal.sync.ranges import Range, Run, owned
from shoal.sync.record import Records
from shoal.sync.replica import Replica
from shoal.sync.slices import Slice
from shoal.sync.sums import bytes_of, dtype_sent
from shoal.sync.words import Words, seq_of

_HOLDERS = 2  # hosts that keep a copy: if one dies, the other goes on where it was
# What is asked for at a time is in the way of sums, for which members wait: it is small, and comes when there are none.
_ASKED, _PIECE_BYTES = 2, 1 << 20
_MOST_BYTES = 1 << 30  # of sums that wait for the copy
_TRIES = 3  # for a piece whose checksum is wrong
_REPLAYED = 2  # commits made again for each that comes: so the others are caught up with, and wait for little

_NEEDS_NONE = 1 << 32  # in place of a commit: who follows has all of the copy

# How a commit came about.
STEPPED, CARRIED, GIVEN = range(3)  # GIVEN: the state was written by one worker, and comes as a whole
_SENT: tuple[Sent, ...] = ("all", "none", "some")
_TOLD = struct.Struct("<QBBIddI")


@dataclass(frozen=True)
class Told:
    """What rank 0 tells followers of a commit before it comes about."""

    step: int  # the tag
    kind: int
    sums: Sent = "none"  # of the gradients, whatever becomes of them
    source: int = 0  # the slot of who gives the state
    scale: float = math.nan  # of the gradients, where they are clipped
    rate: float = 1.0  # what learning rates are multiplied with
    threads: int = 1  # by which it was computed
    present: bytes = b""  # which tensors have gradients, as bits

    def pack(self) -> memoryview:
        fixed = (self.step, self.kind, _SENT.index(self.sums), self.source, self.scale, self.rate, self.threads)
        return memoryview(_TOLD.pack(*fixed) + self.present)

    @classmethod
    def unpack(cls, body: memoryview) -> Told:
        step, kind, sums, *others = _TOLD.unpack(body[: _TOLD.size])
        source, scale, rate, threads = others
        return cls(step, kind, _SENT[sums], source, scale, rate, threads, bytes(body[_TOLD.size :]))


@dataclass(frozen=True)
class Origin:
    """The commit of which followers get a copy, and the slots of those who keep it. `fresh`: it is made now."""

    seq: int
    holders: tuple[int, ...]
    fresh: bool


def origin(standing: Standing) -> Origin | None:
    """For the followers of a generation, once all have parked; the same wherever it is asked. None: none needs one."""
    words, places = standing.words, standing.places
    slots = [it.slot for it in places.generation.followers if not words.get(it.slot, w.INCUMBENT)]
    behind = [slot for slot in slots if words.get(slot, w.COPY) != _NEEDS_NONE]
    newest, has = standing.begins()
    if not behind or not newest:
        return None
    leaders = [slot for host, slot in places.leaders.items() if has[host] and slot in standing.slots]
    wanted = {words.get(slot, w.COPY) for slot in behind}
    if len(wanted) == 1 and 0 not in wanted:
        (seq,) = wanted
        if holders := tuple(slot for slot in leaders if words.get(slot, w.COPY) == seq):
            return Origin(seq, holders, fresh=False)
    return Origin(seq_of(newest), tuple(leaders[:_HOLDERS]), fresh=True) if leaders else None


class Source:
    """A member's part: tells followers of commits, and keeps a copy for them where it is to."""

    def __init__(self, arena: Arena, words: Words, slot: int) -> None:
        self._arena, self._words, self._slot = arena, words, slot
        self._copy: list[bytes] = []
        self._told = 0
        words.put(slot, w.COPY, 0)  # whoever had the slot before may have left something there
        self._group: Group | None = None

    def enter(self, group: Group) -> None:
        self._group, self._told = group, 0
        wanted = origin(group) if group.followers else None
        if wanted is None or self._slot not in wanted.holders:
            self._keep([], 0)
            return
        if wanted.fresh:
            record = Records(self._words.record).pack(wanted.seq)
            self._keep(
                [bytes(it) for it in pieces_of(self._arena.image(wanted.seq & 1), _PIECE_BYTES)] + [record], wanted.seq
            )
        for follower in group.followers:
            self._expect(group, follower, 0)

    def tell(self, told: Told) -> None:
        """Rank 0 tells, before anything else of that commit."""
        group = self._group
        if group is None or group.far is None or group.rank != 0:
            return
        self._told += 1
        for follower in group.followers:
            group.far.wire.post(group.far.number, follower, frame_tag(0, COMMIT, self._told), told.pack())

    def _keep(self, copy: list[bytes], seq: int) -> None:
        self._copy = copy
        self._words.put(self._slot, w.COPY, seq)

    # On the wire's thread.

    def _expect(self, group: Group, follower: int, count: int) -> None:
        assert group.far is not None
        answer = partial(self._answer, group, follower, count)
        group.far.wire.expect_up_to(group.far.number, follower, frame_tag(0, ASKED, count), 8, answer)

    def _answer(self, group: Group, follower: int, count: int, asked: memoryview) -> None:
        self._expect(group, follower, count + 1)
        index = int.from_bytes(asked, "little")
        if index < len(self._copy):
            self._give(group, follower, index)

    def _give(self, group: Group, follower: int, index: int) -> None:
        assert group.far is not None
        piece = self._copy[index]
        for part, view in enumerate((piece, zlib.crc32(piece).to_bytes(4, "little"))):
            group.far.wire.post(group.far.number, follower, frame_tag(0, PIECE, 2 * index + part), memoryview(view))


@dataclass(frozen=True)
class _Commit:
    """All that is needed to make a commit again."""

    told: Told
    record: bytes
    sums: list[torch.Tensor] = field(default_factory=list)  # by segment
    pieces: Sequence[Range] = ()
    buffers: list[torch.Tensor] = field(default_factory=list)


class _Copy:
    """The copy of one commit, as far as it has come. It lies where the arena has that commit. The wire's thread alone
    writes it."""

    def __init__(self, arena: Arena, seq: int) -> None:
        self.seq = seq
        self.record = bytearray(Records.packed_bytes)
        self.pieces = [*pieces_of(arena.image(seq & 1), _PIECE_BYTES), memoryview(self.record)]
        self.missing = set(range(len(self.pieces)))
        self._tries: dict[int, int] = {}
        self._given_up = False

    def ask(self, far: Far, holder: int, notify: Callable[[], None]) -> None:
        """Ask for what is missing. `notify` when all is there, on the wire's thread."""
        asked, waiting = 0, deque(sorted(self.missing))

        def ask() -> None:
            nonlocal asked
            if not waiting:
                return
            index = waiting.popleft()
            piece, checksum = bytearray(self.pieces[index].nbytes), bytearray(4)
            wire = far.wire
            wire.expect(far.number, holder, frame_tag(0, PIECE, 2 * index), memoryview(piece), lambda: None)
            then = partial(come, index, piece, checksum)
            wire.expect(far.number, holder, frame_tag(0, PIECE, 2 * index + 1), memoryview(checksum), then)
            wire.post(far.number, holder, frame_tag(0, ASKED, asked), memoryview(index.to_bytes(8, "little")))
            asked += 1

        def come(index: int, piece: bytearray, checksum: bytearray) -> None:
            if self._given_up:
                return
            if zlib.crc32(piece).to_bytes(4, "little") == checksum:
                self.pieces[index][:] = piece
                self.missing.discard(index)
            else:
                self._tries[index] = self._tries.get(index, 0) + 1
                if self._tries[index] == _TRIES:
                    raise errors.ShoalError(f"piece {index} of the state came with a wrong checksum {_TRIES} times")
                waiting.append(index)
            ask()
            if not self.missing:
                notify()

        for _ in range(_ASKED):
            ask()

    def give_up(self, far: Far) -> None:
        """When this returns, nothing of it is written any more."""
        given_up = threading.Event()

        def give_up() -> None:
            self._given_up = True
            given_up.set()

        far.wire.ask(give_up)
        while not given_up.wait(NET_S):
            far.look()


class Follower:
    """From generation to generation, until its host has the state."""

    def __init__(self, arena: Arena, replica: Replica, words: Words, slot: int, narrow: torch.dtype | None) -> None:
        """`narrow`: see `Sums`."""
        self._arena, self._replica, self._words, self._slot, self._narrow = arena, replica, words, slot, narrow
        self._records = Records(words.record)
        self._copy: _Copy | None = None
        self._based = False  # a state is here from which what is behind can be made
        self._from = 0  # the tag of the commit that is copied
        self._newest = 0  # the tag of the newest one that is counted
        self._behind: deque[_Commit] = deque()  # to be made again
        self._unsure: _Commit | None = None  # all of it is here, and whether it is committed is not known
        self.live = False  # this host has the state
        self._sums = _Given(arena)
        whole = owned(arena.layout, 0, 1, 1)
        self._slice = Slice(arena, replica.optimizer, [], whole, self._sums)

    def follow(self, group: Following, cut: Cut, caught_up: Callable[[], None]) -> None:
        """Until all enter a newer generation; or Changed. `caught_up` is called when this host has the state."""
        assert group.far is not None
        far, rank_0 = group.far, group.slots[0]
        come: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._begin(group, partial(come.put, memoryview(b"")))
        seq, count = seq_of(group.newest), 0
        while True:
            receiving = None if not seq else _Receiving(far, cut, self._arena, self._narrow, seq + 1)
            count += 1
            far.wire.expect_up_to(far.number, rank_0, frame_tag(0, COMMIT, count), 1 << 16, come.put)
            body = memoryview(b"")
            while not body.nbytes:  # the copy is there
                self._make_up(come, caught_up)
                body = far.wait(rank_0, come)
            told = Told.unpack(body)
            commit = self._receive(far, rank_0, told, receiving)
            if self._holds_bytes() > _MOST_BYTES:
                self._await_copy(far, come)  # and the members this one, at their commit
                self._make_up(come, caught_up)
            if self.live:
                self._make(commit)
            else:
                self._unsure = commit
            fault_point("follow")
            planned = group.follow(told.step)
            self._committed(told.step)
            seq = seq_of(told.step)
            if planned:
                return

    def _holds_bytes(self) -> int:
        return sum(it.nbytes for commit in self._behind for it in commit.sums)

    def _await_copy(self, far: Far, come: queue.SimpleQueue[memoryview | None]) -> None:
        while self._copy is not None and self._copy.missing:
            far.wait(None, come)  # nobody tells of a commit before this one has come about

    def _begin(self, group: Following, notify: Callable[[], None]) -> None:
        """Find out what was committed, and get the rest of the copy."""
        if self._unsure is not None and self._unsure.told.step == group.newest:
            self._committed(group.newest)
        self._unsure = None
        if not self.live and self._newest not in (0, group.newest):
            # It has seen every done word of a commit that nobody else lives to know of: that does not count.
            assert group.far is not None
            self._forget()
            group.far.renew("a follower has counted what is not committed")
            raise Changed
        wanted = origin(group)
        if wanted is None or self.live or self._based:
            return
        if wanted.fresh or self._copy is None:
            self._behind.clear()
            self._copy, self._from, self._newest = _Copy(self._arena, wanted.seq), group.newest, group.newest
            self._words.commit = 0  # what lies here from an earlier life is overwritten, piece by piece
            self._words.put(self._slot, w.COPY, wanted.seq)
        if self._copy.missing:
            assert group.far is not None
            # Several followers ask different holders, where there are some.
            holder = wanted.holders[self._slot % len(wanted.holders)]
            group.far.wire.ask(partial(self._copy.ask, group.far, holder, notify))

    def _receive(self, far: Far, rank_0: int, told: Told, receiving: _Receiving | None) -> _Commit:
        """All of a commit that comes, in the order in which rank 0 sends it."""
        seq = seq_of(told.step)
        if told.kind == GIVEN:
            if not self.live:
                # It counts more than all that came before, and may lie over it: if it is not committed, begin again.
                if self._copy is not None:
                    self._copy.give_up(far)
                self._forget()
            far.take_checked(told.source, seq, STATE, self._arena.image(seq & 1))
        buffers = [torch.empty_like(places[0]) for places in self._arena.buffers]
        if told.kind == STEPPED and buffers:
            far.take(rank_0, seq, BUFFERS, [bytes_of(it) for it in buffers])
        record = bytearray(Records.packed_bytes)
        far.take_checked(rank_0, seq, RECORD, [memoryview(record)])
        if receiving is None:
            return _Commit(told, bytes(record), buffers=buffers)
        return _Commit(told, bytes(record), receiving.finish(told.sums), receiving.pieces, buffers)

    def _forget(self) -> None:
        self._behind.clear()
        self._copy, self._based, self._newest = None, False, 0
        self._words.commit = 0
        self._words.put(self._slot, w.COPY, 0)

    def _committed(self, step: int) -> None:
        commit, self._unsure = self._unsure, None
        self._newest = step
        if self.live:
            self._words.commit = step
        elif commit is not None:
            self._behind.append(commit)
            if commit.told.kind == GIVEN:
                self._is_based()

    def _is_based(self) -> None:
        self._based, self._copy = True, None
        self._words.put(self._slot, w.COPY, _NEEDS_NONE)

    def _make_up(self, come: queue.SimpleQueue[memoryview | None], caught_up: Callable[[], None]) -> None:
        """Make commits again, once the copy is there: some, or as many as there is time for."""
        if self._copy is not None and not self._copy.missing:
            self._records.unpack(self._copy.seq, self._copy.record)
            self._words.commit = self._from
            self._is_based()
        if self.live or not self._based:
            return
        made = 0
        while self._behind and (made < _REPLAYED or come.empty()):
            commit = self._behind.popleft()
            self._make(commit)
            self._words.commit = commit.told.step
            made += 1
        if not self._behind:
            self.live = True
            caught_up()

    def _make(self, commit: _Commit) -> None:
        """Write the state of a commit, from that of the one before, into the other buffer."""
        told, arena = commit.told, self._arena
        seq, parity = seq_of(told.step), seq_of(told.step) & 1
        self._records.unpack(seq, commit.record)
        if told.kind == GIVEN:
            return
        if torch.get_num_threads() != told.threads:  # where an optimizer adds up a tensor, bits depend on it
            torch.set_num_threads(told.threads)
        if told.kind == STEPPED:
            record = self._records.read(seq)
            self._replica.take_text(self._records.text(record.text_place, record.text_bytes))
            self._sums.set(commit.sums, told.present, commit.pieces)
            self._slice.plan(seq)
            scale = None if math.isnan(told.scale) else told.scale
            if scale is not None:
                self._slice.reduce()
            with self._replica.rates_times(told.rate):
                self._slice.step(seq, scale)
        else:
            self._slice.carry(seq)
        for places, moved in zip(arena.buffers, commit.buffers, strict=True):
            places[parity].copy_(moved if told.kind == STEPPED else places[1 - parity])
        arena.frozen_place[parity][0] = arena.frozen_place[1 - parity][0]


class _Receiving:
    """The sums of one step, as they come from those who add them."""

    def __init__(self, far: Far, cut: Cut, arena: Arena, narrow: torch.dtype | None, seq: int) -> None:
        self._far, self._seq, self.pieces = far, seq, cut.pieces
        self._come: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        layout = arena.layout
        self._sums = [torch.empty(it.numel, dtype=dtype_sent(it.dtype, narrow)) for it in layout.segments]
        self._slots: dict[int, int] = {}
        for chunk, piece in enumerate(cut.pieces):
            slot = self._slots[chunk] = cut.table.slot(chunk, cut.table.owner(chunk))
            view = bytes_of(self._sums[piece.segment][piece.lo : piece.hi])
            far.wire.expect(far.number, slot, frame_tag(seq, SUM, chunk), view, partial(self._come.put, chunk))

    def finish(self, which: Sent) -> list[torch.Tensor]:
        """Once it is known which were sent: wait for them. With some, the generation is over soon."""
        if which == "none":
            self._far.wire.forget(self._far.number, frame_tag(self._seq, SUM, 0), frame_tag(self._seq, SUM, -1))
        if which != "all":
            return []
        while self._slots:
            chunk = self._far.wait(next(iter(self._slots.values())), self._come)
            del self._slots[chunk]
        return self._sums


class _Given:
    """Stands for the exchange, of which everything is here already."""

    def __init__(self, arena: Arena) -> None:
        self._segments, self._tensors = arena.layout.segments, arena.layout.tensors
        self._sums: Sequence[torch.Tensor] = ()
        self._pieces: Sequence[Range] = ()
        self._present: npt.NDArray[np.uint8] = np.zeros(self._tensors, dtype=np.uint8)

    def set(self, sums: Sequence[torch.Tensor], present: bytes, pieces: Sequence[Range]) -> None:
        """`pieces`: in which the members have stepped it."""
        self._pieces = pieces
        self._sums = [it.to(segment.dtype) for it, segment in zip(sums, self._segments, strict=True)]
        self._present = np.unpackbits(np.frombuffer(present, dtype=np.uint8), count=self._tensors)

    def elsewhere(self) -> npt.NDArray[np.uint8]:
        return self._present

    def plan(self, runs: Sequence[Run]) -> None:
        pass

    def run(self) -> Iterator[Range]:
        return iter(self._pieces)

    def view(self, segment: int, lo: int, hi: int) -> torch.Tensor:
        return self._sums[segment][lo:hi]
