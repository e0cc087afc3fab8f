"""Tensors whose gradients go on their way to other hosts together, as soon as backward has made all of them.

Backward makes gradients about from the last tensor to the first. Small buckets are on their way sooner, large ones cost
fewer looks; which are best is tried out in the first steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.sync.layout import Layout, element_bytes
from shoal.sync.ranges import Range

MOST = 64  # that fit into a word, a bit for each
CANDIDATES = (1, 8, 24, 64)
_STEPS = 4  # with each candidate; the first of them is not counted


@dataclass(frozen=True)
class FarBuckets:
    tensors: tuple[tuple[int, ...], ...]  # of each bucket, in the order in which they are likely to be complete
    of: tuple[int, ...]  # the bucket of each tensor

    @classmethod
    def cut(cls, layout: Layout, count: int) -> FarBuckets:
        """About so many, of as many bytes each as tensors allow."""
        sizes = [it.numel * element_bytes(segment.dtype) for segment in layout.segments for it in segment.tensors]
        each = sum(sizes) / count
        found: list[list[int]] = []
        filled = each
        for index in reversed(range(len(sizes))):
            if filled >= each and len(found) < count:
                found.append([])
                filled = 0.0
            found[-1].append(index)
            filled += sizes[index]
        of = {index: bucket for bucket, tensors in enumerate(found) for index in tensors}
        return cls(tuple(tuple(it) for it in found), tuple(of[index] for index in range(len(sizes))))

    def missing(self, late: Collection[int]) -> list[set[int]]:
        """The tensors that each bucket waits for. One with a tensor that comes late is never complete early."""
        never = set(late)
        return [set() if never.intersection(tensors) else set(tensors) for tensors in self.tensors]

    def bits(self, layout: Layout, piece: Range) -> int:
        """Of the buckets that these elements belong to."""
        segment = layout.segments[piece.segment]
        inside = [
            segment.first + at
            for at, it in enumerate(segment.tensors)
            if it.offset < piece.hi and piece.lo < it.offset + it.numel
        ]
        return sum(1 << bucket for bucket in {self.of[index] for index in inside})


class Tuning:
    """Which candidate a step is made with: each is tried, then the quickest is kept."""

    def __init__(self) -> None:
        self.took_s: list[list[float]] = [[] for _ in CANDIDATES]

    def note(self, candidate: int, took_s: float) -> bool:
        """What a step took. Whether this was the last that had to be known."""
        if self.settled:
            return False
        self.took_s[candidate].append(took_s)
        return self.settled

    @property
    def settled(self) -> bool:
        return all(len(one) >= _STEPS for one in self.took_s)

    def next(self) -> int:
        if not self.settled:
            return next(index for index, one in enumerate(self.took_s) if len(one) < _STEPS)
        return min(range(len(CANDIDATES)), key=self.median_s)

    def median_s(self, candidate: int) -> float:
        counted = sorted(self.took_s[candidate][1:])
        return counted[len(counted) // 2]

    def __str__(self) -> str:
        tried = ", ".join(f"{CANDIDATES[it]}: {self.median_s(it) * 1e3:.0f} ms" for it in range(len(CANDIDATES)))
        return f"gradients go to other hosts in {CANDIDATES[self.next()]} buckets (a step took with {tried})"
