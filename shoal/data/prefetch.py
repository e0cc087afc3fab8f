"""Batches on a device: copied there from pinned memory, the next one while the one before is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shoal.data.batches import Fetched, Loader
from shoal.data.ledger import Cursor

# Copied where the device computes: to have it done beside that takes the host longer than this takes the device.
_SMALL_BYTES = 1 << 20


class Prefetch(Loader):
    """A loader whose batches come on a device. With `ahead`, the batch after the one that `next` gives is read and its
    copy begun; a new split throws it away, as all that was read ahead. Streams are not read ahead: what `next` gives of
    them is what was committed before it."""

    def __init__(self, loader: Loader, device: torch.device, *, ahead: bool) -> None:
        self._loader, self._device = loader, device
        self._copies: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None  # whatever was begun last
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._beside = False  # that was on the stream of its own
        self._ahead = ahead and self._copies is not None and not loader.is_stream
        self._waiting: Fetched | None = None

    @property
    def is_stream(self) -> bool:
        return self._loader.is_stream

    def start(self, cursor: Cursor, rank: int, size: int) -> None:
        self._waiting = None
        self._loader.start(cursor, rank, size)

    def follow(self) -> None:
        self._loader.follow()

    def add(self, epoch: int, lo: int, hi: int) -> None:
        self._loader.add(epoch, lo, hi)

    @property
    def depth(self) -> int:
        return self._loader.depth

    @property
    def left(self) -> int:
        return self._loader.left

    def next(self) -> Fetched | None:
        fetched = self._waiting or self._fetch()
        if fetched is None:
            return None
        if self._beside and self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            _each(fetched.data, partial(_used_on, current))
        self._waiting = self._fetch() if self._ahead else None
        return fetched

    def close(self) -> None:
        self._waiting = None
        self._loader.close()

    def _fetch(self) -> Fetched | None:
        fetched = self._loader.next()
        if fetched is None:
            return None
        self._beside = self._copies is not None and _bytes(fetched.data) > _SMALL_BYTES
        if self._copies is None or self._copied is None or not self._beside:
            return replace(fetched, data=_each(fetched.data, self._to_device))
        with torch.cuda.stream(self._copies):
            data = _each(fetched.data, self._to_device)
            self._copied.record(self._copies)
        return replace(fetched, data=data)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=self._copies is not None)


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)  # its memory is not given away before this stream has used it
    return tensor


def _bytes(data: Any) -> int:
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()  # which sparse ones have, too
        return tensor

    _each(data, count)
    return total


def _each(data: Any, do: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor replaced."""
    if isinstance(data, torch.Tensor):
        return do(data)
    if isinstance(data, dict):
        return {key: _each(value, do) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a namedtuple
        return type(data)(*(_each(value, do) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_each(value, do) for value in data)
    return data
