"""A small training with metrics, a clipped gradient and a learning rate that moves."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import shoal


def main(worker: shoal.Worker) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
    worker.attach(model, optimizer, clip_norm=1.0, schedulers=[decay])
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    for inputs, targets in worker.batches(TensorDataset(x, x[:, :4].argmax(1)), global_batch=32, epochs=20):
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        worker.step(loss, accuracy=(outputs.argmax(1) == targets).float().mean())


if __name__ == "__main__":
    shoal.run(main)
