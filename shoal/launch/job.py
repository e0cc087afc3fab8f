"""One job from its first process to its last: a launcher, a coordinator, and what happens between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal import checkpoints, errors
from shoal.control import commands
from shoal.control.environment import WorkerEnvironment
from shoal.control.membership.failures import OnError
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.launch.coordinator import CoordinatorKeeper
from shoal.launch.fleet import Fleet
from shoal.launch.heir import Inherited
from shoal.launch.host import Ending, HostKeeper, Owner, Place
from shoal.launch.local import LocalLauncher, clear_shared_memory
from shoal.launch.output import Output
from shoal.launch.relaunch import Relaunch
from shoal.launch.screen import Screen
from shoal.launch.settings import Size
from shoal.launch.tail import LOG_LIMIT_BYTES
from shoal.launch.tasks import Tasks
from shoal.metrics import read_events

HOME = "~"  # what the launcher of a job is called that keeps no workers itself: no host's name


@dataclass(frozen=True)
class Origin:
    """What a job goes on from: the checkpoint's place in the training, and what numbers were used before."""

    committed: Committed | None = None
    generation: int = 0
    next_worker: int = 0


BEGINNING = Origin()


class Job(Owner):
    """Keeps a coordinator, and workers: on this host, or with a `fleet` on others. It ends when the job does.

    Everything here runs on one event loop.
    """

    def __init__(
        self,
        run_dir: RunDir,
        size: Size,
        timeouts: Timeouts,
        relaunch: Relaunch,
        on_error: OnError,
        environment: WorkerEnvironment,
        screen: Screen,
        origin: Origin = BEGINNING,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
        fleet: Fleet | Inherited | None = None,
    ) -> None:
        self._run_dir, self._size, self._timeouts = run_dir, size, timeouts
        self._relaunch, self._on_error = relaunch, on_error
        self._environment = environment
        self._screen = screen
        self._origin = origin
        self._fleet = fleet
        self._log_limit_bytes = log_limit_bytes
        self._ending: Ending | None = None

    async def run(self, make_launcher: Callable[..., LocalLauncher]) -> Ending:
        """Run the job to its end. `make_launcher` is called with on_exit, on_failure and on_lost.

        When this returns or raises, no process of the job is left.
        """
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._tasks = Tasks(self._on_problem)
        self._coordinator = CoordinatorKeeper(
            self._run_dir,
            self._size,
            self._timeouts,
            self._on_error,
            self._origin.generation,
            self._origin.next_worker,
            self._environment.address,
            () if self._fleet is None else self._fleet.founders,
            "the loss of the job's own host" if isinstance(self._fleet, Inherited) else "",
        )
        place = Place(socket.gethostname(), first_worker=self._origin.next_worker)
        if self._fleet is not None:
            place = Place(HOME, slots=0)
        self._keeper = HostKeeper(
            place, self._run_dir, self._timeouts, self._relaunch, self._on_error, make_launcher, self, self._tasks
        )
        self._output = Output(self._run_dir, self._screen, self._keeper.live, self._log_limit_bytes)
        self._connected = False
        with self._signals():
            try:
                self._succession = self._tasks.spawn(self._keep_coordinator())
                self._tasks.spawn(self._begin())
                await self._over.wait()
            finally:
                await self._close()
        assert self._ending is not None
        return self._with_last_words(self._ending)

    # ---- begin and end

    async def _begin(self) -> None:
        opening = asyncio.ensure_future(self._keeper.open())
        try:
            while not self._coordinator.serves and self._ending is None:
                await asyncio.sleep(0.01)
            await opening
        except errors.ShoalError as error:
            return self._end(Ending(error=error), grace_s=0.0)
        finally:
            opening.cancel()
        if self._ending is not None:
            return
        self._keeper.connect(self._environment)
        self._connected = True
        if self._fleet is not None:
            self._fleet.start(self._tasks, self._screen, self.lost)
        self._tasks.spawn(self._output.show_lines())
        self._tasks.spawn(self._output.show_progress())
        self._tasks.spawn(self._coordinator.watch())

    async def _keep_coordinator(self) -> None:
        lost = await self._coordinator.keep()
        self._end(Ending(error=lost), grace_s=0.0)

    def _end(self, ending: Ending, grace_s: float) -> None:
        """Stop all workers and be over. The first reason counts."""
        if self._ending is not None:
            return
        self._ending = ending
        self._keeper.end()
        self._tasks.spawn(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        latest_s = self._loop.time() + grace_s + self._timeouts.save_s

        def saving() -> bool:
            is_stop = self._ending is not None and self._ending.error is None
            return is_stop and self._loop.time() < latest_s and checkpoints.being_written(self._run_dir.checkpoints)

        await self._keeper.stop(grace_s, busy=saving)
        if self._fleet is not None:
            await self._fleet.stop(grace_s, busy=saving)
        self._over.set()

    async def _close(self) -> None:
        await self._tasks.cancel(but=self._succession)
        await self._output.settle()
        committed = await self._keeper.close()
        if self._fleet is not None:
            committed = await self._fleet.close()
        committed = committed or self._origin.committed
        if committed is not None:
            self._run_dir.write_committed(committed)
        if self._fleet is None:  # else there are pids of other machines
            clear_shared_memory(self._run_dir.loaders)
        # Delivers the last deaths, and before that the coordinator writes down what the one before could not.
        await self._keeper.disconnect(0.0 if self._succession.done() else self._timeouts.budget_s)
        self._succession.cancel()
        await asyncio.gather(self._succession, return_exceptions=True)
        await self._coordinator.close(self._timeouts.budget_s)
        self._run_dir.remove_drafts()
        self._output.close()

    def _with_last_words(self, ending: Ending) -> Ending:
        """A worker may have told the coordinator, and not the launcher, why it failed."""
        if ending.error is None or ending.traceback is not None or not isinstance(ending.error, errors.ScriptFailed):
            return ending
        told = [failure.traceback for failure in self._keeper.failures.values() if failure.traceback]
        told += [event["traceback"] for event in read_events(self._run_dir.events) if event.get("traceback")]
        return Ending(ending.reason, ending.error, told[0] if told else None, ending.signum)

    def _on_problem(self, problem: errors.ShoalError) -> None:
        # Nothing here may fail unseen: the job would hang.
        self._ending = self._ending or Ending(error=problem)
        self._over.set()

    # ---- what is heard of the workers

    def told_to_end(self, ending: Ending, grace_s: float) -> None:
        self._end(ending, grace_s)

    def failed(self, ending: Ending) -> None:
        self._end(ending, self._timeouts.budget_s)

    def lost(self, error: errors.ShoalError) -> None:
        self._end(Ending(error=error), grace_s=0.0)

    def idle(self, wanted: bool) -> None:
        if self._fleet is None:
            self._end(Ending(reason="every worker has gone"), 0.0)

    def dropped(self, rest_s: float) -> None:
        raise AssertionError("the job's own launcher is never lost")

    def refused(self, reason: str) -> None:
        self._end(Ending(error=errors.ShoalError(reason)), grace_s=0.0)

    def kept(self, path: str, size_bytes: int) -> None:
        raise AssertionError("home writes its files itself")

    def say(self, line: str) -> None:
        self._screen.say(line)

    def follow(self, worker_id: str) -> None:
        self._output.follow(worker_id)

    def cut(self, worker_id: str, log_bytes: int | None) -> None:
        self._output.cut(worker_id, log_bytes)

    # ---- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal drains, the second kills. After the job they do nothing: what it did is still to be told."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
            wanted.append(signal.SIGHUP)
        on_signal = self._tasks.on_loop(self._on_signal)
        for signum in wanted:
            # Not the loop's own handlers: when they go, a signal ends the process.
            signal.signal(signum, lambda signum, _: on_signal(signum))
        try:
            yield
        finally:
            for signum in wanted:
                signal.signal(signum, signal.SIG_IGN)

    def _on_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if self._over.is_set():
            return
        if self._ending is not None:
            self._screen.say(f"{name} again: killing every worker")
            self._over.set()
            return
        self._screen.say(f"{name}: workers finish their step and leave; once more to kill them")
        if self._connected:
            self._tasks.spawn(asyncio.to_thread(self._tell_stop, f"{name} at the launcher"))
        self._end(Ending(reason=name, signum=signum), self._timeouts.drain_s)

    def _tell_stop(self, reason: str) -> None:
        # It ended meanwhile, or hangs, or its certificate has expired: the workers get a signal too.
        with contextlib.suppress(errors.JobNotFound, errors.CertificateRefused, errors.CertificateUnusable):
            commands.stop(self._run_dir, reason, self._timeouts.budget_s)
