"""Small scripts of users, chosen by the first argument: what they do is what the tests are about."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import Case, Gate, Slow, Stream, data, model

import shoal
from shoal.train.attempt import Batch
from shoal.train.step import StepReport

OUT = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
GATE = Gate(OUT / "gate") if "gated" in sys.argv else None


def loss_of(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch.x), batch.y)


def hold(worker: shoal.Worker) -> None:
    """Before a step of a scene whose end must not come before others do."""
    if GATE is not None:
        GATE.hold(worker)


def write(worker: shoal.Worker, what: object) -> None:
    (OUT / f"{worker.id}.json").write_text(json.dumps(what))


def edits(worker: shoal.Worker) -> None:
    """Parameters are changed in place between steps, by every worker alike; one worker comes later."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with worker.edit():
        nn.init.ones_(net[0].weight)
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=30):
        if worker.step(loss_of(net, batch)) and worker.steps % 50 == 0:
            with worker.edit(), torch.no_grad():
                net[0].weight.fill_(worker.steps)
    write(worker, {"last": net[0].weight[0, 0].item()})


def passes(worker: shoal.Worker) -> None:
    """An epoch a call, with code of the user's between."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    seen = 0
    for _ in range(8):
        for batch in worker.batches(data(Case("")), batch_size=20):
            seen += len(batch) if worker.step(loss_of(net, batch)) else 0
    write(worker, {"seen": seen})


def breaks(worker: shoal.Worker) -> None:
    """Each call of batches is left after two steps."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for half in range(1, 121):
        for batch in worker.batches(data(Case("")), global_batch=24):
            hold(worker)
            worker.step(loss_of(net, batch))
            if worker.steps >= 2 * half:
                break


def stops(worker: shoal.Worker) -> None:
    """Trains for six steps of many."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in worker.batches(data(Case("")), global_batch=24, epochs=100):
        hold(worker)
        worker.step(loss_of(net, batch))
        if worker.steps >= 6:
            break


def reconfigures(worker: shoal.Worker) -> None:
    """Keeps what it is told of new generations."""
    net = model(Case(""))
    seen: list[dict[str, object]] = []
    worker.attach(
        net, torch.optim.SGD(net.parameters(), lr=0.01), on_reconfigure=lambda change: seen.append(vars(change))
    )
    for batch in worker.batches(data(Case("")), global_batch=24, epochs=20):
        hold(worker)
        worker.step(loss_of(net, batch))
    write(worker, seen)


def edits_in_callback(worker: shoal.Worker) -> None:
    """Parameters are changed by a callback, after every third step."""
    net = model(Case(""))

    def clamp(report: StepReport) -> None:
        if report.step % 3 == 0:
            with worker.edit(), torch.no_grad():
                net[0].weight.clamp_(-0.05, 0.05)

    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), on_step=clamp)
    for batch in worker.batches(data(Case("")), global_batch=24, epochs=20):
        worker.step(loss_of(net, batch))


def stages(worker: shoal.Worker) -> None:
    """Each pass is left after two steps, and the model is halved between passes; it has BatchNorm."""
    net = nn.Sequential(nn.BatchNorm1d(data(Case(""))[0][0].numel()).double(), model(Case("")))
    weight = net[1][0].weight
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.0))
    with worker.edit():
        nn.init.ones_(weight)
    for half in range(1, 41):
        for batch in worker.batches(data(Case("")), global_batch=24):
            worker.step(nn.functional.cross_entropy(net(batch.x.flatten(1)), batch.y))
            if worker.steps >= 2 * half:
                break
        with worker.edit(), torch.no_grad():
            weight.mul_(0.5)
    write(worker, {"halved": -torch.log2(weight[0, 0]).item(), "batches": net[0].num_batches_tracked.item()})


def ranks(worker: shoal.Worker) -> None:
    """Code after each pass, as scripts have it that evaluate and save."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    after = [worker.rank]
    for _ in range(3):
        for batch in worker.batches(data(Case("")), global_batch=24, epochs=3):
            hold(worker)
            worker.step(loss_of(net, batch))
        after.append(worker.rank)
    write(worker, after)


def poisoned(worker: shoal.Worker) -> None:
    """The loss of one step is not a number."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), nan=sys.argv[3])  # type: ignore[arg-type]
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=2):
        bad = batch.step == 7 and 0 in range(len(batch)) and worker.rank == worker.size - 1
        worker.step(loss_of(net, batch) * (float("nan") if bad else 1.0))
    write(worker, {"finite": bool(torch.isfinite(net[0].weight).all())})


def raises(worker: shoal.Worker) -> None:
    """One worker's code is wrong."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=2):
        if batch.step == 5 and worker.id == "w1":
            raise ZeroDivisionError("the user's own mistake")
        worker.step(loss_of(net, batch))


def in_place(worker: shoal.Worker) -> None:
    """Writes into a parameter without saying so."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=2):
        worker.step(loss_of(net, batch))
        with torch.no_grad():
            net[0].weight.mul_(0.99)


def differs(worker: shoal.Worker) -> None:
    """The learning rate depends on who one is."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01 if worker.id == "w0" else 0.02))
    for batch in worker.batches(data(Case("")), global_batch=48):
        worker.step(loss_of(net, batch))


def shapes(worker: shoal.Worker) -> None:
    """The model depends on who one is."""
    wide = 8 if worker.id in ("w0", "a-w0") else 6
    net = nn.Sequential(nn.Linear(16, wide, bias=False), nn.Linear(wide, 5, bias=False)).double()
    sync = shoal.Replicated() if "replicated" in sys.argv else None
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), sync)
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=400 if GATE is not None else 1):
        hold(worker)
        worker.step(loss_of(net, batch))


def drifts(worker: shoal.Worker) -> None:
    """A bit of the memory of the host that is named by the third argument flips, in the first of two passes."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
    for _ in range(2):
        for batch in worker.batches(data(Case("")), global_batch=48, epochs=3):
            if worker.id == f"{sys.argv[3]}-w0" and worker.steps == 5:
                flip(worker)
            worker.step(loss_of(net, batch))


def flip(worker: shoal.Worker) -> None:
    arena, group = worker._sync._arena, worker._seat.group
    bits = arena.planes[0]["momentum_buffer"][group.seq & 1].view(torch.int64)
    bits[arena.layout.segments[0].tensors[1].offset] ^= 1 << 20


def decays(worker: shoal.Worker) -> None:
    """Hyperparameters are changed in callbacks and in edits; every step ends an epoch."""
    net = model(Case(""))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def decay(epoch: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.99

    worker.attach(net, optimizer, on_epoch=decay)
    for batch in worker.batches(data(Case("")), global_batch=480, epochs=300):
        hold(worker)
        if worker.step(loss_of(net, batch)) and worker.steps % 7 == 0:
            with worker.edit():
                optimizer.param_groups[0]["weight_decay"] = worker.steps / 100_000
    write(worker, {"rate": optimizer.param_groups[0]["lr"]})


def drops(worker: shoal.Worker) -> None:
    """How many samples an epoch drops depends on the number of workers."""
    net = model(Case(""))
    ended: list[int] = []
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), on_epoch=ended.append)
    inputs = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).double()
    few = TensorDataset(inputs, inputs[:, :5].argmax(1))
    for _ in range(2):
        for batch in worker.batches(few, batch_size=2, epochs=2, drop_last=True):
            worker.step(loss_of(net, batch))
    write(worker, {"ended": ended})


def evaluates(worker: shoal.Worker) -> None:
    """Scores after every epoch and predictions at the end; one worker dies in an evaluation, one joins in another, one
    dies while it predicts."""
    net, samples = model(Case("")), data(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.05))
    used = 0
    scores = []

    def score(batch: Batch) -> dict[str, torch.Tensor]:
        nonlocal used
        used += 1
        assert not net.training
        if worker.rank == 0 and worker.steps == 20 and used % 2:
            worker.scale(3)
        if worker.id == "w1" and worker.steps == 40 and used % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = net(batch.x)
        right = (outputs.argmax(1) == batch.y).double().mean()
        return {"right": right, "loss": nn.functional.cross_entropy(outputs, batch.y)}

    def predict(batch: Batch) -> torch.Tensor:
        if worker.id == "w0" and batch.ids[0] > 200:
            os.kill(os.getpid(), signal.SIGKILL)
        return net(batch.x)

    for _ in range(6):
        for batch in worker.batches(samples, global_batch=48):
            worker.step(loss_of(net, batch))
        scores.append(worker.evaluate(samples, score, batch_size=7))
        assert net.training
    worker.predict(samples, predict, OUT / "rows.npy", batch_size=11)
    outputs = net(samples.tensors[0])
    loss = nn.functional.cross_entropy(outputs, samples.tensors[1]).item()
    write(worker, {"scores": scores, "loss": loss, "outputs": outputs.tolist()})


def leased(worker: shoal.Worker) -> None:
    """No lockstep: each worker at the pace of the argument that names it, or of `else`, until there is a file `go`."""
    net = model(Case(""))
    paces = dict(pair.split("=") for pair in sys.argv[5:])
    pause_s = float(paces.get(worker.id, paces.get("else", "0")))
    seen: dict[str, list[object]] = {"epochs": [], "steps": [], "sizes": []}
    worker.attach(
        net,
        torch.optim.SGD(net.parameters(), lr=0.01),
        sync=shoal.Independent(lockstep=False),
        on_step=lambda report: seen["steps"].append(report.step),
        on_epoch=lambda epoch: seen["epochs"].append(epoch),
        on_reconfigure=lambda change: seen["sizes"].append(len(change.workers)),
    )
    samples = Slow(data(Case(""))) if sys.argv[4] != "0" else data(Case(""))
    for batch in worker.batches(samples, batch_size=10, epochs=int(sys.argv[3]), num_workers=int(sys.argv[4])):
        if not (OUT / "go").exists():
            time.sleep(pause_s)
        worker.step(loss_of(net, batch))
    write(worker, seen)


def leased_steps(worker: shoal.Worker) -> None:
    """No lockstep, with all that a step can have; in two passes, of which one is left early."""
    net = model(Case(""))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reports: list[StepReport] = []
    worker.attach(
        net, optimizer, sync=shoal.Independent(lockstep=False), accumulate=2, clip_norm=0.5, nan="skip",
        schedulers=[torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)], on_step=reports.append,
    )  # fmt: skip
    first = worker.batches(data(Case("")), batch_size=10, epochs=100)  # held on to after it is left
    for batch in first:
        worker.step(loss_of(net, batch), size=len(batch))
        if worker.steps >= 7:
            break
    for batch in worker.batches(data(Case("")), batch_size=7, epochs=2, drop_last=True):
        poisoned = batch.fetched.batch.lo == 14
        worker.step(loss_of(net, batch) * (float("nan") if poisoned else 1.0))
    refused = []
    for call in (
        lambda: worker.evaluate(data(Case("")), lambda batch: {}, batch_size=10),
        lambda: worker.predict(data(Case("")), lambda batch: batch.x, OUT / "rows.npy", batch_size=10),
        lambda: worker.edit().__enter__(),
        lambda: worker.batches(data(Case("")), global_batch=48),
    ):
        try:
            call()
        except shoal.errors.SettingsContradict as mistake:
            refused.append(str(mistake))
    write(
        worker,
        {
            "steps": [report.step for report in reports],
            "samples": [report.samples for report in reports],
            "skipped": sum(report.skipped for report in reports),
            "rates": [report.learning_rate for report in reports],
            "sizes": sorted({report.metrics["size"] for report in reports[:7]}),
            "refused": refused,
            "finite": bool(torch.isfinite(net[0].weight).all()),
        },
    )


def neighbors(worker: shoal.Worker) -> None:
    """Averages with neighbors, until there is a file `go`; then for as many epochs as are asked for."""
    net = model(Case(""))
    inner = shoal.Neighbor(sys.argv[4], order="awc" if sys.argv[5] == "awc" else "atc")
    sync = shoal.LocalSGD(inner, every=4) if sys.argv[5] == "local" else inner
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.05), sync=sync)
    samples, losses = data(Case("")), list[float]()
    for epochs in (1_000_000, int(sys.argv[3])):
        for batch in worker.batches(samples, batch_size=10, epochs=epochs):
            loss = loss_of(net, batch)
            worker.step(loss)
            losses.append(loss.item())
            if epochs == 1_000_000 and (OUT / "go").exists():
                break
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    write(worker, {"values": flat.tolist(), "losses": losses})


def leased_global(worker: shoal.Worker) -> None:
    """Asks for what only lockstep has."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), sync=shoal.Independent(lockstep=False))
    for batch in worker.batches(data(Case("")), global_batch=48):
        worker.step(loss_of(net, batch))


def long(worker: shoal.Worker) -> None:
    """Trains until it is told to stop."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in worker.batches(data(Case("")), global_batch=48, epochs=1_000_000, num_workers=int(sys.argv[3])):
        worker.step(loss_of(net, batch))


def measures(worker: shoal.Worker) -> None:
    """Metrics averaged over workers, callbacks, schedulers."""
    net = model(Case(""))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    epochs: list[int] = []
    reports: list[tuple[float, float]] = []
    worker.attach(
        net,
        optimizer,
        epoch_schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)],
        on_step=lambda report: reports.append((report.metrics["first_id"], report.learning_rate)),
        on_epoch=epochs.append,
    )
    ids = torch.arange(40)
    for batch in worker.batches(TensorDataset(torch.randn(40, 16).double(), ids % 5, ids), global_batch=7, epochs=3):
        loss = nn.functional.cross_entropy(net(batch.data[0]), batch.data[1])
        worker.step(loss, first_id=batch.data[2].double().mean())
    write(worker, {"epochs": epochs, "reports": reports})


def streams(worker: shoal.Worker) -> None:
    """Trains on a stream, then scores all of it."""
    net = model(Case(""))
    samples, epochs, generations = data(Case("")), list[int](), list[int]()

    class Watched(Stream):
        def __iter__(self) -> Iterator[Any]:
            generations.append(worker.generation)
            return super().__iter__()

    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01), on_epoch=epochs.append)
    for batch in worker.batches(Watched(samples), batch_size=20, epochs=4):
        hold(worker)
        worker.step(loss_of(net, batch))

    def score(batch: Batch) -> dict[str, torch.Tensor]:
        if worker.id == "w1" and batch.ids[0] > 200:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": loss_of(net, batch)}

    found = worker.evaluate(Stream(samples), score, batch_size=7)
    loss = nn.functional.cross_entropy(net(samples.tensors[0]), samples.tensors[1]).item()
    write(worker, {"epochs": epochs, "found": found, "loss": loss, "generations": generations})


def streams_differ(worker: shoal.Worker) -> None:
    """Each worker's stream comes in another order."""
    net = model(Case(""))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    order = torch.randperm(480, generator=torch.Generator().manual_seed(os.getpid()))
    for batch in worker.batches(Stream(TensorDataset(*data(Case(""))[order])), global_batch=20):  # type: ignore[arg-type]
        worker.step(loss_of(net, batch))


if __name__ == "__main__":
    shoal.run(globals()[sys.argv[1]])
