"""What `shoal run` runs in the memory section of `benchmarks.core`: MODEL BATCH OPTIMIZER, until it is ended."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import TensorDataset

import shoal
from shoal.bench.bodies import Training
from shoal.bench.loops import material, optimizer


def main(worker: shoal.Worker) -> None:
    work = Training(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    made = material(work, 0)
    worker.attach(made.model, optimizer(work.optimizer, made.model.parameters()))
    for _ in worker.batches(TensorDataset(torch.zeros(100_000)), batch_size=work.batch, epochs=1_000_000):
        worker.step(made.loss(made.model(made.inputs), made.targets))


if __name__ == "__main__":
    shoal.run(main)
