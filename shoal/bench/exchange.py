"""A buffer summed over the group, and the floor under that: the same bytes copied once by each worker alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shoal.bench.bodies import Buffer, Setup, Step
from shoal.bench.loops import join_gloo
from shoal.bench.meeting import MeetingMemory, meet
from shoal.errors import SettingsContradict
from shoal.sync.arena import tensor_at
from shoal.sync.memory import map_bytes


def memcpy(setup: Setup) -> Step:
    source = _floats(setup)
    target = torch.empty_like(source)

    def step() -> None:
        target.copy_(source)

    return step


def gloo_allreduce(setup: Setup) -> Step:
    # Zeros, because the sum is written back and summed again: ones would be infinite after 128 steps of two workers.
    buffer = _floats(setup)
    join_gloo(setup)

    def step() -> None:
        dist.all_reduce(buffer)

    return step


def shoal_allreduce(setup: Setup) -> Step:
    """The sum as a step makes it: everybody's numbers lie in lanes, worker k sums slice k, and all see the result."""
    mine = _floats(setup)
    memory = MeetingMemory(Path(setup.meeting_dir))
    size_bytes = mine.numel() * 4
    lanes = [_shared(memory, f"lane-{rank}", size_bytes) for rank in range(setup.n_workers)]
    result = _shared(memory, "result", size_bytes)
    group = meet(setup, memory)
    per = -(-mine.numel() // setup.n_workers)
    mine_slice = slice(setup.rank * per, (setup.rank + 1) * per)
    parts, target = [lane[mine_slice] for lane in lanes], result[mine_slice]

    def step() -> None:
        group.ready()
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
        group.commit()

    return step


def _shared(memory: MeetingMemory, name: str, size_bytes: int) -> torch.Tensor:
    mapping = map_bytes(memory.open(name, size_bytes), size_bytes, writable=True)
    return tensor_at(mapping, 0, torch.float32, size_bytes // 4)


def _floats(setup: Setup) -> torch.Tensor:
    if not isinstance(setup.work, Buffer):
        raise SettingsContradict(f"body {setup.body!r} moves a buffer; it was given {setup.work}")
    torch.set_num_threads(setup.threads)
    return torch.zeros(setup.work.size_bytes // 4).fill_(0.0)  # written once, so that its pages exist
