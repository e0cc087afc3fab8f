"""Gradients in buckets: a few flat tensors that are summed over all ranks while the backward still runs.

Buckets hold parameters from the last to the first, about the order in which gradients come. Every rank begins their
sums in the same order, whichever gradients it has: what is missing is zero, and whether anybody had it is summed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

H = TypeVar("H")  # a sum that is under way

_BUCKET_BYTES = 25 << 20
# The first one is small, so that the exchange begins early.
_FIRST_BYTES = 1 << 20
_ALIGN_BYTES = 64


@dataclass
class _Bucket:
    flat: torch.Tensor
    members: list[int]
    views: list[torch.Tensor]
    waiting: set[int] = field(default_factory=set)  # parameters whose gradients have not come


class Buckets(Generic[H]):
    """`begin_sum` begins the sum of a flat tensor over all ranks, in place."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        begin_sum: Callable[[torch.Tensor], H],
        bucket_bytes: int = _BUCKET_BYTES,
        first_bytes: int = _FIRST_BYTES,
    ) -> None:
        self._parameters, self._begin_sum = parameters, begin_sum
        self._buckets = [_make(parameters, cut) for cut in _cut(parameters, bucket_bytes, first_bytes)]
        self._home = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._had = torch.zeros(len(parameters), device=parameters[0].device)
        self.reset()

    def __len__(self) -> int:
        return len(self._buckets)

    def reset(self) -> None:
        """A step begins. Sums of the one before have ended."""
        self._begun: list[H] = []
        self._mine = [0.0] * len(self._parameters)
        for bucket in self._buckets:
            bucket.waiting = set(bucket.members)

    def came(self, index: int) -> None:
        """The last micro-batch's gradient of this parameter is there."""
        bucket = self._home[index]
        bucket.waiting.discard(index)
        while len(self._begun) < len(self._buckets) and not self._buckets[len(self._begun)].waiting:
            self._begin_next()

    def finish(self) -> list[H]:
        """No more gradients come: begin what is left. All sums of the step, which are as many on every rank."""
        while len(self._begun) < len(self._buckets):
            self._begin_next()
        if len(self._begun) == len(self._buckets):
            self._had.copy_(torch.tensor(self._mine))
            self._begun.append(self._begin_sum(self._had))
        return self._begun

    def take(self) -> None:
        """The sums have ended: they are the parameters' gradients. A parameter for which no rank had any has none."""
        had = self._had.tolist()
        for bucket in self._buckets:
            for index, view in zip(bucket.members, bucket.views, strict=True):
                self._parameters[index].grad = view if had[index] else None

    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._begun)]
        views, gradients, missing = [], [], []
        for index, view in zip(bucket.members, bucket.views, strict=True):
            gradient = self._parameters[index].grad
            if gradient is None:
                missing.append(view)
                continue
            self._mine[index] = 1.0
            views.append(view)
            gradients.append(gradient if gradient.layout == torch.strided else gradient.to_dense())
            self._parameters[index].grad = None  # its memory is free again
        with torch.no_grad():
            if missing:
                torch._foreach_zero_(missing)
            if views:
                torch._foreach_copy_(views, gradients)
        self._begun.append(self._begin_sum(bucket.flat))


def _cut(parameters: Sequence[torch.Tensor], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Indices of each bucket, from the last parameter to the first; one dtype each."""
    cuts: list[list[int]] = []
    open_: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in range(len(parameters) - 1, -1, -1):
        parameter = parameters[index]
        members, filled = open_.get(parameter.dtype, ([], 0))
        members.append(index)
        filled += _padded(parameter) * parameter.element_size()
        open_[parameter.dtype] = (members, filled)
        if filled >= (bucket_bytes if cuts else first_bytes):
            cuts.append(members)
            del open_[parameter.dtype]
    return cuts + [members for members, _ in open_.values()]


def _make(parameters: Sequence[torch.Tensor], members: list[int]) -> _Bucket:
    first = parameters[members[0]]
    flat = torch.zeros(sum(_padded(parameters[it]) for it in members), dtype=first.dtype, device=first.device)
    views, at = [], 0
    for index in members:
        parameter = parameters[index]
        piece = flat[at : at + parameter.numel()]
        # In the parameter's own order of dimensions: an optimizer is slow where the two differ.
        dense = any(parameter.is_contiguous(memory_format=it) for it in _formats(parameter))
        views.append(piece.as_strided(parameter.size(), parameter.stride()) if dense else piece.view(parameter.shape))
        at += _padded(parameter)
    return _Bucket(flat, members, views)


def _formats(parameter: torch.Tensor) -> list[torch.memory_format]:
    more = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(parameter.dim(), [])
    return [torch.contiguous_format, *more]


def _padded(parameter: torch.Tensor) -> int:
    """Elements with those up to the next aligned place."""
    each = max(1, _ALIGN_BYTES // parameter.element_size())
    return -(-parameter.numel() // each) * each
