"""The hosts of a job whose own host was lost, as whoever took its place sees them: they were joined by hand, have
workers that train on, and find the new coordinator by the run directory that all of them share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal.control import commands
from shoal.control.rundir import Committed, RunDir, finite
from shoal.control.timeouts import Timeouts
from shoal.launch.hosts import HostSpec
from shoal.launch.screen import Screen
from shoal.launch.tasks import Tasks
from shoal.metrics import read_events


class Inherited:
    """In the place of a `Fleet`: nothing is started."""

    founders: Sequence[HostSpec] = ()

    def __init__(self, run_dir: RunDir, timeouts: Timeouts) -> None:
        self._run_dir, self._timeouts = run_dir, timeouts

    def start(self, tasks: Tasks, screen: Screen, on_unusable: Callable[[errors.ShoalError], None]) -> None:
        """The coordinator serves by now. If nobody comes back to it, there is nothing to go on with."""
        tasks.spawn(self._await_somebody(on_unusable))

    async def _await_somebody(self, on_unusable: Callable[[errors.ShoalError], None]) -> None:
        latest_s = asyncio.get_running_loop().time() + self._timeouts.join_s
        while not any(worker["pid"] for worker in await self._workers()):
            if asyncio.get_running_loop().time() > latest_s:
                return on_unusable(
                    errors.StateLost(
                        f"no worker of the job came to {self._run_dir.address()} within {self._timeouts.join_s:g} s: "
                        "go on from the newest checkpoint with shoal resume"
                    )
                )
            await asyncio.sleep(self._timeouts.beat_s)

    async def stop(self, grace_s: float, busy: Callable[[], bool]) -> None:
        """Their launchers are told by the coordinator; it stays until their workers have left."""
        latest_s = asyncio.get_running_loop().time() + grace_s
        while await self._workers() and (busy() or asyncio.get_running_loop().time() < latest_s):
            await asyncio.sleep(self._timeouts.beat_s / 10)

    async def close(self) -> Committed | None:
        """As far as workers have said so."""
        state = await self._status()
        if state is None:
            return None
        told = [int(event["seq"]) for event in read_events(self._run_dir.events) if event["event"] == "finished"]
        return Committed(
            max([state["seq"], *told]),
            state["step"],
            state["epoch"],
            state["samples"],
            finite(state["loss"] or math.nan),
        )

    async def _workers(self) -> list[dict[str, Any]]:
        state = await self._status()
        return [] if state is None else list(state["workers"])

    async def _status(self) -> dict[str, Any] | None:
        try:
            return await asyncio.to_thread(commands.status, self._run_dir, self._timeouts.command_s)
        except errors.UserMistake:  # it is being followed by another
            return None
