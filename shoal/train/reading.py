"""Numbers that are computed on a device, on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Reading:
    """Begun before the backward pass and read after it was set going: the device is then computing gradients while the
    host makes the step and sets the next forward pass going, as in a loop that reads nothing at all."""

    def __init__(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        self._numbers = numbers
        devices = {it.device for it in numbers.values() if isinstance(it, torch.Tensor) and it.device.type == "cuda"}
        self._event: torch.cuda.Event | None = None
        if not devices:
            return
        self._there = [name for name, it in numbers.items() if isinstance(it, torch.Tensor) and it.device in devices]
        tensors = [torch.as_tensor(numbers[name]).detach().reshape(()) for name in self._there]
        self._host = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True)
        stacked = torch.stack([it.to(devices.copy().pop(), torch.float64) for it in tensors])
        self._host.copy_(stacked, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def values(self) -> dict[str, float]:
        """Waits until the device has computed them."""
        if self._event is None:
            return {name: _number(it) for name, it in self._numbers.items()}
        self._event.synchronize()
        read = dict(zip(self._there, self._host.tolist(), strict=True))
        return {name: read[name] if name in read else _number(it) for name, it in self._numbers.items()}


def _number(value: float | torch.Tensor) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)
