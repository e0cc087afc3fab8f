"""One job from its first process to its last: a launcher, a coordinator, and what happens between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import checkpoints, errors
from shoal.control import client, commands
from shoal.control.coordinator import OnError
from shoal.control.environment import WorkerEnvironment
from shoal.control.instructions import SetTarget, Stop
from shoal.control.membership import REFUSABLE
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.launch.coordinator import CoordinatorKeeper
from shoal.launch.launcher import Exit, Failure, Launcher
from shoal.launch.output import Output
from shoal.launch.relaunch import GiveUp, Relaunch, Start, ends_job
from shoal.launch.screen import Screen
from shoal.launch.settings import Size
from shoal.launch.tail import LOG_LIMIT_BYTES
from shoal.metrics import read_events

_LAST_WORD_S = 2.0  # from the last worker's end until the coordinator has said that the job is over


@dataclass(frozen=True)
class Origin:
    """What a job goes on from: the checkpoint's place in the training, and what numbers were used before."""

    committed: Committed | None = None
    generation: int = 0
    next_worker: int = 0


BEGINNING = Origin()


@dataclass(frozen=True)
class Ending:
    """Why a job ended: with an error, by a signal, or because all was done or somebody stopped it."""

    reason: str = ""
    error: errors.ShoalError | None = None
    traceback: str | None = None
    signum: int | None = None


def clear_shared_memory(loaders: Path) -> None:
    """Remove what data sets that share tensors themselves have left in /dev/shm, in loader processes that were killed:
    torch names a piece after its maker, and takes the name away at once, unless it is killed in between. All of them
    are dead by now."""
    pids = loaders.read_text().split() if loaders.exists() else []
    for pid in pids:
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)


class Job:
    """Keeps as many workers as the coordinator wants, tells it of every death, and ends when the job does.

    Everything here runs on one event loop; what the coordinator says comes in by `call_soon_threadsafe`.
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
    ) -> None:
        self._run_dir, self._size, self._timeouts = run_dir, size, timeouts
        self._relaunch, self._on_error = relaunch, on_error
        self._environment = environment
        self._screen = screen
        self._host = socket.gethostname()
        self._finishing = False
        self._origin = origin
        self._target_heard = -1  # its number
        self._next_number = origin.next_worker
        self._live: dict[str, int] = {}  # worker id → pid
        self._failures: dict[str, Failure] = {}
        self._told: Failure | None = None  # by the coordinator
        self._excused: set[str] = set()  # who leave: they need no replacement however they end
        self._doubtful: dict[str, Ending] = {}  # whose failure ends the job, unless they are excused
        self._delayed: list[asyncio.Task[None]] = []  # starts that wait for their time, and may be called off
        self._starting = 0
        self._output = Output(run_dir, screen, self._live, log_limit_bytes)
        self._ending: Ending | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, make_launcher: Callable[..., Launcher]) -> Ending:
        """Run the job to its end. `make_launcher` is called with on_exit, on_failure and on_lost.

        When this returns or raises, no process of the job is left.
        """
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._coordinator = CoordinatorKeeper(
            self._run_dir, self._size, self._timeouts, self._on_error, self._origin.generation
        )
        self._launcher = make_launcher(on_exit=self._on_exit, on_failure=self._on_failure, on_lost=self._on_lost)
        self._link: client.LauncherClient | None = None
        with self._signals():
            try:
                self._keeper = self._spawn(self._keep_coordinator())
                self._spawn(self._begin())
                await self._over.wait()
            finally:
                await self._close()
        assert self._ending is not None
        return self._with_last_words(self._ending)

    # ---- begin and end

    async def _begin(self) -> None:
        opening = asyncio.ensure_future(self._launcher.open())
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
        self._environment = replace(
            self._environment,
            dir=str(self._run_dir.path),
            host=self._host,
            budget_s=self._timeouts.budget_s,
        )
        self._link = client.LauncherClient(
            self._run_dir,
            self._host,
            self._timeouts,
            live=lambda: tuple(self._live.items()),
            on_target=self._on_loop(self._on_target),
            on_fence=self._on_loop(self._on_fence),
            on_probe=self._on_loop(self._on_probe),
            on_excuse=self._on_loop(self._on_excuse),
            on_stop=self._on_loop(self._on_stop),
        )
        self._link.start()
        self._spawn(self._output.show_lines())
        self._spawn(self._output.show_progress())
        self._spawn(self._coordinator.watch())

    async def _keep_coordinator(self) -> None:
        lost = await self._coordinator.keep()
        self._end(Ending(error=lost), grace_s=0.0)

    def _end(self, ending: Ending, grace_s: float) -> None:
        """Stop all workers and be over. The first reason counts."""
        if self._ending is not None:
            return
        self._ending = ending
        for start in self._delayed:
            start.cancel()
        self._spawn(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        latest_s = self._loop.time() + grace_s + self._timeouts.save_s

        def saving() -> bool:
            is_stop = self._ending is not None and self._ending.error is None
            return is_stop and self._loop.time() < latest_s and checkpoints.being_written(self._run_dir.checkpoints)

        await self._launcher.stop(grace_s, busy=saving)
        self._over.set()

    async def _close(self) -> None:
        others = self._tasks - {self._keeper}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._output.settle()
        committed = await self._launcher.close() or self._origin.committed
        if committed is not None:
            self._run_dir.write_committed(committed)
        clear_shared_memory(self._run_dir.loaders)
        if self._link is not None:
            # Delivers the last deaths, and before that the coordinator writes down what the one before could not.
            patience_s = 0.0 if self._keeper.done() else self._timeouts.budget_s
            await asyncio.to_thread(self._link.close, patience_s)
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._coordinator.close(self._timeouts.budget_s)
        self._run_dir.remove_drafts()
        self._output.close()

    def _with_last_words(self, ending: Ending) -> Ending:
        """A worker may have told the coordinator, and not the launcher, why it failed."""
        if ending.error is None or ending.traceback is not None or not isinstance(ending.error, errors.ScriptFailed):
            return ending
        told = [failure.traceback for failure in self._failures.values() if failure.traceback]
        told += [event["traceback"] for event in read_events(self._run_dir.events) if event.get("traceback")]
        return Ending(ending.reason, ending.error, told[0] if told else None, ending.signum)

    # ---- what the coordinator wants

    def _on_target(self, told: SetTarget) -> None:
        if told.number <= self._target_heard:
            return  # another coordinator repeats it
        self._target_heard, self._finishing = told.number, told.finishing
        staying = len(self._live.keys() - self._excused)
        surplus = staying + self._starting + len(self._delayed) - told.target
        for start in self._delayed[::-1][: max(0, surplus)]:
            start.cancel()
        for _ in range(-surplus):
            self._start_after(0.0)

    def _on_fence(self, worker_id: str) -> None:
        self._spawn(self._launcher.fence(worker_id))

    def _on_probe(self, worker_id: str) -> None:
        evidence = self._launcher.evidence(worker_id)
        if evidence is not None and self._link is not None:
            self._link.evidence(worker_id, evidence.stopped, evidence.cpu_s)

    def _on_excuse(self, worker_id: str) -> None:
        self._doubtful.pop(worker_id, None)
        if worker_id in self._live:
            self._excused.add(worker_id)

    def _on_stop(self, stop: Stop) -> None:
        if not stop.failed:
            return self._end(Ending(reason=stop.reason), self._timeouts.drain_s)
        for worker_id in list(self._doubtful):
            self._end_doubtful(worker_id)
        # The worker that failed is still saying why: a signal now would cut it short.
        self._told, self._finishing = Failure("", stop.kind, stop.reason), True
        self._loop.call_later(_LAST_WORD_S, self._end_as_told)

    def _end_as_told(self) -> None:
        told = next(iter(self._failures.values()), self._told)
        assert told is not None
        self._end(Ending(error=told.as_error(), traceback=told.traceback), self._timeouts.budget_s)

    def _end_doubtful(self, worker_id: str) -> None:
        if self._ending is None and self._link is not None and not self._link.answered:
            self._loop.call_later(_LAST_WORD_S, self._end_doubtful, worker_id)  # nobody is there to excuse it
        elif (ending := self._doubtful.pop(worker_id, None)) is not None:
            self._end(ending, self._timeouts.budget_s)

    # ---- workers come and go

    def _start_after(self, delay_s: float) -> None:
        if self._ending is not None or self._finishing:
            return
        delayed = self._spawn(asyncio.sleep(delay_s))
        self._delayed.append(delayed)
        delayed.add_done_callback(self._on_due)

    def _on_due(self, delayed: asyncio.Task[None]) -> None:
        self._delayed.remove(delayed)
        if not delayed.cancelled() and self._ending is None:
            self._starting += 1
            self._spawn(self._start())

    async def _start(self) -> None:
        worker_id = f"w{self._next_number}"
        self._next_number += 1
        self._relaunch = self._relaunch.on_start(worker_id, time.monotonic())
        try:
            pid = await self._launcher.start(replace(self._environment, worker_id=worker_id))
        except errors.ShoalError as error:
            self._screen.say(f"{worker_id} was not started: {error}")
            return self._on_exit(Exit(worker_id))
        finally:
            self._starting -= 1
        self._live[worker_id] = pid
        self._output.follow(worker_id)
        if self._link is not None:
            self._link.started(worker_id, pid)

    def _on_failure(self, failure: Failure) -> None:
        self._failures.setdefault(failure.worker_id, failure)
        self._output.cut(failure.worker_id, failure.log_bytes)

    def _on_exit(self, exit: Exit) -> None:
        failure = self._failures.get(exit.worker_id)
        if self._link is not None:
            refusable = failure is not None and isinstance(failure.as_error(), REFUSABLE)
            said = (failure.kind, failure.message) if failure is not None and refusable else None
            self._link.gone(exit.worker_id, str(exit), said)
        self._live.pop(exit.worker_id, None)
        if self._ending is not None:
            return
        self._failures.pop(exit.worker_id, None)
        excused = exit.worker_id in self._excused and self._told is None  # a job that fails excuses everybody
        self._excused.discard(exit.worker_id)
        error = ends_job(exit, failure, self._on_error, excused)
        if error is not None:
            ending = Ending(error=error, traceback=failure.traceback if failure is not None else None)
            if isinstance(error, REFUSABLE) and self._live and self._told is None:
                # The coordinator knows whether this was a newcomer that the others can do without.
                self._doubtful[exit.worker_id] = ending
                self._loop.call_later(_LAST_WORD_S, self._end_doubtful, exit.worker_id)
                return None
            return self._end(ending, self._timeouts.budget_s)
        if failure is not None and not exit.clean:  # the job goes on, and the user still wants to know
            self._screen.say(failure.traceback or f"{exit.worker_id} failed: {failure.kind}: {failure.message}")
        replaceable = not exit.clean and not excused
        self._relaunch, decisions = self._relaunch.on_exit(exit.worker_id, not replaceable, time.monotonic())
        for decision in decisions:
            if isinstance(decision, Start):
                self._start_after(decision.delay_s)
            elif isinstance(decision, GiveUp):
                reason = f"{decision.reason}; the last was {exit.worker_id} ({exit}), logs are in {self._run_dir.logs}"
                return self._end(Ending(error=errors.RestartBudgetSpent(reason)), self._timeouts.budget_s)
        if self._live or self._starting or self._delayed:
            return
        if self._told is not None:
            self._end_as_told()
        else:
            # A finished job is declared over by the coordinator; one that nobody joined is known here alone.
            wait_s = _LAST_WORD_S if self._finishing else 0.0
            self._loop.call_later(wait_s, self._end, Ending(reason="every worker has gone"), 0.0)

    def _on_lost(self, error: errors.ShoalError) -> None:
        self._end(Ending(error=error), grace_s=0.0)

    # ---- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal drains, the second kills. After the job they do nothing: what it did is still to be told."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
            wanted.append(signal.SIGHUP)
        for signum in wanted:
            # Not the loop's own handlers: when they go, a signal ends the process.
            signal.signal(signum, lambda signum, _: self._from_thread(self._on_signal, signum))
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
        if self._link is not None:
            self._spawn(asyncio.to_thread(self._tell_stop, f"{name} at the launcher"))
        self._end(Ending(reason=name, signum=signum), self._timeouts.drain_s)

    def _tell_stop(self, reason: str) -> None:
        # It ended meanwhile, or hangs, or its certificate has expired: the workers get a signal too.
        with contextlib.suppress(errors.JobNotFound, errors.CertificateRefused, errors.CertificateUnusable):
            commands.stop(self._run_dir, reason, self._timeouts.budget_s)

    # ---- tasks

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            # Nothing here may fail unseen: the job would hang.
            self._ending = self._ending or Ending(error=_unexpected(problem))
            self._over.set()

    def _on_loop(self, act: Callable[..., None]) -> Callable[..., None]:
        return lambda *said: self._from_thread(act, *said)

    def _from_thread(self, act: Callable[..., None], *said: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the job with it
            self._loop.call_soon_threadsafe(act, *said)


def _unexpected(problem: BaseException) -> errors.ShoalError:
    if isinstance(problem, errors.ShoalError):
        return problem
    error = errors.ShoalError(f"the launcher failed: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
