"""The job's control server, from the directory it claims to the address it serves at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from shoal.control import prometheus, protocol
from shoal.control.coordinator.commands import Commands
from shoal.control.coordinator.decisions import Decisions
from shoal.control.coordinator.launchers import Launchers
from shoal.control.coordinator.streams import Streams
from shoal.control.coordinator.telling import Teller
from shoal.control.coordinator.workers import Workers
from shoal.control.drift import Checks
from shoal.control.invitation import invite
from shoal.control.membership.failures import OnError
from shoal.control.membership.values import Membership
from shoal.control.rundir import RunDir
from shoal.control.status import Figures
from shoal.errors import ShoalError
from shoal.metrics import fault_point

_log = logging.getLogger("shoal.coordinator")


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
        self.run_dir = run_dir
        self._on_error = on_error
        self._after = after
        self._bind = bind
        self._token = run_dir.token()
        self._named = membership.hosts  # when the job was started
        self._figures = Figures()
        self._checks = Checks()
        self._teller = Teller(self._token, self._figures)
        self._decisions = Decisions(run_dir, membership, self._teller, self._figures, clock, wall, self._break)
        self._stopping = asyncio.Event()
        self._broken: Exception | None = None

    @property
    def generation(self) -> int:
        return self._decisions.membership.number

    def status(self) -> dict[str, Any]:
        figures = self._figures.status(self.run_dir, self._decisions.membership)
        return {**figures, "alike_at": self._checks.alike_at or None}

    async def start(self) -> str:
        """Bind, at the port of the coordinator before if that is free. Returns host:port. Raises
        RunDirUnusable while there is another one."""
        import grpc

        self._claim = self.run_dir.claim()
        if self._after:
            fault_point("returns")
        self._decisions.take_up(self._claim, self._after)
        self._server = grpc.aio.server(options=protocol.server_options(self._decisions.membership.timeouts))
        self._server.add_generic_rpc_handlers((self._handlers(),))
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
        self._ticker = asyncio.create_task(self._decisions.tick())
        await self._serve_metrics()
        return address

    def _handlers(self) -> Any:
        import grpc

        decisions, teller, figures = self._decisions, self._teller, self._figures
        streams = Streams(self._token, self._claim.term, decisions.membership.timeouts.beat_s)
        workers = Workers(self.run_dir, streams, decisions, teller, figures, self._checks, self._on_error)
        launchers = Launchers(self.run_dir, streams, decisions, teller, figures, self._on_error)
        commands = Commands(self.run_dir, streams, decisions, teller, self.status, self._named, self._bind)
        handlers = {
            # What comes in stays bytes: what is no message is ours to tell, and not gRPC's in a traceback.
            "Work": grpc.stream_stream_rpc_method_handler(workers.work, None, protocol.to_bytes),
            "Launch": grpc.stream_stream_rpc_method_handler(launchers.launch, None, protocol.to_bytes),
            "Command": grpc.unary_unary_rpc_method_handler(commands.command, None, protocol.to_bytes),
        }
        return grpc.method_handlers_generic_handler(protocol.SERVICE, handlers)

    def _listen(self, address: str) -> int:
        """The port. Raises RuntimeError where it is not free, CertificateUnusable."""
        tls = self.run_dir.tls(self._bind)
        if tls is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, tls.server_credentials())
        return port

    async def _serve_metrics(self) -> None:
        """For Prometheus, where the job was started with a port for it."""
        self._metrics: asyncio.Server | None = None
        if (at := self.run_dir.settings().get("metrics_port")) is not None:
            host, port = prometheus.parse_address(at)
            try:
                self._metrics = await prometheus.serve(
                    host, port, lambda: prometheus.exposition(self.status(), self._figures.counts)
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

    def _break(self, error: Exception) -> None:
        self._broken = error
        self.request_stop()

    async def close(self) -> None:
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        if self._metrics is not None:
            self._metrics.close()
        await self._server.stop(grace=None)
        self._decisions.close()
        self._claim.release()
