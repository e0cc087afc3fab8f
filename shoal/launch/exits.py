"""What a launcher knows of a worker: whether it lives, what it said when it failed, how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal import errors


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
