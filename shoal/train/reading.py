"""Numbers that are computed on a device, on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Reading:
    """Begun before the backward pass and read after it was set going: the device is then computing gradients while the
    host makes the step and sets the next forward pass going, as in a loop that reads nothing at all."""

    def __init__(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        self._numbers = dict(numbers)
        self._event: torch.cuda.Event | None = None
        for name, number in numbers.items():
            if isinstance(number, torch.Tensor) and number.device.type == "cuda":
                number = number.detach()
                # Pinned, so that the copy is one more thing for the device to do and not a wait for it.
                self._numbers[name] = torch.empty_like(number, device="cpu", pin_memory=True).copy_(
                    number, non_blocking=True
                )
                self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def values(self) -> dict[str, float]:
        """Waits until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return {name: _number(it) for name, it in self._numbers.items()}


def _number(value: float | torch.Tensor) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)
