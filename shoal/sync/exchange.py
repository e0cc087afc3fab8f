"""One worker's slice of the gradients, summed over hosts: reduced over this host's lanes chunk by chunk, and each chunk
exchanged as soon as it is reduced."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shoal import errors
from shoal.metrics import fault_point
from shoal.sync import words as w
from shoal.sync.arena import Lane
from shoal.sync.far_buckets import CANDIDATES, FarBuckets
from shoal.sync.group import Group
from shoal.sync.layout import Layout
from shoal.sync.ranges import Range, Run, owned
from shoal.sync.sums import Sums, Table
from shoal.sync.words import MAX_MARKS_BYTES, fence, tag

# Elements of a chunk, about: large enough that Python's share of the time stays small, small enough that hosts add one
# while the next is on its way.
CHUNK = 256 * 1024

Sent: TypeAlias = Literal["all", "none", "some"]  # of the sums of a step


@dataclass(frozen=True)
class Cut:
    """How the model is cut into chunks, the same on every host."""

    table: Table
    pieces: tuple[Range, ...]  # of each chunk

    @classmethod
    def of(cls, layout: Layout, hosts: tuple[tuple[int, ...], ...]) -> Cut:
        each = len(hosts) * max(len(slots) for slots in hosts)
        parts = each * max(1, math.ceil(layout.elements / CHUNK / each))
        pieces = [(part, piece) for part in range(parts) for piece in owned(layout, part, part + 1, parts)]
        return cls(Table(hosts, parts, tuple(part for part, _ in pieces)), tuple(piece for _, piece in pieces))


class Exchange:
    """In one generation. A step begins, its gradients are given bucket by bucket while backward makes them, as far as
    all workers of this host have them, and the rest when everybody is ready."""

    def __init__(
        self,
        layout: Layout,
        group: Group,
        narrow: torch.dtype | None,
        lanes: Sequence[Lane],
        split: Collection[int] = (),
    ) -> None:
        """`narrow`: see `Sums`. `lanes`: of this host's members. `split`: tensors whose gradients are made row by
        row."""
        self._split = split
        assert group.far is not None
        self._layout, self._group, self._lanes = layout, group, lanes
        self._words, self._far, self._tensors = group.words, group.far, layout.tensors
        self._marks_bytes = -(-layout.tensors // 8)
        if self._marks_bytes > MAX_MARKS_BYTES:
            raise errors.ModelUnusable(
                f"the model has {layout.tensors:,} tensors, of which {8 * MAX_MARKS_BYTES:,} at most can be trained on "
                "several hosts: train it on one, or merge some"
            )
        cut = Cut.of(layout, group.places.members)
        table, mine = cut.table, cut.table.parts_of(group.slot)
        self.ranges = owned(layout, mine.start, mine.stop, table.parts)
        # Where the sums are made. A worker that is alone on its host has its part of them in its lane already, which is
        # written to by the next backward only; with others, they would read there what is summed.
        self._buffers = {
            it.segment: (it.lo, lanes[0].flat[it.segment][it.lo : it.hi])
            if len(lanes) == 1
            else (it.lo, torch.empty(it.hi - it.lo, dtype=layout.segments[it.segment].dtype))
            for it in self.ranges
        }
        self._pieces = {chunk: cut.pieces[chunk] for chunk in table.chunks_of(group.slot)}
        self._values = {chunk: self.view(it.segment, it.lo, it.hi) for chunk, it in self._pieces.items()}
        self._sums = Sums(group.far, table, group.slot, narrow, group.followers)
        self._far_members = [slot for slot in group.slots if slot in group.far.slots]
        self._marks = b""
        self._told = b""
        self._elsewhere: npt.NDArray[np.uint8] = np.zeros(layout.tensors, dtype=np.uint8)
        self._work: dict[int, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        self._cuts: dict[int, tuple[FarBuckets, dict[int, int]]] = {}
        self._seq = 0
        self.choice = 0
        self._missing: list[set[int]] = []
        self._written = 0
        self._left: dict[int, int] = {}  # chunks that are not given yet, and the bits of the buckets they wait for
        self.spoiled: int | None = None  # a tensor whose gradient grew after its bucket was on its way

    # While backward runs.

    def begin(self, seq: int, late: Collection[int]) -> None:
        """Of the step towards commit `seq`, which others may have begun. `late`: tensors whose gradients are not known
        to be complete before backward has ended."""
        if seq == self._seq:
            return
        self._seq, step = seq, tag(self._group.generation.number, seq)
        self.choice = self._words.buckets(step)
        if self.choice not in self._cuts:
            buckets = FarBuckets.cut(self._layout, CANDIDATES[self.choice], self._split)
            bits = {chunk: buckets.bits(self._layout, piece) for chunk, piece in self._pieces.items()}
            order = sorted(bits, key=lambda chunk: (bits[chunk].bit_length(), -chunk))
            self._cuts[self.choice] = buckets, {chunk: bits[chunk] for chunk in order}
        self._buckets, waits = self._cuts[self.choice]
        self._left, self._written, self.spoiled = dict(waits), 0, None
        self._missing = self._buckets.missing(late)
        self._words.put(self._group.slot, w.WRITTEN, 0)
        self._words.put(self._group.slot, w.WRITTEN_OF, step)
        self._sums.begin(seq, self._values)

    def made(self, index: int) -> list[int]:
        """Backward has made the gradient of this tensor. The buckets that are complete with it: call `announce` when
        their `tensors` lie in the lane."""
        buckets = self._buckets.of[index]
        if any(self._written >> bucket & 1 for bucket in buckets):
            self.spoiled = index
            return []
        return [bucket for bucket in buckets if self._completes(bucket, index)]

    def _completes(self, bucket: int, index: int) -> bool:
        missing = self._missing[bucket]
        if index not in missing:
            return False
        missing.discard(index)
        return not missing

    def tensors(self, buckets: Sequence[int]) -> list[int]:
        return [index for bucket in buckets for index in self._buckets.tensors[bucket]]

    def rows(self, index: int) -> tuple[int, ...]:
        """Where blocks of rows end that are to be made one after the other: `made_rows` tells of each. Nothing: it is
        made as a whole."""
        return self._buckets.rows.get(index, ())

    def made_rows(self, index: int, block: int) -> None:
        bucket = self._buckets.of[index][block]
        if self._completes(bucket, index):
            self.announce([bucket])

    def announce(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self._written |= 1 << bucket
        self._words.put(self._group.slot, w.WRITTEN, self._written)
        self.advance()

    def advance(self) -> None:
        """Give what all workers of this host have written."""
        words, step = self._words, tag(self._group.generation.number, self._seq)
        there = -1
        for slot in self._group.near:
            there &= words.get(slot, w.WRITTEN) if words.get(slot, w.WRITTEN_OF) == step else 0
        fence()
        chunks = [chunk for chunk, bits in self._left.items() if bits & there == bits]
        for chunk in chunks:
            del self._left[chunk]
            if len(self._lanes) > 1:
                piece = self._pieces[chunk]
                _add(self._values[chunk], [lane.flat[piece.segment][piece.lo : piece.hi] for lane in self._lanes])
                self._sums.give([chunk])
        if chunks and len(self._lanes) == 1:
            self._sums.give(chunks)

    # Around the ready words.

    def offer(self, present: npt.NDArray[np.uint8], *, trains: bool) -> None:
        """Say which tensors have a gradient here, and whether there are any at all. Before the ready word."""
        marks = np.packbits(present).tobytes()
        if marks != self._told:
            self._told = marks
            self._far.tell_marks(marks)
        step = tag(self._group.generation.number, self._seq)
        self._words.put(self._group.slot, w.GAVE, step if trains else 0)

    def elsewhere(self) -> npt.NDArray[np.uint8]:
        """Which tensors have a gradient on other hosts. After the ready words."""
        marks = b"".join(self._words.marks(slot, self._marks_bytes) for slot in self._far_members)
        if marks != self._marks:
            self._marks = marks
            rows = np.frombuffer(marks, dtype=np.uint8).reshape(len(self._far_members), -1)
            self._elsewhere = np.unpackbits(np.bitwise_or.reduce(rows, axis=0), count=self._tensors)
        return self._elsewhere

    def view(self, segment: int, lo: int, hi: int) -> torch.Tensor:
        """These elements of what was reduced."""
        start, buffer = self._buffers[segment]
        return buffer[lo - start : hi - start]

    def plan(self, runs: Sequence[Run]) -> None:
        """Of what each chunk is made up, until the next plan."""
        self._work = {}
        for chunk, piece in self._pieces.items():
            sources = self._work[chunk] = []
            for run in runs:
                lo, hi = max(run.lo, piece.lo), min(run.hi, piece.hi)
                if run.segment == piece.segment and lo < hi and run.stepped:
                    parts = [self._lanes[lane].flat[run.segment][lo:hi] for lane in run.lanes]
                    sources.append((self.view(run.segment, lo, hi), parts))

    def run(self) -> Iterator[Range]:
        """Give the chunks that are left, and take all sums, as they come."""
        left = list(self._left)
        for at, chunk in enumerate(left):
            if at == len(left) // 2:
                fault_point("reduce")
            for target, parts in self._work[chunk]:
                _add(target, parts)
            self._sums.give([chunk])
        if not left:
            fault_point("reduce")
        self._left = {}
        for chunk in self._sums.take():
            yield self._pieces[chunk]

    def give_up(self) -> Sent:
        """The step does not come. "some" have given of it and others have not, so that what they gave is in the way of
        whatever comes next: the generation must begin again."""
        step = tag(self._group.generation.number, self._seq)
        gave = {self._words.get(slot, w.GAVE) == step for slot in self._group.slots}
        if gave == {True}:
            self._sums.give(list(self._left))  # whatever they hold
            self._left = {}
            for _ in self._sums.take():
                pass
            return "all"
        if gave == {False}:
            self._sums.abandon()
            return "none"
        return "some"


def _add(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if not parts:
        target.zero_()
    elif len(parts) == 1:
        if parts[0].data_ptr() != target.data_ptr():
            target.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
