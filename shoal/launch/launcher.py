"""What a job asks of whatever starts its workers.

A launcher of another kind (ssh, slurm, kubernetes, ray) is one class with these operations; the job (`launch/job.py`)
and the policy by which lost workers are replaced (`launch/relaunch.py`) stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal import errors
from shoal.control.environment import WorkerEnvironment
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
        return f"exit status {'unknown' if self.exit_code is None else self.exit_code}"


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
        return errors.named(self.kind, self.message)


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
    async def start(self, environment: WorkerEnvironment) -> int:
        """Start the worker of that name, which nobody has started before; its pid, for people to read. Fails with a
        ShoalError if the machine refuses."""

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
    async def stop(self, grace_s: float, busy: Callable[[], bool] = lambda: False) -> None:
        """Ask every worker to leave, and end after `grace_s` those that have not, but not while `busy()`."""

    @abstractmethod
    async def close(self) -> Committed | None:
        """End whatever is left: nothing this launcher started lives on. What the job had committed by then, if
        anything."""
