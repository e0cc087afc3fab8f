"""Tensors whose gradients go on their way to other hosts together, as soon as backward has made all of them.

Backward makes gradients about from the last tensor to the first. Small buckets are on their way sooner, large ones cost
fewer looks; which are best is tried out in the first steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.sync.layout import Layout, element_bytes
from shoal.sync.ranges import Range
from shoal.wording import counted

MOST = 64  # that fit into a word, a bit for each
CANDIDATES = (1, 8, 16, 32)
_STEPS = 6  # with each candidate, by two: the first of two still waits for what the one before has left on its way
_ALIKE = 1.02  # what takes no longer than that times the quickest is as quick


@dataclass(frozen=True)
class FarBuckets:
    tensors: tuple[tuple[int, ...], ...]  # of each bucket, in the order in which they are likely to be complete
    of: tuple[tuple[int, ...], ...]  # the bucket of each tensor; of one that is split those of its blocks of rows
    rows: dict[int, tuple[int, ...]]  # of a tensor that is split: where its blocks end

    @classmethod
    def cut(cls, layout: Layout, count: int, split: Collection[int] = ()) -> FarBuckets:
        """About so many, of as many bytes each as tensors allow. `split`: tensors that are made row by row."""
        plans = [(it, element_bytes(segment.dtype)) for segment in layout.segments for it in segment.tensors]
        each = sum(it.numel * size_bytes for it, size_bytes in plans) / count
        found: list[list[int]] = []
        rows: dict[int, tuple[int, ...]] = {}
        filled = each
        for index in reversed(range(len(plans))):
            tensor, size_bytes = plans[index][0], plans[index][0].numel * plans[index][1]
            most = min(tensor.shape[0], MOST // 2 // len(split)) if index in split else 1
            blocks = min(int(size_bytes // each), most)
            if blocks > 1:
                found += [[index] for _ in range(blocks)]
                rows[index] = tuple(tensor.shape[0] * (at + 1) // blocks for at in range(blocks))
                filled = each
                continue
            if filled >= each and len(found) < MOST:
                found.append([])
                filled = 0.0
            found[-1].append(index)
            filled += size_bytes
        of: dict[int, list[int]] = {}
        for bucket, tensors in enumerate(found):
            for index in tensors:
                of.setdefault(index, []).append(bucket)
        return cls(tuple(map(tuple, found)), tuple(tuple(of[index]) for index in range(len(plans))), rows)

    def missing(self, late: Collection[int]) -> list[set[int]]:
        """The tensors that each bucket waits for. One with a tensor that comes late is never complete early."""
        never = set(late)
        return [set() if never.intersection(tensors) else set(tensors) for tensors in self.tensors]

    def bits(self, layout: Layout, piece: Range) -> int:
        """Of the buckets that these elements belong to."""
        segment = layout.segments[piece.segment]
        found: set[int] = set()
        for at, it in enumerate(segment.tensors):
            lo, hi = max(piece.lo, it.offset) - it.offset, min(piece.hi, it.offset + it.numel) - it.offset
            if lo >= hi:
                continue
            buckets, ends = self.of[segment.first + at], self.rows.get(segment.first + at)
            if ends is None:
                found.update(buckets)
                continue
            row = it.numel // it.shape[0]
            starts = (0, *ends[:-1])
            found.update(
                bucket
                for bucket, start, end in zip(buckets, starts, ends, strict=True)
                if start * row < hi and lo < end * row
            )
        return sum(1 << bucket for bucket in found)


class Tuning:
    """Which candidate a step is made with: they are tried in turns, so that a machine that gets slower meanwhile is so
    for all of them, then the quickest is kept; of several that are as quick, the one with the fewest buckets."""

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
            return min(range(len(CANDIDATES)), key=lambda candidate: len(self.took_s[candidate]) // 2)
        took_s = [self.median_s(candidate) for candidate in range(len(CANDIDATES))]
        return next(at for at, one_s in enumerate(took_s) if one_s <= _ALIKE * min(took_s))

    def median_s(self, candidate: int) -> float:
        late_s = sorted(self.took_s[candidate][1::2])
        return late_s[len(late_s) // 2]

    def __str__(self) -> str:
        tried = ", ".join(f"{CANDIDATES[it]}: {self.median_s(it) * 1e3:.0f} ms" for it in range(len(CANDIDATES)))
        return f"gradients go to other hosts in {counted(CANDIDATES[self.next()], 'bucket')} (a step took with {tried})"
