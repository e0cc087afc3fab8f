"""How the elements of a model are cut between workers, and what of them is stepped as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.sync.layout import Layout, Segment, aligned


@dataclass(frozen=True)
class Range:
    """Elements `lo` to `hi` of a segment."""

    segment: int
    lo: int
    hi: int


def owned(layout: Layout, lo: int, hi: int, of: int) -> list[Range]:
    """Parts `lo` to `hi` of `of` equal parts of all elements, cut where the unit allows: what one worker reduces and
    steps."""
    total = layout.elements
    ranges = []
    at = 0
    for index, segment in enumerate(layout.segments):
        first = _cut(segment, total * lo // of - at, lo)
        last = _cut(segment, total * hi // of - at, hi) if hi < of else segment.numel
        if segment.unit == "model":
            first, last = (0, segment.numel) if lo == 0 < hi else (0, 0)
        if first < last:
            ranges.append(Range(index, first, last))
        at += segment.numel
    return ranges


def _cut(segment: Segment, at: int, part: int) -> int:
    if part == 0 or at <= 0:
        return 0
    if at >= segment.numel:
        return segment.numel
    if segment.unit == "element":
        return min(aligned(at, segment.dtype), segment.numel)
    starts = [tensor.offset for tensor in segment.tensors]
    return starts[int(np.searchsorted(starts, at, side="right")) - 1]


class Run:
    """Elements of a segment that are stepped as one."""

    def __init__(
        self, range_: Range, tensors: range, lanes: tuple[int, ...], born: bool, elsewhere: bool = False
    ) -> None:
        self.segment = range_.segment
        self.lo, self.hi = range_.lo, range_.hi
        self.tensors = tensors  # indices among all tensors
        self.lanes = lanes  # of this host that have a gradient
        self.stepped = bool(lanes) or elsewhere  # if not, the elements are only carried over
        self.born = born
