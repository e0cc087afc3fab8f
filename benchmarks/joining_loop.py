"""What `shoal run` runs in `benchmarks.joining`: a model of the usual size, each committed step written down."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import shoal
from shoal.bench.bodies import Training
from shoal.bench.loops import material, optimizer
from shoal.metrics import EventLog


def main(worker: shoal.Worker) -> None:
    folder, model, kind, batch = sys.argv[1:]
    work = Training(model, batch=int(batch), optimizer=kind)
    made = material(work, 0)
    log = EventLog(Path(folder) / f"{worker.id}.jsonl")
    worker.attach(made.model, optimizer(work.optimizer, made.model.parameters()))
    for _ in worker.batches(TensorDataset(torch.zeros(96_000)), batch_size=work.batch, epochs=1_000_000):
        if worker.step(made.loss(made.model(made.inputs), made.targets)):
            log.write(time.time(), "step", step=worker.steps, group_size=worker.size, pid=os.getpid())
        if (Path(folder) / "end").exists():
            break


if __name__ == "__main__":
    shoal.run(main)
