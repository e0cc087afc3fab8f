"""Deciding: what was heard changes the membership, is written to journal and event log, and then told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from shoal.control import lending
from shoal.control.coordinator.telling import Teller
from shoal.control.instructions import Instruction, Log, Publish
from shoal.control.journal import Journal, JournalDamaged, put_aside
from shoal.control.membership.liveness import on_tick
from shoal.control.membership.settling import settle
from shoal.control.membership.values import Membership, Outcome
from shoal.control.rebuild import Rebuilding
from shoal.control.rundir import Claim, RunDir
from shoal.control.status import Figures
from shoal.errors import RunDirUnusable
from shoal.metrics import EventLog, event_line, fault_point

Event = Callable[[Membership, float], Outcome]

_log = logging.getLogger("shoal.coordinator")


class Decisions:
    """`membership` is what was decided last. While `rebuilding`, nothing is. `on_broken` is called with what keeps this
    coordinator from deciding any more."""

    def __init__(
        self,
        run_dir: RunDir,
        membership: Membership,
        teller: Teller,
        figures: Figures,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._run_dir = run_dir
        self.membership = membership
        self._teller = teller
        self._figures = figures
        self.clock = clock
        self._wall = wall
        self._on_broken = on_broken
        self.rebuilding: Rebuilding | None = None
        self._inbox: list[Event] = []

    def take_up(self, claim: Claim, after: str) -> None:
        """Go on where the coordinator before was killed, if there was one."""
        self._claim = claim
        followed = self._run_dir.address() is not None
        self._events = EventLog(self._run_dir.events)
        entry, lost = None, "nothing was in it"
        try:
            self._journal = Journal(self._run_dir.journal)
            entry = self._journal.load(self.clock())
        except JournalDamaged as damage:
            aside = put_aside(self._run_dir.journal)
            lost = f"{damage}" if aside is None else f"{damage}; it is kept as {aside.name}"
            self._journal = Journal(self._run_dir.journal)
        self._events.mend(*((), self._events.size_bytes) if entry is None else (entry.lines, entry.at_bytes))
        if after:
            self._event("restarted", text=f"after {after}")
        if entry is not None:
            self.membership = entry.membership
        elif followed:
            self._event("journal_lost", text=lost)
            until = self.clock() + self.membership.timeouts.budget_s
            self.rebuilding = Rebuilding(self._run_dir, until, self.membership.hosts)
        else:
            self._journal.record(self.membership)

    def close(self) -> None:
        self._journal.close()
        self._events.close()

    def post(self, event: Event) -> None:
        """Everything posted in one turn of the loop is handled together, and makes one generation at most."""
        self._inbox.append(event)
        if self.rebuilding is not None:
            self._go_on_if_rebuilt()
        elif len(self._inbox) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _go_on_if_rebuilt(self) -> None:
        known = self.rebuilding
        if known is None or not known.complete(self.clock()):
            return
        self.rebuilding = None
        # Before all that was heard meanwhile: joins, rosters and deaths are handled as after any restart.
        self._inbox.insert(0, known.rebuilt)
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        try:
            self._handle_inbox()
        except Exception as error:
            # Whatever it is, what was decided may be neither written nor told, and the loop would go on as if nothing
            # were: `serve` raises it instead, and the next coordinator goes on from the journal.
            _log.exception("the coordinator cannot go on")
            self._on_broken(error)

    def _handle_inbox(self) -> None:
        events, self._inbox = self._inbox, []
        now = self.clock()
        before = self.membership
        instructions: list[Instruction] = []
        for event in events:
            self.membership, more = event(self.membership, now)
            instructions += more
        for consequence in (settle, lending.lend):
            self.membership, more = consequence(self.membership)
            instructions += more
        lines = [line for instruction in instructions if (line := self._line(instruction)) is not None]
        if self.membership != before:
            fault_point("decided")
            self._check_term()
            self._journal.record(self.membership, lines, self._events.size_bytes)
            fault_point("journaled")
        for line in lines:
            self._events.append(line)
        for instruction in instructions:
            self._teller.act(instruction)
        if self.membership.lent.passes:
            self._figures.note_samples(self.membership.lent.used()[0], self.clock())

    def _check_term(self) -> None:
        """RunDirUnusable when this coordinator has been followed by another, which may be elsewhere: what it decides is
        of no effect any more."""
        if self._run_dir.term() > self._claim.term:
            raise RunDirUnusable(f"another coordinator has taken this one's place in {self._run_dir.path}")

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self.membership.timeouts.probe_s)
            try:
                self._check_term()
            except RunDirUnusable as followed:
                return self._on_broken(followed)
            except OSError:
                pass  # it is looked at again, and before each decision
            if self.rebuilding is None:
                self.post(on_tick)
            else:
                self._go_on_if_rebuilt()

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """In the event log, of what decides nothing."""
        self._events.append(event_line(self._wall(), kind, fields))
        self._figures.counts[kind] += 1

    def _line(self, instruction: Instruction) -> str | None:
        """What the event log tells of it."""
        if isinstance(instruction, Log):
            fields = {"worker_id": instruction.worker_id, "text": instruction.text, **instruction.details}
            return event_line(self._wall(), instruction.kind, fields)
        if isinstance(instruction, Publish):
            generation = instruction.generation
            fields = {
                "number": generation.number,
                "members": [member.worker_id for member in generation.members],
                "leavers": [member.worker_id for member in generation.leavers],
                "followers": [member.worker_id for member in generation.followers],
                "fault": generation.fault,
                "paused": generation.paused,
                "cause": instruction.cause,
            }
            return event_line(self._wall(), "generation", fields)
        return None

    def _event(self, kind: str, text: str) -> None:
        self.note(kind, {"text": text})
        _log.info("%s %s", kind, text)
