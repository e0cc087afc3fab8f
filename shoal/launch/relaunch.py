"""When a worker has ended: whether the job ends with it, and when another takes its place."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal import errors
from shoal.control.membership.failures import OnError
from shoal.launch.exits import Exit, Failure
from shoal.wording import counted


def ends_job(exit: Exit, failure: Failure | None, on_error: OnError, excused: bool = False) -> errors.ShoalError | None:
    """The error that the end of this worker means for the whole job; None if the job goes on.

    What the user can put right ends the job, since every worker would fail alike; unless the worker is `excused`: the
    others are well without it. With "relaunch", an exception in user code is taken for a fault of the machine.
    """
    if exit.clean or excused:
        return None
    if failure is not None:
        error = failure.as_error()
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


@dataclass(frozen=True)
class Succession:
    """When a coordinator that ended is followed by another: at once, since training goes on only so long without one.
    Those that end before they serve, or by themselves soon after, are followed later each time, and after `attempts`
    of them in a row by none."""

    attempts: int = 5
    healthy_s: float = 10.0
    first_delay_s: float = 0.1
    in_vain: int = 0

    def on_end(self, killed: bool, served: bool, lived_s: float) -> tuple[Succession, Start | GiveUp]:
        if served and (killed or lived_s >= self.healthy_s):
            return replace(self, in_vain=0), Start(0.0)
        state = replace(self, in_vain=self.in_vain + 1)
        if state.in_vain >= self.attempts:
            return state, GiveUp(f"{counted(state.in_vain, 'coordinator')} in a row ended without serving")
        return state, Start(self.first_delay_s * 2.0 ** (state.in_vain - 1))


@dataclass(frozen=True)
class CoolDown:
    """How long a host rests whose launcher has ended: longer each time, but never for ever. One that did well for
    `healthy_s` begins anew."""

    first_s: float = 2.0
    longest_s: float = 300.0
    healthy_s: float = 60.0
    in_vain: Mapping[str, int] = field(default_factory=dict)  # by host

    def on_end(self, host: str, lived_s: float) -> tuple[CoolDown, float]:
        """Its launcher was in the job for that long. The rest that follows."""
        before = 0 if lived_s >= self.healthy_s else self.in_vain.get(host, 0)
        rest_s = min(self.first_s * 2.0 ** min(before, 64), self.longest_s)
        return replace(self, in_vain={**self.in_vain, host: before + 1}), rest_s


def default_restarts(target: int) -> int:
    """A large job may lose many workers at once, and that alone must not end it."""
    return max(10, 3 * target)
