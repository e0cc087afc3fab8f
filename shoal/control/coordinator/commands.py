"""Somebody commands: one request, and an answer once it is decided."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from shoal.control import bounds
from shoal.control.bounds import BadMessage
from shoal.control.coordinator.decisions import Decisions
from shoal.control.coordinator.streams import Streams
from shoal.control.coordinator.telling import Teller
from shoal.control.hosts import Host, slots_of
from shoal.control.instructions import Stop
from shoal.control.membership.finishing import on_stop
from shoal.control.membership.hosts import on_unlisted
from shoal.control.membership.target import on_scale
from shoal.control.membership.values import Membership, Outcome
from shoal.control.protocol import CommandReply, CommandRequest, ToWorker
from shoal.control.rundir import RunDir
from shoal.control.tls import is_loopback
from shoal.errors import SettingsContradict


class Commands:
    """Serves commands. `named`: the hosts that the job was started with; `bind`: where this coordinator serves."""

    def __init__(
        self,
        run_dir: RunDir,
        streams: Streams,
        decisions: Decisions,
        teller: Teller,
        status: Callable[[], dict[str, Any]],
        named: Sequence[Host],
        bind: str,
    ) -> None:
        self._run_dir = run_dir
        self._streams = streams
        self._decisions = decisions
        self._teller = teller
        self._status = status
        self._named = named
        self._bind = bind

    async def command(self, request: bytes, context: Any) -> Any:
        await self._streams.admit(context)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            kind, body = bounds.parse(CommandRequest, request)
        except BadMessage as bad:
            return await self._streams.drop(context, "", bad)
        if kind == "describe":
            described = {"dir": str(self._run_dir.path), "settings": self._run_dir.settings()}
            return CommandReply(status_json=json.dumps(described))

        named_slots = self._named_slots() if kind == "scale" else None

        def event(membership: Membership, now: float) -> Outcome:
            outcome: Outcome = (membership, [])
            try:
                if kind == "scale":
                    outcome = on_scale(membership, body.target, named_slots)
                elif kind == "checkpoint":
                    if membership.newest is not None and membership.newest.members:
                        self._teller.tell_worker(membership.newest.members[0].worker_id, ToWorker(checkpoint={}))
                elif kind == "stop":
                    outcome = on_stop(membership, Stop(body.reason))
                elif kind == "unlisted":
                    outcome = on_unlisted(membership, body.hosts)
            except SettingsContradict as mistake:
                if not done.done():
                    done.set_exception(mistake)
            else:
                if not done.done():  # whoever asked waits no longer
                    done.set_result(None)
            return outcome

        self._decisions.post(event)
        try:
            await done
        except SettingsContradict as mistake:
            return CommandReply(error=str(mistake))
        return CommandReply(status_json=json.dumps(self._status()))

    def _named_slots(self) -> int | None:
        """Of the hosts that the job was started with; None if others may come: nobody joins from another machine what
        serves on loopback."""
        settings = self._run_dir.settings()
        if settings.get("discover") or settings.get("address") or not is_loopback(self._bind):
            return None
        return slots_of(self._named) if self._named else None
