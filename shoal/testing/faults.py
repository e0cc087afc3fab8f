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
    from shoal.control.coordinator.server import Coordinator
    from shoal.train.worker import Worker

Action = Literal["kill", "stop", "slow", "fail", "leave", "join"]
JournalFate = Literal["kept", "deleted", "overwritten"]
COORDINATOR = "coordinator"  # in place of a worker's id; the step is a generation then
_WORKER_POINTS = (*metrics.POINTS, *metrics.FOLLOWER_POINTS)


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
    journal: JournalFate = "kept"  # when the coordinator is killed


@dataclass(frozen=True)
class Chaos:
    """Every worker that passes any of the points dies there with this probability, until `limit` have died."""

    seed: int
    rate: float
    limit: int
    during: tuple[str, ...] = _WORKER_POINTS


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

    def kill_coordinator(
        self, generation: int | None = None, during: str = "journaled", journal: JournalFate = "kept"
    ) -> FaultPlan:
        """SIGKILL of the coordinator, the first time it passes that point once this generation is the newest; the
        journal may be deleted or overwritten in the same moment. `metrics.COORDINATOR_POINTS` are the points."""
        return self._with(Fault("kill", COORDINATOR, generation, during, journal=journal))

    def stop_coordinator(self, generation: int | None = None, during: str = "returns") -> FaultPlan:
        """SIGSTOP: it is there and does nothing."""
        return self._with(Fault("stop", COORDINATOR, generation, during))

    def join(self, at_step: int, count: int = 1) -> FaultPlan:
        """The job is asked for `count` more workers."""
        return self._with(Fault("join", None, at_step, "forward", count))

    def chaos(self, seed: int, rate: float, limit: int, during: Iterable[str] = _WORKER_POINTS) -> FaultPlan:
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
        _check_point(fault.during, metrics.COORDINATOR_POINTS if fault.worker_id == COORDINATOR else _WORKER_POINTS)
        return FaultPlan((*self.faults, fault), self.chaos_)


def _check_point(point: str, points: tuple[str, ...] = _WORKER_POINTS) -> None:
    if point not in points:
        raise errors.SettingsContradict(f"there is no point {point!r}: choose one of {', '.join(points)}")


def lose_journal(run_dir: RunDir, fate: JournalFate) -> None:
    """Whoever writes it must be stopped, or be the caller."""
    if fate == "kept":
        return
    for log in ("-wal", "-shm"):
        run_dir.journal.with_name(run_dir.journal.name + log).unlink(missing_ok=True)
    if fate == "deleted":
        run_dir.journal.unlink(missing_ok=True)
    else:
        run_dir.journal.write_bytes(b"no journal any more " * 500)


def install(worker: Worker) -> None:
    """Arm this worker with the plan that the environment names; the launcher's environment reaches every worker."""
    environment = WorkerEnvironment.from_env(os.environ)
    plan = FaultPlan.from_json(Path(environment.faults).read_text())
    metrics.arm(_Armed(worker, plan, RunDir(Path(environment.dir)).faults).at)


def install_in_coordinator(coordinator: Coordinator) -> None:
    """The same for the coordinator. What the record says has happened does not happen to the next one."""
    environment = WorkerEnvironment.from_env(os.environ)
    plan = FaultPlan.from_json(Path(environment.faults).read_text())
    metrics.arm(_ArmedCoordinator(coordinator, plan).at)


class _ArmedCoordinator:
    def __init__(self, coordinator: Coordinator, plan: FaultPlan) -> None:
        self._coordinator, self._run_dir = coordinator, coordinator.run_dir
        record = coordinator.run_dir.faults
        happened = FaultPlan.load(record).faults if record.exists() else ()
        self._pending = [fault for fault in plan.faults if fault.worker_id == COORDINATOR and fault not in happened]

    def at(self, point: str) -> None:
        for fault in self._pending:
            if fault.during == point and self._coordinator.generation >= (fault.step or 0):
                self._pending.remove(fault)
                _write_down(self._run_dir.faults, fault)
                lose_journal(self._run_dir, fault.journal)
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.action])
                return


def _write_down(record: Path, happened: Fault) -> None:
    fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (json.dumps(asdict(happened)) + "\n").encode())
    os.close(fd)


class _Armed:
    def __init__(self, worker: Worker, plan: FaultPlan, record: Path) -> None:
        self._worker = worker
        self._pending = [fault for fault in plan.faults if fault.worker_id in (worker.id, None)]
        self._chaos = [(chaos, random.Random(f"{chaos.seed}/{worker.id}")) for chaos in plan.chaos_]
        self._record = record
        self._joins = sorted((it for it in plan.faults if it.action == "join"), key=lambda it: it.step or 0)

    def at(self, point: str) -> None:
        step = self._worker.steps + 1
        for fault in self._pending:
            if fault.during == point and step >= (fault.step or 0) and (fault.worker_id or self._worker.rank == 0):
                self._pending.remove(fault)
                if fault.action != "join" or not self._has_joined(fault):
                    self._act(fault, step)
                return
        for chaos, draw in self._chaos:
            if point in chaos.during and draw.random() < chaos.rate and self._deaths() < chaos.limit:
                self._act(Fault("kill", self._worker.id, None, point), step)

    def _has_joined(self, fault: Fault) -> bool:
        """Whether a worker that was rank 0 before has asked for it."""
        happened = FaultPlan.load(self._record).faults if self._record.exists() else ()
        return sum(it.action == "join" for it in happened) > self._joins.index(fault)

    def _deaths(self) -> int:
        return len(self._record.read_text().splitlines()) if self._record.exists() else 0

    def _act(self, fault: Fault, step: int) -> None:
        who = None if fault.action == "join" else self._worker.id
        _write_down(self._record, replace(fault, worker_id=who, step=step))
        if fault.action == "join":
            self._worker.scale(fault.count, relative=True)
        elif fault.action == "slow":
            time.sleep(fault.seconds)
        elif fault.action == "fail":
            raise PlannedFailure(f"planned failure of {self._worker.id} in step {step} during {fault.during}")
        else:
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
            os.kill(os.getpid(), signals[fault.action])
