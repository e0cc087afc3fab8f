"""What `benchmarks.soak` runs: a small model over and over, until the job is stopped."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def main(worker: shoal.Worker) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    worker.attach(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    for batch in worker.batches(data, global_batch=60, epochs=1_000_000):
        worker.step(nn.functional.cross_entropy(net(batch.x), batch.y))


if __name__ == "__main__":
    shoal.run(main)
