"""What a job could leave behind on its machine, found by looking at the machine and not at the job."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from shoal import checkpoints
from shoal.control.rundir import RunDir
from shoal.errors import CheckpointUnusable
from shoal.testing import LocalJob

_DYING_S = 20.0
_SHARED_MEMORY = Path("/dev/shm")


class Traces:
    """Of every process that inherits this directory for temporary files, and of the job they make up."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._shared_memory = set(os.listdir(_SHARED_MEMORY))
        self._ports: set[int] = set()
        self._memory: set[tuple[int, int]] = set()  # device and inode of each piece that has no name
        self._pids: set[int] = set()

    def note(self, job: LocalJob) -> None:
        """Remember what the job holds now."""
        self._pids.update(process.pid for process in self._processes())
        address = RunDir(job.directory).address()
        if address is not None:
            self._ports.add(int(address.rpartition(":")[2]))
        self._memory.update(_memory_held(job.process.pid))

    def left(self, job: LocalJob, unfinished: bool = False) -> list[str]:
        """A line for each thing that the job, which has ended, has left. One that was killed and could be resumed may
        have left something unfinished in its own directory."""
        _, alive = psutil.wait_procs(self._processes(), timeout=_DYING_S)
        found = [f"process {process}" for process in alive]
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port in self._ports and each.pid in {None, *self._pids}:
                found.append(f"port {each.laddr.port} of process {each.pid}")
        for process in psutil.process_iter():
            if self._memory & _memory_held(process.pid):
                found.append(f"shared memory held by {process}")
        found += [f"{_SHARED_MEMORY}/{name}" for name in self._named_memory(RunDir(job.directory))]
        # A cache that torch keeps for all processes of a user.
        found += [str(path) for path in self._temporary.iterdir() if not path.name.startswith("torchinductor_")]
        if unfinished:
            return found
        found += [str(path) for path in job.directory.rglob(".*")]
        for path in checkpoints.listed(RunDir(job.directory).checkpoints):
            try:
                checkpoints.check(path)
            except CheckpointUnusable as problem:
                found.append(str(problem))
        return found

    def _processes(self) -> list[psutil.Process]:
        """All that were started with our directory in their environment, or forked from such a one."""
        ours = f"TMPDIR={self._temporary}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if ours in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def _named_memory(self, run_dir: RunDir) -> list[str]:
        """What is new in /dev/shm. torch names a piece after its maker: other jobs on this machine make such too."""
        makers = {*map(str, self._pids), *(run_dir.loaders.read_text().split() if run_dir.loaders.exists() else ())}
        new = set(os.listdir(_SHARED_MEMORY)) - self._shared_memory
        return [name for name in new if (found := re.match(r"torch_(\d+)_", name)) and found[1] in makers]


def _memory_held(pid: int) -> set[tuple[int, int]]:
    held = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:shoal-"):
                    about = fd.stat()
                    held.add((about.st_dev, about.st_ino))
    return held
