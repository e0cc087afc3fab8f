"""One job through thousands of kills, stops, joins and leaves: does anything leak, get lost or come twice?

    python -m benchmarks.soak --minutes 60 --blows 2000

It ends with 1 when a process, a descriptor, shared memory, memory or the journal grew without bound, or a sample was
lost or repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from shoal import errors
from shoal.testing import LocalJob

_LOOK_EVERY = 25  # blows
_SMALLEST, _LARGEST = 1, 5
# A worker that is asked to leave is not replaced, and the job ends with the last one. One that was asked before may
# not have been heard yet.
_LEAVE_FROM = 3
# A worker that is stopped must be seen and fenced; with the default budget that takes most of the time of a soak.
_OPTIONS = ("--threads", "1", "--backoff", "0", "--restarts", "1000000", "--budget", "1", "--quiet", "--no-pin")
_GROWTH = 1.5  # of the last quarter's median against the first's
_SLACK = {"descriptors": 20, "resident_mb": 60.0, "shared_mb": 20.0, "journal_mb": 4.0, "processes": 8}


@dataclass(frozen=True)
class Look:
    """What the job holds at a moment. `resident_mb` and `descriptors` are of the processes that live as long as it."""

    processes: int
    descriptors: int
    resident_mb: float
    shared_mb: float
    journal_mb: float


def look(job: LocalJob) -> Look:
    """Again, if a coordinator has just been killed: who dies while it is looked at cannot be counted."""
    for _ in range(20):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            return _look(job)
        time.sleep(0.1)
    raise TimeoutError("the job's processes come and go so fast that they cannot be counted")


def _look(job: LocalJob) -> Look:
    launcher = psutil.Process(job.process.pid)
    lasting = [launcher, *(child for child in launcher.children() if "shoal." in " ".join(child.cmdline()))]
    journal = [path for path in job.directory.glob("journal*") if path.is_file()]
    return Look(
        processes=len(launcher.children(recursive=True)),
        descriptors=sum(process.num_fds() for process in lasting),
        resident_mb=sum(process.memory_info().rss for process in lasting) / 1e6,
        shared_mb=psutil.virtual_memory().shared / 1e6,
        journal_mb=sum(path.stat().st_size for path in journal) / 1e6,
    )


class Soak:
    def __init__(self, job: LocalJob, seed: int) -> None:
        self._job, self._draw = job, random.Random(seed)
        self.dealt: Counter[str] = Counter()

    def deal(self) -> None:
        """One blow, at whatever moment this is."""
        kinds = ("kill", "kill", "stop", "leave", "scale", "scale", "coordinator")
        kind = self._draw.choice(kinds)
        with contextlib.suppress(ProcessLookupError, StopIteration, IndexError, errors.UserMistake):
            state = self._job.status()
            workers = [worker for worker in state.get("workers", ()) if worker["pid"]]
            if kind == "scale":
                self._job.scale(self._draw.randrange(_SMALLEST, _LARGEST + 1))
            elif kind == "coordinator":
                self._job.kill_coordinator()
            elif kind == "leave" and len(workers) < _LEAVE_FROM:
                return
            else:
                signum = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}[kind]
                os.kill(self._draw.choice(workers)["pid"], signum)
            self.dealt[kind] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no longer than this")
    parser.add_argument("--blows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    job = LocalJob(
        Path(__file__).with_name("soak_loop.py"), workers=f"{_SMALLEST}:{_LARGEST}", directory=directory / "run",
        options=_OPTIONS,
    )  # fmt: skip
    job.start()
    try:
        exit_code = _run(job, chosen, console)
    except TimeoutError as problem:
        console.print(f"[red]{problem}")
        exit_code = 1
    finally:
        if job.process.poll() is None:
            job.kill()
    if exit_code:
        console.print(f"what the job left is in {directory}")
    else:
        shutil.rmtree(directory)
    return exit_code


def _run(job: LocalJob, chosen: argparse.Namespace, console: Console) -> int:
    job.wait_until(lambda: job.status().get("step", 0) > 0)
    before = set(os.listdir("/dev/shm"))
    soak, looks, began_s = Soak(job, chosen.seed), [look(job)], time.monotonic()
    pause_s = chosen.minutes * 60 / chosen.blows
    while sum(soak.dealt.values()) < chosen.blows and time.monotonic() - began_s < chosen.minutes * 60:
        if job.process.poll() is not None:
            console.print(f"the job ended: {job.process.communicate()[0][-2000:]}")
            return 1
        due_s = time.monotonic() + pause_s * random.uniform(0.0, 1.5)
        soak.deal()
        blows = sum(soak.dealt.values())
        if blows % _LOOK_EVERY == 0:
            looks.append(look(job))
            step = job.status().get("step", 0)
            console.print(
                f"{time.monotonic() - began_s:6.0f} s  {blows} blows  step {step}  {looks[-1]}", soft_wrap=True
            )
        time.sleep(max(0.0, due_s - time.monotonic()))
    os.kill(job.process.pid, signal.SIGTERM)
    result = job.wait(timeout_s=120.0)
    findings = [] if result.audit.clean else [f"not clean: {result.audit}"]
    findings += _growth(looks)
    left = set(os.listdir("/dev/shm")) - before
    findings += [f"{len(left)} pieces are left in /dev/shm"] if left else []
    _show(console, soak, result, looks, time.monotonic() - began_s)
    for line in findings:
        console.print(f"[red]{line}")
    return 1 if findings or sum(soak.dealt.values()) < chosen.blows else 0


def _growth(looks: Sequence[Look]) -> list[str]:
    """What the last quarter has more of than the first, beyond a slack."""
    quarter = max(1, len(looks) // 4)
    findings = []
    for name, slack in _SLACK.items():
        first, last = (sorted(getattr(one, name) for one in part) for part in (looks[:quarter], looks[-quarter:]))
        before, after = first[len(first) // 2], last[len(last) // 2]
        if after > before * _GROWTH + slack:
            findings.append(f"{name} grew from {before:,.1f} to {after:,.1f}")
    return findings


def _show(console: Console, soak: Soak, result: Any, looks: Sequence[Look], took_s: float) -> None:
    table = Table(title=f"{sum(soak.dealt.values()):,} blows in {took_s / 60:.1f} minutes")
    for column in ("", "first look", "last look", "most"):
        table.add_column(column, justify="left" if not column else "right")
    for name in _SLACK:
        values = [getattr(one, name) for one in looks]
        table.add_row(name.replace("_", " "), *(f"{value:,.1f}" for value in (values[0], values[-1], max(values))))
    console.print(table)
    console.print(", ".join(f"{count} × {kind}" for kind, count in soak.dealt.items()))
    console.print(f"{result.steps:,} steps, {len(result.of('generation')):,} generations; {result.audit}")


if __name__ == "__main__":
    sys.exit(main())
