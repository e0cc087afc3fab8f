"""A host's part in a job: its workers are kept here, by the word of a coordinator that is elsewhere.

It ends with the job, when it is asked to, and when home is cut off: `shoal run` started it and pings it, here or over
ssh. A host that was added by hand belongs to whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal import __version__, errors
from shoal.control.client import LauncherClient
from shoal.control.environment import WorkerEnvironment
from shoal.control.invitation import Invitation
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.launch.host import Ending, HostKeeper, Owner, Place
from shoal.launch.hosts import own_address
from shoal.launch.local import LocalLauncher, clear_shared_memory
from shoal.launch.output import Output
from shoal.launch.remote import LINE_BYTES, Told, line_of
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings
from shoal.launch.shipping import Shipping
from shoal.launch.tasks import Tasks
from shoal.process import die_with

_BACKLOG_BYTES = 1 << 20  # of lines that nobody reads; the logs have them all
_LOOK_S = 0.05
_OWN = "shoal-join-"
_SWEEP_S = 60.0  # from when a folder is made until it is held


@dataclass(frozen=True)
class Host:
    """What there is on this host for the job: a run directory, which may be home's own, and settings."""

    told: Told
    run_dir: RunDir
    shared: bool
    settings: JobSettings

    @property
    def environment(self) -> WorkerEnvironment:
        given = WorkerEnvironment.from_env(self.told.environment)
        return replace(given, address=own_address(self.told.address.rpartition(":")[0]))


@contextlib.contextmanager
def host(told: Told) -> Iterator[Host]:
    """The run directory that home told of, if it can be seen here; else one of this host's own, for as long as this
    lasts. Raises HostUnusable if the script is not here."""
    theirs = told.settings.get("version", __version__)
    if theirs != __version__:
        raise errors.HostUnusable(
            f"{told.host} has shoal {__version__}, the job {theirs}; install the same on every host"
        )
    settings = JobSettings.read({**told.settings, "address": ""})  # which is one of home's
    if not Path(settings.script).is_file():
        raise errors.HostUnusable(f"{told.host} has no {settings.script}; put the script there, at the same path")
    home = RunDir(Path(told.dir))
    try:
        shared = not told.own_dir and home.token() == told.token
    except OSError:
        shared = False
    if shared:
        yield Host(told, home, True, settings)
        return
    _sweep()
    with tempfile.TemporaryDirectory(prefix=_OWN) as folder:
        invitation = Invitation(told.address, told.token, told.certificates)
        own = invitation.accept(Path(folder) / Path(told.dir).name, told.settings)
        with own.held():
            yield Host(told, own, False, settings)


def _sweep() -> None:
    """Remove what launchers that were killed have left here."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_OWN}*"):
        with contextlib.suppress(OSError):  # another user's, or just removed
            old = time.time() - folder.stat().st_mtime > _SWEEP_S
            held = [run_dir for run_dir in map(RunDir, folder.iterdir()) if run_dir.runs()]
            if old and not held:
                shutil.rmtree(folder)


class Session(Owner):
    """One life of this host in the job. `over` when the job goes on without it and it may come again: `again`."""

    def __init__(
        self,
        host: Host,
        screen: Screen,
        on_up: Callable[[], None] = lambda: None,
        launcher: Callable[..., LocalLauncher] = LocalLauncher,
    ) -> None:
        self._host, self._screen, self._on_up, self._make_launcher = host, screen, on_up, launcher
        self._timeouts = host.settings.timeouts
        self._draining = False
        self._ending: Ending | None = None
        self._link: LauncherClient | None = None
        self._shipping: Shipping | None = None
        self.again, self.rest_s = False, 0.0
        self.error: errors.ShoalError | None = None
        self.committed: dict[str, Any] | None = None

    async def run(self) -> None:
        """Until it is over; no process is left then. Raises what kept it from taking part."""
        host, settings = self._host, self._host.settings
        self._over = asyncio.Event()
        self._tasks = Tasks(self.lost)
        make_launcher = functools.partial(
            self._make_launcher,
            Path(settings.script),
            list(settings.args),
            host.run_dir.logs,
            memory_limit_bytes=settings.memory_bytes,
        )
        place = Place(host.told.host, host.told.slots, home=False, grow=host.told.grow)
        self._keeper = HostKeeper(
            place, host.run_dir, self._timeouts, settings.relaunch, settings.on_error, make_launcher, self, self._tasks
        )
        # A log of which the head is taken off could not be sent home by its length.
        log_bytes = settings.log_bytes if host.shared else sys.maxsize
        self._output = Output(host.run_dir, self._screen, self._keeper.live, log_bytes, events=False)
        try:
            begins = self._tasks.spawn(self._begin())
            await self._over.wait()
        finally:
            begins.cancel()
            self._keeper.end()  # or the deaths that come now would have successors
            await self._tasks.cancel()
            await self._output.settle()
            committed = await self._keeper.close()
            self.committed = None if committed is None else asdict(committed)
            if self._shipping is not None and self._link is not None and self._link.answered:
                await self._shipping.finish(self._timeouts.budget_s)
            if not host.shared:
                clear_shared_memory(host.run_dir.loaders)
            # The last deaths; not patiently: home may be cut off.
            await self._keeper.disconnect(0.0)
            self._output.close()
        if self.error is not None:
            raise self.error

    async def _begin(self) -> None:
        await self._keeper.open()
        environment = self._host.environment
        self._link = link = self._keeper.connect(environment)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        latest_s = began_s + self._timeouts.join_s
        while not link.answered:
            if link.refused is not None and loop.time() > began_s + self._timeouts.budget_s:
                return self.lost(link.refused)  # before that, it may be another's port for now
            if link.token_refused:
                return self.lost(errors.TokenRefused(f"{self._host.told.address} refused the token; give this job's"))
            if loop.time() > latest_s:
                where = self._host.told.address
                return self.lost(
                    errors.HostUnusable(
                        f"{self._host.told.host} gets no answer from the coordinator at {where}; does a firewall stand "
                        "between them? --address names another address of home"
                    )
                )
            await asyncio.sleep(_LOOK_S)
        self._on_up()
        if not self._host.shared:
            self._shipping = Shipping(self._host.run_dir, self._host.told.host, link.piece)
            self._tasks.spawn(self._shipping.run())
        self._tasks.spawn(self._output.show_lines())
        await self._until_unanswered(link)

    async def _until_unanswered(self, link: LauncherClient) -> None:
        """A host that is cut off waits for the job to be reached again, at another address if need be. But the job may
        be over, and nobody says so."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while True:
            await asyncio.sleep(self._timeouts.beat_s)
            silent_s = loop.time() - heard_s
            if link.answered:
                heard_s = loop.time()
            elif silent_s > self._timeouts.deserted_s or (silent_s > self._timeouts.join_s and self._has_ended()):
                where = self._host.told.address
                return self.lost(
                    errors.HostUnusable(f"no word from the job at {where} for {silent_s:.0f} s: it is over")
                )

    def _has_ended(self) -> bool:
        """Whether it can be seen that the job came to its end; if its own host was lost, another may take its place."""
        run_dir = self._host.run_dir
        return self._host.shared and not run_dir.runs() and run_dir.committed() is not None

    # ---- what others want

    def set_slots(self, slots: int) -> None:
        """With none, the workers leave, and then it is over."""
        self._draining = not slots
        if self._link is None:
            self._over.set()
        else:
            self._link.set_slots(slots)

    def stop(self, grace_s: float) -> None:
        self.told_to_end(Ending(), grace_s)

    def kill(self) -> None:
        self._over.set()

    # ---- what is heard of the workers

    def told_to_end(self, ending: Ending, grace_s: float) -> None:
        if self._ending is None:
            self._ending = ending
            self._keeper.end()
            self._tasks.spawn(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        await self._keeper.stop(grace_s, busy=lambda: False)
        self._over.set()

    def failed(self, ending: Ending) -> None:
        """The coordinator ends the job, here too; if there is none, this host leaves it."""
        assert self._link is not None
        assert ending.error is not None
        self._link.failed(type(ending.error).__name__, str(ending.error), ending.traceback or "")
        self._tasks.later(self._timeouts.drain_s, self.told_to_end, ending, 0.0)

    def lost(self, error: errors.ShoalError) -> None:
        self.error = self.error or error
        self._over.set()

    def idle(self, wanted: bool) -> None:
        if self._draining and not wanted:
            self._over.set()
        elif wanted and self._link is not None:
            self._link.idle()

    def dropped(self, rest_s: float) -> None:
        when = f" in {rest_s:.0f} s" if rest_s else ""
        self._screen.say(f"{self._host.told.host} was cut off from the job; it comes again{when}, with new workers")
        self.again, self.rest_s = True, rest_s
        self._over.set()

    def refused(self, reason: str) -> None:
        self.lost(errors.HostUnusable(reason))

    def kept(self, path: str, size_bytes: int) -> None:
        if self._shipping is not None:
            self._shipping.on_kept(path, size_bytes)

    def say(self, line: str) -> None:
        self._screen.say(line)

    def follow(self, worker_id: str) -> None:
        self._output.follow(worker_id)

    def cut(self, worker_id: str, log_bytes: int | None) -> None:
        self._output.cut(worker_id, log_bytes)


# ---- by `shoal run` --------------------------------------------------------------------------------------------------


class ScreenAtHome(Screen):
    """What workers print goes home by the pipe. While nobody reads there, lines are left out."""

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        self._write = write
        self.live = False

    def say(self, line: str) -> None:
        self._write(line_of({"say": line}))

    def show(self, traceback: str) -> None:
        self.say(traceback.rstrip("\n"))

    def tell(self, line: str) -> None:
        pass

    def echo(self, worker_id: str, line: str) -> None:
        self._write(line_of({"echo": [worker_id, line[: LINE_BYTES // 8]]}))

    def close(self) -> None:
        pass


class HomePipe:
    """This end of the pipe to home."""

    @classmethod
    async def open(cls) -> HomePipe:
        """From standard input and output, which are the pipe's from now on."""
        pipe, loop = cls(), asyncio.get_running_loop()
        pipe._reader = asyncio.StreamReader(limit=LINE_BYTES)
        ours = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)  # whatever is printed by mistake is no line of ours
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe._reader), ours[0])
        pipe._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ours[1])
        return pipe

    _reader: asyncio.StreamReader
    _writer: asyncio.WriteTransport

    def write(self, line: bytes) -> bool:
        """Whether there was room for it."""
        if self._writer.is_closing() or self._writer.get_write_buffer_size() > _BACKLOG_BYTES:
            return False
        self._writer.write(line)
        return True

    def tell(self, said: dict[str, Any]) -> None:
        self.write(line_of(said))

    async def read(self, within_s: float) -> dict[str, Any] | None:
        """What home says next; None when it is cut off."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), within_s)
            said = json.loads(line) if line else None
        except (asyncio.TimeoutError, ValueError, OSError):
            return None
        return said if isinstance(said, dict) else None


async def _as_told() -> int:
    pipe = await HomePipe.open()
    said = await pipe.read(Timeouts().join_s)
    if said is None:
        return 1
    told = Told(**{field.name: said[field.name] for field in fields(Told) if field.name in said})
    if told.parent:
        die_with(told.parent)
    screen = ScreenAtHome(pipe.write)
    try:
        with host(told) as here:
            await _until_cut_off(here, pipe, screen)
    except errors.ShoalError as error:
        pipe.tell({"error": [type(error).__name__, str(error)]})
        return errors.exit_code(error)
    return 0


async def _until_cut_off(here: Host, pipe: HomePipe, screen: Screen) -> None:
    timeouts = here.settings.timeouts
    sessions: list[Session] = []
    cut_off = False

    async def ping() -> None:
        while True:
            pipe.tell({"ping": 1})
            await asyncio.sleep(timeouts.beat_s)

    async def obey() -> None:
        nonlocal cut_off
        slots = here.told.slots
        while (said := await pipe.read(timeouts.cut_off_s)) is not None:
            if "slots" in said:
                slots = said["slots"]
                sessions[-1].set_slots(slots)
            elif "stop" in said:
                sessions[-1].stop(said["stop"])
            elif said.get("ping") and not here.shared:
                here.run_dir.write_address(said["ping"])
        cut_off = True
        sessions[-1].kill()

    sessions.append(Session(here, screen, on_up=lambda: pipe.tell({"up": 1})))
    others = [asyncio.ensure_future(work) for work in (ping(), obey())]
    on_signal = asyncio.get_running_loop().add_signal_handler
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        on_signal(signum, lambda: sessions[-1].set_slots(0))
    try:
        while True:
            session = sessions[-1]
            await session.run()
            if session.committed is not None:
                pipe.tell({"committed": session.committed})
            if not session.again or cut_off:
                return
            await asyncio.sleep(session.rest_s)
            if cut_off:
                return
            sessions.append(Session(here, screen))
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def as_told() -> int:
    """The process that `shoal run` starts on each host. The exit status."""
    code = asyncio.run(_as_told())
    sys.stderr.flush()
    return code


def cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0))


# ---- by hand ---------------------------------------------------------------------------------------------------------


def by_hand(told: Told, screen: Screen, launcher: Callable[..., LocalLauncher] = LocalLauncher) -> int:
    """Until the job ends, or Ctrl-C. The exit status."""

    async def take_part(here: Host) -> int:
        def say_up() -> None:
            screen.say(f"{told.host} is in the job; Ctrl-C leaves it")

        sessions = [Session(here, screen, say_up, launcher)]
        signals: list[int] = []

        def on_signal(signum: int) -> None:
            signals.append(signum)
            if len(signals) > 1:
                return sessions[-1].kill()
            screen.say("the workers of this host finish their step and leave; once more to kill them")
            sessions[-1].set_slots(0)

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
        while True:
            await sessions[-1].run()
            if not sessions[-1].again or signals:
                return 128 + signals[0] if len(signals) > 1 else 0
            await asyncio.sleep(sessions[-1].rest_s)
            if signals:
                return 0
            sessions.append(Session(here, screen, launcher=launcher))

    with host(told) as here:
        return asyncio.run(take_part(here))
