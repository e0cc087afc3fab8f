"""A small CNN on scikit-learn's digits (1,797 real images of 8×8).

    shoal run -n 2 examples/digits.py            # two workers on this machine
    python examples/digits.py                    # the same script alone

With a folder as argument it also writes there when each step was committed and how good the model is in the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def main(worker: shoal.Worker) -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    train, test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps: list[tuple[float, int]] = []
    worker.attach(model, optimizer, on_step=lambda report: steps.append((time.time(), report.workers)))
    for x, y in worker.batches(train, global_batch=128, epochs=30):
        worker.step(nn.functional.cross_entropy(model(x), y))

    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    if worker.rank == 0:
        print(f"accuracy on held-out digits: {accuracy:.3f}")
    if out is not None:
        (out / f"{worker.id}.json").write_text(json.dumps({"accuracy": accuracy, "steps": steps}))


if __name__ == "__main__":
    shoal.run(main)
