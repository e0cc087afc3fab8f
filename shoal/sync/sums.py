"""Sums over hosts, chunk by chunk.

Each chunk has an owner among the hosts, which adds the hosts' parts and sends the sum back. So every host has the same
bits, and sends 2·(h − 1)/h of the bytes whatever its number of workers. On each host a chunk is the work of the worker
that steps it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from shoal.sync.hosts import PART, SUM, Far, frame_tag

_SERIAL = 32_000  # elements


@dataclass(frozen=True)
class Table:
    """Who has which chunk to do. `hosts`: the slots of each host's workers. The model is cut into `parts`, of which
    each worker of a host has a range; `chunks`: the part that each chunk is of, in order."""

    hosts: tuple[tuple[int, ...], ...]
    parts: int
    chunks: tuple[int, ...]

    def owner(self, chunk: int) -> int:
        """The host that adds it."""
        return self.chunks[chunk] % len(self.hosts)

    def slot(self, chunk: int, host: int) -> int:
        """Of the worker there whose work it is."""
        slots = self.hosts[host]
        return slots[self.chunks[chunk] * len(slots) // self.parts]

    def parts_of(self, slot: int) -> range:
        """The parts of a worker: a range of them, so that it steps one slice."""
        slots = self.hosts[self.host_of(slot)]
        place, n = slots.index(slot), len(slots)
        return range(-(-place * self.parts // n), -(-(place + 1) * self.parts // n))

    def chunks_of(self, slot: int) -> list[int]:
        mine = self.parts_of(slot)
        return [chunk for chunk, part in enumerate(self.chunks) if part in mine]

    @cached_property
    def _hosts(self) -> dict[int, int]:
        return {slot: host for host, slots in enumerate(self.hosts) for slot in slots}

    def host_of(self, slot: int) -> int:
        return self._hosts[slot]


class _Step:
    """What there is of one step. The wire's thread alone writes it, once it has begun."""

    def __init__(self, number: int, values: Mapping[int, torch.Tensor]) -> None:
        self.number, self.values = number, values
        self.parts: dict[int, dict[int, torch.Tensor]] = {}  # of the chunks that this host adds, by host
        # Chunks whose sums are there. None: look whether the wait is over.
        self.summed: queue.SimpleQueue[int | None] = queue.SimpleQueue()


class Sums:
    """One worker's part of the sums of a generation, one step after the other. Parts are added as they come, on the
    wire's thread: whoever waits for a sum does not wait for what this worker computes meanwhile.

    `narrow`: the dtype that floats are sent in, if that is a narrower one. What is lost by it is added to what is sent
    next (error feedback), by who gives a part and by who gives the sum.
    """

    def __init__(
        self, far: Far, table: Table, slot: int, narrow: torch.dtype | None = None, followers: Sequence[int] = ()
    ) -> None:
        """`followers`: slots of those who get every sum."""
        self._far, self._table, self._narrow, self._followers = far, table, narrow, followers
        self._host = table.host_of(slot)
        self._others = [host for host in range(len(table.hosts)) if host != self._host]
        self._scratch: dict[tuple[int, int], torch.Tensor] = {}  # what comes from a host for a chunk
        self._packed: dict[tuple[int, int], torch.Tensor] = {}  # what is sent, by chunk and kind, where it is narrowed
        self._lost: dict[tuple[int, int], torch.Tensor] = {}  # likewise, what narrowing has taken away so far
        self._step = _Step(0, {})
        self._left: set[int] = set()  # chunks whose sums were not taken

    def begin(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        """Expect the step's chunks of this worker. `values` is where this host's parts will lie when they are given,
        and where the sums are once they are taken."""
        assert not self._left, "the step before has not been taken to its end"
        self._step = _Step(step, values)
        self._left = set(values)
        self._far.wire.ask(partial(self._begin, self._step))

    def give(self, chunks: Sequence[int]) -> None:
        """This host's parts of these chunks are there."""
        self._far.wire.ask(partial(self._give, self._step, chunks))

    def take(self) -> Iterator[int]:
        """The chunks whose sums are there, as they come, until all are. Changed, when the generation is over."""
        while self._left:
            chunk = next(iter(self._left))
            owner = self._table.owner(chunk)
            host = owner if owner != self._host else next(iter(self._others), None)
            slot = None if host is None else self._table.slot(chunk, host)
            chunk = self._far.wait(slot, self._step.summed)
            self._left.discard(chunk)
            yield chunk

    def abandon(self) -> None:
        """Of the step nothing was given, by anybody: it does not come."""
        self._left = set()
        number = self._step.number
        self._far.wire.forget(self._far.number, frame_tag(number, PART, 0), frame_tag(number, SUM, -1))

    # On the wire's thread.

    def _begin(self, it: _Step) -> None:
        for chunk, part in it.values.items():
            if self._table.owner(chunk) == self._host:
                it.parts[chunk] = {}
                for host in self._others:
                    into = self._scratch_for(chunk, host, part)
                    self._expect(it, chunk, host, PART, into, partial(self._add, it, chunk, host, into))
            else:
                # No place of its own is needed: the sum is sent only when this host's part has arrived.
                into = part if self._wide(part) else self._scratch_for(chunk, self._host, part)
                self._expect(it, chunk, self._table.owner(chunk), SUM, into, partial(self._keep, it, chunk, into))

    def _give(self, step: _Step, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            part = step.values[chunk]
            if chunk in step.parts:
                self._add(step, chunk, self._host, part)
            else:
                sent = part if self._wide(part) else self._pack(chunk, PART, part)
                self._post(step, chunk, self._table.slot(chunk, self._table.owner(chunk)), PART, sent)

    def _keep(self, step: _Step, chunk: int, total: torch.Tensor) -> None:
        values = step.values[chunk]
        if total is not values:
            torch._foreach_copy_(_pieces(values), _pieces(total))
        step.summed.put(chunk)

    def _add(self, step: _Step, chunk: int, host: int, part: torch.Tensor) -> None:
        parts = step.parts[chunk]
        parts[host] = part
        if len(parts) < len(self._table.hosts):
            return
        total = step.values[chunk]
        for other in self._others:
            torch._foreach_add_(_pieces(total), _pieces(parts[other]))
        sent = total
        if not self._wide(total):
            sent = self._pack(chunk, SUM, total)
            torch._foreach_copy_(_pieces(total), _pieces(sent))  # as the others will have it
        for other in self._others:
            self._post(step, chunk, self._table.slot(chunk, other), SUM, sent)
        for slot in self._followers:
            self._post(step, chunk, slot, SUM, sent)
        step.summed.put(chunk)

    def _wide(self, part: torch.Tensor) -> bool:
        """Whether it is sent as it is."""
        return dtype_sent(part.dtype, self._narrow) == part.dtype

    def _pack(self, chunk: int, kind: int, part: torch.Tensor) -> torch.Tensor:
        """The part in the narrow dtype, with what was lost before; what is lost now is kept."""
        assert self._narrow is not None
        key = chunk, kind
        if key not in self._packed:
            self._packed[key] = torch.empty_like(part, dtype=self._narrow)
            self._lost[key] = torch.zeros_like(part)
        packed = self._packed[key]
        lost, narrow = _pieces(self._lost[key]), _pieces(packed)
        torch._foreach_add_(lost, _pieces(part))
        torch._foreach_copy_(narrow, lost)
        torch._foreach_sub_(lost, narrow)
        return packed

    def _scratch_for(self, chunk: int, host: int, like: torch.Tensor) -> torch.Tensor:
        if (chunk, host) not in self._scratch:
            self._scratch[chunk, host] = torch.empty_like(like, dtype=dtype_sent(like.dtype, self._narrow))
        return self._scratch[chunk, host]

    def _expect(
        self, step: _Step, chunk: int, host: int, kind: int, into: torch.Tensor, then: Callable[[], None]
    ) -> None:
        slot, tag = self._table.slot(chunk, host), frame_tag(step.number, kind, chunk)
        self._far.wire.expect(self._far.number, slot, tag, bytes_of(into), then)

    def _post(self, step: _Step, chunk: int, slot: int, kind: int, data: torch.Tensor) -> None:
        self._far.wire.post(self._far.number, slot, frame_tag(step.number, kind, chunk), bytes_of(data))


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a size that torch does not divide between threads: those are the training's."""
    return torch.unsafe_split(tensor, _SERIAL)  # which is `split`, not by way of Python


def dtype_sent(dtype: torch.dtype, narrow: torch.dtype | None) -> torch.dtype:
    return dtype if narrow is None or dtype not in (torch.float32, torch.float64) else narrow


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
