"""The workers of one host: as many as the coordinator wants, replaced when they die, and every death told."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal import errors
from shoal.control.client import LauncherClient
from shoal.control.environment import WorkerEnvironment
from shoal.control.generation import MAX_SLOTS
from shoal.control.instructions import SetTarget, Stop
from shoal.control.membership.failures import REFUSABLE, OnError
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.launch.exits import Exit, Failure
from shoal.launch.local import LocalLauncher
from shoal.launch.relaunch import GiveUp, Relaunch, Start, ends_job
from shoal.launch.tasks import Tasks

LAST_WORD_S = 2.0  # from the last worker's end until the coordinator has said that the job is over


@dataclass(frozen=True)
class Ending:
    """Why a job ended: with an error, by a signal, or because all was done or somebody stopped it."""

    reason: str = ""
    error: errors.ShoalError | None = None
    traceback: str | None = None
    signum: int | None = None


@dataclass(frozen=True)
class Place:
    """The host as the job knows it. `home`: its launcher is the job's own; of another, workers have names of their own.
    `grow`: with it the job is to have so many workers more."""

    host: str
    slots: int = MAX_SLOTS
    home: bool = True
    grow: bool = False
    first_worker: int = 0  # the lowest number that no worker has had


class Owner(ABC):
    """Who has workers kept on a host, and hears what concerns more than these."""

    @abstractmethod
    def told_to_end(self, ending: Ending, grace_s: float) -> None:
        """The job is over, by the coordinator's word."""

    @abstractmethod
    def failed(self, ending: Ending) -> None:
        """What happened to a worker ends the job."""

    @abstractmethod
    def lost(self, error: errors.ShoalError) -> None:
        """Workers can be kept here no longer."""

    @abstractmethod
    def idle(self, wanted: bool) -> None:
        """Every worker has gone, and none is to come; `wanted`: although the coordinator wants some."""

    @abstractmethod
    def dropped(self, rest_s: float) -> None:
        """The job goes on without this host."""

    @abstractmethod
    def refused(self, reason: str) -> None:
        """The coordinator does not take this host."""

    @abstractmethod
    def kept(self, path: str, size_bytes: int) -> None:
        """So much of a file that a worker has written is at home."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Something for people to read."""

    @abstractmethod
    def follow(self, worker_id: str) -> None:
        """The worker has a log from now on."""

    @abstractmethod
    def cut(self, worker_id: str, log_bytes: int | None) -> None:
        """What is in the log behind so many bytes is told otherwise."""


class HostKeeper:
    """Keeps the workers of one host. Everything here runs on one event loop; what the coordinator says comes in by
    `Tasks.on_loop`. `make_launcher` is called with on_exit, on_failure and on_lost."""

    def __init__(
        self,
        place: Place,
        run_dir: RunDir,
        timeouts: Timeouts,
        relaunch: Relaunch,
        on_error: OnError,
        make_launcher: Callable[..., LocalLauncher],
        owner: Owner,
        tasks: Tasks,
    ) -> None:
        self._place, self._run_dir, self._timeouts = place, run_dir, timeouts
        self._relaunch, self._on_error = relaunch, on_error
        self._owner, self._tasks = owner, tasks
        self._launcher = make_launcher(on_exit=self._on_exit, on_failure=self._on_failure, on_lost=owner.lost)
        self._environment = WorkerEnvironment()
        self._link: LauncherClient | None = None
        self._ended = self._finishing = False
        self._target_heard = -1  # its number
        self._wanted = 0
        self._next_number = place.first_worker
        self.live: dict[str, int] = {}  # worker id → pid
        self.failures: dict[str, Failure] = {}
        self._told: Failure | None = None  # by the coordinator
        self._excused: set[str] = set()  # who leave: they need no replacement however they end
        self._doubtful: dict[str, Ending] = {}  # whose failure ends the job, unless they are excused
        self._delayed: list[asyncio.Task[None]] = []  # starts that wait for their time, and may be called off
        self._starting = 0

    # ---- begin and end

    async def open(self) -> None:
        """Make ready to start workers. Fails with a ShoalError that says why it cannot."""
        if self._place.slots:
            await self._launcher.open()

    def connect(self, environment: WorkerEnvironment) -> LauncherClient:
        """Do from now on what the coordinator wants, with workers that are told this."""
        self._environment = replace(
            environment, dir=str(self._run_dir.path), host=self._place.host, budget_s=self._timeouts.budget_s
        )
        on_loop = self._tasks.on_loop
        self._link = LauncherClient(
            self._run_dir,
            self._place.host,
            self._timeouts,
            live=lambda: tuple(self.live.items()),
            on_target=on_loop(self._on_target),
            on_fence=on_loop(self._on_fence),
            on_probe=on_loop(self._on_probe),
            on_excuse=on_loop(self._on_excuse),
            on_stop=on_loop(self._on_stop),
            on_dropped=on_loop(self._owner.dropped),
            on_refused=on_loop(self._owner.refused),
            on_kept=on_loop(self._owner.kept),
            slots=self._place.slots,
            home=self._place.home,
            grow=self._place.grow,
        )
        self._link.start()
        return self._link

    @property
    def empty(self) -> bool:
        """No worker is here or on its way."""
        return not (self.live or self._starting or self._delayed)

    def end(self) -> None:
        """No worker is started any more."""
        self._ended = True
        for start in self._delayed:
            start.cancel()

    async def stop(self, grace_s: float, busy: Callable[[], bool]) -> None:
        await self._launcher.stop(grace_s, busy=busy)

    async def close(self) -> Committed | None:
        """End whatever is left. What the job had committed here by then."""
        return await self._launcher.close()

    async def disconnect(self, patience_s: float) -> None:
        """Deliver the last deaths; while the coordinator is away, wait that long for its return."""
        if self._link is not None:
            await asyncio.to_thread(self._link.close, patience_s)

    # ---- what the coordinator wants

    def _on_target(self, told: SetTarget) -> None:
        if told.number <= self._target_heard:
            return  # another coordinator repeats it
        if self._target_heard < 0 and not self._place.home:
            self._next_number = max(self._next_number, told.next_workers.get(self._place.host, 0))
        self._target_heard, self._finishing = told.number, told.finishing
        self._wanted = told.share(self._place.host)
        staying = len(self.live.keys() - self._excused)
        surplus = staying + self._starting + len(self._delayed) - self._wanted
        for start in self._delayed[::-1][: max(0, surplus)]:
            start.cancel()
        for _ in range(-surplus):
            self._start_after(0.0)
        if self.empty and not self._wanted:
            self._owner.idle(wanted=False)

    def _on_fence(self, worker_id: str) -> None:
        self._tasks.spawn(self._launcher.fence(worker_id))

    def _on_probe(self, worker_id: str) -> None:
        evidence = self._launcher.evidence(worker_id)
        if evidence is not None and self._link is not None:
            self._link.evidence(worker_id, evidence.stopped, evidence.cpu_s)

    def _on_excuse(self, worker_id: str) -> None:
        self._doubtful.pop(worker_id, None)
        if worker_id in self.live:
            self._excused.add(worker_id)

    def _on_stop(self, stop: Stop) -> None:
        if not stop.failed:
            return self._owner.told_to_end(Ending(reason=stop.reason), self._timeouts.drain_s)
        for worker_id in list(self._doubtful):
            self._end_doubtful(worker_id)
        # The worker that failed is still saying why: a signal now would cut it short.
        self._told, self._finishing = Failure("", stop.kind, stop.reason), True
        self._tasks.later(LAST_WORD_S, self._end_as_told)

    def _end_as_told(self) -> None:
        told = next(iter(self.failures.values()), self._told)
        assert told is not None
        self._owner.told_to_end(Ending(error=told.as_error(), traceback=told.traceback), self._timeouts.budget_s)

    def _end_doubtful(self, worker_id: str) -> None:
        if not self._ended and self._link is not None and not self._link.answered:
            self._tasks.later(LAST_WORD_S, self._end_doubtful, worker_id)  # nobody is there to excuse it
        elif (ending := self._doubtful.pop(worker_id, None)) is not None:
            self._owner.failed(ending)

    # ---- workers come and go

    def _start_after(self, delay_s: float) -> None:
        if self._ended or self._finishing:
            return
        delayed = self._tasks.spawn(asyncio.sleep(delay_s))
        self._delayed.append(delayed)
        delayed.add_done_callback(self._on_due)

    def _on_due(self, delayed: asyncio.Task[None]) -> None:
        self._delayed.remove(delayed)
        if not delayed.cancelled() and not self._ended:
            self._starting += 1
            self._tasks.spawn(self._start())

    async def _start(self) -> None:
        worker_id = f"w{self._next_number}" if self._place.home else f"{self._place.host}-w{self._next_number}"
        self._next_number += 1
        self._relaunch = self._relaunch.on_start(worker_id, time.monotonic())
        try:
            pid = await self._launcher.start(replace(self._environment, worker_id=worker_id))
        except errors.ShoalError as error:
            self._owner.say(f"{worker_id} was not started: {error}")
            return self._on_exit(Exit(worker_id))
        finally:
            self._starting -= 1
        self.live[worker_id] = pid
        self._owner.follow(worker_id)
        if self._link is not None:
            self._link.started(worker_id, pid)

    def _on_failure(self, failure: Failure) -> None:
        self.failures.setdefault(failure.worker_id, failure)
        self._owner.cut(failure.worker_id, failure.log_bytes)

    def _on_exit(self, exit: Exit) -> None:
        failure = self.failures.get(exit.worker_id)
        if self._link is not None:
            refusable = failure is not None and isinstance(failure.as_error(), REFUSABLE)
            said = (failure.kind, failure.message) if failure is not None and refusable else None
            self._link.gone(exit.worker_id, str(exit), said)
        self.live.pop(exit.worker_id, None)
        if self._ended:
            return
        self.failures.pop(exit.worker_id, None)
        excused = exit.worker_id in self._excused and self._told is None  # a job that fails excuses everybody
        self._excused.discard(exit.worker_id)
        error = ends_job(exit, failure, self._on_error, excused)
        if error is not None:
            return self._on_error_of(exit, error, failure)
        if failure is not None and not exit.clean:  # the job goes on, and the user still wants to know
            self._owner.say(failure.traceback or f"{exit.worker_id} failed: {failure.kind}: {failure.message}")
        replaceable = not exit.clean and not excused
        self._relaunch, decisions = self._relaunch.on_exit(exit.worker_id, not replaceable, time.monotonic())
        for decision in decisions:
            if isinstance(decision, Start):
                self._start_after(decision.delay_s)
            elif isinstance(decision, GiveUp):
                reason = f"{decision.reason}; the last was {exit.worker_id} ({exit}), logs are in {self._run_dir.logs}"
                return self._owner.failed(Ending(error=errors.RestartBudgetSpent(reason)))
        if not self.empty:
            return
        if self._told is not None:
            self._end_as_told()
        else:
            # A finished job is declared over by the coordinator; one that nobody joined is known here alone.
            self._tasks.later(LAST_WORD_S if self._finishing else 0.0, self._tell_idle)

    def _on_error_of(self, exit: Exit, error: errors.ShoalError, failure: Failure | None) -> None:
        ending = Ending(error=error, traceback=failure.traceback if failure is not None else None)
        others = bool(self.live) or not self._place.home
        if isinstance(error, REFUSABLE) and others and self._told is None:
            # The coordinator knows whether this was a newcomer that the others can do without.
            self._doubtful[exit.worker_id] = ending
            self._tasks.later(LAST_WORD_S, self._end_doubtful, exit.worker_id)
            return
        self._finishing = True
        self._owner.failed(ending)

    def _tell_idle(self) -> None:
        if self.empty and not self._ended:
            self._owner.idle(wanted=bool(self._wanted))
