"""One small training, twice: as a script for shoal, and as a plain loop over the same global batches to compare
with."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import shoal
from shoal.data.ledger import Cursor, Pass, advance, take

SAMPLES, FEATURES, CLASSES = 480, 16, 5


@dataclass(frozen=True)
class Case:
    out: str
    optimizer: str = "adamw"
    dtype: str = "float64"
    epochs: int = 6
    global_batch: int = 50  # does not divide the data: the last step of an epoch is ragged
    loader_workers: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    batchnorm: bool = False
    width: int = 24  # of the hidden layer
    scheduler: bool = False
    loss: str = "mean"
    stream: bool = False  # the data can only be iterated over
    replicated: str = ""  # the device of a replica for each worker; none: the host's model
    gate: str = ""  # the path of a `Gate` before each step

    def args(self) -> list[str]:
        return [json.dumps(asdict(self))]


class Gate:
    """How far a training may go: however late a test looks, the job has not run past what the test waits for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._step = 0  # as far as this side knows

    def open(self, step: int) -> None:
        """For the test: steps up to this one may be made."""
        draft = self.path.with_name(self.path.name + ".draft")
        draft.write_text(str(step))
        os.replace(draft, self.path)

    def hold(self, worker: shoal.Worker) -> None:
        """For the script, before each step. A change of workers is let through, and with it one step at most: it has
        to come about, and a job that is stopped has to end."""
        while worker.steps >= self._step and worker._seat.notice.newest <= worker.generation:
            self._step = int(self.path.read_text()) if self.path.exists() else 0
            if worker.steps >= self._step:
                time.sleep(0.002)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, dampening=0.0),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),  # not elementwise: looks at rows and columns
}


class Slow(Dataset[Any]):
    """Samples read one by one, as most data sets are."""

    def __init__(self, tensors: TensorDataset) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Any:
        return self._tensors[index]


class Stream(IterableDataset[Any]):
    def __init__(self, tensors: TensorDataset) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[Any]:
        return (self._tensors[index] for index in range(len(self._tensors)))


def data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=getattr(torch, case.dtype))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, case.width), nn.Tanh(), nn.Linear(case.width, CLASSES)]
    if case.batchnorm:
        layers.insert(1, nn.BatchNorm1d(case.width))
    return nn.Sequential(*layers).to(getattr(torch, case.dtype))


def optimizer(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[case.optimizer](net.parameters())


def schedulers(case: Case, stepped: torch.optim.Optimizer) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(stepped, gamma=0.99)] if case.scheduler else []


def loss_of(case: Case, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction=case.loss)


@functools.lru_cache(maxsize=4)
def reference(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state and the losses of one process that knows nothing of workers."""
    torch.set_num_threads(1)  # the model is small, and the cores are somebody's
    tensors, net = data(case), model(case)
    stepped = optimizer(case, net)
    schedule = schedulers(case, stepped)
    pass_ = Pass(0, SAMPLES, case.epochs, 0, not case.stream, False, case.global_batch, None, case.accumulate)
    cursor, losses = Cursor(), []
    while (batch := take(pass_, cursor, 1)) is not None:
        ids = torch.from_numpy(np.array(pass_.order(batch.epoch)[batch.lo : batch.hi]))
        inputs, targets = tensors[ids]
        stepped.zero_grad()
        loss = loss_of(case, net(inputs), targets)
        loss.backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip_norm)
        stepped.step()
        for scheduler in schedule:
            scheduler.step()
        losses.append(loss.item() / (len(ids) if case.loss == "sum" else 1))
        cursor = advance(cursor, batch)
    return net.state_dict(), losses


def main(worker: shoal.Worker) -> None:
    case = Case(**json.loads(sys.argv[1]))
    out = Path(case.out)
    net = model(case)
    if case.replicated:
        net = shoal.SyncBatchNorm.convert(net).to(worker.device)  # as one process has it, where it has any
    stepped = optimizer(case, net)
    losses: dict[int, float] = {}
    worker.attach(
        net,
        stepped,
        shoal.Replicated() if case.replicated else None,
        loss=case.loss,
        clip_norm=case.clip_norm,
        accumulate=case.accumulate,
        schedulers=schedulers(case, stepped),
        on_step=lambda report: losses.update({report.step: report.loss}),
    )
    tensors: Dataset[Any] = data(case)
    if case.stream:
        tensors = Stream(data(case))
    elif case.loader_workers:
        tensors = Slow(data(case))
    gate = Gate(Path(case.gate))
    for batch in worker.batches(
        tensors,
        global_batch=case.global_batch,
        epochs=case.epochs,
        num_workers=case.loader_workers,
        device=worker.device if case.replicated else None,
    ):
        if case.gate:
            gate.hold(worker)
        worker.step(loss_of(case, net(batch.x), batch.y))
    if case.replicated and worker.rank < 0:
        return  # it came after the last step, and has not seen the state that is on the others' devices
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    torch.save({"state": state, "losses": losses}, out / f"{worker.id}.pt")


def results(case: Case) -> dict[str, Any]:
    return {path.stem: torch.load(path) for path in sorted(Path(case.out).glob("*.pt"))}


if __name__ == "__main__":
    shoal.run(main)
