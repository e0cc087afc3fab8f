"""`shoal logs`: what the workers print, worker by worker, or as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal import errors
from shoal.control.rundir import RunDir
from shoal.launch.tail import Tail, older_part

POLL_S = 0.2
_FOLLOWED_LINES = 10  # of what was there before, as tail -f

Line = tuple[str, str]  # whose, and what


def names(run_dir: RunDir, wanted: Sequence[str] = ()) -> list[str]:
    """Whose logs: those wanted, or every worker's there is. Fails with JobNotFound for one that has none."""
    there = {path.stem for path in run_dir.logs.glob("*.log")}
    workers = sorted((name for name in there if _number(name) is not None), key=lambda name: _number(name) or 0)
    for name in wanted:
        if name not in there:
            listed = ", ".join([*workers, *sorted(there - set(workers))]) or "none yet"
            raise errors.JobNotFound(f"no log of {name} in {run_dir.logs}; there are: {listed}")
    return list(wanted) or workers


def logs(run_dir: RunDir, wanted: Sequence[str] = (), last_lines: int | None = None) -> Iterator[Line]:
    """Every line there is, or the last ones of each worker: one worker after the other. Fails with JobNotFound."""
    found = names(run_dir, wanted)
    if not found:
        raise errors.JobNotFound(f"no log in {run_dir.logs}; a job of one process prints where it was started")
    for name in found:
        lines = _lines(run_dir.logs / f"{name}.log")
        yield from ((name, line) for line in (lines if last_lines is None else deque(lines, last_lines)))


def follow(run_dir: RunDir, wanted: Sequence[str] = (), last_lines: int | None = None) -> Iterator[Line]:
    """The last lines there are and then each as it comes, also of workers that join, until the job has ended."""
    first = _FOLLOWED_LINES if last_lines is None else last_lines
    tails = {name: Tail(run_dir.logs / f"{name}.log", first) for name in names(run_dir, wanted)}
    try:
        while True:
            over = not run_dir.runs()
            for name in names(run_dir, wanted):
                tail = tails.setdefault(name, Tail(run_dir.logs / f"{name}.log"))
                yield from ((name, line) for line in tail.lines(last=over))
            if over:
                return
            time.sleep(POLL_S)
    finally:
        for tail in tails.values():
            tail.close()


def _lines(path: Path) -> Iterator[str]:
    """The part that was taken off and the rest are one text: a line may begin in one and end in the other."""
    rest = b""
    for part in (older_part(path), path):
        if part.exists():
            with open(part, "rb") as file:
                for line in file:
                    rest += line
                    if rest.endswith(b"\n"):
                        yield rest[:-1].decode(errors="replace")
                        rest = b""
    if rest:
        yield rest.decode(errors="replace")


def _number(name: str) -> int | None:
    """Of a worker; None for other logs, as the coordinator's."""
    return int(name[1:]) if name[:1] == "w" and name[1:].isdecimal() else None
