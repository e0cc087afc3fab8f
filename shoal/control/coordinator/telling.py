"""Telling: what was decided goes out, to workers and launchers on their streams."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from shoal.control import protocol
from shoal.control.generation import Generation
from shoal.control.instructions import (
    Bye,
    Drop,
    Excuse,
    Fence,
    Granted,
    Heeded,
    Instruction,
    PassOver,
    Probe,
    Publish,
    Refuse,
    RefuseHost,
    SetTarget,
    Settled,
    Stop,
)
from shoal.control.protocol import ToLauncher, ToWorker
from shoal.control.status import Figures
from shoal.metrics import fault_point
from shoal.wording import counted

_log = logging.getLogger("shoal.coordinator")


class Outbox:
    """What waits to be sent on one stream, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, message: Any) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def send_all(self, context: Any) -> None:
        while (message := await self._queue.get()) is not None:
            await context.write(message)
            fault_point("told")


class Teller:
    """Knows who is connected. Whoever is not hears nothing now, and what counts then when it comes back."""

    def __init__(self, token: str, figures: Figures) -> None:
        self._token = token
        self._figures = figures
        self.workers: dict[str, Outbox] = {}
        self.launchers: dict[str, Outbox] = {}  # by host

    def act(self, instruction: Instruction) -> None:
        if isinstance(instruction, Publish):
            self._publish(instruction.generation, instruction.cause)
        elif isinstance(instruction, Bye):
            self.tell_worker(instruction.worker_id, ToWorker(bye={}))
        elif isinstance(instruction, Refuse):
            self.tell_worker(instruction.worker_id, ToWorker(refused={"reason": instruction.reason}))
        elif isinstance(instruction, Heeded):
            self.tell_worker(instruction.worker_id, ToWorker(heeded={"number": instruction.number}))
        elif isinstance(instruction, Granted):
            self.tell_worker(instruction.worker_id, ToWorker(granted=protocol.lease_to_wire(instruction.lease)))
        elif isinstance(instruction, Settled):
            self.tell_worker(instruction.worker_id, ToWorker(settled={"numbers": instruction.numbers}))
        elif isinstance(instruction, PassOver):
            over = {"pass_index": instruction.pass_index, "complete": instruction.complete}
            self.tell_worker(instruction.worker_id, ToWorker(pass_over=over))
        elif isinstance(instruction, Fence):
            self._tell_launchers(ToLauncher(fence={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, Excuse):
            self._tell_launchers(ToLauncher(excuse={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, Probe):
            self._tell_launchers(ToLauncher(probe={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, SetTarget):
            for host, its in self.launchers.items():
                its.put(ToLauncher(target=protocol.target_to_wire(instruction, host)))
        elif isinstance(instruction, Drop):
            self.tell_launcher(instruction.host, ToLauncher(dropped={"rest_s": instruction.rest_s}))
        elif isinstance(instruction, RefuseHost):
            self.tell_launcher(instruction.host, ToLauncher(refused={"reason": instruction.reason}))
        elif isinstance(instruction, Stop):
            self._tell_launchers(ToLauncher(stop=vars(instruction)))
        else:
            self._figures.counts[instruction.kind] += 1
            _log.info("%s %s %s", instruction.kind, instruction.worker_id, instruction.text)
            if instruction.kind in ("left", "lost"):
                self._figures.forget(instruction.worker_id)

    def _publish(self, generation: Generation, cause: str) -> None:
        self._figures.counts["generation"] += 1
        workers = counted(len(generation.members), "worker") + (", paused" if generation.paused else "")
        _log.info("generation %d → %d: %s, %s", generation.number - 1, generation.number, cause, workers)
        message = self.told(generation)
        for member in generation.all:
            self.tell_worker(member.worker_id, message)

    def told(self, generation: Generation) -> Any:
        """As workers are told of it."""
        return ToWorker(
            generation=protocol.to_wire(replace(generation, key=protocol.key_of(self._token, generation.number)))
        )

    def tell_worker(self, worker_id: str, message: Any) -> None:
        if (outbox := self.workers.get(worker_id)) is not None:
            outbox.put(message)

    def tell_launcher(self, host: str, message: Any) -> None:
        if (outbox := self.launchers.get(host)) is not None:
            outbox.put(message)

    def _tell_launchers(self, message: Any) -> None:
        for outbox in self.launchers.values():
            outbox.put(message)
