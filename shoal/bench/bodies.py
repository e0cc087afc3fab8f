"""What a measured worker process does in its turns, found by name.

A body is `body(setup) -> step`, and `step()` does one step. It is called in the worker's process, pinned, before
anything heavy is imported: this module does not import torch, so that the runner does not either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.errors import SettingsContradict


@dataclass(frozen=True)
class Training:
    """Steps of a model of `shoal.models` on a fixed synthetic batch; `optimizer` is a name of `loops.OPTIMIZERS`."""

    model: str
    batch: int
    optimizer: str


@dataclass(frozen=True)
class Buffer:
    """A step moves this many bytes once, by whatever way the body is about."""

    size_bytes: int


@dataclass(frozen=True)
class Setup:
    """What one worker of a measured group knows. `meeting_dir` is empty at the start and the group's own."""

    body: str
    work: Training | Buffer
    rank: int
    n_workers: int
    threads: int
    keep_freed_memory: bool
    meeting_dir: str
    host: str = "here"  # workers of one name share memory
    address: str = ""  # of the host, where there are several
    interface: str = "lo"  # that gloo talks over
    wire: str = "full"  # see `AllReduce`


Step: TypeAlias = Callable[[], None]
Body: TypeAlias = Callable[[Setup], Step]

_HOMES = {
    "independent": "shoal.bench.loops:independent",
    "lockstep": "shoal.bench.loops:lockstep",
    "ddp": "shoal.bench.loops:ddp",
    "shoal": "shoal.bench.shoal_loop:shoal",
    "memcpy": "shoal.bench.exchange:memcpy",
    "gloo_allreduce": "shoal.bench.exchange:gloo_allreduce",
    "shoal_allreduce": "shoal.bench.exchange:shoal_allreduce",
}


def body(name: str) -> Body:
    """The body of that name, or at `module:function`. Raises SettingsContradict for any other name."""
    home = _HOMES.get(name, name)
    module, _, function = home.partition(":")
    if not function:
        raise SettingsContradict(f"there is no body {name!r}; the bodies are {', '.join(_HOMES)}, or module:function")
    found: Body = getattr(importlib.import_module(module), function)
    return found
