"""A training whose steps take 10 ms, however many workers share a core; for `benchmarks.cost`."""

from __future__ import annotations

import time

import torch
from torch.utils.data import TensorDataset

import shoal

STEP_S = 0.010
_SAMPLES = 1 << 16
_GAIN = 0.05  # of what a step was too short or too long, in the next one's computing


def main(worker: shoal.Worker) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    data = TensorDataset(torch.randn(_SAMPLES, 256), torch.randint(0, 8, (_SAMPLES,)))
    load = torch.randn(128, 128)
    began_s, computes_s = time.perf_counter(), STEP_S
    for x, y in worker.batches(data, global_batch=128, epochs=1000):  # ends when the job is stopped
        outputs = model(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
        while time.perf_counter() - began_s < computes_s:
            load @ load
        worker.step(loss, accuracy=(outputs.argmax(1) == y).float().mean())
        took_s = time.perf_counter() - began_s
        computes_s = min(STEP_S, max(0.0, computes_s + _GAIN * (STEP_S - took_s)))
        began_s += took_s


if __name__ == "__main__":
    shoal.run(main)
