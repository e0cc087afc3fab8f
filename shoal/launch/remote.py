"""The launcher of another host as the job sees it: a process, here or at the far end of ssh, and a pipe to it.

Both ends say lines of JSON, one object each, and nothing of them is secret but the first, which has the token and keys:

    to the host      what `Told` has, once; then {"ping": address of the coordinator}, {"slots": n}, {"stop": seconds}
    from the host    {"up": 1} once it is in the job; {"ping": 1}; {"echo": [worker, line]}; {"say": line};
                     {"error": [class, text]} before it ends with one; {"committed": …}

Each end takes silence for the other's death: whoever cuts the line, nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal import errors
from shoal.control.rundir import Committed
from shoal.control.timeouts import Timeouts
from shoal.launch.hosts import HostSpec
from shoal.launch.screen import Screen

LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Told:
    """What a host must know to take part in a job."""

    host: str
    slots: int
    address: str  # of the coordinator
    token: str
    certificates: Mapping[str, str]  # as in an invitation
    dir: str  # the run directory at home; the host's too, if it sees the same
    settings: Mapping[str, Any]  # of the job
    environment: Mapping[str, str] = field(default_factory=dict)  # of its workers
    parent: int = 0  # the pid to end with, on the same machine
    grow: bool = False
    own_dir: bool = False  # also if the host sees home's

    def to_line(self) -> bytes:
        return line_of(asdict(self))


@dataclass(frozen=True)
class Reach:
    """How a process is started on another host. `ssh`: the command, with what options it needs."""

    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    cwd: str = field(default_factory=os.getcwd)
    python_path: str = field(default_factory=lambda: os.environ.get("PYTHONPATH", ""))

    def command(self, spec: HostSpec, timeouts: Timeouts) -> list[str]:
        if not spec.where:
            return [sys.executable, "-m", "shoal", "join", "--told"]
        words = [self.python, "-m", "shoal", "join", "--told"]
        if self.python_path:
            words = ["env", f"PYTHONPATH={self.python_path}", *words]
        alive_s = max(1, round(timeouts.budget_s))
        options = {"BatchMode": "yes", "ServerAliveInterval": alive_s, "ServerAliveCountMax": 3}
        options["ConnectTimeout"] = max(1, round(timeouts.join_s / 2))
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*self.ssh, *given, "-T", spec.where, f"cd {shlex.quote(self.cwd)} && exec {shlex.join(words)}"]


@dataclass(frozen=True)
class End:
    """How the launcher of a host ended: whether it was in the job before, and why."""

    up: bool
    error: errors.ShoalError | None
    lived_s: float


class RemoteHost:
    """One process, from its start to its end."""

    def __init__(self, spec: HostSpec, told: Told, reach: Reach, timeouts: Timeouts, screen: Screen) -> None:
        self.spec = spec
        self.committed: Committed | None = None
        self._told, self._reach, self._timeouts, self._screen = told, reach, timeouts, screen
        self._process: asyncio.subprocess.Process | None = None
        self._unsaid = [told.to_line()]  # until there is a process
        self._error: errors.ShoalError | None = None
        self._complaints: deque[str] = deque(maxlen=20)
        self.up = False

    async def run(self, address: Callable[[], str]) -> End:
        """Until the process has ended. `address`: of the coordinator, now."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        command = self._reach.command(self.spec, self._timeouts)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C in the terminal reaches the job only, which drains
            )
        except OSError as problem:
            why = f"{self.spec.name}: {command[0]} cannot be run: {problem.strerror}; see --ssh"
            return End(False, errors.HostUnusable(why), 0.0)
        for line in self._unsaid:
            self._write(line)
        others = [asyncio.ensure_future(work) for work in (self._ping(address), self._read_complaints(process))]
        try:
            await self._listen(process)
        finally:
            others[0].cancel()
            await self._end(process)
            await asyncio.wait(others, timeout=1.0)
            for other in others:
                other.cancel()
        return End(self.up, self._error or self._blamed(process.returncode), loop.time() - began_s)

    def set_slots(self, slots: int) -> None:
        """From now on; with none, its workers leave and then the process ends."""
        self._write(line_of({"slots": slots}))

    def stop(self, grace_s: float) -> None:
        """Ask the workers to leave, and end after that long."""
        self._write(line_of({"stop": grace_s}))

    def _write(self, line: bytes) -> None:
        if self._process is None:
            self._unsaid.append(line)
        elif self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has ended
                self._process.stdin.write(line)

    async def _ping(self, address: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(self._timeouts.beat_s)
            self._write(line_of({"ping": address()}))

    async def _read_complaints(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line without end
            while line := await process.stderr.readline():
                self._complaints.append(line.decode(errors="replace").strip())

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            patience_s = self._timeouts.cut_off_s if self.up else self._timeouts.join_s + self._timeouts.cut_off_s
            try:
                line = await asyncio.wait_for(process.stdout.readline(), patience_s)
            except asyncio.TimeoutError:
                self._error = errors.HostLost(f"{self.spec.name}: nothing was heard for {patience_s:g} s")
                return
            except ValueError:
                continue  # a line without end, which is none of ours
            if not line:
                return
            try:
                said = json.loads(line)
            except ValueError:
                continue  # what the shell of the host prints
            if isinstance(said, dict):
                self._hear(said)

    def _hear(self, said: Mapping[str, Any]) -> None:
        if "echo" in said:
            self._screen.echo(*said["echo"])
        elif "say" in said:
            self._screen.say(str(said["say"]))
        elif "up" in said:
            self.up = True
        elif "error" in said:
            self._error = errors.named(*said["error"])
        elif "committed" in said:
            self.committed = Committed(**said["committed"])

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """At the end of its input it ends by itself, with all that it started; over there that is the only way."""
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), self._timeouts.budget_s)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _blamed(self, code: int | None) -> errors.ShoalError | None:
        """What the exit status and the last words mean, of a process that did not say so itself."""
        if code == 0:
            return None
        name, where = self.spec.name, self.spec.where
        status = f"exit status {code}"
        if code is not None and code < 0:
            program = self._reach.ssh[0] if where else "python"
            status = f"{program} was ended by signal {-code} ({signal.strsignal(-code)})"
        last = next((line for line in reversed(self._complaints) if line), status)[:300]
        if self.up:
            return errors.HostLost(f"{name}: its launcher ended: {last}")
        if where and code == 255:
            return errors.HostUnusable(
                f"{name}: {last}; `{shlex.join(self._reach.ssh)} {where}` must work without asking"
            )
        if "No module named" in last or code == 127:
            python = self._reach.python if where else sys.executable
            return errors.HostUnusable(
                f"{name}: {last}; {python} must be there and have shoal with what it needs, see --remote-python"
            )
        return errors.HostUnusable(f"{name}: {last}")


def line_of(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def reached_by(ssh: Sequence[str], where: str) -> str:
    """The address that ssh would connect to, for a name that may be known to its configuration only. Raises
    SettingsContradict if there is no such ssh."""
    import subprocess

    host = where.rpartition("@")[2]
    try:
        shown = subprocess.run([*ssh, "-G", where], capture_output=True, text=True, timeout=10, check=True).stdout
    except OSError as problem:
        program = ssh[0] if ssh else "''"
        raise errors.SettingsContradict(
            f"--ssh {program} cannot be run: {problem.strerror}; name an ssh client, with the options it needs"
        ) from None
    except subprocess.SubprocessError:
        return host
    named = (line.split(None, 1)[1] for line in shown.splitlines() if line.startswith("hostname "))
    return next(named, host)
