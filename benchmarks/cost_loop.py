"""A training whose steps take 10 ms where every worker has a core, or as much CPU time as its share of the cores gives
it in 10 ms; for `benchmarks.cost`."""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import TensorDataset

import shoal

STEP_S = 0.010
_SAMPLES = 1 << 16


def main(worker: shoal.Worker) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    data = TensorDataset(torch.randn(_SAMPLES, 256), torch.randint(0, 8, (_SAMPLES,)))
    load = torch.randn(128, 128)
    cores = os.cpu_count() or 1
    began_s = time.thread_time()
    for x, y in worker.batches(data, global_batch=128, epochs=1000):  # ends when the job is stopped
        outputs = model(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
        while time.thread_time() - began_s < STEP_S * min(1.0, cores / worker.size):
            load @ load
        worker.step(loss, accuracy=(outputs.argmax(1) == y).float().mean())
        began_s = time.thread_time()


if __name__ == "__main__":
    shoal.run(main)
