"""What a job shows while it runs: lines of workers, transitions, progress. It also bounds the logs that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Container
from pathlib import Path

from shoal import errors
from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.data.progress import Passes
from shoal.launch.screen import Screen, transition_line
from shoal.launch.tail import Tail, bound
from shoal.recipe import epochs_of

_POLL_S = 0.1  # between two looks for output while some comes
_IDLE_POLL_S = 0.5  # while none does: each look wakes a process that would sleep
_LIVE_PROGRESS_S = 0.5
_PLAIN_PROGRESS_S = 5.0


class Output:
    """From the files of a run directory to a screen. `live`: the workers that may still write to their logs. Without
    `events`, transitions are left to somebody else."""

    def __init__(
        self, run_dir: RunDir, screen: Screen, live: Container[str], log_limit_bytes: int, events: bool = True
    ) -> None:
        self._run_dir, self._screen, self._live = run_dir, screen, live
        self._log_limit_bytes = log_limit_bytes
        self._bounding: asyncio.Future[bool] | None = None
        self._tails: dict[str, Tail] = {}
        self._events = Tail(run_dir.events if events else Path(os.devnull))
        list(self._events.lines())  # of a job that goes on, what happened before was shown then

    def follow(self, worker_id: str) -> None:
        self._tails[worker_id] = Tail(self._run_dir.logs / f"{worker_id}.log")

    def cut(self, worker_id: str, log_bytes: int | None) -> None:
        """Leave out what the worker writes after so many bytes: its failure is told once, by the job."""
        if worker_id in self._tails:
            self._tails[worker_id].cut(log_bytes)

    async def show_lines(self) -> None:
        """Until it is cancelled."""
        pause_s = _POLL_S
        while True:
            pause_s = _POLL_S if self._echo() else min(1.5 * pause_s, _IDLE_POLL_S)
            await self._bound_logs()
            await asyncio.sleep(pause_s)

    async def show_progress(self) -> None:
        """Until it is cancelled."""
        every_s = _LIVE_PROGRESS_S if self._screen.live else _PLAIN_PROGRESS_S
        passes = Passes(self._run_dir.audit, epochs_of(self._run_dir.settings()))
        newest = 0
        with commands.Commands(self._run_dir) as coordinator:
            while True:
                await asyncio.sleep(every_s)
                # It does not answer just now, or is not believed: who watches the coordinator decides about that.
                with contextlib.suppress(errors.JobNotFound, errors.CertificateRefused, errors.CertificateUnusable):
                    status = await asyncio.to_thread(coordinator.status, every_s)
                    if status["seq"] >= newest:  # a coordinator that has just come does not know yet
                        newest = status["seq"]
                        self._screen.progress(status, passes.progress(status))

    async def settle(self) -> None:
        """A log's last lines are read when its head is off."""
        if self._bounding is not None:
            await asyncio.wait([self._bounding])

    def close(self) -> None:
        """Show what is left. Later lines of the screen are plain ones."""
        self._echo(last=True)
        self._screen.close()

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
