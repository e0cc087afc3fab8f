"""What `shoal run` runs in `benchmarks.recovery`: the tiny model, each committed step written down."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import shoal
from benchmarks import torchrun_loop
from shoal.bench.bodies import Training
from shoal.bench.loops import material, optimizer
from shoal.metrics import EventLog


def main(worker: shoal.Worker) -> None:
    work = Training("tiny", batch=32, optimizer="sgd")
    made = material(work, 0)
    log = EventLog(Path(os.environ[torchrun_loop.LOG_DIR]) / f"{worker.id}.jsonl")
    pace_s, end_s = float(os.environ[torchrun_loop.PACE_S]), float(os.environ[torchrun_loop.END_S])
    worker.attach(made.model, optimizer(work.optimizer, made.model.parameters()))
    for _ in worker.batches(TensorDataset(torch.zeros(96_000)), batch_size=32, epochs=1_000_000):
        size = worker.size
        if worker.step(made.loss(made.model(made.inputs), made.targets)):
            log.write(time.monotonic(), "step", worker=worker.id, pid=os.getpid(), group_size=size)
        if time.monotonic() > end_s:
            break
        time.sleep(pace_s)  # as in the loop of the others


if __name__ == "__main__":
    shoal.run(main)
