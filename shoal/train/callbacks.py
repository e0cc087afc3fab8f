"""What a script wants done after steps, epochs and changes of workers: its schedulers, and its own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from shoal.sync.replica import Scheduler
from shoal.train.reconfigure import Reconfiguration
from shoal.train.step import StepReport

OnStep = Callable[[StepReport], None]
OnEpoch = Callable[[int], None]
OnReconfigure = Callable[[Reconfiguration], None]


@dataclass(frozen=True)
class Callbacks:
    optimizer: Optimizer
    schedulers: Sequence[Scheduler]
    epoch_schedulers: Sequence[Scheduler]
    on_step: OnStep | None
    on_epoch: OnEpoch | None
    on_reconfigure: OnReconfigure | None

    def step_schedulers(self, loss: float) -> None:
        self._step(self.schedulers, loss)

    def step_epoch_schedulers(self, loss: float) -> None:
        self._step(self.epoch_schedulers, loss)

    def _step(self, schedulers: Sequence[Scheduler], loss: float) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it
        for scheduler in schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
