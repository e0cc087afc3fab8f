"""How processes of a job end together, how old they are, and what they may use."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, however it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before the kernel knew of the wish
        os._exit(1)


def age_s() -> float:
    """How long ago this process was started or forked, to a hundredth of a second."""
    # Field 22, behind the name, which is in parentheses and may hold spaces.
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0))
