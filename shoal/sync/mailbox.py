"""Mailboxes: what each worker of a host has published last, for its neighbors to read when they come to it.

A worker writes its own mailbox, round after round, into two places in turn. Nothing here waits, and whoever dies leaves
words that nobody has to mend.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import torch

from shoal.sync.arena import tensor_at
from shoal.sync.layout import element_bytes, pages
from shoal.sync.memory import HostMemory, map_bytes
from shoal.sync.words import fence

PLACES = 2
_PUBLISHED, _RESTS = 0, 1  # words
_HEAD_BYTES = pages(16)


def life_of(worker_id: str) -> int:
    """Tells a slot's worker from those that had the slot before; never 0."""
    return zlib.crc32(worker_id.encode()) | 1


class Mailbox:
    """That of one slot, in the memory of its host. `like`: flat tensors, of which each place holds as many."""

    def __init__(self, memory: HostMemory, slot: int, like: Sequence[torch.Tensor]) -> None:
        offsets, place_bytes = [], 0
        for tensor in like:
            offsets.append(place_bytes)
            place_bytes += pages(tensor.numel() * element_bytes(tensor.dtype))
        size_bytes = _HEAD_BYTES + PLACES * place_bytes
        fd = memory.open(f"mailbox-{slot}", size_bytes)
        mapping = map_bytes(fd, size_bytes, writable=True)
        os.close(fd)
        self._words = memoryview(mapping)[:_HEAD_BYTES].cast("Q")
        self._places = [
            [
                tensor_at(mapping, _HEAD_BYTES + at * place_bytes + offset, tensor.dtype, tensor.numel())
                for offset, tensor in zip(offsets, like, strict=True)
            ]
            for at in range(PLACES)
        ]

    def place(self, round_: int) -> list[torch.Tensor]:
        return self._places[round_ % PLACES]

    # The owner's.

    def reset(self) -> None:
        """Nothing is published, nobody is waited for."""
        self._words[_PUBLISHED] = self._words[_RESTS] = 0
        fence()

    def publish(self, life: int, round_: int) -> None:
        """The place of this round is written. Whoever sees this sees it whole."""
        fence()
        self._words[_RESTS] = 0
        self._words[_PUBLISHED] = life << 32 | round_ + 1

    def rest(self) -> None:
        """No round comes for a while: nobody is to wait for one."""
        self._words[_RESTS] = 1

    # The neighbors'.

    def published(self, life: int) -> int:
        """The newest round of this life; -1 if there is none."""
        word = self._words[_PUBLISHED]
        fence()
        return (word & 0xFFFFFFFF) - 1 if word >> 32 == life else -1

    @property
    def rests(self) -> bool:
        return bool(self._words[_RESTS])
