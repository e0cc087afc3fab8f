"""Faults as data: which worker meets what, in which step, at which named point of it.

A plan is a value: it can be written down, read back and run again. What really happened in a job is in `faults.jsonl`
of its run directory, in the same form: `FaultPlan.load` makes a plan of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal import errors, metrics
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import RunDir

if TYPE_CHECKING:
    from shoal.train.worker import Worker

Action = Literal["kill", "stop", "slow", "fail", "leave", "join"]


class PlannedFailure(RuntimeError):
    """What `FaultPlan.fail` raises in the user's code."""


@dataclass(frozen=True)
class Fault:
    action: Action
    worker_id: str | None  # None: whoever is rank 0 then
    step: int | None  # the first attempt at this step, or at a later one if the worker comes later; None: at any step
    during: str
    count: int = 1  # of workers, for a join
    seconds: float = 0.0  # for a slow one


@dataclass(frozen=True)
class Chaos:
    """Every worker that passes any of the points dies there with this probability, until `limit` have died."""

    seed: int
    rate: float
    limit: int
    during: tuple[str, ...] = metrics.POINTS


@dataclass(frozen=True)
class FaultPlan:
    faults: tuple[Fault, ...] = ()
    chaos_: tuple[Chaos, ...] = ()

    def kill(self, worker_id: str, step: int | None = None, during: str = "forward") -> FaultPlan:
        """SIGKILL, at once."""
        return self._with(Fault("kill", worker_id, step, during))

    def stop(self, worker_id: str, step: int | None = None, during: str = "forward") -> FaultPlan:
        """SIGSTOP: the worker is there and does nothing."""
        return self._with(Fault("stop", worker_id, step, during))

    def slow(self, worker_id: str, step: int | None = None, during: str = "forward", seconds: float = 1.0) -> FaultPlan:
        """The worker takes that much longer; it is not dead, and must not be taken for it."""
        return self._with(Fault("slow", worker_id, step, during, seconds=seconds))

    def fail(self, worker_id: str, step: int | None = None, during: str = "forward") -> FaultPlan:
        """An exception in the user's code."""
        return self._with(Fault("fail", worker_id, step, during))

    def leave(self, worker_id: str, step: int | None = None, during: str = "forward") -> FaultPlan:
        """SIGTERM: the worker finishes its step and leaves."""
        return self._with(Fault("leave", worker_id, step, during))

    def join(self, at_step: int, count: int = 1) -> FaultPlan:
        """The job is asked for `count` more workers."""
        return self._with(Fault("join", None, at_step, "forward", count))

    def chaos(self, seed: int, rate: float, limit: int, during: Iterable[str] = metrics.POINTS) -> FaultPlan:
        """Random deaths, drawn from the seed."""
        points = tuple(during)
        for point in points:
            _check_point(point)
        return FaultPlan(self.faults, (*self.chaos_, Chaos(seed, rate, limit, points)))

    def to_json(self) -> str:
        return json.dumps({"faults": [asdict(f) for f in self.faults], "chaos": [asdict(c) for c in self.chaos_]})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        read = json.loads(text)
        return cls(
            tuple(Fault(**fault) for fault in read["faults"]),
            tuple(Chaos(**{**chaos, "during": tuple(chaos["during"])}) for chaos in read["chaos"]),
        )

    @classmethod
    def load(cls, recorded: Path) -> FaultPlan:
        """The plan of what happened in a run, from its `faults.jsonl`."""
        return cls(tuple(Fault(**json.loads(line)) for line in recorded.read_text().splitlines()))

    def _with(self, fault: Fault) -> FaultPlan:
        _check_point(fault.during)
        return FaultPlan((*self.faults, fault), self.chaos_)


def _check_point(point: str) -> None:
    if point not in metrics.POINTS:
        known = ", ".join(metrics.POINTS)
        raise errors.SettingsContradict(f"there is no point {point!r} in a step: choose one of {known}")


def install(worker: Worker) -> None:
    """Arm this worker with the plan that the environment names; the launcher's environment reaches every worker."""
    environment = WorkerEnvironment.from_env(os.environ)
    plan = FaultPlan.from_json(Path(environment.faults).read_text())
    metrics.arm(_Armed(worker, plan, RunDir(Path(environment.dir)).faults).at)


class _Armed:
    def __init__(self, worker: Worker, plan: FaultPlan, record: Path) -> None:
        self._worker = worker
        self._pending = [fault for fault in plan.faults if fault.worker_id in (worker.id, None)]
        self._chaos = [(chaos, random.Random(f"{chaos.seed}/{worker.id}")) for chaos in plan.chaos_]
        self._record = record

    def at(self, point: str) -> None:
        step = self._worker.steps + 1
        for fault in self._pending:
            if fault.during == point and step >= (fault.step or 0) and (fault.worker_id or self._worker.rank == 0):
                self._pending.remove(fault)
                self._act(fault, step)
                return
        for chaos, draw in self._chaos:
            if point in chaos.during and draw.random() < chaos.rate and self._deaths() < chaos.limit:
                self._act(Fault("kill", self._worker.id, None, point), step)

    def _deaths(self) -> int:
        return len(self._record.read_text().splitlines()) if self._record.exists() else 0

    def _act(self, fault: Fault, step: int) -> None:
        who = None if fault.action == "join" else self._worker.id
        happened = replace(fault, worker_id=who, step=step)
        fd = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, (json.dumps(asdict(happened)) + "\n").encode())
        os.close(fd)
        if fault.action == "join":
            self._worker.scale(fault.count, relative=True)
        elif fault.action == "slow":
            time.sleep(fault.seconds)
        elif fault.action == "fail":
            raise PlannedFailure(f"planned failure of {self._worker.id} in step {step} during {fault.during}")
        else:
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
            os.kill(os.getpid(), signals[fault.action])
