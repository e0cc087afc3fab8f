"""The job's control server: it feeds what it hears to `membership`, writes the journal, then tells everybody.

Killed at any time, another one on the same directory goes on from the journal, or from what workers and launcher say if
there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from shoal.control import bounds, lending, pieces, prometheus, protocol
from shoal.control import membership as m
from shoal.control.bounds import BadMessage
from shoal.control.drift import Checks, Drift, Told
from shoal.control.generation import Generation
from shoal.control.hosts import Host, is_name
from shoal.control.instructions import (
    Bye,
    Drop,
    Excuse,
    Fence,
    Granted,
    Heeded,
    Instruction,
    Log,
    PassOver,
    Probe,
    Publish,
    Refuse,
    SetTarget,
    Settled,
    Stop,
)
from shoal.control.invitation import invite
from shoal.control.journal import Journal, JournalDamaged, put_aside
from shoal.control.membership import Membership, Outcome, State
from shoal.control.protocol import CommandReply, CommandRequest, FromLauncher, FromWorker, ToLauncher, ToWorker
from shoal.control.rebuild import Rebuilding, Report, Roster
from shoal.control.rundir import RunDir, write_atomically
from shoal.control.status import Figures
from shoal.errors import RunDirUnusable, SettingsContradict, ShoalError
from shoal.metrics import EventLog, event_line, fault_point
from shoal.wording import counted

OnError = Literal["stop", "relaunch"]
Event = Callable[[Membership, float], Outcome]
NOTES = ("checkpointed", "checkpoint_failed")  # kinds of events that workers tell of
_UNLOGGED = 1 << 20  # generations that nobody remembers any more: none in practice

_DEATH_S = 0.1  # for a launcher to say that a worker, whose connection has ended, is dead

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
        bind: str = "127.0.0.1",
    ) -> None:
        """`bind`: the address to serve at, by which every host of the job reaches it."""
        self._bind = bind
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
        self._figures = Figures()
        self._checks = Checks()
        self._stopping = asyncio.Event()
        self._broken: Exception | None = None

    @property
    def generation(self) -> int:
        return self._membership.number

    def status(self) -> dict[str, Any]:
        return {**self._figures.status(self.run_dir, self._membership), "alike_at": self._checks.alike_at or None}

    async def start(self) -> str:
        """Bind, at the port of the coordinator before if that is free. Returns host:port. Raises
        RunDirUnusable while there is another one."""
        import grpc

        self._claim = self.run_dir.claim()
        if self._after:
            fault_point("returns")
        self._take_up()
        self._server = grpc.aio.server(options=protocol.server_options(self._membership.timeouts))
        handlers = {
            # What comes in stays bytes: what is no message is ours to tell, and not gRPC's in a traceback.
            "Work": grpc.stream_stream_rpc_method_handler(self._work, None, protocol.to_bytes),
            "Launch": grpc.stream_stream_rpc_method_handler(self._launch, None, protocol.to_bytes),
            "Command": grpc.unary_unary_rpc_method_handler(self._command, None, protocol.to_bytes),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, handlers),))
        before = self.run_dir.address() or ""
        try:
            port = self._listen(before if before.rpartition(":")[0] == self._bind else f"{self._bind}:0")
        except RuntimeError:  # somebody else has it by now
            port = self._listen(f"{self._bind}:0")
        await self._server.start()
        address = f"{self._bind}:{port}"
        invite(self.run_dir, address)
        self.run_dir.write_address(address)
        self._claim.write("serves")
        self._ticker = asyncio.create_task(self._tick())
        await self._serve_metrics()
        return address

    def _listen(self, address: str) -> int:
        """The port. Raises RuntimeError where it is not free, CertificateUnusable."""
        tls = self.run_dir.tls(self._bind)
        if tls is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, tls.server_credentials())
        return port

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
            self._rebuilding = Rebuilding(self.run_dir, until, self._membership.hosts)
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
            self._check_term()
            self._journal.record(self._membership, lines, self._events.size_bytes)
            fault_point("journaled")
        for line in lines:
            self._events.append(line)
        for instruction in instructions:
            self._act(instruction)
        if self._membership.lent.passes:
            self._figures.note_samples(self._membership.lent.used()[0], self._clock())

    def _check_term(self) -> None:
        """RunDirUnusable when this coordinator has been followed by another, which may be elsewhere: what it decides is
        of no effect any more."""
        if self.run_dir.term() > self._claim.term:
            raise RunDirUnusable(f"another coordinator has taken this one's place in {self.run_dir.path}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._membership.timeouts.probe_s)
            try:
                self._check_term()
            except RunDirUnusable as followed:
                self._broken = followed
                return self.request_stop()
            except OSError:
                pass  # it is looked at again, and before each decision
            if self._rebuilding is None:
                self._post(m.on_tick)
            else:
                self._go_on_if_rebuilt()

    # Streams.

    async def _converse(
        self,
        requests: AsyncIterator[bytes],
        context: Any,
        message_class: Any,
        streams: dict[str, Outbox],
        first: str,
        opened: Callable[[Any, Outbox], str],
        heard: Callable[[str, str, Any], None],
        closed: Callable[[str], None] = lambda whose: None,
    ) -> None:
        """Serve one stream to its end. Its `first` message says whose it is, which `opened` returns; the stream takes
        the place of an older one of the same in `streams`, and `closed` is called unless another has taken its own. A
        message that cannot be meant ends it."""
        await self._admit(context)
        await context.send_initial_metadata(protocol.term_to_wire(self._claim.term))
        outbox = Outbox()
        whose = ""
        sending = asyncio.create_task(outbox.send_all(context))
        try:
            async for message in requests:
                kind, body = bounds.parse(message_class, message)
                if kind == first and not whose:
                    whose = opened(body, outbox)
                    if (older := streams.get(whose)) is not None:
                        older.end()
                    streams[whose] = outbox
                elif whose:
                    heard(whose, kind, body)
            outbox.end()
            await sending
        except BadMessage as bad:
            outbox.end()
            # A status cannot follow while something is being sent; whoever reads nothing meanwhile hears none.
            await asyncio.wait([sending], timeout=self._membership.timeouts.beat_s)
            await self._drop(context, whose, bad)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)  # it fails when the stream broke: no news
            if streams.get(whose) is outbox:
                del streams[whose]
                closed(whose)

    async def _drop(self, context: Any, whose: str, bad: BadMessage) -> None:
        import grpc

        _log.warning("a stream of %s is ended: %s", whose or context.peer(), bad)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(bad))

    async def _admit(self, context: Any) -> None:
        if not protocol.admits(self._token, context.invocation_metadata()):
            import grpc

            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or not this job's")

    # A worker speaks.

    async def _work(self, requests: AsyncIterator[bytes], context: Any) -> None:
        def closed(worker_id: str) -> None:
            self._post(lambda membership, now: self._disconnected(membership, worker_id))

        streams = self._workers
        await self._converse(requests, context, FromWorker, streams, "join", self._enter, self._heard, closed)

    def _enter(self, join: Any, outbox: Outbox) -> str:
        newest = protocol.from_wire(join.newest) if join.HasField("newest") else None
        slot = join.slot if join.HasField("slot") else None
        said = protocol.said_from_wire(join.leases, join.worker_id) if join.HasField("leases") else None
        report = Report(join.worker_id, join.host, slot, newest, join.last_fault, join.dismissed, said, join.address)
        self._doubt(report)
        self._figures.pids[join.worker_id] = join.pid
        if self._rebuilding is not None:
            self._rebuilding.reports[report.worker_id] = report
        self._post(self._joined(report, join.version, outbox))
        return report.worker_id

    def _doubt(self, report: Report) -> None:
        """Fails with BadMessage where the worker knows of much more than can have been: nothing of it is in the log."""
        known = self._membership.number if self._rebuilding is None else self._rebuilding.number
        told = 0 if report.newest is None else report.newest.number
        if told > known + _UNLOGGED:
            raise BadMessage(f"{report.worker_id} knows generation {told}, and the job {known}")
        said = report.leases
        if self._rebuilding is not None and said is not None and said.heard >= self._rebuilding.next_lease:
            raise BadMessage(f"{report.worker_id} has lease {said.heard}, which nobody has given")

    def _joined(self, report: Report, version: str, outbox: Outbox) -> Event:
        worker_id, known = report.worker_id, 0 if report.newest is None else report.newest.number

        def event(membership: Membership, now: float) -> Outcome:
            if version != protocol.VERSION:
                reason = f"it speaks version {version} and the job {protocol.VERSION}; start it from the same shoal"
                return membership, [Refuse(worker_id, reason)]
            membership, instructions = m.on_join(
                membership, worker_id, report.host, now, known, report.slot, address=report.address
            )
            worker = membership.worker(worker_id)
            if worker is not None and not worker.fenced:
                outbox.put(ToWorker(welcome={"slot": worker.member.slot}))
                newest = m.newest_for(membership, known)
                if newest is not None and newest.lists(worker_id):
                    outbox.put(self._told(newest))
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
            self._figures.on_beat(worker_id, body, self._clock())
            if body.HasField("leases"):
                self._heard(worker_id, "leases", body.leases)
            self._post(lambda membership, now: m.on_beat(membership, worker_id, now))
            awaited = tuple(body.waiting_for)
            self._post(lambda membership, now: m.on_waiting(membership, worker_id, awaited, now))
        elif kind == "ready":
            self._post(lambda membership, now: m.on_ready(membership, worker_id, body.follows))
        elif kind == "caught_up":
            self._post(lambda membership, now: m.on_caught_up(membership, worker_id))
        elif kind == "leases":
            said = protocol.said_from_wire(body, worker_id)
            self._post(lambda membership, now: lending.on_said(membership, worker_id, said))
        elif kind == "model":
            self._tell_worker(worker_id, ToWorker(model={"tensors": self._model(body.tensors)}))
        elif kind == "leave":
            self._post(lambda membership, now: m.on_leave(membership, worker_id))
        elif kind == "parked":
            self._post(lambda membership, now: m.on_parked(membership, worker_id, body.generation))
        elif kind == "entered":
            self._post(lambda membership, now: m.on_entered(membership, worker_id, body.generation))
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
            self._post(lambda membership, now: m.on_finished(membership, worker_id, details))
        elif kind == "failed":
            self._post(self._failed(worker_id, body))
        elif kind == "note" and body.kind in NOTES:
            fields = {"worker_id": worker_id, "text": body.text, **bounds.details(body.fields_json)}
            self._events.append(event_line(self._wall(), body.kind, fields))
            self._counts[body.kind] += 1
            self._tell_worker(worker_id, ToWorker(heeded={"number": body.number}))
        elif kind == "scale":
            self._post(lambda membership, now: self._wished(membership, worker_id, body))

    def _model(self, tensors: bytes) -> bytes:
        """The job's model: that of the worker which is first to have one."""
        file = self.run_dir.model_file
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
        return m.on_drift(membership, verdict, only_tell=self.run_dir.settings().get("on_drift") == "tell")

    def _broken_link(self, worker_id: str, broken: Any, membership: Membership, now: float) -> Outcome:
        on = m.on_unreached if broken.unreached else m.on_broken
        return on(membership, worker_id, broken.generation, broken.slot)

    def _failed(self, worker_id: str, failure: Any) -> Event:
        said = (failure.kind, failure.message, failure.traceback)
        ends_job = self._on_error == "stop"
        return lambda membership, now: m.on_failed(membership, worker_id, *said, ends_job=ends_job)

    def _wished(self, membership: Membership, worker_id: str, wish: Any) -> Outcome:
        try:
            return m.on_wish(membership, worker_id, wish.number, wish.target, wish.relative)
        except SettingsContradict as mistake:
            _log.warning("%s: %s", worker_id, mistake)
            return membership, [Heeded(worker_id, wish.number)]

    # A launcher speaks.

    async def _launch(self, requests: AsyncIterator[bytes], context: Any) -> None:
        streams = self._launchers
        await self._converse(requests, context, FromLauncher, streams, "hello", self._greet, self._heard_launcher)

    def _greet(self, hello: Any, outbox: Outbox) -> str:
        name, now = str(hello.host), self._clock()
        if (why := self._refuses(hello, now)) is not None:
            outbox.put(ToLauncher(refused={"reason": why}))
            return ""  # it is heard no more, and takes nobody's place
        grown = hello.slots if hello.grow else 0
        host = Host(name, hello.slots, hello.life, hello.home, grown=grown, heard_at=now)
        live, gone = tuple(worker.worker_id for worker in hello.workers), tuple(hello.gone)
        known = (*live, *gone)
        if self._rebuilding is not None:
            target = protocol.target_from_wire(hello.target, name) if hello.HasField("target") else None
            stopping = protocol.stop_from_wire(hello.stop) if hello.HasField("stop") else None
            self._rebuilding.rosters[name] = Roster(host, live, gone, target, stopping)
        self._post(lambda membership, now: m.on_roster(membership, host, known))
        for worker in hello.workers:
            self._heard_launcher(name, "started", worker)
        return name

    def _refuses(self, hello: Any, now: float) -> str | None:
        if not hello.home and not is_name(hello.host):
            return f"{hello.host!r} is no name of a host; take letters, digits, dots and dashes"
        ours = protocol.versions()
        for what, version in hello.versions.items():
            if version != ours.get(what, version):
                return f"{hello.host} has {what} {version}, the job {ours[what]}; install the same on every host"
        known = self._membership.host(hello.host)
        if known is None or known.life in ("", hello.life):
            return None
        silent = now - known.heard_at > self._membership.timeouts.budget_s / 2
        if (silent or hello.host not in self._launchers) and not (known.home and not hello.home):
            return None  # it is being lost, which the job's own host never is
        return f"the job has a host {hello.host} already; name this one with --host-name"

    def _heard_launcher(self, host: str, kind: str, body: Any) -> None:
        self._post(lambda membership, now: m.on_host_heard(membership, host, now))
        if kind == "slots":
            self._post(lambda membership, now: m.on_slots(membership, host, body.n))
        elif kind == "idle":
            self._post(lambda membership, now: m.on_idle(membership, host))
        elif kind == "failed":
            self._post(lambda membership, now: self._failed_on(membership, host, body))
        elif kind == "piece":
            self._take_piece(host, body)
        if kind not in ("started", "gone", "evidence"):
            return  # a launcher of a newer version says more than this one understands
        worker_id = body.worker_id
        if kind == "started":
            self._figures.pids[worker_id] = body.pid
            self._post(lambda membership, now: m.on_join(membership, worker_id, host, now, launched=True))
        elif kind == "gone":
            if self._rebuilding is not None:
                self._rebuilding.on_gone(worker_id)
            if body.HasField("failed"):
                self._post(self._failed(worker_id, body.failed))
            self._post(lambda membership, now: m.on_gone(membership, worker_id, body.reason))
        elif kind == "evidence":
            self._post(lambda membership, now: m.on_evidence(membership, worker_id, body.stopped, body.cpu_time_s, now))

    def _take_piece(self, host: str, piece: Any) -> None:
        if not pieces.is_known(host, piece.path):
            return _log.warning("%s sends %r, which is no file of its workers", host, piece.path)
        try:
            size_bytes = pieces.take(self.run_dir, piece.path, piece.offset, piece.data)
        except OSError as problem:  # the host sends it again
            return _log.warning("%s cannot be written: %s", piece.path, problem.strerror)
        if (outbox := self._launchers.get(host)) is not None:
            outbox.put(ToLauncher(kept={"path": piece.path, "size": size_bytes}))

    def _failed_on(self, membership: Membership, host: str, failure: Any) -> Outcome:
        text = f"{failure.kind}: {failure.message}"
        stop = Stop(f"{host}: {failure.message}", failed=True, kind=failure.kind)
        membership, told = m.on_stop(membership, stop)
        if not told:
            return membership, []
        return membership, [Log("failed", "", f"{host}: {text}", {"traceback": failure.traceback}), *told]

    # Somebody commands.

    async def _command(self, request: bytes, context: Any) -> Any:
        await self._admit(context)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            kind, body = bounds.parse(CommandRequest, request)
        except BadMessage as bad:
            return await self._drop(context, "", bad)
        if kind == "describe":
            described = {"dir": str(self.run_dir.path), "settings": self.run_dir.settings()}
            return CommandReply(status_json=json.dumps(described))

        def event(membership: Membership, now: float) -> Outcome:
            outcome: Outcome = (membership, [])
            try:
                if kind == "scale":
                    outcome = m.on_scale(membership, body.target)
                elif kind == "checkpoint":
                    if membership.newest is not None and membership.newest.members:
                        self._tell_worker(membership.newest.members[0].worker_id, ToWorker(checkpoint={}))
                elif kind == "stop":
                    outcome = m.on_stop(membership, Stop(body.reason))
            except SettingsContradict as mistake:
                if not done.done():
                    done.set_exception(mistake)
            else:
                if not done.done():  # whoever asked waits no longer
                    done.set_result(None)
            return outcome

        self._post(event)
        try:
            await done
        except SettingsContradict as mistake:
            return CommandReply(error=str(mistake))
        return CommandReply(status_json=json.dumps(self.status()))

    # Instructions go out.

    def _act(self, instruction: Instruction) -> None:
        if isinstance(instruction, Publish):
            self._publish(instruction.generation, instruction.cause)
        elif isinstance(instruction, Bye):
            self._tell_worker(instruction.worker_id, ToWorker(bye={}))
        elif isinstance(instruction, Refuse):
            self._tell_worker(instruction.worker_id, ToWorker(refused={"reason": instruction.reason}))
        elif isinstance(instruction, Heeded):
            self._tell_worker(instruction.worker_id, ToWorker(heeded={"number": instruction.number}))
        elif isinstance(instruction, Granted):
            self._tell_worker(instruction.worker_id, ToWorker(granted=protocol.lease_to_wire(instruction.lease)))
        elif isinstance(instruction, Settled):
            self._tell_worker(instruction.worker_id, ToWorker(settled={"numbers": instruction.numbers}))
        elif isinstance(instruction, PassOver):
            over = {"pass_index": instruction.pass_index, "complete": instruction.complete}
            self._tell_worker(instruction.worker_id, ToWorker(pass_over=over))
        elif isinstance(instruction, Fence):
            self._tell_launchers(ToLauncher(fence={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, Excuse):
            self._tell_launchers(ToLauncher(excuse={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, Probe):
            self._tell_launchers(ToLauncher(probe={"worker_id": instruction.worker_id}))
        elif isinstance(instruction, SetTarget):
            for host, its in self._launchers.items():
                its.put(ToLauncher(target=protocol.target_to_wire(instruction, host)))
        elif isinstance(instruction, Drop):
            if (outbox := self._launchers.get(instruction.host)) is not None:
                outbox.put(ToLauncher(dropped={"rest_s": instruction.rest_s}))
        elif isinstance(instruction, Stop):
            self._tell_launchers(ToLauncher(stop=vars(instruction)))
        else:
            self._counts[instruction.kind] += 1
            _log.info("%s %s %s", instruction.kind, instruction.worker_id, instruction.text)
            if instruction.kind in ("left", "lost"):
                self._figures.forget(instruction.worker_id)

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

    def _publish(self, generation: Generation, cause: str) -> None:
        self._counts["generation"] += 1
        workers = counted(len(generation.members), "worker") + (", paused" if generation.paused else "")
        _log.info("generation %d → %d: %s, %s", generation.number - 1, generation.number, cause, workers)
        message = self._told(generation)
        for member in generation.all:
            self._tell_worker(member.worker_id, message)

    def _told(self, generation: Generation) -> Any:
        """As workers are told of it."""
        return ToWorker(
            generation=protocol.to_wire(replace(generation, key=protocol.key_of(self._token, generation.number)))
        )

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


if __name__ == "__main__":
    from shoal.control.serve import main  # it imports this module, under its own name

    main()
