"""Batches on a device: copied there from pinned memory, the next one while the one before is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shoal.data.batches import Fetched, Loader
from shoal.data.ledger import Cursor


class Prefetch(Loader):
    """A loader whose batches come on a device. With `ahead`, the batch after the one that `next` gives is read and its
    copy begun; a new split throws it away, as all that was read ahead. Streams are not read ahead: what `next` gives of
    them is what was committed before it."""

    def __init__(self, loader: Loader, device: torch.device, *, ahead: bool) -> None:
        self._loader, self._device = loader, device
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead = ahead and self._copies is not None and not loader.is_stream
        self._waiting: tuple[Fetched | None, torch.cuda.Event | None] | None = None

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
        fetched, copied = self._waiting if self._waiting is not None else self._fetch()
        self._waiting = self._fetch() if self._ahead and fetched is not None else None
        if copied is not None and fetched is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            _each(fetched.data, partial(_used_on, current))
        return fetched

    def close(self) -> None:
        self._waiting = None
        self._loader.close()

    def _fetch(self) -> tuple[Fetched | None, torch.cuda.Event | None]:
        fetched = self._loader.next()
        if fetched is None:
            return None, None
        if self._copies is None:
            return replace(fetched, data=_each(fetched.data, lambda tensor: tensor.to(self._device))), None
        with torch.cuda.stream(self._copies):
            data = _each(fetched.data, lambda tensor: tensor.to(self._device, non_blocking=True))
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)
        return replace(fetched, data=data), copied


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)  # its memory is not given away before this stream has used it
    return tensor


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
