"""A buffer summed over the group, and the floor under that: the same bytes copied once by each worker alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.bench.bodies import Buffer, Run, Setup
from shoal.bench.loops import join_gloo
from shoal.errors import SettingsContradict


def memcpy(setup: Setup) -> Run:
    source = _floats(setup)
    target = torch.empty_like(source)

    def run(steps: int) -> None:
        for _ in range(steps):
            target.copy_(source)

    return run


def gloo_allreduce(setup: Setup) -> Run:
    # Zeros, because the sum is written back and summed again: ones would be infinite after 128 steps of two workers.
    buffer = _floats(setup)
    join_gloo(setup)

    def run(steps: int) -> None:
        for _ in range(steps):
            dist.all_reduce(buffer)

    return run


def _floats(setup: Setup) -> torch.Tensor:
    if not isinstance(setup.work, Buffer):
        raise SettingsContradict(f"body {setup.body!r} moves a buffer; it was given {setup.work}")
    torch.set_num_threads(setup.threads)
    return torch.zeros(setup.work.size_bytes // 4).fill_(0.0)  # written once, so that its pages exist
