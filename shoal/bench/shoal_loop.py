"""Shoal itself as a measured body: real workers and a real coordinator, started by the runner instead of a launcher."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from shoal.bench.bodies import Setup, Step, Training
from shoal.bench.loops import material, optimizer, samples
from shoal.bench.meeting import MeetingMemory
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.errors import CoordinatorLost, SettingsContradict
from shoal.sync.allreduce import AllReduce
from shoal.train.worker import Worker

_WAIT_S = 60.0
_BUDGET_S = 30.0  # between their turns workers are silent for long
_EPOCHS = 1_000_000_000  # the runner says when it is enough


def shoal(setup: Setup) -> Step:
    """The loop of a user's script: batches, forward, step."""
    if not isinstance(setup.work, Training):
        raise SettingsContradict(f"body {setup.body!r} trains; it was given {setup.work}")
    torch.set_num_threads(setup.threads)
    made = material(setup.work, setup.rank)
    worker = join(setup)
    sync = AllReduce(wire=setup.wire)  # type: ignore[arg-type]
    worker.attach(made.model, optimizer(setup.work.optimizer, made.model.parameters()), sync)
    batches = worker.batches(samples(setup, setup.work), batch_size=setup.work.batch, epochs=_EPOCHS)

    def step() -> None:
        next(batches)
        worker.step(made.loss(made.model(made.inputs), made.targets))

    return step


def join(setup: Setup) -> Worker:
    """This process as a worker of the group's job; rank 0 starts the coordinator."""
    meeting = Path(setup.meeting_dir)
    run = meeting / "run"
    if setup.rank == 0:
        RunDir.create(run, {"plain_text": True})
        count = str(setup.n_workers)
        command = [sys.executable, "-m", "shoal.control.coordinator", "--dir", str(run)]
        sizes = ["--min", count, "--max", count, "--target", count]
        sizes += ["--address", setup.address] if setup.address else []
        coordinator = subprocess.Popen([*command, *sizes, "--budget", str(_BUDGET_S)])
        os.sched_setaffinity(coordinator.pid, range(os.cpu_count() or 1))  # as a launcher starts it: on any core
        atexit.register(coordinator.kill)
    deadline_s = time.monotonic() + _WAIT_S
    while not (run / "address").exists():
        if time.monotonic() > deadline_s:
            raise CoordinatorLost(f"the coordinator did not start within {_WAIT_S:g} s; it says why on standard error")
        time.sleep(0.01)
    home = meeting / setup.host
    home.mkdir(exist_ok=True)
    environment = WorkerEnvironment(address=setup.address, checkpoint_every="off")
    return Worker(
        f"w{setup.rank}", setup.host, RunDir.open(run), MeetingMemory(home), Timeouts(_BUDGET_S), None, environment
    )
