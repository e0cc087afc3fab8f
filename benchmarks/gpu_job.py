"""What `benchmarks.gpu` runs with several workers on one GPU, while one is killed and one joins."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.gpu_loop import MODELS

SIDE = 64


def main(worker: shoal.Worker) -> None:
    torch.manual_seed(0)
    net = MODELS["MobileNetV2"](10).to(worker.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    worker.attach(net, torch.optim.AdamW(net.parameters(), lr=1e-3), clip_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(2000, 3, SIDE, SIDE, generator=generator), torch.randint(0, 10, (2000,), generator=generator)
    )
    for batch in worker.batches(data, global_batch=120, epochs=int(sys.argv[1]), device=worker.device):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(batch.x.to(memory_format=torch.channels_last)), batch.y)
        worker.step(loss)


if __name__ == "__main__":
    shoal.run(main)
