"""Operations on tensors between workers that are connected each with each. All of it runs on the wire's thread.

A sum is made in pieces: each rank adds one piece, in the order of the ranks, and gives it to the others. So all have
the same bits, and send 2·(n − 1)/n of the bytes. A large one is made in chunks that stay in the cache between their
arrival and their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shoal.sync.hosts import frame_tag
from shoal.sync.sums import bytes_of
from shoal.sync.wire import Wire

PART, SUM, NOTE = range(3)  # kinds of frames
_CHUNK = 256 * 1024  # elements of a piece of a sum, at most
_SERIAL = 32_000  # elements that torch does not divide between threads, which are the training's
_HALVES = (torch.float16, torch.bfloat16)
Done = Callable[[torch.Tensor], None]

REDUCES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda total, part: total.add_(part),
    "average": lambda total, part: total.add_(part),
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "product": lambda total, part: total.mul_(part),
}


class Mesh:
    """The workers of generation `number`, by rank. `op` numbers operations, alike on all of them."""

    def __init__(self, wire: Wire, number: int, slots: Sequence[int], rank: int) -> None:
        self._wire, self._number, self._slots, self.rank = wire, number, slots, rank
        self.size = len(slots)
        self.others = [other for other in range(self.size) if other != rank]

    def post_note(self, rank: int, count: int, note: bytes) -> None:
        self._wire.post(self._number, self._slots[rank], frame_tag(count, NOTE, 0), memoryview(note))

    def expect_note(self, rank: int, count: int, most_bytes: int, then: Callable[[memoryview], None]) -> None:
        self._wire.expect_up_to(self._number, self._slots[rank], frame_tag(count, NOTE, 0), most_bytes, then)

    def _give(self, tag: int, pieces: Sequence[torch.Tensor]) -> None:
        """To each other rank its piece. They must stay as they are until all have them."""
        for rank in self.others:
            if pieces[rank].numel():
                self._wire.post(self._number, self._slots[rank], tag, bytes_of(pieces[rank].view(-1)))

    def _take(self, tag: int, into: Sequence[torch.Tensor], then: Callable[[], None]) -> None:
        """From each other rank a piece; `then` when all are there. Of an empty one both ends know that it does not
        come."""
        awaited = [rank for rank in self.others if into[rank].numel()]
        if not awaited:
            then()
        came = _after(len(awaited), then)
        for rank in awaited:
            self._wire.expect(self._number, self._slots[rank], tag, bytes_of(into[rank].view(-1)), came)

    # Each takes a contiguous tensor that is its own from then on, and gives the result to `done`.

    def allreduce(self, op: int, values: torch.Tensor, reduce: str, factor: float, done: Done) -> None:
        chunks = torch.split(values.view(-1), _CHUNK * self.size)
        ended = _after(2 * len(chunks), lambda: done(values))
        for index, chunk in enumerate(chunks):
            pieces = chunk.tensor_split(self.size)
            # In place: a sum is sent only when this rank's part has arrived.
            self._take(frame_tag(op, SUM, index), pieces, ended)
            self._reduce(
                frame_tag(op, PART, index), pieces, reduce, factor,
                partial(self._reduced, frame_tag(op, SUM, index), pieces[self.rank], ended),
            )  # fmt: skip

    def _reduced(self, tag: int, mine: torch.Tensor, ended: Callable[[], None], total: torch.Tensor) -> None:
        self._give(tag, [total] * self.size)
        copy(mine, total)
        ended()

    def reducescatter(self, op: int, values: torch.Tensor, reduce: str, factor: float, done: Done) -> None:
        self._reduce(frame_tag(op, PART, 0), values.tensor_split(self.size), reduce, factor, done)

    def _reduce(self, tag: int, pieces: Sequence[torch.Tensor], reduce: str, factor: float, done: Done) -> None:
        parts = [torch.empty_like(pieces[self.rank]) for _ in pieces]
        parts[self.rank] = pieces[self.rank]
        self._take(tag, parts, lambda: done(_fold(parts, reduce, factor)))
        self._give(tag, pieces)

    def broadcast(self, op: int, values: torch.Tensor, root: int, done: Done) -> None:
        if self.rank == root:
            self._give(frame_tag(op, PART, 0), [values] * self.size)
            result = torch.empty_like(values)
            copy(result, values)
            done(result)
            return
        nothing = values.new_empty(0)
        into = [values if rank == root else nothing for rank in range(self.size)]
        self._take(frame_tag(op, PART, 0), into, lambda: done(values))

    def allgather(self, op: int, values: torch.Tensor, rows: Sequence[int], done: Done) -> None:
        self._exchange(op, [values] * self.size, values.shape[1:], rows, done)

    def alltoall(self, op: int, values: torch.Tensor, splits: Sequence[int], rows: Sequence[int], done: Done) -> None:
        self._exchange(op, torch.split(values, list(splits)), values.shape[1:], rows, done)

    def _exchange(
        self, op: int, pieces: Sequence[torch.Tensor], shape: torch.Size, rows: Sequence[int], done: Done
    ) -> None:
        """`rows`: how many come from each rank."""
        result = pieces[0].new_empty((sum(rows), *shape))
        into = torch.split(result, list(rows))
        copy(into[self.rank], pieces[self.rank])
        self._take(frame_tag(op, PART, 0), into, lambda: done(result))
        self._give(frame_tag(op, PART, 0), pieces)


def _after(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """To be called so many times; `then` with the last."""

    def came() -> None:
        nonlocal count
        count -= 1
        if not count:
            then()

    return came


def copy(into: torch.Tensor, of: torch.Tensor) -> None:
    """Of contiguous tensors that are alike, on this thread alone."""
    if of.numel():
        bytes_of(into.view(-1))[:] = bytes_of(of.view(-1))


def _fold(parts: Sequence[torch.Tensor], reduce: str, factor: float) -> torch.Tensor:
    """A piece at a time, narrow floats in single precision."""
    total = torch.empty_like(parts[0])
    wide = torch.float32 if total.dtype in _HALVES else total.dtype
    flat, flats = total.view(-1), [part.view(-1) for part in parts]
    for lo in range(0, flat.numel(), _SERIAL):
        first, *others = (it[lo : lo + _SERIAL] for it in flats)
        piece = first.to(wide, copy=True)
        for other in others:
            REDUCES[reduce](piece, other.to(wide))
        if reduce == "average":
            piece.div_(len(parts), rounding_mode=None if piece.is_floating_point() else "trunc")
        flat[lo : lo + _SERIAL] = piece if factor == 1.0 else scaled(piece, factor)
    return total


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Times the factor; whole numbers are cut off."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.double()
    return (wide * factor).to(tensor.dtype)
