"""What else the machine did while something was measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.05


@dataclass(frozen=True)
class Load:
    """CPU shares are parts of all cores over the wall time: `other` went to processes that are not ours, `stolen` to
    other guests of the same hardware."""

    wall_s: float
    load_average: tuple[float, float, float]
    other_cpu_share: float
    stolen_cpu_share: float


@dataclass(frozen=True)
class Machine:
    cores: int
    processor: str
    memory_bytes: int
    kernel: str
    python: str
    torch: str


@dataclass(frozen=True)
class _Snapshot:
    time_s: float
    busy_s: float
    stolen_s: float
    ours_s: float


class LoadProbe:
    """Asks the system at `begin` and `end`; costs some milliseconds each, so never within a timed turn."""

    def __init__(self) -> None:
        self._before = _snapshot()

    def begin(self) -> None:
        self._before = _snapshot()

    def end(self) -> Load:
        before, after = self._before, _snapshot()
        wall_s = after.time_s - before.time_s
        ours_s = after.ours_s - before.ours_s
        capacity_s = wall_s * (psutil.cpu_count() or 1)
        return Load(
            wall_s=wall_s,
            load_average=psutil.getloadavg(),
            other_cpu_share=max(0.0, (after.busy_s - before.busy_s - ours_s) / capacity_s),
            stolen_cpu_share=max(0.0, (after.stolen_s - before.stolen_s) / capacity_s),
        )


def _snapshot() -> _Snapshot:
    times = psutil.cpu_times()
    busy_s = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    ours_s = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            cpu = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # What ended and was waited for has left its time with its parent.
        ours_s += cpu.user + cpu.system + cpu.children_user + cpu.children_system
    return _Snapshot(time.monotonic(), busy_s, getattr(times, "steal", 0.0), ours_s)


def load_doubts(loads: Sequence[Load]) -> list[str]:
    """Whether the machine was ours alone while it was measured; empty when it was."""
    doubts: list[str] = []
    if not loads:
        return doubts
    wall_s = sum(load.wall_s for load in loads)
    for what, shares in (
        ("other processes took", [load.other_cpu_share for load in loads]),
        ("the hypervisor took", [load.stolen_cpu_share for load in loads]),
    ):
        mean = sum(share * load.wall_s for share, load in zip(shares, loads, strict=True)) / wall_s
        if mean > BUSY_SHARE:
            doubts.append(f"{what} {mean:.0%} of the CPU while this was measured (worst round {max(shares):.0%})")
    return doubts


def this_machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
    )


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
