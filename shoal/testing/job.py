"""A job on this machine, for tests: the real launcher, coordinator and workers, in a directory of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.control import client
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import Committed, RunDir
from shoal.data.audit import AuditReport, audit
from shoal.metrics import read_events
from shoal.testing.faults import FaultPlan

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

    def run(self, timeout_s: float = 120.0) -> JobResult:
        self.start()
        return self.wait(timeout_s)

    def start(self) -> None:
        env = dict(os.environ)
        if self._plan is not None:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            path = self.directory.with_name(self.directory.name + ".plan.json")
            path.write_text(self._plan.to_json())
            env |= WorkerEnvironment(plugin="shoal.testing.faults:install", faults=str(path.absolute())).to_env()
        self._process = subprocess.Popen(
            self._command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

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
            run_dir = RunDir.open(self.directory)
            address = run_dir.address()
            return client.status(address, run_dir.token()) if address else {}
        except errors.UserMistake:
            return {}

    def scale(self, target: int) -> None:
        run_dir = RunDir.open(self.directory)
        client.scale(run_dir.address() or "", run_dir.token(), target)

    def stop(self) -> None:
        """As `shoal stop` does; then `wait`."""
        run_dir = RunDir.open(self.directory)
        client.stop(run_dir.address() or "", run_dir.token(), "stopped by its test")

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
