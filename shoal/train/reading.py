"""Numbers that are computed on a device, on their way to the host."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch


class _Places(threading.local):
    """Where numbers arrive: pinned memory, so that the copy is one more thing for the device to do and not a wait for
    it. Kept, because making them takes longer than the copy; each thread reads one step at a time."""

    def __init__(self) -> None:
        self.pinned: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.event: torch.cuda.Event | None = None

    def take(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        if (index, dtype) not in self.pinned:
            self.pinned[index, dtype] = torch.empty((), dtype=dtype, pin_memory=True)
        return self.pinned[index, dtype]


_places = _Places()


class Reading:
    """Begun before the backward pass and read after it was set going: the device is then computing gradients while the
    host makes the step and sets the next forward pass going, as in a loop that reads nothing at all. Read it before the
    next one is begun."""

    def __init__(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        self._numbers = dict(numbers)
        self._event: torch.cuda.Event | None = None
        for index, (name, number) in enumerate(numbers.items()):
            if isinstance(number, torch.Tensor) and number.device.type == "cuda" and number.numel() == 1:
                place = _places.take(index, number.dtype)
                alone = number.detach()
                self._numbers[name] = place.copy_(alone.reshape(()) if alone.dim() else alone, non_blocking=True)
                if _places.event is None:
                    _places.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event = _places.event
        if self._event is not None:
            self._event.record()

    def values(self) -> dict[str, float]:
        """Waits until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return {name: _number(it) for name, it in self._numbers.items()}


def _number(value: float | torch.Tensor) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)
