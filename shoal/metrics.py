"""What happened: named points of a step (where faults can be injected) and the event log of a run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# In the order a step passes them. `park` and `join` belong to a change of generation.
POINTS = (
    "join",  # connected, not yet a member
    "park",  # a generation ended for this worker, the next has not begun
    "forward",  # a batch is about to be handed to the user's loop
    "backward",  # between two gradients
    "lane",  # all gradients are in the lane, the ready word is not written
    "ready",  # the ready word is written, the neighbors' are awaited
    "reduce",  # in the middle of reducing this worker's slice
    "optimizer",  # in the middle of stepping this worker's slice
    "before_done",  # the slice is stepped, the done word is not written
    "after_done",  # the done word is written, the neighbors' are awaited
    "before_commit",  # every done word was seen, the commit word is not written
    "after_commit",  # the commit word is written, this worker has not moved on
)

# Of one that gets the state for its host while others train.
FOLLOWER_POINTS = ("follow",)  # all of a commit is here, and the others wait to hear so

# Of the coordinator, in the order a decision passes them. `returns` is passed once, by one that follows another.
COORDINATOR_POINTS = (
    "returns",  # it has not looked at the journal yet, and does not serve
    "decided",  # a change is decided, and not in the journal
    "journaled",  # it is in the journal, and nobody was told
    "told",  # somebody was told; others perhaps not
)

_hook: Callable[[str], None] | None = None


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the point's name at every fault point of this process; None disarms."""
    global _hook
    _hook = hook


def fault_point(name: str) -> None:
    if _hook is not None:
        _hook(name)


def event_line(time_s: float, kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"time": round(time_s, 6), "event": kind, **fields})


class EventLog:
    """Appends one JSON object a line; a line is one write, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, time_s: float, kind: str, **fields: Any) -> None:
        self.append(event_line(time_s, kind, fields))

    def append(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    def mend(self, lines: Sequence[str], at_bytes: int) -> None:
        """Write what is missing of `lines`, which were to stand at `at_bytes`: whoever wrote them was killed there."""
        with os.fdopen(os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY), "rb") as file:
            file.seek(at_bytes)
            *whole, torn = file.read().split(b"\n")
        os.ftruncate(self._fd, self.size_bytes - len(torn))
        for line in lines[len(whole) :]:
            self.append(line)

    def close(self) -> None:
        os.close(self._fd)


def write_end(path: Path, phase: str, text: str) -> None:
    """The last event of a job. Its coordinator has gone, and some endings it never knew."""
    with contextlib.suppress(OSError):  # on a full disk the error itself is still to be told
        log = EventLog(path)
        log.write(time.time(), "over", phase=phase, text=text)
        log.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole events of the log; a line that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]
