"""One step as a worker attempts it: the batches that its script is given, and what has come of them so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from shoal import errors
from shoal.data.batches import Fetched
from shoal.data.ledger import GlobalBatch
from shoal.sync.record import Record
from shoal.sync.sync import Sync
from shoal.train.reading import Reading
from shoal.train.schedules import Schedule, Situation, last_change

_LOSS = ""  # no metric has that name


@dataclass(frozen=True)
class Policy:
    """What `Worker.attach` was told about steps."""

    loss: Literal["mean", "sum"] = "mean"
    clip_norm: float | None = None
    nan: Literal["stop", "skip"] = "stop"
    schedule: Schedule | None = None

    def factor(self, record: Record, size: int, step: int, epoch: int) -> float:
        """What the learning rate is multiplied with in a step of `size` workers that follows the record."""
        if self.schedule is None:
            return 1.0
        changed_at, before = last_change(record, size, step)
        return self.schedule.factor(Situation(step, epoch, size, before, step - changed_at))


class Batch:
    """One micro-batch of this worker's share. Unpacks as the data set's samples do: `x, y = batch`."""

    def __init__(self, fetched: Fetched, step: int) -> None:
        self.data = fetched.data
        self.ids = fetched.ids
        self.epoch = fetched.batch.epoch
        self.step = step
        self.fetched = fetched

    @property
    def x(self) -> Any:
        return self.data[0] if isinstance(self.data, (list, tuple)) else self.data

    @property
    def y(self) -> Any:
        return self.data[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return self.fetched.hi - self.fetched.lo


@dataclass
class Attempt:
    """What this worker has done so far for one step: micro-batches of its share."""

    pass_index: int
    batch: GlobalBatch
    lo: int
    hi: int
    began_s: float
    first: int | None = None  # a digest of the step's first sample, of a stream
    settings: str = ""  # of the pass
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    counted: int = 0  # samples that gave a loss
    loss: float = 0.0  # summed over them
    metrics: dict[str, float] = field(default_factory=dict)  # likewise

    def learn(
        self,
        sync: Sync,
        policy: Policy,
        loss: torch.Tensor,
        metrics: Mapping[str, float | torch.Tensor],
        samples: int,
        *,
        last: bool = True,
    ) -> None:
        """Add one micro-batch: its gradients, weighted so that all workers' together are the global batch's, its loss
        and its metrics. `last`: of this worker's in the step."""
        share, batch = self.hi - self.lo, self.batch.hi - self.batch.lo
        is_mean = policy.loss == "mean"
        reading = Reading({**metrics, _LOSS: loss})
        if last:
            sync.closing()
        sync.backward(loss, sync.weight(samples, share, batch) if is_mean else 1.0)
        values = reading.values()
        self.add(samples, values.pop(_LOSS) * (samples if is_mean else 1), values)

    def add(self, samples: int, loss: float, metrics: Mapping[str, Any]) -> None:
        """`loss` is summed over the samples, `metrics` are means."""
        self.counted += samples
        self.loss += loss
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value) * samples

    def __str__(self) -> str:
        """As a line of the statement; by hand, because it is written at every step."""
        batch, rest = self.batch, self.settings
        if self.first is not None:
            rest = f', "first sample of the step": {self.first}{rest}'
        return f'{{"pass": {self.pass_index}, "epoch": {batch.epoch}, "from": {batch.lo}, "to": {batch.hi}{rest}}}'


def not_finite(loss: str, epoch: int, lo: int, hi: int) -> errors.LossNotFinite:
    """`loss`: whose and what it is. [lo, hi): where its samples are in the order."""
    return errors.LossNotFinite(
        f"the loss of {loss} (epoch {epoch}, positions {lo} to {hi}): lower the learning rate, or attach with "
        "nan='skip'"
    )
