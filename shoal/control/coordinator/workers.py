"""A worker speaks, on a stream that lasts as long as both live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from shoal.control import bounds, lending, protocol
from shoal.control.bounds import BadMessage
from shoal.control.coordinator.decisions import Decisions, Event
from shoal.control.coordinator.streams import Streams
from shoal.control.coordinator.telling import Outbox, Teller
from shoal.control.drift import Checks, Drift, Told
from shoal.control.instructions import Heeded, Refuse
from shoal.control.membership.failures import OnError, on_broken, on_drift, on_failed, on_unreached
from shoal.control.membership.finishing import on_finished
from shoal.control.membership.liveness import on_beat, on_waiting
from shoal.control.membership.settling import newest_for
from shoal.control.membership.target import on_wish
from shoal.control.membership.values import Membership, Outcome, State
from shoal.control.membership.workers import on_caught_up, on_entered, on_gone, on_join, on_leave, on_parked, on_ready
from shoal.control.protocol import FromWorker, ToWorker
from shoal.control.rebuild import Report
from shoal.control.rundir import RunDir, write_atomically
from shoal.control.status import Figures
from shoal.errors import SettingsContradict

NOTES = ("checkpointed", "checkpoint_failed")  # kinds of events that workers tell of
_UNLOGGED = 1 << 20  # generations that nobody remembers any more: none in practice

_DEATH_S = 0.1  # for a launcher to say that a worker, whose connection has ended, is dead

_log = logging.getLogger("shoal.coordinator")


class Workers:
    """Serves the streams of workers."""

    def __init__(
        self,
        run_dir: RunDir,
        streams: Streams,
        decisions: Decisions,
        teller: Teller,
        figures: Figures,
        checks: Checks,
        on_error: OnError,
    ) -> None:
        self._run_dir = run_dir
        self._streams = streams
        self._decisions, self._post = decisions, decisions.post
        self._teller = teller
        self._figures = figures
        self._checks = checks
        self._on_error = on_error

    async def work(self, requests: AsyncIterator[bytes], context: Any) -> None:
        def closed(worker_id: str) -> None:
            self._post(lambda membership, now: self._disconnected(membership, worker_id))

        streams = self._teller.workers
        await self._streams.converse(requests, context, FromWorker, streams, "join", self._enter, self._heard, closed)

    def _enter(self, join: Any, outbox: Outbox) -> str:
        newest = protocol.from_wire(join.newest) if join.HasField("newest") else None
        slot = join.slot if join.HasField("slot") else None
        said = protocol.said_from_wire(join.leases, join.worker_id) if join.HasField("leases") else None
        report = Report(join.worker_id, join.host, slot, newest, join.last_fault, join.dismissed, said, join.address)
        self._doubt(report)
        self._figures.pids[join.worker_id] = join.pid
        if self._decisions.rebuilding is not None:
            self._decisions.rebuilding.reports[report.worker_id] = report
        self._post(self._joined(report, join.version, outbox))
        return report.worker_id

    def _doubt(self, report: Report) -> None:
        """Fails with BadMessage where the worker knows of much more than can have been: nothing of it is in the log."""
        rebuilding = self._decisions.rebuilding
        known = self._decisions.membership.number if rebuilding is None else rebuilding.number
        told = 0 if report.newest is None else report.newest.number
        if told > known + _UNLOGGED:
            raise BadMessage(f"{report.worker_id} knows generation {told}, and the job {known}")
        said = report.leases
        if rebuilding is not None and said is not None and said.heard >= rebuilding.next_lease:
            raise BadMessage(f"{report.worker_id} has lease {said.heard}, which nobody has given")

    def _joined(self, report: Report, version: str, outbox: Outbox) -> Event:
        worker_id, known = report.worker_id, 0 if report.newest is None else report.newest.number

        def event(membership: Membership, now: float) -> Outcome:
            if version != protocol.VERSION:
                reason = f"it speaks version {version} and the job {protocol.VERSION}; start it from the same shoal"
                return membership, [Refuse(worker_id, reason)]
            membership, instructions = on_join(
                membership, worker_id, report.host, now, known, report.slot, address=report.address
            )
            worker = membership.worker(worker_id)
            if worker is not None and not worker.fenced:
                outbox.put(ToWorker(welcome={"slot": worker.member.slot}))
                newest = newest_for(membership, known)
                if newest is not None and newest.lists(worker_id):
                    outbox.put(self._teller.told(newest))
            if report.leases is not None:
                membership, more = lending.on_said(membership, worker_id, report.leases)
                instructions += more
            return membership, instructions

        return event

    def _disconnected(self, membership: Membership, worker_id: str) -> Outcome:
        """A broken stream is no death. But nobody else will say that a worker without a launcher has gone."""
        worker = membership.worker(worker_id)
        if worker is None or worker.launched or worker.state is not State.PARTED or worker_id in self._teller.workers:
            return membership, []
        if not self._teller.launchers and any(other.launched for other in membership.workers):
            return membership, []  # the launcher has not come back to this coordinator yet; it may be its worker
        return on_gone(membership, worker_id, "disconnected")

    def _heard(self, worker_id: str, kind: str, body: Any) -> None:
        if kind == "beat":
            self._figures.on_beat(worker_id, body, self._decisions.clock())
            if body.HasField("leases"):
                self._heard(worker_id, "leases", body.leases)
            self._post(lambda membership, now: on_beat(membership, worker_id, now))
            awaited = tuple(body.waiting_for)
            self._post(lambda membership, now: on_waiting(membership, worker_id, awaited, now))
        elif kind == "ready":
            self._post(lambda membership, now: on_ready(membership, worker_id, body.follows))
        elif kind == "caught_up":
            self._post(lambda membership, now: on_caught_up(membership, worker_id))
        elif kind == "leases":
            said = protocol.said_from_wire(body, worker_id)
            self._post(lambda membership, now: lending.on_said(membership, worker_id, said))
        elif kind == "model":
            self._teller.tell_worker(worker_id, ToWorker(model={"tensors": self._model(body.tensors)}))
        elif kind == "leave":
            self._post(lambda membership, now: on_leave(membership, worker_id))
        elif kind == "parked":
            self._post(lambda membership, now: on_parked(membership, worker_id, body.generation))
        elif kind == "entered":
            self._post(lambda membership, now: on_entered(membership, worker_id, body.generation))
        elif kind == "broken":
            # A death breaks connections too, and is told by its launcher: that goes first.
            event = partial(self._broken_link, worker_id, body)
            asyncio.get_running_loop().call_later(_DEATH_S, self._post, event)
        elif kind == "checked":
            told = protocol.told_from_wire(body)
            self._post(lambda membership, now: self._checked(membership, worker_id, told))
        elif kind == "finished":
            report = bounds.details(body.report_json)
            details = {"digest": body.digest, "step": body.step, "seq": body.seq, "report": report}
            self._post(lambda membership, now: on_finished(membership, worker_id, details))
        elif kind == "failed":
            self._post(failed(worker_id, body, self._on_error))
        elif kind == "note" and body.kind in NOTES:
            fields = {"worker_id": worker_id, "text": body.text, **bounds.details(body.fields_json)}
            self._decisions.note(body.kind, fields)
            self._teller.tell_worker(worker_id, ToWorker(heeded={"number": body.number}))
        elif kind == "scale":
            self._post(lambda membership, now: self._wished(membership, worker_id, body))

    def _model(self, tensors: bytes) -> bytes:
        """The job's model: that of the worker which is first to have one."""
        file = self._run_dir.model_file
        if not file.exists():
            write_atomically(file, tensors)
        return file.read_bytes()

    def _checked(self, membership: Membership, worker_id: str, told: Told) -> Outcome:
        worker = membership.worker(worker_id)
        if worker is None or worker.state not in (State.MEMBER, State.LEAVING):
            return membership, []
        verdict = self._checks.on_told(worker_id, told)
        if not isinstance(verdict, Drift):
            return membership, []
        return on_drift(membership, verdict, only_tell=self._run_dir.settings().get("on_drift") == "tell")

    def _broken_link(self, worker_id: str, broken: Any, membership: Membership, now: float) -> Outcome:
        on = on_unreached if broken.unreached else on_broken
        return on(membership, worker_id, broken.generation, broken.slot)

    def _wished(self, membership: Membership, worker_id: str, wish: Any) -> Outcome:
        try:
            return on_wish(membership, worker_id, wish.number, wish.target, wish.relative)
        except SettingsContradict as mistake:
            _log.warning("%s: %s", worker_id, mistake)
            return membership, [Heeded(worker_id, wish.number)]


def failed(worker_id: str, failure: Any, on_error: OnError) -> Event:
    """As the worker tells it, or its launcher."""
    said = (failure.kind, failure.message, failure.traceback)
    ends_job = on_error == "stop"
    return lambda membership, now: on_failed(membership, worker_id, *said, ends_job=ends_job, fresh=failure.fresh)
