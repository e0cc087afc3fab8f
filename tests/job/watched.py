"""A job that cannot run past what a test waits for, and how far it is by the word of its shared memory."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import psutil

from shoal.sync.record import Record, Records
from shoal.sync.words import _RECORD_AT, generation_of, seq_of
from shoal.testing import LocalJob
from tests.job.training import Gate

AHEAD = 30  # steps that the job may make while the test makes up its mind


class Watched:
    """A job and the gate of its training. The shared memory tells of each step at once, also while there is no
    coordinator."""

    def __init__(self, job: LocalJob, gate: Gate) -> None:
        self.job, self._gate = job, gate
        self._furthest = 0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever went wrong, the job does not go on."""
        if self.job.process.poll() is None:
            self.job.kill()

    def reach(self, more: int) -> None:
        """Until the job is so many steps further than ever before. It goes on for a few, so it trains when this
        returns, and is not at its end."""
        self._furthest = max(self._furthest, self.commit()[1].step) + more
        self._gate.open(self._furthest + AHEAD)
        self.job.wait_until(lambda: self.commit()[1].step >= self._furthest)

    def commit(self) -> tuple[int, Record]:
        """The generation and the record of the newest commit."""
        for fd in Path(f"/proc/{self.job.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(fd) == "/memfd:shoal-words (deleted)":
                    return _newest(fd)
        return 0, Record()

    def workers(self) -> list[psutil.Process]:
        return self.fork_server().children()

    def fork_server(self) -> psutil.Process:
        def serves(child: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # a coordinator that was just killed
                return "shoal.launch.forkserver" in child.cmdline()
            return False

        return next(filter(serves, psutil.Process(self.job.process.pid).children()))

    def settle(self) -> None:
        """Until all the workers that are wanted have made a step together."""

        def settled() -> bool:
            status, (generation, record) = self.job.status(), self.commit()
            members = [worker for worker in status.get("workers", []) if worker["rank"] is not None]
            if not members or len(members) != status["target"]:
                return False
            self._gate.open(max(self._furthest, record.step) + AHEAD)  # the step may have to be made yet
            return bool(generation == status["generation"] and record.size == len(members))

        self.job.wait_until(settled)


def _newest(words: Path) -> tuple[int, Record]:
    """A record stays as it is until the second commit after its own."""
    fd = os.open(words, os.O_RDONLY)
    try:
        while os.fstat(fd).st_size:  # it has just been made, otherwise
            (tag,) = struct.unpack("<Q", os.pread(fd, 8, 0))
            record = Records(memoryview(os.pread(fd, 1024, _RECORD_AT))).read(seq_of(tag))
            if os.pread(fd, 8, 0) == struct.pack("<Q", tag):
                return generation_of(tag), record if tag else Record()
        return 0, Record()
    finally:
        os.close(fd)
