"""A variant that is a group of worker processes, each on its own cores."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shoal.bench.bodies import Buffer, Setup, Training
from shoal.errors import ScriptFailed, SettingsContradict

# Run and not timed at the head of every turn: caches were somebody else's, threads asleep, workers not yet in step.
_LEAD_IN_STEPS = 1
_TAIL_CHARACTERS = 2000


def placement(available: Collection[int], n_workers: int, cores_per_worker: int) -> list[frozenset[int]]:
    """Which cores each worker stays on: disjoint, and the same for every variant of the same size.

    Raises SettingsContradict when there are not enough.
    """
    if n_workers * cores_per_worker > len(available):
        raise SettingsContradict(
            f"{n_workers} workers × {cores_per_worker} cores do not fit the {len(available)} cores of this machine;"
            " start fewer workers or give each fewer cores"
        )
    cores = sorted(available)
    return [frozenset(cores[rank * cores_per_worker :][:cores_per_worker]) for rank in range(n_workers)]


@dataclass(frozen=True)
class Place:
    """A host that is a part of this machine: what is put before a command to run it there, and how others reach it."""

    host: str
    address: str
    interface: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    errors: Path


class ProcessGroup:
    """A `Variant`: n processes that run one body. The group's time for a turn is that of its slowest worker.

    `share_cores` lets all workers run on all cores; for what is not timed, such as memory.
    """

    def __init__(
        self,
        body: str,
        work: Training | Buffer,
        *,
        keep_freed_memory: bool = False,
        share_cores: bool = False,
        places: Sequence[Place] = (),
        wire: str = "full",
        timeout_s: float = 600.0,
    ) -> None:
        """`places`: of each worker, where they are on several hosts."""
        self.body = body
        self._work = work
        self._keep_freed_memory = keep_freed_memory
        self._share_cores, self._places, self._wire = share_cores, places, wire
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def start(self, n_workers: int, cores_per_worker: int) -> None:
        available = os.sched_getaffinity(0)
        cores = (
            [frozenset(available)] * n_workers
            if self._share_cores
            else placement(available, n_workers, cores_per_worker)
        )
        self._directory = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        for rank in range(n_workers):
            self._workers.append(self._spawn(rank, cores_per_worker))
            setup = Setup(
                body=self.body,
                work=self._work,
                rank=rank,
                n_workers=n_workers,
                threads=cores_per_worker,
                keep_freed_memory=self._keep_freed_memory,
                meeting_dir=self._directory.name,
                wire=self._wire,
            )
            if self._places:
                place = self._places[rank]
                setup = replace(setup, host=place.host, address=place.address, interface=place.interface)
            self._workers[rank].connection.send((setup, cores[rank]))
        self._answers("come up")

    def measure(self, steps: int) -> float:
        for worker in self._workers:
            worker.connection.send((_LEAD_IN_STEPS, steps))
        taken_s: list[float] = self._answers(f"run {steps} steps")
        return max(taken_s) / steps

    def stop(self) -> None:
        for worker in self._workers:
            try:
                worker.connection.send(None)
            except BrokenPipeError:  # dead already
                pass
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _spawn(self, rank: int, threads: int) -> _Worker:
        assert self._directory is not None
        errors = Path(self._directory.name) / f"worker{rank}.err"
        ours, theirs = Pipe()
        # A new interpreter, never a fork: this process may have threads, and torch in it has been used.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "OMP_NUM_THREADS": str(threads),
        }
        with errors.open("wb") as sink, theirs:
            before = self._places[rank].command if self._places else ()
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "shoal.bench.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        return _Worker(process, ours, errors)

    def _answers(self, task: str) -> list[Any]:
        """One answer of each worker. The first that dies ends the wait: its neighbors may wait for it for ever."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(self._workers):
            waiting = {w.connection: rank for rank, w in enumerate(self._workers) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(min(waiting.values()), f"did not {task} within {self._timeout_s:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failure(rank, f"died when it was to {task}") from None
        return list(answers.values())

    def _failure(self, rank: int, what: str) -> ScriptFailed:
        said = self._workers[rank].errors.read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
        return ScriptFailed(f"worker {rank} of {self.body!r} {what}; it said: {said or 'nothing'}")
