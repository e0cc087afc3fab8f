"""What `benchmarks.gpu` runs for each row: one worker and a plain loop, in turns, on the same model in one process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.models.mobilenetv2 import mobilenetv2
from shoal.models.resnet50 import resnet50

MODELS: dict[str, Callable[[int], nn.Module]] = {"ResNet50": resnet50, "MobileNetV2": mobilenetv2}
CLASSES = 1000
_STEPS = 20_000  # more than are made


class Numbers(Dataset[int]):
    """A data set that costs next to nothing: what is measured is the step."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def main(worker: shoal.Worker) -> None:
    asked = json.loads(sys.argv[1])
    torch.manual_seed(0)
    net = MODELS[asked["model"]](CLASSES).to(worker.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    worker.attach(net, optimizer)
    forward = torch.compile(net) if asked["compile"] else net
    found = []
    for batch in asked["batches"]:
        torch._dynamo.reset()
        found.append(measure(worker, forward, optimizer, batch, asked))
        print(json.dumps(found[-1]), flush=True)
    Path(asked["out"]).write_text(json.dumps(found))


def measure(
    worker: shoal.Worker,
    forward: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: int,
    asked: dict[str, Any],
) -> dict[str, Any]:
    """Seconds a step of each, round by round."""
    device = worker.device
    images = torch.randn(batch, 3, asked["side"], asked["side"], device=device)
    images = images.to(memory_format=torch.channels_last)
    targets = torch.randint(0, CLASSES, (batch,), device=device)
    samples = Numbers(batch * _STEPS)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(forward(images), targets)

    plain_batches = iter(DataLoader(samples, batch_size=batch, num_workers=1, collate_fn=torch.tensor, pin_memory=True))
    shoal_batches = iter(
        worker.batches(samples, batch_size=batch, shuffle=False, num_workers=1, collate_fn=torch.tensor, device=device)
    )

    def plain() -> None:
        next(plain_batches).to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def ours() -> None:
        next(shoal_batches)
        worker.step(loss())

    for step in (plain, ours) * 5:
        turn(step, 3)
    count = max(4, round(asked["turn_s"] / turn(plain, 10)))
    seconds: dict[str, list[float]] = {"plain": [], "shoal": []}
    for round_ in range(asked["rounds"]):
        for name, step in in_turn(round_, plain, ours):
            seconds[name].append(turn(step, count))
    return {"model": asked["model"], "compile": asked["compile"], "batch": batch, "seconds": seconds}


def in_turn(
    round_: int, plain: Callable[[], None], ours: Callable[[], None]
) -> Iterator[tuple[str, Callable[[], None]]]:
    both = [("plain", plain), ("shoal", ours)]
    yield from both if round_ % 2 == 0 else reversed(both)


def turn(step: Callable[[], None], count: int) -> float:
    """Seconds for each of `count` steps, with all the work of the device in them."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / count


if __name__ == "__main__":
    shoal.run(main)
