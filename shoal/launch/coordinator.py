"""The coordinator's process, as its launcher sees it: it is started, followed by another, and killed when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from shoal import errors
from shoal.control import commands
from shoal.control.membership.failures import OnError
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.launch.exits import Exit
from shoal.launch.hosts import HostSpec
from shoal.launch.relaunch import GiveUp, Succession
from shoal.launch.settings import Size


class CoordinatorProcess:
    """The coordinator, as a process that ends with this one. `after`: how the one before it ended."""

    def __init__(
        self,
        run_dir: RunDir,
        size: Size,
        timeouts: Timeouts,
        on_error: OnError,
        generation: int,
        next_worker: int = 0,
        address: str = "",
        hosts: Sequence[HostSpec] = (),
        after: str = "",
    ) -> None:
        """`generation` and `next_worker`: numbers used before, for a job that goes on. `address`: where to serve, if
        not on loopback."""
        self._run_dir = run_dir
        self.log = run_dir.logs / "coordinator.log"
        options = {
            "--dir": run_dir.path,
            "--min": size.min,
            "--max": size.max,
            "--target": size.target,
            "--budget": timeouts.budget_s,
            "--on-error": on_error,
            "--generation": generation,
            "--next-worker": next_worker,
            "--address": address or "127.0.0.1",
            "--hosts": ",".join(map(str, hosts)),
            "--after": after,
            "--parent": os.getpid(),
        }
        command = [sys.executable, "-m", "shoal.control.coordinator"]
        command += [str(word) for option in options.items() for word in option]
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only, which drains
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._began_s = time.monotonic()
        self._hung = ""
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._process.wait()
        self.ended.set()

    @property
    def serves(self) -> bool:
        """Whether it came to serve, also when it has ended since; not any more once another has begun."""
        return self._run_dir.coordinator() == (self._process.pid, True)

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def killed(self) -> bool:
        return self._process.returncode is not None and self._process.returncode < 0

    def how_it_ended(self) -> str:
        if self._hung or not self.killed:
            return self._hung or f"exit status {self._process.returncode}"
        return f"killed by {signal.Signals(-self._process.returncode).name}"

    def kill(self, why: str) -> None:
        self._hung = why
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def lost(self) -> errors.CoordinatorLost:
        exit = Exit.of("", self._process.returncode)
        said = self.log.read_text(errors="replace").split("\n") if exit.exit_code else []
        last = next((f": {line.strip()[:300]}" for line in reversed(said) if line.strip()), "")
        return errors.CoordinatorLost(f"the coordinator ended with {exit}{last}; see {self.log}")

    async def close(self, grace_s: float) -> None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if not self.ended.is_set():
                signal.pidfd_send_signal(self._pidfd, signum)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), grace_s)
        self.release()

    def release(self) -> None:
        os.close(self._pidfd)


class CoordinatorKeeper:
    """Sees to it that there is a coordinator. The first is started at once, on the loop that runs."""

    def __init__(
        self,
        run_dir: RunDir,
        size: Size,
        timeouts: Timeouts,
        on_error: OnError,
        generation: int,
        next_worker: int = 0,
        address: str = "",
        hosts: Sequence[HostSpec] = (),
        after: str = "",
    ) -> None:
        """As `CoordinatorProcess`."""
        self._run_dir, self._timeouts = run_dir, timeouts
        self._make = functools.partial(
            CoordinatorProcess, run_dir, size, timeouts, on_error, generation, next_worker, address, hosts
        )
        self._succession = Succession()
        self._start(after)

    def _start(self, after: str) -> None:
        self._process = self._make(after=after)

    @property
    def serves(self) -> bool:
        return self._process.serves

    async def keep(self) -> errors.CoordinatorLost:
        """Follow each that ends by another, while workers train on. Returns when that is in vain, with the reason."""
        while True:
            ended = self._process
            await ended.ended.wait()
            self._succession, decision = self._succession.on_end(ended.killed, ended.serves, ended.lived_s)
            if isinstance(decision, GiveUp):
                return ended.lost()
            await asyncio.sleep(decision.delay_s)
            self._start(after=ended.how_it_ended())
            ended.release()

    async def watch(self) -> None:
        """One that hangs is killed, and followed by another. Nobody is told what it may decide when it wakes up. Fails
        with CertificateRefused where no coordinator was ever believed; later, when a certificate has run out, training
        goes on."""
        answered = False
        while True:
            await asyncio.sleep(self._timeouts.budget_s)
            watched, within_s = self._process, self._timeouts.command_s
            try:
                await asyncio.to_thread(commands.status, self._run_dir, within_s)
                answered = True
            except (errors.CertificateRefused, errors.CertificateUnusable):
                if not answered:
                    raise
            except FileNotFoundError:
                pass  # the token is gone: a coordinator that cannot serve says so, and `keep` ends the job
            except errors.JobNotFound:
                if watched is self._process and not watched.ended.is_set():
                    watched.kill(f"no answer for {within_s:g} s")

    async def close(self, grace_s: float) -> None:
        """`keep` has ended."""
        await self._process.close(grace_s)
