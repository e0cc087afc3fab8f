"""What a process is told by whoever started it, and the variables it travels in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.checkpoints import DEFAULT_EVERY, DEFAULT_KEEP
from shoal.control.timeouts import DEFAULT_BUDGET_S

# "module:function", called with the coordinator before it serves
COORDINATOR_PLUGIN = "SHOAL_COORDINATOR_PLUGIN"


@dataclass(frozen=True)
class WorkerEnvironment:
    """One variable for each field, `SHOAL_` and its name. What is left out, or empty, has the default."""

    worker_id: str = ""  # none: the process is no worker of a job
    host: str = ""
    dir: str = ""  # the run directory
    budget_s: float = DEFAULT_BUDGET_S
    channel_fd: int = -1  # the socket to the launcher
    threads: int = 0  # of torch; 0 for the worker's share of the cores
    pin: bool = True  # to cores of its own
    device: str = "auto"  # what `Worker.device` is: cpu, cuda, or whichever there is
    plugin: str = ""  # "module:function", called with the worker before the script's main
    faults: str = ""  # path of a plan for `shoal.testing`
    checkpoint_every: str = DEFAULT_EVERY  # see `checkpoints.Every`
    checkpoint_keep: int = DEFAULT_KEEP
    resume: str = ""  # path of the checkpoint that the job goes on from
    init_from: str = ""  # path of weights that the job begins with
    invitation: str = ""  # path; to the job that processes of torchrun join, if they are to begin none
    address: str = ""  # of this host, to listen at for workers of other hosts; empty: the job has one host

    def to_env(self) -> dict[str, str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {_variable(name): str(int(it) if isinstance(it, bool) else it) for name, it in values.items()}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerEnvironment:
        told = {field.name: text for field in fields(cls) if (text := env.get(_variable(field.name)))}
        return cls(**{name: _KINDS.get(name, str)(text) for name, text in told.items()})


_KINDS: dict[str, Callable[[str], Any]] = {
    "budget_s": float,
    "channel_fd": int,
    "threads": int,
    "checkpoint_keep": int,
    "pin": lambda text: text == "1",
}


def _variable(name: str) -> str:
    return f"SHOAL_{name.upper()}"
