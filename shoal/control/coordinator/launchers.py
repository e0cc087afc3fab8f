"""A launcher speaks: what there is of its host, and how its workers are."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from shoal.control import pieces, protocol
from shoal.control.coordinator.decisions import Decisions
from shoal.control.coordinator.streams import Streams
from shoal.control.coordinator.telling import Outbox, Teller
from shoal.control.coordinator.workers import failed
from shoal.control.hosts import Host, is_name
from shoal.control.membership.failures import OnError
from shoal.control.membership.hosts import on_host_failed, on_host_heard, on_idle, on_roster, on_slots
from shoal.control.membership.liveness import on_evidence
from shoal.control.membership.workers import on_gone, on_join
from shoal.control.protocol import FromLauncher, ToLauncher
from shoal.control.rebuild import Roster
from shoal.control.rundir import RunDir
from shoal.control.status import Figures

_log = logging.getLogger("shoal.coordinator")


class Launchers:
    """Serves the streams of launchers."""

    def __init__(
        self,
        run_dir: RunDir,
        streams: Streams,
        decisions: Decisions,
        teller: Teller,
        figures: Figures,
        on_error: OnError,
    ) -> None:
        self._run_dir = run_dir
        self._streams = streams
        self._decisions, self._post = decisions, decisions.post
        self._teller = teller
        self._figures = figures
        self._on_error = on_error

    async def launch(self, requests: AsyncIterator[bytes], context: Any) -> None:
        streams = self._teller.launchers
        await self._streams.converse(requests, context, FromLauncher, streams, "hello", self._greet, self._heard)

    def _greet(self, hello: Any, outbox: Outbox) -> str:
        name, now = str(hello.host), self._decisions.clock()
        if (why := self._refuses(hello, now)) is not None:
            outbox.put(ToLauncher(refused={"reason": why}))
            return ""  # it is heard no more, and takes nobody's place
        grown = hello.slots if hello.grow else 0
        host = Host(name, hello.slots, hello.life, hello.home, grown=grown, guest=hello.grow, heard_at=now)
        live, gone = tuple(worker.worker_id for worker in hello.workers), tuple(hello.gone)
        known = (*live, *gone)
        if self._decisions.rebuilding is not None:
            target = protocol.target_from_wire(hello.target, name) if hello.HasField("target") else None
            stopping = protocol.stop_from_wire(hello.stop) if hello.HasField("stop") else None
            self._decisions.rebuilding.rosters[name] = Roster(host, live, gone, target, stopping)
        self._post(lambda membership, now: on_roster(membership, host, known))
        for worker in hello.workers:
            self._heard(name, "started", worker)
        return name

    def _refuses(self, hello: Any, now: float) -> str | None:
        if not hello.home and not is_name(hello.host):
            return f"{hello.host!r} is no name of a host; take letters, digits, dots and dashes"
        ours = protocol.versions()
        for what, version in hello.versions.items():
            if version != ours.get(what, version):
                return f"{hello.host} has {what} {version}, the job {ours[what]}; install the same on every host"
        known = self._decisions.membership.host(hello.host)
        if known is None or known.life in ("", hello.life):
            return None
        silent = now - known.heard_at > self._decisions.membership.timeouts.budget_s / 2
        if (silent or hello.host not in self._teller.launchers) and not (known.home and not hello.home):
            return None  # it is being lost, which the job's own host never is
        return f"the job has a host {hello.host} already; name this one with --host-name"

    def _heard(self, host: str, kind: str, body: Any) -> None:
        self._post(lambda membership, now: on_host_heard(membership, host, now))
        if kind == "slots":
            self._post(lambda membership, now: on_slots(membership, host, body.n))
        elif kind == "idle":
            self._post(lambda membership, now: on_idle(membership, host))
        elif kind == "failed":
            said = (body.kind, body.message, body.traceback)
            self._post(lambda membership, now: on_host_failed(membership, host, *said))
        elif kind == "piece":
            self._take_piece(host, body)
        if kind not in ("started", "gone", "evidence"):
            return  # a launcher of a newer version says more than this one understands
        worker_id = body.worker_id
        if kind == "started":
            self._figures.pids[worker_id] = body.pid
            self._post(lambda membership, now: on_join(membership, worker_id, host, now, launched=True))
        elif kind == "gone":
            if self._decisions.rebuilding is not None:
                self._decisions.rebuilding.on_gone(worker_id)
            if body.HasField("failed"):
                self._post(failed(worker_id, body.failed, self._on_error))
            self._post(lambda membership, now: on_gone(membership, worker_id, body.reason))
        elif kind == "evidence":
            self._post(lambda membership, now: on_evidence(membership, worker_id, body.stopped, body.cpu_time_s, now))

    def _take_piece(self, host: str, piece: Any) -> None:
        if not pieces.is_known(host, piece.path):
            return _log.warning("%s sends %r, which is no file of its workers", host, piece.path)
        try:
            size_bytes = pieces.take(self._run_dir, piece.path, piece.offset, piece.data)
        except OSError as problem:  # the host sends it again
            return _log.warning("%s cannot be written: %s", piece.path, problem.strerror)
        self._teller.tell_launcher(host, ToLauncher(kept={"path": piece.path, "size": size_bytes}))
