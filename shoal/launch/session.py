"""One life of a host in a job: its workers are kept here, by the word of a coordinator that is elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal import __version__, errors
from shoal.control.client import LauncherClient
from shoal.control.environment import WorkerEnvironment
from shoal.control.invitation import Invitation
from shoal.control.rundir import RunDir
from shoal.launch.host import LAST_WORD_S, Ending, HostKeeper, Owner, Place
from shoal.launch.hosts import own_address
from shoal.launch.local import LocalLauncher, clear_shared_memory, launcher_of
from shoal.launch.output import Output
from shoal.launch.remote import Told
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings
from shoal.launch.shipping import Shipping
from shoal.launch.tasks import Tasks

OWN = "shoal-join-"  # how folders of a host's own are called
_LOOK_S = 0.05
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
    with tempfile.TemporaryDirectory(prefix=OWN) as folder:
        invitation = Invitation(told.address, told.token, told.certificates)
        own = invitation.accept(Path(folder) / Path(told.dir).name, told.settings)
        with own.held():
            yield Host(told, own, False, settings)


def _sweep() -> None:
    """Remove what launchers that were killed have left here."""
    for folder in Path(tempfile.gettempdir()).glob(f"{OWN}*"):
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
        self._host, self._screen, self._on_up, self._launcher = host, screen, on_up, launcher
        self._timeouts = host.settings.timeouts
        self._by_hand = host.told.grow
        self._slots, self._draining = host.told.slots, False
        self._traceback: str | None = None  # of what failed here
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
        make_launcher = launcher_of(settings, host.run_dir.logs, self._launcher)
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
        if self._slots != self._host.told.slots:
            link.set_slots(self._slots)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        latest_s = began_s + self._timeouts.join_s
        while not link.answered:
            if link.refused is not None and loop.time() > began_s + self._timeouts.budget_s:
                return self.lost(link.refused)  # before that, it may be another's port for now
            if link.token_refused:
                return self.lost(errors.TokenRefused(f"{self._host.told.address} refused the token; give this job's"))
            if self._by_hand and self._draining:
                return self._over.set()  # it is not in yet
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
        told = False
        while True:
            await asyncio.sleep(min(self._timeouts.beat_s, LAST_WORD_S))
            silent_s = loop.time() - heard_s
            if link.answered:
                heard_s = loop.time()
                if told:
                    self._screen.say("the coordinator of the job is heard again")
                told = False
            elif self._by_hand and self._draining and silent_s > LAST_WORD_S:
                return self._over.set()  # nobody is there to let the workers go
            elif self._by_hand and not told and silent_s > self._timeouts.budget_s:
                self._screen.say(self._deserted())
                told = True
            elif silent_s > self._timeouts.deserted_s or (silent_s > self._timeouts.join_s and self._has_ended()):
                where = self._host.told.address
                return self.lost(
                    errors.HostUnusable(f"no word from the job at {where} for {silent_s:.0f} s: it is over")
                )

    def _deserted(self) -> str:
        told = self._host.told
        elsewhere = f"shoal coordinator {told.dir} --address IP starts another if its machine is lost"
        next_ = f"{elsewhere}, and " if self._host.shared else ""
        return f"no word from the coordinator of the job; {told.host} waits for it: {next_}Ctrl-C leaves the job"

    def _has_ended(self) -> bool:
        """Whether it can be seen that the job came to its end; if its own host was lost, another may take its place."""
        run_dir = self._host.run_dir
        return self._host.shared and not run_dir.runs() and run_dir.committed() is not None

    # ---- what others want

    def set_slots(self, slots: int) -> None:
        """With none, the workers leave, and then it is over."""
        self._slots, self._draining = slots, not slots
        if self._link is not None:
            self._link.set_slots(slots)
        elif not slots:
            self._over.set()

    def leave(self) -> str:
        """With all workers, as far as there is somebody to let them go. What comes now, in words."""
        self.set_slots(0)
        if self._link is None or not self._link.answered:
            return "no coordinator answers: the workers of this host are ended; once more to kill them at once"
        return "the workers of this host finish their step and leave; once more to kill them"

    def stop(self, grace_s: float) -> None:
        self.told_to_end(Ending(), grace_s)

    def kill(self) -> None:
        self._over.set()

    # ---- what is heard of the workers

    def told_to_end(self, ending: Ending, grace_s: float) -> None:
        if self._ending is None:
            self._ending = ending
            if self._by_hand:  # elsewhere `shoal run` says it
                self.error = self.error or ending.error
            self._keeper.end()
            self._tasks.spawn(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        await self._keeper.stop(grace_s, busy=lambda: False)
        self._over.set()

    def failed(self, ending: Ending) -> None:
        """The coordinator ends the job, here too; if there is none, this host leaves it."""
        assert self._link is not None
        assert ending.error is not None
        self._traceback = self._traceback or ending.traceback
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
        if self.error is not None:
            return
        when = f" in {rest_s:.0f} s" if rest_s else ""
        self._screen.say(f"{self._host.told.host} was cut off from the job; it comes again{when}, with new workers")
        self.again, self.rest_s = True, rest_s
        self._over.set()

    def refused(self, reason: str) -> None:
        self.error = self.error or errors.HostUnusable(reason)
        self._keeper.end()
        # The worker that failed is still saying why.
        self._tasks.later(0.0 if self._keeper.empty else LAST_WORD_S, self._end_refused)

    def _end_refused(self) -> None:
        failures = self._keeper.failures.values()
        traceback = self._traceback or next((it.traceback for it in failures if it.traceback), None)
        if traceback is not None and not self._over.is_set():
            self._screen.show(traceback)
        self._over.set()

    def kept(self, path: str, size_bytes: int) -> None:
        if self._shipping is not None:
            self._shipping.on_kept(path, size_bytes)

    def say(self, line: str) -> None:
        self._screen.say(line)

    def follow(self, worker_id: str) -> None:
        self._output.follow(worker_id)

    def cut(self, worker_id: str, log_bytes: int | None) -> None:
        self._output.cut(worker_id, log_bytes)
