"""Sums over hosts, chunk by chunk.

Each chunk has an owner among the hosts, which adds the hosts' parts in their order and sends the sum back. So every
host has the same bits, and sends 2·(h − 1)/h of the bytes whatever its number of workers. On each host a chunk is the
work of the worker that steps it.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from shoal.errors import Changed
from shoal.sync.wire import Wire

_PART, _SUM = 0, 1  # kinds of frames: to the owner, and back


@dataclass(frozen=True)
class Table:
    """Who has which chunk to do. `hosts`: the slots of each host's workers."""

    hosts: tuple[tuple[int, ...], ...]
    chunks: int

    def owner(self, chunk: int) -> int:
        """The host that adds it."""
        return chunk % len(self.hosts)

    def slot(self, chunk: int, host: int) -> int:
        """Of the worker there whose work it is."""
        slots = self.hosts[host]
        return slots[chunk * len(slots) // self.chunks]

    def chunks_of(self, slot: int) -> range:
        """The chunks of a worker: a range of them, so that it steps one slice."""
        slots = next(slots for slots in self.hosts if slot in slots)
        place, n = slots.index(slot), len(slots)
        return range(-(-place * self.chunks // n), -(-(place + 1) * self.chunks // n))

    def host_of(self, slot: int) -> int:
        return next(host for host, slots in enumerate(self.hosts) if slot in slots)

    def others(self, slot: int) -> frozenset[int]:
        """The slots that a worker exchanges chunks with."""
        mine = self.host_of(slot)
        far = [host for host in range(len(self.hosts)) if host != mine]
        return frozenset(self.slot(chunk, host) for chunk in self.chunks_of(slot) for host in far)


@dataclass
class _Owned:
    """A chunk that this host adds."""

    total: torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # by host


class Sums:
    """One worker's part of the sums of a generation, one step after the other. The wire must be connected."""

    def __init__(self, wire: Wire, generation: int, table: Table, slot: int) -> None:
        self._wire, self._generation, self._table, self._slot = wire, generation, table, slot
        self._host = table.host_of(slot)
        self._far = [host for host in range(len(table.hosts)) if host != self._host]
        self._scratch: dict[tuple[int, int], torch.Tensor] = {}  # what comes from a host for a chunk
        # What has come of the step: chunk, host, and the host's part or the sum. None: nothing more may come.
        self._arrived: queue.SimpleQueue[tuple[int, int, torch.Tensor] | None] = queue.SimpleQueue()
        self._owned: dict[int, _Owned] = {}
        self._awaited: dict[int, torch.Tensor] = {}
        self._step = 0

    def begin(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:
        """Expect the step's chunks of this worker; `totals` is where their sums go. Before anybody can send one: two
        steps' frames have other tags, and what comes early waits."""
        assert not self._owned, "the step before has not been taken to its end"
        assert not self._awaited, "the step before has not been taken to its end"
        self._step = step
        for chunk, total in totals.items():
            if self._table.owner(chunk) == self._host:
                self._owned[chunk] = _Owned(total)
                for host in self._far:
                    self._expect(chunk, host, _PART, self._scratch_for(chunk, host, total))
            else:
                self._awaited[chunk] = total
                self._expect(chunk, self._table.owner(chunk), _SUM, total)

    def give(self, chunk: int, part: torch.Tensor) -> None:
        """This host's part of a chunk. It must stay as it is until the sums are taken."""
        owner = self._table.owner(chunk)
        if owner != self._host:
            self._post(chunk, owner, _PART, part)
            return
        self._arrived.put((chunk, self._host, part))

    def take(self) -> Iterator[int]:
        """The chunks whose sums are there, as they come, until all are. Changed, when `release` was called."""
        while self._owned or self._awaited:
            arrived = self._arrived.get()
            if arrived is None:
                raise Changed
            chunk, host, part = arrived
            if self._awaited.pop(chunk, None) is not None:
                yield chunk
                continue
            owned = self._owned[chunk]
            owned.parts[host] = part
            if len(owned.parts) < len(self._table.hosts):
                continue
            self._add(owned)
            for far in self._far:
                self._post(chunk, far, _SUM, owned.total)
            del self._owned[chunk]
            yield chunk

    def release(self) -> None:
        """End the wait of `take`, from any thread: what it waits for may never come."""
        self._arrived.put(None)

    def _add(self, owned: _Owned) -> None:
        first, *others = (owned.parts[host] for host in range(len(self._table.hosts)))
        if not others:
            owned.total.copy_(first)
            return
        torch.add(first, others[0], out=owned.total)
        for other in others[1:]:
            owned.total.add_(other)

    def _scratch_for(self, chunk: int, host: int, like: torch.Tensor) -> torch.Tensor:
        if (chunk, host) not in self._scratch:
            self._scratch[chunk, host] = torch.empty_like(like)
        return self._scratch[chunk, host]

    def _expect(self, chunk: int, host: int, kind: int, into: torch.Tensor) -> None:
        slot, tag = self._table.slot(chunk, host), self._tag(chunk, kind)
        arrives = partial(self._arrived.put, (chunk, host, into))
        self._wire.expect(self._generation, slot, tag, _bytes_of(into), arrives)

    def _post(self, chunk: int, host: int, kind: int, data: torch.Tensor) -> None:
        self._wire.post(self._generation, self._table.slot(chunk, host), self._tag(chunk, kind), _bytes_of(data))

    def _tag(self, chunk: int, kind: int) -> int:
        return (self._step & 0xFFFFFFFF) << 32 | chunk << 1 | kind


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
