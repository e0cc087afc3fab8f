"""The job's control server: it feeds what it hears to `membership`, writes the journal, then tells everybody.

    python -m shoal.control.coordinator --dir DIR --min 1 --max 8 --target 4 --budget 5

The process ends with its parent. `EmbeddedCoordinator` runs the same server in a thread. Killed at any time, another
one on the same directory goes on from the journal, or from what workers and launcher say if there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from shoal.control import lending, prometheus, protocol
from shoal.control import membership as m
from shoal.control.environment import COORDINATOR_PLUGIN
from shoal.control.journal import Journal, JournalDamaged, put_aside
from shoal.control.membership import Instruction, Membership, Outcome, State
from shoal.control.protocol import (
    CommandReply,
    CommandRequest,
    FromLauncher,
    FromWorker,
    ToLauncher,
    ToWorker,
    to_bytes,
)
from shoal.control.rundir import RunDir, finite
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.data.leases import Lent
from shoal.errors import SettingsContradict, ShoalError
from shoal.metrics import EventLog, event_line, fault_point
from shoal.process import die_with
from shoal.wording import counted

OnError = Literal["stop", "relaunch"]
Event = Callable[[Membership, float], Outcome]
RATE_WINDOW_S = 10.0
NOTES = ("checkpointed", "checkpoint_failed")  # kinds of events that workers tell of

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


class Rebuilding:
    """The journal is lost: what is heard until there is enough to go on. Decisions wait for that long."""

    def __init__(self, events: Path, until: float) -> None:
        self._until = until
        self.number, self.slots, self.losses = _remembered(events)
        self.reports: dict[str, m.Report] = {}
        self.rosters: dict[str, m.Roster] = {}
        self._gone: set[str] = set()

    def on_gone(self, worker_id: str) -> None:
        self._gone.add(worker_id)

    def complete(self, now: float) -> bool:
        """Whether the launcher is here and all of its workers have come back or are dead; or it took too long."""
        live = {worker_id for roster in self.rosters.values() for worker_id in roster.live}
        return now >= self._until or (bool(self.rosters) and live <= self.reports.keys() | self._gone)


def _remembered(events: Path) -> tuple[int, dict[str, int], int]:
    """The highest number of a generation, the slot of every worker, and how often a journal was lost, from as much of
    the event log as is whole."""
    number, slots, losses = 0, {}, 0
    for line in events.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
            if event["event"] == "generation":
                number = max(number, int(event["number"]))
            elif event["event"] == "joined":
                slots[str(event["worker_id"])] = int(event["slot"])
            elif event["event"] == "journal_lost":
                losses += 1
        except (ValueError, KeyError, TypeError):
            continue
    return number, slots, losses


class Coordinator:
    """Serves one job. `membership` is that of a new job; what the journal holds, or workers know, goes before it.
    `after`: how the coordinator before this one ended, as the launcher tells it."""

    def __init__(
        self,
        run_dir: RunDir,
        membership: Membership,
        on_error: OnError = "stop",
        after: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir = run_dir
        self._on_error = on_error
        self._clock = clock
        self._wall = wall
        self._after = after
        self._token = run_dir.token()
        self._membership = membership
        self._rebuilding: Rebuilding | None = None
        self._counts: Counter[str] = Counter()
        self._inbox: list[Event] = []
        self._workers: dict[str, Outbox] = {}
        self._launchers: dict[str, Outbox] = {}
        self._pids: dict[str, int] = {}
        self._beats: dict[str, Any] = {}
        self._front: Any = FromWorker().beat  # the newest of the worker that is furthest, also when all have gone
        self._samples: deque[tuple[float, int]] = deque()
        self._stopping = asyncio.Event()
        self._broken: Exception | None = None

    @property
    def generation(self) -> int:
        return self._membership.number

    async def start(self) -> str:
        """Bind to loopback, at the port of the coordinator before if that is free. Returns host:port. Raises
        RunDirUnusable while there is another one."""
        import grpc

        self._claim = self.run_dir.claim()
        if self._after:
            fault_point("returns")
        self._take_up()
        self._server = grpc.aio.server(options=protocol.SERVER_OPTIONS)
        handlers = {
            "Work": grpc.stream_stream_rpc_method_handler(self._work, FromWorker.FromString, to_bytes),
            "Launch": grpc.stream_stream_rpc_method_handler(self._launch, FromLauncher.FromString, to_bytes),
            "Command": grpc.unary_unary_rpc_method_handler(self._command, CommandRequest.FromString, to_bytes),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, handlers),))
        before = self.run_dir.address()
        try:
            port = self._server.add_insecure_port(before or "127.0.0.1:0")
        except RuntimeError:  # somebody else has it by now
            port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        address = f"127.0.0.1:{port}"
        self.run_dir.write_address(address)
        self._claim.write("serves")
        self._ticker = asyncio.create_task(self._tick())
        await self._serve_metrics()
        return address

    def _take_up(self) -> None:
        """Go on where the coordinator before was killed, if there was one."""
        followed = self.run_dir.address() is not None
        self._events = EventLog(self.run_dir.events)
        entry, lost = None, "nothing was in it"
        try:
            self._journal = Journal(self.run_dir.journal)
            entry = self._journal.load(self._clock())
        except JournalDamaged as damage:
            aside = put_aside(self.run_dir.journal)
            lost = f"{damage}" if aside is None else f"{damage}; it is kept as {aside.name}"
            self._journal = Journal(self.run_dir.journal)
        self._events.mend(*((), self._events.size_bytes) if entry is None else (entry.lines, entry.at_bytes))
        if self._after:
            self._event("restarted", text=f"after {self._after}")
        if entry is not None:
            self._membership = entry.membership
        elif followed:
            self._event("journal_lost", text=lost)
            until = self._clock() + self._membership.timeouts.budget_s
            self._rebuilding = Rebuilding(self.run_dir.events, until)
        else:
            self._journal.record(self._membership)

    async def _serve_metrics(self) -> None:
        """For Prometheus, where the job was started with a port for it."""
        self._metrics: asyncio.Server | None = None
        if (at := self.run_dir.settings().get("metrics_port")) is not None:
            host, port = prometheus.parse_address(at)
            try:
                self._metrics = await prometheus.serve(
                    host, port, lambda: prometheus.exposition(self.status(), self._counts)
                )
            except OSError as problem:
                raise ShoalError(f"cannot serve metrics at {host}:{port}: {problem.strerror}") from None

    async def serve(self, serving: Callable[[str], None] | None = None) -> None:
        """Run until `request_stop`; `serving` is called with the address once it answers. Raises what broke it."""
        address = await self.start()
        if serving is not None:
            serving(address)
        _log.info("coordinator serves %s at %s", self.run_dir.path, address)
        await self._stopping.wait()
        await self.close()
        if self._broken is not None:
            raise self._broken

    def request_stop(self) -> None:
        self._stopping.set()

    async def close(self) -> None:
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        if self._metrics is not None:
            self._metrics.close()
        await self._server.stop(grace=None)
        self._journal.close()
        self._events.close()
        self._claim.release()

    # Events come in.

    def _post(self, event: Event) -> None:
        """Everything posted in one turn of the loop is handled together, and makes one generation at most."""
        self._inbox.append(event)
        if self._rebuilding is not None:
            self._go_on_if_rebuilt()
        elif len(self._inbox) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _go_on_if_rebuilt(self) -> None:
        known = self._rebuilding
        if known is None or not known.complete(self._clock()):
            return
        self._rebuilding = None

        def rebuilt(founding: Membership, now: float) -> Outcome:
            reports, rosters = known.reports.values(), known.rosters.values()
            membership, instructions = m.rebuild(founding, reports, rosters, known.slots, known.number, now)
            newest = "no generation" if membership.newest is None else f"generation {membership.newest.number}"
            text = f"{newest}, from {counted(len(known.reports), 'worker')}; the next is {membership.number + 1}"
            lent = self._lent(known)
            silent = [it.worker_id for it in membership.workers if it.worker_id not in known.reports]
            membership = replace(membership, lent=replace(lent, strangers=(*lent.strangers, *silent)))
            return membership, [m.Log("rebuilt", "", text), *instructions]

        # Before all that was heard meanwhile: joins, rosters and deaths are handled as after any restart.
        self._inbox.insert(0, rebuilt)
        asyncio.get_running_loop().call_soon(self._turn)

    def _lent(self, known: Rebuilding) -> Lent:
        """What is used, the audit's records know; what is on lease, the workers."""
        from shoal.data.audit import lent  # numpy costs a tenth of a second

        said = [one.leases for one in known.reports.values() if one.leases is not None and not one.dismissed]
        held = [lease for one in said for lease in one.held]
        heard = max((one.heard for one in said), default=0)
        begun = max((one.extent.pass_index for one in said if one.extent is not None), default=-1)
        return lent(self.run_dir.audit, held, heard, begun, known.losses)

    def _turn(self) -> None:
        try:
            self._handle_inbox()
        except Exception as error:
            # What was decided may be neither written nor told: the next coordinator goes on from the journal.
            _log.exception("the coordinator cannot go on")
            self._broken = error
            self.request_stop()

    def _handle_inbox(self) -> None:
        events, self._inbox = self._inbox, []
        now = self._clock()
        before = self._membership
        instructions: list[Instruction] = []
        for event in events:
            self._membership, more = event(self._membership, now)
            instructions += more
        for consequence in (m.settle, lending.lend):
            self._membership, more = consequence(self._membership)
            instructions += more
        lines = [line for instruction in instructions if (line := self._line(instruction)) is not None]
        if self._membership != before:
            fault_point("decided")
            self._journal.record(self._membership, lines, self._events.size_bytes)
            fault_point("journaled")
        for line in lines:
            self._events.append(line)
        for instruction in instructions:
            if isinstance(instruction, (m.Log, m.Publish)):
                self._counts[instruction.kind if isinstance(instruction, m.Log) else "generation"] += 1
        for instruction in instructions:
            self._act(instruction)
        if self._membership.lent.passes:
            self._note_samples(self._membership.lent.used()[0])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._membership.timeouts.probe_s)
            if self._rebuilding is None:
                self._post(m.on_tick)
            else:
                self._go_on_if_rebuilt()

    async def _work(self, requests: AsyncIterator[Any], context: Any) -> None:
        def opened(join: Any, outbox: Outbox) -> str:
            self._pids[join.worker_id] = join.pid
            newest = protocol.from_wire(join.newest) if join.HasField("newest") else None
            slot = join.slot if join.HasField("slot") else None
            said = protocol.said_from_wire(join.leases, join.worker_id) if join.HasField("leases") else None
            report = m.Report(join.worker_id, join.host, slot, newest, join.last_fault, join.dismissed, said)
            if self._rebuilding is not None:
                self._rebuilding.reports[report.worker_id] = report
            self._post(self._joined(report, join.version, outbox))
            return report.worker_id

        def closed(worker_id: str) -> None:
            self._post(lambda membership, now: self._disconnected(membership, worker_id))

        await self._converse(requests, context, self._workers, "join", opened, self._heard, closed)

    async def _converse(
        self,
        requests: AsyncIterator[Any],
        context: Any,
        streams: dict[str, Outbox],
        first: str,
        opened: Callable[[Any, Outbox], str],
        heard: Callable[[str, str, Any], None],
        closed: Callable[[str], None] = lambda whose: None,
    ) -> None:
        """Serve one stream to its end. Its `first` message says whose it is, which `opened` returns; the stream takes
        the place of an older one of the same in `streams`, and `closed` is called unless another has taken its own."""
        await self._admit(context)
        outbox = Outbox()
        whose = ""
        sending = asyncio.create_task(outbox.send_all(context))
        try:
            async for message in requests:
                kind, body = protocol.kind_of(message)
                if kind == first and not whose:
                    whose = opened(body, outbox)
                    if (older := streams.get(whose)) is not None:
                        older.end()
                    streams[whose] = outbox
                elif whose:
                    heard(whose, kind, body)
            outbox.end()
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)  # it fails when the stream broke: no news
            if streams.get(whose) is outbox:
                del streams[whose]
                closed(whose)

    def _joined(self, report: m.Report, version: str, outbox: Outbox) -> Event:
        worker_id, known = report.worker_id, 0 if report.newest is None else report.newest.number

        def event(membership: Membership, now: float) -> Outcome:
            if version != protocol.VERSION:
                reason = f"it speaks version {version} and the job {protocol.VERSION}; start it from the same shoal"
                return membership, [m.Refuse(worker_id, reason)]
            membership, instructions = m.on_join(membership, worker_id, report.host, now, known, report.slot)
            worker = membership.worker(worker_id)
            if worker is not None and not worker.fenced:
                outbox.put(ToWorker(welcome={"slot": worker.member.slot}))
                newest = m.newest_for(membership, known)
                if newest is not None and newest.lists(worker_id):
                    outbox.put(ToWorker(generation=protocol.to_wire(newest)))
            if report.leases is not None:
                membership, more = lending.on_said(membership, worker_id, report.leases)
                instructions += more
            return membership, instructions

        return event

    def _disconnected(self, membership: Membership, worker_id: str) -> Outcome:
        """A broken stream is no death. But nobody else will say that a worker without a launcher has gone."""
        worker = membership.worker(worker_id)
        if worker is None or worker.launched or worker.state is not State.PARTED or worker_id in self._workers:
            return membership, []
        if not self._launchers and any(other.launched for other in membership.workers):
            return membership, []  # the launcher has not come back to this coordinator yet; it may be its worker
        return m.on_gone(membership, worker_id, "disconnected")

    def _heard(self, worker_id: str, kind: str, body: Any) -> None:
        if kind == "beat":
            self._beats[worker_id] = body
            if body.seq >= self._front.seq:
                self._front = body
            if body.HasField("leases"):
                self._heard(worker_id, "leases", body.leases)
            else:
                self._note_samples(body.samples)
            self._post(lambda membership, now: m.on_beat(membership, worker_id, now))
            awaited = tuple(body.waiting_for)
            self._post(lambda membership, now: m.on_waiting(membership, worker_id, awaited, now))
        elif kind == "ready":
            self._post(lambda membership, now: m.on_ready(membership, worker_id))
        elif kind == "leases":
            said = protocol.said_from_wire(body, worker_id)
            self._post(lambda membership, now: lending.on_said(membership, worker_id, said))
        elif kind == "leave":
            self._post(lambda membership, now: m.on_leave(membership, worker_id))
        elif kind == "parked":
            self._post(lambda membership, now: m.on_parked(membership, worker_id, body.generation))
        elif kind == "finished":
            report = json.loads(body.report_json or "{}")
            details = {"digest": body.digest, "step": body.step, "seq": body.seq, "report": report}
            self._post(lambda membership, now: m.on_finished(membership, worker_id, details))
        elif kind == "failed":
            self._post(self._failed(worker_id, body))
        elif kind == "note" and body.kind in NOTES:
            fields = {"worker_id": worker_id, "text": body.text, **json.loads(body.fields_json or "{}")}
            self._events.append(event_line(self._wall(), body.kind, fields))
            self._counts[body.kind] += 1
            self._tell_worker(worker_id, ToWorker(heeded={"number": body.number}))
        elif kind == "scale":
            self._post(lambda membership, now: self._wished(membership, worker_id, body))

    def _failed(self, worker_id: str, failure: Any) -> Event:
        said = (failure.kind, failure.message, failure.traceback)
        ends_job = self._on_error == "stop"
        return lambda membership, now: m.on_failed(membership, worker_id, *said, ends_job=ends_job)

    def _wished(self, membership: Membership, worker_id: str, wish: Any) -> Outcome:
        try:
            return m.on_wish(membership, worker_id, wish.number, wish.target, wish.relative)
        except SettingsContradict as mistake:
            _log.warning("%s: %s", worker_id, mistake)
            return membership, [m.Heeded(worker_id, wish.number)]

    async def _launch(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._converse(requests, context, self._launchers, "hello", self._greet, self._heard_launcher)

    def _greet(self, hello: Any, outbox: Outbox) -> str:
        host = str(hello.host)
        live, gone = tuple(worker.worker_id for worker in hello.workers), tuple(hello.gone)
        known = (*live, *gone)
        if self._rebuilding is not None:
            it, stop = hello.target, hello.stop
            target = m.SetTarget(it.n, it.finishing, it.number) if hello.HasField("target") else None
            stopping = m.Stop(stop.reason, stop.failed, stop.kind) if hello.HasField("stop") else None
            self._rebuilding.rosters[host] = m.Roster(host, live, gone, target, stopping)
        self._post(lambda membership, now: m.on_roster(membership, host, known))
        for worker in hello.workers:
            self._heard_launcher(host, "started", worker)
        return host

    def _heard_launcher(self, host: str, kind: str, body: Any) -> None:
        if kind not in ("started", "gone", "evidence"):
            return  # a launcher of a newer version says more than this one understands
        worker_id = body.worker_id
        if kind == "started":
            self._pids[worker_id] = body.pid
            self._post(lambda membership, now: m.on_join(membership, worker_id, host, now, launched=True))
        elif kind == "gone":
            if self._rebuilding is not None:
                self._rebuilding.on_gone(worker_id)
            if body.HasField("failed"):
                self._post(self._failed(worker_id, body.failed))
            self._post(lambda membership, now: m.on_gone(membership, worker_id, body.reason))
        elif kind == "evidence":
            self._post(lambda membership, now: m.on_evidence(membership, worker_id, body.stopped, body.cpu_time_s, now))

    async def _command(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kind, body = protocol.kind_of(request)

        def event(membership: Membership, now: float) -> Outcome:
            outcome: Outcome = (membership, [])
            try:
                if kind == "scale":
                    outcome = m.on_scale(membership, body.target)
                elif kind == "checkpoint":
                    if membership.newest is not None and membership.newest.members:
                        self._tell_worker(membership.newest.members[0].worker_id, ToWorker(checkpoint={}))
                elif kind == "stop":
                    outcome = m.on_stop(membership, m.Stop(body.reason))
            except SettingsContradict as mistake:
                done.set_exception(mistake)
            else:
                done.set_result(None)
            return outcome

        self._post(event)
        try:
            await done
        except SettingsContradict as mistake:
            return CommandReply(error=str(mistake))
        return CommandReply(status_json=json.dumps(self.status()))

    async def _admit(self, context: Any) -> None:
        if not protocol.admits(self._token, context.invocation_metadata()):
            import grpc

            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or not this job's")

    # Instructions go out.

    def _act(self, instruction: Instruction) -> None:
        if isinstance(instruction, m.Publish):
            self._publish(instruction.generation, instruction.cause)
        elif isinstance(instruction, m.Bye):
            self._tell_worker(instruction.worker_id, ToWorker(bye={}))
        elif isinstance(instruction, m.Refuse):
            self._tell_worker(instruction.worker_id, ToWorker(refused={"reason": instruction.reason}))
        elif isinstance(instruction, m.Heeded):
            self._tell_worker(instruction.worker_id, ToWorker(heeded={"number": instruction.number}))
        elif isinstance(instruction, m.Granted):
            self._tell_worker(instruction.worker_id, ToWorker(granted=protocol.lease_to_wire(instruction.lease)))
        elif isinstance(instruction, m.Settled):
            self._tell_worker(instruction.worker_id, ToWorker(settled={"numbers": instruction.numbers}))
        elif isinstance(instruction, m.PassOver):
            over = {"pass_index": instruction.pass_index, "complete": instruction.complete}
            self._tell_worker(instruction.worker_id, ToWorker(pass_over=over))
        elif isinstance(instruction, m.Fence):
            self._tell_launchers(ToLauncher(fence={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, m.Excuse):
            self._tell_launchers(ToLauncher(excuse={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, m.Probe):
            self._tell_launchers(ToLauncher(probe={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, m.SetTarget):
            target = {"n": instruction.target, "finishing": instruction.finishing, "number": instruction.number}
            self._tell_launchers(ToLauncher(target=target))
        elif isinstance(instruction, m.Stop):
            stop = {"reason": instruction.reason, "failed": instruction.failed, "kind": instruction.kind}
            self._tell_launchers(ToLauncher(stop=stop))
        else:
            _log.info("%s %s %s", instruction.kind, instruction.worker_id, instruction.text)
            if instruction.kind in ("left", "lost"):
                self._forget(instruction.worker_id)

    def _line(self, instruction: Instruction) -> str | None:
        """What the event log tells of it."""
        if isinstance(instruction, m.Log):
            fields = {"worker_id": instruction.worker_id, "text": instruction.text, **instruction.details}
            return event_line(self._wall(), instruction.kind, fields)
        if isinstance(instruction, m.Publish):
            generation = instruction.generation
            fields = {
                "number": generation.number,
                "members": [member.worker_id for member in generation.members],
                "leavers": [member.worker_id for member in generation.leavers],
                "fault": generation.fault,
                "paused": generation.paused,
                "cause": instruction.cause,
            }
            return event_line(self._wall(), "generation", fields)
        return None

    def _publish(self, generation: m.Generation, cause: str) -> None:
        workers = counted(len(generation.members), "worker") + (", paused" if generation.paused else "")
        _log.info("generation %d → %d: %s, %s", generation.number - 1, generation.number, cause, workers)
        message = ToWorker(generation=protocol.to_wire(generation))
        for member in (*generation.members, *generation.leavers):
            self._tell_worker(member.worker_id, message)

    def _tell_worker(self, worker_id: str, message: Any) -> None:
        if (outbox := self._workers.get(worker_id)) is not None:
            outbox.put(message)

    def _tell_launchers(self, message: Any) -> None:
        for outbox in self._launchers.values():
            outbox.put(message)

    def _event(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        self._events.write(self._wall(), kind, text=text)
        _log.info("%s %s", kind, text)

    def _forget(self, worker_id: str) -> None:
        for kept in (self._pids, self._beats):
            kept.pop(worker_id, None)

    # What is known.

    def _note_samples(self, samples: int) -> None:
        now = self._clock()
        if not samples:
            return  # of a job that goes on it is not the beginning, but a worker that does not know yet
        if not self._samples or samples > self._samples[-1][1]:
            self._samples.append((now, samples))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / max(last_at - first_at, 1e-9)

    def _phase(self) -> str:
        newest = self._membership.newest
        if self._membership.ended:
            return "ended"
        if self._membership.stopping is not None:
            return "stopping"
        if self._membership.finishing:
            return "finishing"
        if newest is None:
            return "starting"
        return "paused" if newest.paused else "running"

    def status(self) -> dict[str, Any]:
        """What `shoal status` shows; everything in it can be written as JSON."""
        membership = self._membership
        newest = membership.newest
        front = self._front
        # Without lockstep each worker has steps of its own: the job's are their sum.
        lent = membership.lent
        step, epoch = (lent.used()[1], lent.epoch()) if lent.passes else (front.step, front.epoch)
        workers = []
        for worker in membership.workers:
            beat = self._beats.get(worker.worker_id)
            workers.append(
                {
                    "worker_id": worker.worker_id,
                    "rank": newest.rank(worker.worker_id) if newest and worker.state is State.MEMBER else None,
                    "slot": worker.member.slot,
                    "host": worker.member.host,
                    "state": worker.state.value,
                    "pid": self._pids.get(worker.worker_id),
                    "step": None if beat is None else beat.step,
                    "seconds": {} if beat is None else dict(beat.seconds),
                    "suspect": worker.life.suspect,
                }
            )
        return {
            "dir": str(self.run_dir.path),
            "phase": self._phase(),
            "reason": "" if membership.stopping is None else membership.stopping.reason,
            "generation": membership.number,
            "workers": workers,
            "seq": front.seq,
            "step": step,
            "epoch": epoch,
            "samples": self._samples[-1][1] if self._samples else 0,
            "evaluating": front.evaluating if front.HasField("evaluating") else None,
            "evaluated": front.evaluated,
            "rate": self._rate(),
            "loss": finite(front.loss) if front.seq else None,
            "metrics": {name: value for name, value in front.metrics.items() if finite(value) is not None},
            "target": membership.target,
            "min": membership.min_size,
            "max": membership.max_size,
        }


class EmbeddedCoordinator:
    """A coordinator in a daemon thread of this process, for a job of one worker and for tests."""

    def __init__(self, run_dir: RunDir, membership: Membership, on_error: OnError = "stop") -> None:
        self._run_dir = run_dir
        self._membership = membership
        self._on_error: OnError = on_error
        self._started = threading.Event()
        self._address = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-coordinator", daemon=True)

    def start(self) -> str:
        """host:port, once it serves. Raises what kept it from serving."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._address

    def stop(self) -> None:
        """Ends the server; workers are not told, as if it had been killed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._coordinator.request_stop)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._error = error
            _log.exception("the coordinator ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = Coordinator(self._run_dir, self._membership, self._on_error)
        await self._coordinator.serve(self._serving)

    def _serving(self, address: str) -> None:
        self._address = address
        self._started.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shoal.control.coordinator", description=__doc__.split("\n")[0])
    parser.add_argument("--dir", required=True, help="the run directory")
    parser.add_argument("--min", type=int, default=1, help="fewer members than this pause the job")
    parser.add_argument("--max", type=int, default=m.MAX_SLOTS, help="no more members than this")
    parser.add_argument("--target", type=int, default=1, help="how many workers found the job")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds an awaited worker may be silent"
    )
    parser.add_argument("--on-error", choices=get_args(OnError), default="stop", help="when a worker's code raises")
    parser.add_argument(
        "--generation", type=int, default=0, help="the highest number used before, for a job that goes on"
    )
    parser.add_argument("--after", default="", help="how the coordinator before this one ended, if there was one")
    parser.add_argument("--parent", type=int, help="the pid that started this; exit if it is not the parent")
    options = parser.parse_args()
    die_with(options.parent if options.parent is not None else os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    async def serve() -> None:
        membership = m.found(options.min, options.max, options.target, Timeouts(options.budget))
        membership = replace(membership, number=options.generation)
        coordinator = Coordinator(RunDir.open(options.dir), membership, options.on_error, options.after)
        if plugin := os.environ.get(COORDINATOR_PLUGIN):
            module, function = plugin.split(":")
            getattr(importlib.import_module(module), function)(coordinator)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, coordinator.request_stop)
        await coordinator.serve()

    try:
        asyncio.run(serve())
    except ShoalError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
