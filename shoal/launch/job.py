"""One job from its first process to its last: a launcher, a coordinator, and what happens between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import checkpoints, errors
from shoal.control import client
from shoal.control.coordinator import OnError
from shoal.control.environment import WorkerEnvironment
from shoal.control.generation import MAX_SLOTS
from shoal.control.instructions import SetTarget, Stop
from shoal.control.membership import REFUSABLE
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.progress import Passes
from shoal.launch.launcher import Exit, Failure, Launcher
from shoal.launch.relaunch import GiveUp, Relaunch, Start, Succession, ends_job
from shoal.launch.screen import Screen, transition_line
from shoal.launch.tail import LOG_LIMIT_BYTES, Tail, bound
from shoal.metrics import read_events

_POLL_S = 0.1  # between two looks for output while some comes
_IDLE_POLL_S = 0.5  # while none does: each look wakes a process that would sleep
_LIVE_PROGRESS_S = 0.5
_PLAIN_PROGRESS_S = 5.0
_LAST_WORD_S = 2.0  # from the last worker's end until the coordinator has said that the job is over


@dataclass(frozen=True)
class Size:
    """How many workers: the job pauses below `min` and starts with `target`."""

    min: int
    max: int
    target: int


def parse_size(text: str, cores: int) -> Size:
    """`4` is a target of 4 with everything from 1 up allowed; `2:8` stays between and aims at the number of cores."""
    try:
        low, high = (int(part) for part in text.split(":")) if ":" in text else (1, MAX_SLOTS)
        target = min(max(cores, low), high) if ":" in text else int(text)
    except ValueError:
        raise errors.SettingsContradict(f"-n {text} is not a number of workers; write -n 4, or -n 2:8") from None
    if low > high:
        raise errors.SettingsContradict(f"-n {text} asks for more at least than at most; write -n {high}:{low}")
    if low < 1 or target < 1:
        raise errors.SettingsContradict(f"-n {text} has no worker; a job needs 1 at least")
    if max(target, high) > MAX_SLOTS:
        raise errors.SettingsContradict(f"-n {text} is more than one host takes; {MAX_SLOTS} workers at most")
    return Size(low, high, target)


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


class CoordinatorProcess:
    """The coordinator, as a process that ends with this one. `after`: how the one before it ended."""

    def __init__(
        self, run_dir: RunDir, size: Size, timeouts: Timeouts, on_error: OnError, generation: int, after: str = ""
    ) -> None:
        """`generation`: the highest number used before, for a job that goes on."""
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
        self._log_limit_bytes = log_limit_bytes
        self._bounding: asyncio.Future[bool] | None = None
        self._relaunch, self._on_error = relaunch, on_error
        self._environment = environment
        self._screen = screen
        self._host = socket.gethostname()
        self._finishing = False
        self._origin = origin
        self._succession = Succession()
        self._target_heard = -1  # its number
        self._next_number = origin.next_worker
        self._live: dict[str, int] = {}  # worker id → pid
        self._failures: dict[str, Failure] = {}
        self._told: Failure | None = None  # by the coordinator
        self._excused: set[str] = set()  # who leave: they need no replacement however they end
        self._doubtful: dict[str, Ending] = {}  # whose failure ends the job, unless they are excused
        self._delayed: list[asyncio.Task[None]] = []  # starts that wait for their time, and may be called off
        self._starting = 0
        self._events = Tail(run_dir.events)
        self._tails: dict[str, Tail] = {}
        self._ending: Ending | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, make_launcher: Callable[..., Launcher]) -> Ending:
        """Run the job to its end. `make_launcher` is called with on_exit, on_failure and on_lost.

        When this returns or raises, no process of the job is left.
        """
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        list(self._events.lines())  # of a job that goes on, what happened before was shown then
        self._start_coordinator()
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
        self._spawn(self._show_output())
        self._spawn(self._show_progress())
        self._spawn(self._watch_coordinator())

    def _start_coordinator(self, after: str = "") -> None:
        self._coordinator = CoordinatorProcess(
            self._run_dir, self._size, self._timeouts, self._on_error, self._origin.generation, after
        )

    async def _keep_coordinator(self) -> None:
        """Follow each that ends by another, while workers train on."""
        while True:
            ended = self._coordinator
            await ended.ended.wait()
            self._succession, decision = self._succession.on_end(ended.killed, ended.serves, ended.lived_s)
            if isinstance(decision, GiveUp):
                return self._end(Ending(error=ended.lost()), grace_s=0.0)
            await asyncio.sleep(decision.delay_s)
            self._start_coordinator(after=ended.how_it_ended())
            ended.release()

    async def _watch_coordinator(self) -> None:
        """One that hangs is killed, and followed by another. Nobody is told what it may decide when it wakes up."""
        while True:
            await asyncio.sleep(self._timeouts.budget_s)
            watched, within_s = self._coordinator, self._timeouts.command_s
            try:
                await asyncio.to_thread(client.status, self._run_dir, within_s)
            except errors.JobNotFound:
                if watched is self._coordinator and not watched.ended.is_set():
                    watched.kill(f"no answer for {within_s:g} s")

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
        if self._bounding is not None:
            await asyncio.wait([self._bounding])  # a log's last lines are read when its head is off
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
        self._echo(last=True)
        self._screen.close()

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
        self._tails[worker_id] = Tail(self._run_dir.logs / f"{worker_id}.log")
        if self._link is not None:
            self._link.started(worker_id, pid)

    def _on_failure(self, failure: Failure) -> None:
        self._failures.setdefault(failure.worker_id, failure)
        if failure.worker_id in self._tails:
            self._tails[failure.worker_id].cut(failure.log_bytes)

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
        with contextlib.suppress(errors.JobNotFound):  # it ended meanwhile, or hangs: the workers get a signal too
            client.stop(self._run_dir, reason, self._timeouts.budget_s)

    # ---- what the user sees

    async def _show_output(self) -> None:
        pause_s = _POLL_S
        while True:
            pause_s = _POLL_S if self._echo() else min(1.5 * pause_s, _IDLE_POLL_S)
            await self._bound_logs()
            await asyncio.sleep(pause_s)

    async def _bound_logs(self) -> None:
        for worker_id in list(self._tails):
            log = self._run_dir.logs / f"{worker_id}.log"
            with contextlib.suppress(OSError):  # not there yet; or the disk is full, which must not end the job
                if log.stat().st_size > self._log_limit_bytes:
                    # In a thread: it copies, and a death in that time must be told at once.
                    self._bounding = asyncio.ensure_future(asyncio.to_thread(bound, log, self._log_limit_bytes))
                    await asyncio.shield(self._bounding)

    def _echo(self, last: bool = False) -> bool:
        """Show what is new. Whether there was anything."""
        shown = False
        for worker_id, tail in list(self._tails.items()):
            gone = worker_id not in self._live
            for line in tail.lines(last=last or gone):
                self._screen.echo(worker_id, line)
                shown = True
            if gone or last:
                self._tails.pop(worker_id).close()
        for line in self._events.lines():
            shown = True
            transition = transition_line(json.loads(line))
            if transition is not None:
                self._screen.tell(transition)
        if last:
            self._events.close()
        return shown

    async def _show_progress(self) -> None:
        every_s = _LIVE_PROGRESS_S if self._screen.live else _PLAIN_PROGRESS_S
        passes = Passes(self._run_dir.audit)
        newest = 0
        with client.Commands(self._run_dir) as coordinator:
            while True:
                await asyncio.sleep(every_s)
                with contextlib.suppress(errors.JobNotFound):  # it does not answer just now
                    status = await asyncio.to_thread(coordinator.status, every_s)
                    if status["seq"] >= newest:  # a coordinator that has just come does not know yet
                        newest = status["seq"]
                        self._screen.progress(status, passes.progress(status))

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
