"""A job on this machine, for tests: the real launcher, coordinator and workers, in a directory of the test's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shoal import errors
from shoal.control import commands
from shoal.control.environment import COORDINATOR_PLUGIN, WorkerEnvironment
from shoal.control.rundir import Committed, RunDir
from shoal.data.audit import AuditReport, audit
from shoal.metrics import read_events
from shoal.testing.faults import COORDINATOR, FaultPlan, JournalFate, lose_journal

_POLL_S = 0.02


@dataclass(frozen=True)
class JobResult:
    exit_code: int
    output: str
    events: list[dict[str, Any]]
    audit: AuditReport
    committed: Committed | None  # the newest commit; None if there was none, or the launcher was killed
    digests: dict[str, str]  # of the state each worker ended with, for those that finished
    faults: list[dict[str, Any]]  # what the plan really did

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def steps(self) -> int:
        return 0 if self.committed is None else self.committed.step


class LocalJob:
    """`workers` is what `shoal run -n` takes. Use `run`, or `start` and `wait` to act while it trains."""

    def __init__(
        self,
        script: Path | str,
        args: Sequence[str] = (),
        *,
        workers: int | str = 2,
        directory: Path,
        plan: FaultPlan | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._command = [
            sys.executable, "-m", "shoal", "run", "-n", str(workers), "--dir", str(directory), *options, str(script),
            *args,
        ]  # fmt: skip
        self.directory = directory
        self._plan = plan
        self._process: subprocess.Popen[str] | None = None
        self._killed: set[psutil.Process] = set()  # coordinators

    def run(self, timeout_s: float = 120.0) -> JobResult:
        self.start()
        return self.wait(timeout_s)

    def start(self) -> None:
        self._start(self._command)

    def resume(self, workers: int | str | None = None, options: Sequence[str] = ()) -> None:
        """Go on with the job after its launcher has ended or was killed, as `shoal resume` does."""
        size = [] if workers is None else ["-n", str(workers)]
        self._start([sys.executable, "-m", "shoal", "resume", str(self.directory), *size, *options])

    def kill(self) -> None:
        """`kill -9` of the launcher, and with it of everything it started."""
        self.process.kill()
        self.process.communicate()

    def _start(self, command: Sequence[str]) -> None:
        env = dict(os.environ)
        if self._plan is not None:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            path = self.directory.with_name(self.directory.name + ".plan.json")
            path.write_text(self._plan.to_json())
            env |= WorkerEnvironment(plugin="shoal.testing.faults:install", faults=str(path.absolute())).to_env()
            if any(fault.worker_id == COORDINATOR for fault in self._plan.faults):
                env[COORDINATOR_PLUGIN] = "shoal.testing.faults:install_in_coordinator"
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the job was not started"
        return self._process

    def wait(self, timeout_s: float = 120.0) -> JobResult:
        """Until the job ends by itself. After the timeout it is killed, and TimeoutError says what it had printed."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise TimeoutError(f"the job did not end within {timeout_s} s; it printed:\n{output}") from None
        return self._result(output)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Until `holds()`, the job ends, or the timeout (TimeoutError)."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if self.process.poll() is not None:
                raise TimeoutError(
                    f"the job ended first, with {self.process.returncode}: {self.process.communicate()[0]}"
                )
            if time.monotonic() > deadline_s:
                self.process.kill()
                raise TimeoutError(f"not within {timeout_s} s; the job printed:\n{self.process.communicate()[0]}")
            time.sleep(_POLL_S)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = read_events(RunDir(self.directory).events)
        return [event for event in found if kind is None or event["event"] == kind]

    def status(self) -> dict[str, Any]:
        """What `shoal status --json` prints; empty while the coordinator does not answer yet."""
        try:
            return commands.status(RunDir.open(self.directory))
        except errors.UserMistake:
            return {}

    def scale(self, target: int) -> None:
        commands.scale(RunDir.open(self.directory), target)

    def stop(self) -> None:
        """As `shoal stop` does."""
        commands.stop(RunDir.open(self.directory), "asked by a test")

    def coordinator(self) -> int:
        """The pid of the coordinator, waited for until it serves: its predecessor may have just been killed."""
        found: list[int] = []

        def serves() -> bool:
            pid, serving = RunDir(self.directory).coordinator()
            found[:] = [pid]
            # Not by the pid alone: in a long job one is used again.
            with contextlib.suppress(psutil.NoSuchProcess):
                return serving and psutil.Process(pid) not in self._killed
            return False

        self.wait_until(serves)
        return found[0]

    def kill_coordinator(self, journal: JournalFate = "kept") -> None:
        """SIGKILL, at whatever instruction it is, and the journal deleted or overwritten in the same moment."""
        pid = self.coordinator()
        self._killed.add(psutil.Process(pid))
        os.kill(pid, signal.SIGSTOP)  # nothing is written between the loss and the death
        lose_journal(RunDir(self.directory), journal)
        os.kill(pid, signal.SIGKILL)

    def checkpoint(self) -> dict[str, Any]:
        """Ask for a checkpoint, as `shoal checkpoint` does; the event that tells of it."""
        run_dir = RunDir.open(self.directory)
        before = len(self.events("checkpointed"))
        commands.checkpoint(run_dir)
        self.wait_until(lambda: len(self.events("checkpointed")) > before)
        return self.events("checkpointed")[before]

    def signal(self, worker_id: str, signum: int = signal.SIGKILL) -> None:
        """Send a worker a signal from outside, at whatever instruction it is."""
        pid = next(worker["pid"] for worker in self.status()["workers"] if worker["worker_id"] == worker_id)
        os.kill(pid, signum)

    def _result(self, output: str) -> JobResult:
        events = self.events()
        finished = [event for event in events if event["event"] == "finished"]
        run_dir = RunDir(self.directory)
        committed = run_dir.committed()
        plan = FaultPlan.load(run_dir.faults).faults if run_dir.faults.exists() else ()
        return JobResult(
            self.process.returncode,
            output,
            events,
            audit(run_dir.audit, None if committed is None else committed.seq),
            committed,
            {event["worker_id"]: event["digest"] for event in finished},
            [fault.__dict__ for fault in plan],
        )
