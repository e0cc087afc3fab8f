"""Committed steps for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.train.step import StepReport


class TensorBoard:
    """`worker.attach(model, optimizer, on_step=shoal.TensorBoard("runs/a"))`

    Every worker makes one; the worker that was rank 0 of a step writes it, so each is written once whoever comes and
    goes. Of a worker that is killed, at most the last seconds are missing. `every`: only each so-many-th step.
    """

    def __init__(self, log_dir: Path | str, every: int = 1, flush_s: float = 5.0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise errors.SettingsContradict(
                "shoal.TensorBoard needs the tensorboard package: pip install 'shoal[tensorboard]'"
            ) from None
        if every < 1:
            raise errors.SettingsContradict(f"TensorBoard(every={every}): it writes every step at most, give 1 or more")
        self._make: Any = SummaryWriter
        self._log_dir, self._every, self._flush_s = str(log_dir), every, flush_s
        self._writer: Any = None

    def __call__(self, report: StepReport) -> None:
        if report.rank != 0 or report.step % self._every:
            return
        if self._writer is None:  # only now: a worker that is never rank 0 leaves no file
            self._writer = self._make(self._log_dir, flush_secs=self._flush_s)
        values = {
            "loss": report.loss,
            **report.metrics,
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "shoal/workers": report.workers,
            "shoal/step_seconds": report.duration_s,
        }
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, report.step)
