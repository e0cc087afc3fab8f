"""One worker's slice of the gradients, summed over hosts: reduced over this host's lanes chunk by chunk, and each chunk
exchanged as soon as it is reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal import errors
from shoal.metrics import fault_point
from shoal.sync.arena import Lane
from shoal.sync.group import Group
from shoal.sync.layout import Layout
from shoal.sync.ranges import Run, owned
from shoal.sync.sums import Sums, Table
from shoal.sync.words import MAX_MARKS_BYTES

# Elements of a chunk, about: large enough that Python's share of the time stays small, small enough that hosts add one
# while the next is on its way.
CHUNK = 256 * 1024


class Exchange:
    def __init__(self, layout: Layout, group: Group, narrow: torch.dtype | None) -> None:
        """`narrow`: see `Sums`."""
        assert group.far is not None
        self._words, self._far, self._tensors = group.words, group.far, layout.tensors
        self._marks_bytes = -(-layout.tensors // 8)
        if self._marks_bytes > MAX_MARKS_BYTES:
            raise errors.ModelUnusable(
                f"the model has {layout.tensors:,} tensors, of which {8 * MAX_MARKS_BYTES:,} at most can be trained on "
                "several hosts: train it on one, or merge some"
            )
        hosts = group.places.members
        each = len(hosts) * max(len(slots) for slots in hosts)
        parts = each * max(1, math.ceil(layout.elements / CHUNK / each))
        pieces = [(part, piece) for part in range(parts) for piece in owned(layout, part, part + 1, parts)]
        table = Table(hosts, parts, tuple(part for part, _ in pieces))
        mine = table.parts_of(group.slot)
        self.ranges = owned(layout, mine.start, mine.stop, parts)
        self._buffers = {
            it.segment: (it.lo, torch.empty(it.hi - it.lo, dtype=layout.segments[it.segment].dtype))
            for it in self.ranges
        }
        self._pieces = {chunk: pieces[chunk][1] for chunk in table.chunks_of(group.slot)}
        self._values = {chunk: self.view(it.segment, it.lo, it.hi) for chunk, it in self._pieces.items()}
        self._sums = Sums(group.far, table, group.slot, narrow)
        self._far_members = [slot for slot in group.slots if slot in group.far.slots]
        self._marks = b""
        self._told = b""
        self._elsewhere: npt.NDArray[np.uint8] = np.zeros(layout.tensors, dtype=np.uint8)
        self._work: list[tuple[int, list[tuple[torch.Tensor, list[torch.Tensor]]]]] = []

    def tell(self, present: npt.NDArray[np.uint8]) -> None:
        """Say which tensors have a gradient here. Before the ready word."""
        marks = np.packbits(present).tobytes()
        if marks != self._told:
            self._told = marks
            self._far.tell_marks(marks)

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

    def plan(self, runs: Sequence[Run], lanes: Sequence[Lane]) -> None:
        """Of what each chunk is made up, until the next plan."""
        self._work = []
        for chunk, piece in self._pieces.items():
            sources = []
            for run in runs:
                lo, hi = max(run.lo, piece.lo), min(run.hi, piece.hi)
                if run.segment == piece.segment and lo < hi and run.stepped:
                    parts = [lanes[lane].flat[run.segment][lo:hi] for lane in run.lanes]
                    sources.append((self.view(run.segment, lo, hi), parts))
            self._work.append((chunk, sources))

    def run(self, seq: int) -> None:
        """Reduce and exchange the chunks of commit `seq`."""
        self._sums.begin(seq, self._values)
        for at, (chunk, sources) in enumerate(self._work):
            if at == len(self._work) // 2:
                fault_point("reduce")
            for target, parts in sources:
                _add(target, parts)
            self._sums.give(chunk)
        for _ in self._sums.take():
            pass


def _add(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if not parts:
        target.zero_()
    elif len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
