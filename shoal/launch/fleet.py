"""The other hosts of a job: a launcher on each, started again when it ends, and hosts that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.control import commands
from shoal.control.environment import WorkerEnvironment
from shoal.control.invitation import certificates_of
from shoal.control.membership.values import ACTIVE, State
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.control.tls import LOOPBACK
from shoal.launch.host import LAST_WORD_S
from shoal.launch.hosts import HostSpec, own_address, parse_hosts, parse_lines
from shoal.launch.relaunch import CoolDown
from shoal.launch.remote import Reach, RemoteHost, Told, reached_by
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings
from shoal.launch.tasks import Tasks
from shoal.wording import counted

_REMEMBERED = 64  # hosts that have come and gone


class Discovery:
    """A script that says which hosts there are, a line of `host:slots` for each."""

    def __init__(self, script: Path, timeouts: Timeouts) -> None:
        self._script, self._timeouts = script, timeouts

    async def hosts(self) -> tuple[HostSpec, ...]:
        """Raises SettingsContradict when it fails, takes too long, or prints something else."""
        called, within_s = f"--discover {self._script}", 2 * self._timeouts.budget_s
        try:
            process = await asyncio.create_subprocess_exec(
                str(self._script),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as problem:
            raise errors.SettingsContradict(f"{called} cannot be run: {problem.strerror}; make it executable") from None
        try:
            out, err = await asyncio.wait_for(process.communicate(), within_s)
        except asyncio.TimeoutError:
            raise errors.SettingsContradict(f"{called} took longer than {within_s:g} s; make it quicker") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            last = [*filter(None, err.decode(errors="replace").split("\n")), "it says nothing"][-1 if err else 0]
            raise errors.SettingsContradict(f"{called} ended with {process.returncode}: {last[:300]}")
        return parse_lines(out.decode(errors="replace").splitlines(), called)


def home_address(settings: JobSettings) -> str:
    """Where the hosts of a job with these settings reach this machine; empty if it has no others and wants none. Raises
    HostUnusable if the first of them is not known."""
    specs = parse_hosts(settings.hosts) if settings.hosts else ()
    if settings.address or not specs:
        return settings.address
    far = next((spec.where for spec in specs if spec.where), "")
    return own_address(reached_by(shlex.split(settings.ssh), far)) if far else LOOPBACK


def fleet_of(settings: JobSettings, run_dir: RunDir, environment: WorkerEnvironment) -> Fleet | None:
    """The other hosts of a job with these settings; None if it has none."""
    if not settings.hosts:
        return None
    specs = parse_hosts(settings.hosts)
    reach = Reach(tuple(shlex.split(settings.ssh)), settings.remote_python or sys.executable, settings.cwd)
    told = Told(
        host="",
        slots=0,
        address="",
        token=run_dir.token(),
        certificates=certificates_of(run_dir, environment.address),
        dir=str(run_dir.path),
        settings=asdict(settings),
        environment=environment.to_env(),
        own_dir=settings.own_dirs,
    )
    discovery = Discovery(Path(settings.discover), settings.timeouts) if settings.discover else None
    follow = (settings.min, settings.max) if discovery is not None and settings.follows_slots else None
    return Fleet(specs, told, reach, run_dir, settings.timeouts, discovery, follow, settings.target)


class Fleet:
    """Keeps a launcher on every host. `told` is what each of them is told, beside its name and slots.

    A host that cannot be used when the job begins ends it, by `on_unusable`; later such a host rests for a while. With
    `discovery`, hosts that appear are used and those that vanish are let go, the last of them when others have the
    state of the job; with `follow`, the number of workers follows the number of slots between these two.
    """

    def __init__(
        self,
        specs: Sequence[HostSpec],
        told: Told,
        reach: Reach,
        run_dir: RunDir,
        timeouts: Timeouts,
        discovery: Discovery | None = None,
        follow: tuple[int, int] | None = None,
        target: int = 0,
    ) -> None:
        self.founders = tuple(specs)
        self._specs = {spec.name: spec for spec in specs}
        self._told, self._reach, self._run_dir, self._timeouts = told, reach, run_dir, timeouts
        self._discovery, self._follow = discovery, follow
        self._cool_down = CoolDown()
        self._remotes: dict[str, RemoteHost] = {}
        self._keeping: dict[str, asyncio.Task[Any]] = {}
        self._committed: list[Committed] = []
        self._founding = set(self._specs)  # without these the job does not begin
        self._last: Set[str] = set()  # hosts that are gone from the list, and alone have the state
        self._unlisted: Set[str] = set()  # as the coordinator was told
        self._wanted = target if target == self._from_slots() else None  # as it was told
        self._stopping = False

    def start(self, tasks: Tasks, screen: Screen, on_unusable: Callable[[errors.ShoalError], None]) -> None:
        """The coordinator serves by now."""
        self._tasks, self._screen, self._on_unusable = tasks, screen, on_unusable
        for spec in self.founders:
            self._keeping[spec.name] = tasks.spawn(self._keep(spec.name))
        if self._discovery is not None:
            tasks.spawn(self._discover(self._discovery))

    async def stop(self, grace_s: float, busy: Callable[[], bool]) -> None:
        """Ask every worker to leave, and end after `grace_s` those that have not, but not while `busy()`."""
        self._stopping = True
        for remote in self._remotes.values():
            remote.stop(grace_s)
        running = [task for name, task in self._keeping.items() if name in self._remotes]
        for name, task in self._keeping.items():
            if name not in self._remotes:
                task.cancel()
        if not running:
            return
        await asyncio.wait(running, timeout=grace_s + self._timeouts.budget_s)
        while busy() and not all(task.done() for task in running):
            await asyncio.wait(running, timeout=self._timeouts.beat_s)

    async def close(self) -> Committed | None:
        """After the tasks were cancelled, and with them every process that was left. The newest commit of them all."""
        return max(self._committed, key=lambda committed: committed.seq, default=None)

    async def _keep(self, name: str) -> None:
        while not self._stopping and name in self._specs:
            spec = self._specs[name]
            told = replace(self._told, host=name, slots=spec.slots, address=self._address())
            told = replace(told, parent=0 if spec.where else os.getpid())
            self._remotes[name] = remote = RemoteHost(spec, told, self._reach, self._timeouts, self._screen)
            try:
                end = await remote.run(self._address)
            finally:
                del self._remotes[name]
                if remote.committed is not None:
                    self._committed.append(remote.committed)
            if self._stopping or name not in self._specs:
                return
            if end.error is None:
                await asyncio.sleep(LAST_WORD_S)  # it may have heard of the job's end before this process does
            error = end.error or errors.HostLost(f"{name}: its launcher ended")
            if name in self._founding and not end.up:
                return self._on_unusable(error)
            self._founding.discard(name)
            self._cool_down, rest_s = self._cool_down.on_end(name, end.lived_s if end.up else 0.0)
            self._screen.say(f"{error}; it is tried again in {rest_s:g} s")
            await asyncio.sleep(rest_s)

    def _address(self) -> str:
        return self._run_dir.address() or self._told.address

    # ---- hosts come and go

    async def _kept(self, listed: Set[str]) -> dict[str, HostSpec]:
        """Those hosts that are not listed any more and cannot go yet, since no other has the state of the job; with one
        worker."""
        going = {name: self._specs[name] for name in sorted(self._specs.keys() - listed)}
        last, self._last = self._last, set()
        if not going:
            return {}
        try:
            status = await asyncio.to_thread(commands.status, self._run_dir, self._timeouts.command_s)
        except errors.ShoalError:
            self._last = last
            return going  # asked again with the next list
        holding = {worker["host"] for worker in status["workers"] if worker["state"] == State.MEMBER.value}
        if not holding and status["phase"] in ("running", "paused"):
            self._last = last
            return going  # all of them are dead, and the next go on from the memory of one of these
        if holding - (self._keeping.keys() - listed):
            return {}
        self._last = (holding | last) & going.keys()
        for name in sorted(self._last - last):
            self._screen.say(f"{name} is gone from the list of hosts; it stays until another has the state of the job")
        return {name: replace(going[name], slots=1) for name in sorted(self._last)}

    async def _discover(self, discovery: Discovery) -> None:
        complained = ""
        while not self._stopping:
            await asyncio.sleep(self._timeouts.budget_s / 2)
            try:
                found = await discovery.hosts()
            except errors.SettingsContradict as problem:
                if str(problem) != complained:
                    complained = str(problem)
                    self._screen.say(f"{problem}; the hosts stay as they are")
                continue
            complained = ""
            await self._change({spec.name: spec for spec in found})

    async def _change(self, listed: Mapping[str, HostSpec]) -> None:
        self._founding &= listed.keys()
        found = await self._kept(listed.keys()) | dict(listed)
        before, self._specs = self._specs, found
        for name in before.keys() - found.keys():
            remote = self._remotes.get(name)
            leaves = ": its workers leave" if remote is not None and remote.up else ""
            self._screen.say(f"{name} is gone from the list of hosts{leaves}")
            if remote is not None:
                remote.set_slots(0)
            else:
                self._keeping[name].cancel()  # it rests
        for name, spec in found.items():
            task = self._keeping.get(name)
            if name in before:
                if spec.slots != before[name].slots and name in self._remotes:
                    self._remotes[name].set_slots(spec.slots)
            elif task is None or task.done():
                self._screen.say(f"{name} is a new host, with {counted(spec.slots, 'slot')}")
                self._keeping[name] = self._tasks.spawn(self._keep(name))
            else:
                self._remotes[name].set_slots(spec.slots)  # it was about to leave
        with contextlib.suppress(errors.ShoalError):  # told and asked again with the next list
            await self._tell_unlisted(self._keeping.keys() - listed.keys())
            await self._follow_slots()

    async def _tell_unlisted(self, names: Set[str]) -> None:
        """What these hosts still have does not count any more, and those that never came are awaited no longer."""
        if names != self._unlisted:
            await asyncio.to_thread(commands.unlisted, self._run_dir, names, self._timeouts.command_s)
            self._unlisted = frozenset(names)
        ended = [name for name in self._keeping if name not in self._specs and self._keeping[name].done()]
        for name in ended[:-_REMEMBERED]:  # by now the coordinator has lost them
            del self._keeping[name]

    def _from_slots(self) -> int | None:
        """How many workers follow from the slots; None if they do not."""
        if self._follow is None:
            return None
        low, high = self._follow
        slots = sum(spec.slots for name, spec in self._specs.items() if name not in self._last)
        return min(max(slots, low), high)

    async def _follow_slots(self) -> None:
        wanted = self._from_slots()
        if wanted is None or wanted == self._wanted:
            return
        status = await asyncio.to_thread(commands.status, self._run_dir, self._timeouts.command_s)
        active = [it for it in status["workers"] if it["state"] in [state.value for state in ACTIVE]]
        if wanted < status["target"] and len(active) > wanted:
            return  # hosts let go of theirs first: the coordinator would choose others, and perhaps all with the state
        if wanted != status["target"]:
            await asyncio.to_thread(commands.scale, self._run_dir, wanted, self._timeouts.command_s)
        self._wanted = wanted
