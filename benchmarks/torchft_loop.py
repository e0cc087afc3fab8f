"""What each replica of torchft runs in `benchmarks.recovery`: its DDP over gloo, each committed step written down.

    python -m benchmarks.torchft_loop GLOO_TIMEOUT_S HEARTBEAT_S

Everything else is as in torchft's own `train_ddp.py`, without the torchrun agent around each replica. Ends by itself
after its lifetime, so that nothing outlives a benchmark that was killed.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.torchrun_loop import END_S, LOG_DIR, NODE, PACE_S
from shoal.bench.bodies import Training
from shoal.bench.loops import material, optimizer
from shoal.metrics import EventLog


def main(gloo_timeout_s: float, heartbeat_s: float) -> None:
    torch.set_num_threads(1)
    node, pace_s, end_s = os.environ[NODE], float(os.environ[PACE_S]), float(os.environ[END_S])
    work = Training("tiny", batch=32, optimizer="sgd")
    made = material(work, 0)
    stepped = optimizer(work.optimizer, made.model.parameters())

    def state() -> dict[str, Any]:
        return {"model": made.model.state_dict(), "optimizer": stepped.state_dict()}

    def load(found: dict[str, Any]) -> None:
        made.model.load_state_dict(found["model"])
        stepped.load_state_dict(found["optimizer"])

    group = ProcessGroupGloo(timeout=timedelta(seconds=gloo_timeout_s))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=node,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(seconds=heartbeat_s),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = DistributedDataParallel(manager, made.model)
    log = EventLog(Path(os.environ[LOG_DIR]) / f"{node}.jsonl")
    while time.monotonic() < end_s:
        manager.start_quorum()
        stepped.zero_grad()
        made.loss(model(made.inputs), made.targets).backward()  # type: ignore[no-untyped-call]
        if manager.should_commit():
            stepped.step()
            # A newcomer that takes over the state commits that step too, but is no participant of it yet.
            size = manager.num_participants()
            log.write(time.monotonic(), "step", worker=node, pid=os.getpid(), group_size=size)
        time.sleep(pace_s)  # as in the loop of the others


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
