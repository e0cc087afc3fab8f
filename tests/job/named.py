"""Scripts that use operations by name: inside a training, and without one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import Changed


def trains(worker: shoal.Worker, out: Path, rounds: int) -> None:
    """Each step has a sum and a gathering of its own, asked for in an order that depends on the worker."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1), TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    checked = shared = 0  # operations that were right, and those of them with others
    for batch in worker.batches(data, global_batch=16, epochs=rounds):
        use, mine = worker.collectives, torch.full((3,), float(worker.rank))
        try:
            asks = [
                lambda use=use, mine=mine: use.allreduce(mine, "sum", op="sum"),
                lambda use=use, mine=mine: use.allgather(mine[:1], "ranks"),
            ]
            first, second = asks if worker.rank % 2 else reversed(asks)
            handles = [first(), second()]
            total, ranks = (it.wait() for it in (handles if worker.rank % 2 else reversed(handles)))
            assert total.tolist() == [float(sum(range(worker.size)))] * 3, total
            assert ranks.tolist() == list(range(worker.size)), ranks
            checked += 1
            shared += worker.size > 1
        except Changed:
            assert not worker.step(None)  # the step comes again, and so do these
            continue
        worker.step(nn.functional.mse_loss(model(batch.x), batch.y))
    (out / worker.id).write_text(f"{checked} {shared}")


def counts(worker: shoal.Worker, out: Path, rounds: int) -> None:
    """A state that rank 0 gives to whoever comes; no model. Half-way rank 0 lets the others wait."""
    state, fresh, changed = torch.zeros(2), True, 0
    while state[0] < rounds:
        before = worker.generation
        worker.regroup()
        try:
            if fresh or worker.generation != before:
                state = worker.collectives.broadcast(state, 0, "state").wait()
                fresh = False
            while worker.rank == 0 and state[0] == rounds // 2 and not (out / "go on").exists():
                (out / "pauses").touch()
                time.sleep(0.01)
            one = worker.collectives.allreduce(torch.ones(1), "one").wait()
            state = state + torch.tensor([1.0, one.item()])
        except Changed:
            fresh, changed = True, changed + 1
    (out / worker.id).write_text(f"{state.tolist()} {changed}")


def main(worker: shoal.Worker) -> None:
    mode, out, rounds = sys.argv[1:]
    {"trains": trains, "counts": counts}[mode](worker, Path(out), int(rounds))


if __name__ == "__main__":
    shoal.run(main)
