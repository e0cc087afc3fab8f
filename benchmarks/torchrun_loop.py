"""What torchrun's agents run in `benchmarks.recovery`: DDP over gloo, the tiny model, each completed step written down.

Ends by itself after its lifetime, so that nothing outlives a benchmark that was killed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.bench.bodies import Training
from shoal.bench.loops import material, optimizer
from shoal.metrics import EventLog

LOG_DIR, NODE, PACE_S, END_S = "RECOVERY_LOG_DIR", "RECOVERY_NODE", "RECOVERY_PACE_S", "RECOVERY_END_S"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Training("tiny", batch=32, optimizer="sgd")
    made = material(work, dist.get_rank())
    model = DistributedDataParallel(made.model)
    stepped = optimizer(work.optimizer, model.parameters())
    node, pace_s, end_s = os.environ[NODE], float(os.environ[PACE_S]), float(os.environ[END_S])
    log = EventLog(Path(os.environ[LOG_DIR]) / f"{node}.jsonl")
    while time.monotonic() < end_s:
        stepped.zero_grad()
        made.loss(model(made.inputs), made.targets).backward()  # type: ignore[no-untyped-call]
        stepped.step()
        log.write(time.monotonic(), "step", worker=node, pid=os.getpid(), group_size=dist.get_world_size())
        time.sleep(pace_s)  # stands for the rest of a longer step, and leaves the cores to whoever recovers


if __name__ == "__main__":
    main()
