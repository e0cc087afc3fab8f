"""What `membership` decides is to be done: told to workers and launchers, or written to the event log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.control.generation import Generation
from shoal.data.leases import Lease


@dataclass(frozen=True)
class Publish:
    generation: Generation
    cause: str


@dataclass(frozen=True)
class Fence:
    worker_id: str


@dataclass(frozen=True)
class Probe:
    worker_id: str


@dataclass(frozen=True)
class Excuse:
    """For the launcher: the worker leaves, and needs no replacement however it ends."""

    worker_id: str


@dataclass(frozen=True)
class Drop:
    """For the launcher of that host: the job goes on without it. It may come again, with nothing of before."""

    host: str
    rest_s: float = 0.0  # before it comes


@dataclass(frozen=True)
class Bye:
    worker_id: str


@dataclass(frozen=True)
class Refuse:
    worker_id: str
    reason: str


@dataclass(frozen=True)
class RefuseHost:
    """For the launcher of that host: it cannot take part, and is not to come again as it is."""

    host: str
    reason: str


@dataclass(frozen=True)
class SetTarget:
    """For the launchers: how many workers there should be, beside those that are excused, and how many of them on each
    host. With `finishing`, one that exits needs no replacement. One that was heard before, by `number`, says nothing
    new."""

    target: int
    finishing: bool
    number: int = field(default=0, compare=False)
    shares: Mapping[str, int] = field(default_factory=dict, compare=False)  # by host
    next_workers: Mapping[str, int] = field(default_factory=dict, compare=False)  # of each host, as yet unused

    def share(self, host: str) -> int:
        return self.shares.get(host, 0)


@dataclass(frozen=True)
class Log:
    """Something for the event log."""

    kind: str
    worker_id: str
    text: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Heeded:
    """For the worker: its wish of that number need not be told again."""

    worker_id: str
    number: int


@dataclass(frozen=True)
class Granted:
    """For the worker: it has this lease."""

    worker_id: str
    lease: Lease


@dataclass(frozen=True)
class Settled:
    """For the worker: these leases of its are over, and need not be told of again."""

    worker_id: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class PassOver:
    """For the worker: there is no more of the pass, because every sample of it is used; or it is not complete, and
    others have left it early."""

    worker_id: str
    pass_index: int
    complete: bool = True


@dataclass(frozen=True)
class Stop:
    """The job ends: why, and the class of the error if it failed. For the launcher, and kept until it has ended."""

    reason: str
    failed: bool = False
    kind: str = ""


Instruction = (
    Publish
    | Fence
    | Probe
    | Excuse
    | Drop
    | Bye
    | Refuse
    | RefuseHost
    | Heeded
    | SetTarget
    | Stop
    | Log
    | Granted
    | Settled
    | PassOver
)
