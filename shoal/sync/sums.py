"""Sums over hosts, chunk by chunk.

Each chunk has an owner among the hosts, which adds the hosts' parts and sends the sum back. So every host has the same
bits, and sends 2·(h − 1)/h of the bytes whatever its number of workers. On each host a chunk is the work of the worker
that steps it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from shoal.sync.hosts import PART, SUM, Far, frame_tag


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


@dataclass
class _Owned:
    """A chunk that this host adds."""

    values: torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # by host


class Sums:
    """One worker's part of the sums of a generation, one step after the other.

    `narrow`: the dtype that floats are sent in, if that is a narrower one. What is lost by it is added to what is sent
    next (error feedback), by who gives a part and by who gives the sum.
    """

    def __init__(self, far: Far, table: Table, slot: int, narrow: torch.dtype | None = None) -> None:
        self._far, self._table, self._narrow = far, table, narrow
        self._host = table.host_of(slot)
        self._others = [host for host in range(len(table.hosts)) if host != self._host]
        self._scratch: dict[tuple[int, int], torch.Tensor] = {}  # what comes from a host for a chunk
        self._packed: dict[tuple[int, int], torch.Tensor] = {}  # what is sent, by chunk and kind, where it is narrowed
        self._lost: dict[tuple[int, int], torch.Tensor] = {}  # likewise, what narrowing has taken away so far
        # What has come of the step: chunk, host, and the host's part or the sum.
        self._arrived: queue.SimpleQueue[tuple[int, int, torch.Tensor] | None] = queue.SimpleQueue()
        self._owned: dict[int, _Owned] = {}
        self._awaited: dict[int, torch.Tensor] = {}
        self._step = 0

    def begin(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        """Expect the step's chunks of this worker. `values` is where this host's parts will lie when they are given,
        and where the sums are once they are taken."""
        assert not self._owned, "the step before has not been taken to its end"
        assert not self._awaited, "the step before has not been taken to its end"
        self._step = step
        for chunk, part in values.items():
            if self._table.owner(chunk) == self._host:
                self._owned[chunk] = _Owned(part)
                for host in self._others:
                    self._expect(chunk, host, PART, self._scratch_for(chunk, host, part))
            else:
                self._awaited[chunk] = part
                # No place of its own is needed: the sum is sent only when this host's part has arrived.
                into = part if self._wide(part) else self._scratch_for(chunk, self._host, part)
                self._expect(chunk, self._table.owner(chunk), SUM, into)

    def give(self, chunk: int) -> None:
        """This host's part of a chunk is there."""
        if chunk in self._owned:
            self._arrived.put((chunk, self._host, self._owned[chunk].values))
        else:
            part = self._awaited[chunk]
            self._post(
                chunk, self._table.owner(chunk), PART, part if self._wide(part) else self._pack(chunk, PART, part)
            )

    def take(self) -> Iterator[int]:
        """The chunks whose sums are there, as they come, until all are. Changed, when the generation is over. Which of
        them `poll` has seen is not told."""
        while self._owned or self._awaited:
            chunk = next(iter(self._awaited or self._owned))
            waited = self._table.owner(chunk) if chunk in self._awaited else self._missing(chunk)
            arrived = self._far.wait(self._table.slot(chunk, waited), self._arrived)
            if self._handle(*arrived):
                yield arrived[0]

    def poll(self) -> None:
        """Add what has come, and wait for nothing."""
        while not self._arrived.empty():
            if (arrived := self._arrived.get()) is not None:
                self._handle(*arrived)

    def _handle(self, chunk: int, host: int, part: torch.Tensor) -> bool:
        """Whether the chunk's sum is there now."""
        if (awaited := self._awaited.pop(chunk, None)) is not None:
            if part is not awaited:
                awaited.copy_(part)
            return True
        owned = self._owned[chunk]
        owned.parts[host] = part
        if len(owned.parts) < len(self._table.hosts):
            return False
        self._add(chunk, owned)
        del self._owned[chunk]
        return True

    def abandon(self) -> None:
        """Of the step nothing was given, by anybody: it does not come."""
        self._owned, self._awaited = {}, {}
        self._far.wire.forget(self._far.number, frame_tag(self._step, PART, 0), frame_tag(self._step, SUM, -1))

    def _missing(self, chunk: int) -> int:
        there = self._owned[chunk].parts
        return next((host for host in self._others if host not in there), self._others[0])

    def _add(self, chunk: int, owned: _Owned) -> None:
        total = owned.values
        for host in self._others:
            total.add_(owned.parts[host])
        sent = total
        if not self._wide(total):
            sent = self._pack(chunk, SUM, total)
            total.copy_(sent)  # as the others will have it
        for host in self._others:
            self._post(chunk, host, SUM, sent)

    def _wide(self, part: torch.Tensor) -> bool:
        """Whether it is sent as it is."""
        return self._narrow is None or part.dtype not in (torch.float32, torch.float64)

    def _pack(self, chunk: int, kind: int, part: torch.Tensor) -> torch.Tensor:
        """The part in the narrow dtype, with what was lost before; what is lost now is kept."""
        assert self._narrow is not None
        key = chunk, kind
        if key not in self._packed:
            self._packed[key] = torch.empty_like(part, dtype=self._narrow)
            self._lost[key] = torch.zeros_like(part)
        lost, packed = self._lost[key], self._packed[key]
        lost.add_(part)
        packed.copy_(lost)
        lost.sub_(packed)
        return packed

    def _scratch_for(self, chunk: int, host: int, like: torch.Tensor) -> torch.Tensor:
        if (chunk, host) not in self._scratch:
            dtype = like.dtype if self._wide(like) else self._narrow
            self._scratch[chunk, host] = torch.empty_like(like, dtype=dtype)
        return self._scratch[chunk, host]

    def _expect(self, chunk: int, host: int, kind: int, into: torch.Tensor) -> None:
        slot = self._table.slot(chunk, host)
        arrives = partial(self._arrived.put, (chunk, host, into))
        self._far.wire.expect(self._far.number, slot, self._tag(chunk, kind), bytes_of(into), arrives)

    def _post(self, chunk: int, host: int, kind: int, data: torch.Tensor) -> None:
        self._far.wire.post(self._far.number, self._table.slot(chunk, host), self._tag(chunk, kind), bytes_of(data))

    def _tag(self, chunk: int, kind: int) -> int:
        return frame_tag(self._step, kind, chunk)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
