"""What a job asks of whatever starts its workers, and the policy by which lost workers are replaced.

A launcher of another kind (ssh, slurm, kubernetes, ray) is one class with these operations; the job (`launch/job.py`)
and the policy below stay as they are.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shoal import errors
from shoal.control.coordinator import OnError
from shoal.control.membership import REFUSABLE, counted
from shoal.control.rundir import Committed


@dataclass(frozen=True)
class Exit:
    """How a worker ended. `exit_code` and `signal` are both None when only its death is known."""

    worker_id: str
    exit_code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, worker_id: str, returncode: int) -> Exit:
        """From what `subprocess` says: below 0, a signal."""
        return cls(worker_id, exit_code=returncode) if returncode >= 0 else cls(worker_id, signal=-returncode)

    @property
    def clean(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal}"
        return "lost" if self.exit_code is None else f"exit status {self.exit_code}"


@dataclass(frozen=True)
class Evidence:
    """What the machine says of a worker's life: a process that is stopped, or burns no CPU, shows none."""

    worker_id: str
    cpu_s: float
    stopped: bool


@dataclass(frozen=True)
class Failure:
    """What a failing worker said before it ended: the error's name, its one line, and a traceback of user code. The
    same is in its log from `log_bytes` on."""

    worker_id: str
    kind: str
    message: str
    traceback: str | None = None
    log_bytes: int | None = field(default=None, compare=False)

    def as_error(self) -> errors.ShoalError:
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, errors.ShoalError):
            return found(self.message)
        return errors.ScriptFailed(f"{self.kind}: {self.message}")


class Launcher(ABC):
    """Starts and stops the workers of one host, or of several. Every worker ends in exactly one call of `on_exit`,
    after which its process is certainly dead; what it said before it failed comes first, by `on_failure`. `on_lost` is
    called when the launcher itself cannot go on."""

    def __init__(
        self,
        on_exit: Callable[[Exit], None],
        on_failure: Callable[[Failure], None],
        on_lost: Callable[[errors.ShoalError], None],
    ) -> None:
        self.on_exit = on_exit
        self.on_failure = on_failure
        self.on_lost = on_lost

    @abstractmethod
    async def open(self) -> None:
        """Make ready to start workers. Fails with a ShoalError that says why it cannot."""

    @abstractmethod
    async def start(self, worker_id: str, env: Mapping[str, str]) -> int:
        """Start a worker that nobody has started before, with `env` added to its environment; its pid, for people to
        read. Fails with a ShoalError if the machine refuses."""

    @abstractmethod
    def signal(self, worker_id: str, signum: int) -> None:
        """Send a signal; a worker that is gone already is left alone."""

    @abstractmethod
    async def fence(self, worker_id: str) -> None:
        """Return once the worker can write nothing any more: killed, and seen to be dead."""

    @abstractmethod
    def evidence(self, worker_id: str) -> Evidence | None:
        """What is known of its life now; None when it is gone."""

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask every worker to leave, and end after `grace_s` those that have not."""

    @abstractmethod
    async def close(self) -> Committed | None:
        """End whatever is left: nothing this launcher started lives on. What the job had committed by then, if
        anything."""


def ends_job(exit: Exit, failure: Failure | None, on_error: OnError, excused: bool = False) -> errors.ShoalError | None:
    """The error that the end of this worker means for the whole job; None if the job goes on.

    What the user can put right ends the job, since every worker would fail alike; unless the worker is `excused`, and
    the others are well without it. With "relaunch", an exception in user code is taken for a fault of the machine.
    """
    if exit.clean:
        return None
    if failure is not None:
        error = failure.as_error()
        if excused and isinstance(error, REFUSABLE):
            return None
        if isinstance(error, errors.ScriptFailed):
            return error if on_error == "stop" else None
        return error if isinstance(error, errors.UserMistake) else None
    if exit.signal == signal.SIGSEGV and on_error == "stop":
        return errors.ScriptFailed(
            f"{exit.worker_id} ended with {exit}; its log says at which line. Parameters are read-only between steps: "
            f"write to them inside `with worker.edit():`"
        )
    if exit.exit_code is not None and on_error == "stop":
        return errors.ScriptFailed(f"{exit.worker_id} ended with {exit}; its log says why")
    return None


@dataclass(frozen=True)
class Start:
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    reason: str


@dataclass(frozen=True)
class Relaunch:
    """When a lost worker is replaced. A worker that lived for `healthy_s` is replaced at once; those that die young
    are replaced later each time, and more than `restarts` failures within `window_s` end the job."""

    restarts: int = 10
    window_s: float = 60.0
    healthy_s: float = 10.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 15.0
    started_at: Mapping[str, float] = field(default_factory=dict)
    failed_at: tuple[float, ...] = ()
    consecutive: int = 0

    def on_start(self, worker_id: str, now: float) -> Relaunch:
        return replace(self, started_at={**self.started_at, worker_id: now})

    def on_exit(self, worker_id: str, clean: bool, now: float) -> tuple[Relaunch, list[Start | GiveUp]]:
        lived_s = now - self.started_at.get(worker_id, now)
        others = {other: at for other, at in self.started_at.items() if other != worker_id}
        if clean:
            return replace(self, started_at=others), []
        consecutive = 0 if lived_s >= self.healthy_s else self.consecutive + 1
        failed_at = (*(at for at in self.failed_at if now - at < self.window_s), now)
        state = replace(self, started_at=others, failed_at=failed_at, consecutive=consecutive)
        if len(failed_at) > self.restarts:
            reason = (
                f"{counted(len(failed_at), 'worker')} failed within {self.window_s:g} s, the budget is "
                f"{self.restarts}; the logs of the last ones say why, --restarts raises the budget"
            )
            return state, [GiveUp(reason)]
        delay_s = self.first_delay_s * 2.0 ** (consecutive - 1) if consecutive else 0.0
        return state, [Start(min(delay_s, self.longest_delay_s))]


def default_restarts(target: int) -> int:
    """A large job may lose many workers at once, and that alone must not end it."""
    return max(10, 3 * target)
