"""What the command line and other onlookers ask of the coordinator.

A command may be told twice, when a coordinator dies before its answer: each says how things are to be, not what to
change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from shoal.control import protocol, tls
from shoal.control.protocol import CommandReply, CommandRequest
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.errors import CertificateRefused, JobNotFound, SettingsContradict, TokenRefused

_ASK_AGAIN_S = 0.05


def status(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """What the coordinator knows of the job. Raises JobNotFound, TokenRefused, CertificateRefused."""
    return _command(run_dir, CommandRequest(status={}), timeout_s)


def scale(run_dir: RunDir, target: int, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Raises JobNotFound, TokenRefused, SettingsContradict when the target is out of range."""
    return _command(run_dir, CommandRequest(scale={"target": target}), timeout_s)


def stop(run_dir: RunDir, reason: str, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Drain every worker and end the job. Raises JobNotFound, TokenRefused, CertificateRefused."""
    return _command(run_dir, CommandRequest(stop={"reason": reason}), timeout_s)


def checkpoint(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Ask for a checkpoint of the next commit. Raises JobNotFound, TokenRefused, CertificateRefused."""
    return _command(run_dir, CommandRequest(checkpoint={}), timeout_s)


def unlisted(run_dir: RunDir, hosts: Iterable[str], timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Say which hosts are gone from the list of those that may be used: all of them, each time. Raises JobNotFound,
    TokenRefused."""
    return _command(run_dir, CommandRequest(unlisted={"hosts": sorted(hosts)}), timeout_s)


def describe(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """The job's run directory, at home, and its settings. Raises JobNotFound, TokenRefused."""
    return _command(run_dir, CommandRequest(describe={}), timeout_s)


def _command(run_dir: RunDir, request: Any, timeout_s: float) -> dict[str, Any]:
    with Commands(run_dir) as commands:
        return commands.say(request, timeout_s)


class _Away(Exception):
    """There is no coordinator at the address, or it gave no answer."""


class _Unreachable(_Away):
    """No connection came about, or it broke."""


class Commands:
    """Commands over one connection; for whoever looks again and again, since a connection costs more than an answer."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._token, self._tls = run_dir.token(), run_dir.tls()
        self._address = ""
        self._channel: Any = None

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self._disconnect()

    def status(self, timeout_s: float) -> dict[str, Any]:
        """As the function of this name."""
        return self.say(CommandRequest(status={}), timeout_s)

    def say(self, request: Any, timeout_s: float) -> dict[str, Any]:
        """Ask until there is an answer: while the job lives, a coordinator that is away comes back. Raises JobNotFound,
        TokenRefused, CertificateRefused, and SettingsContradict for what the coordinator will not do."""
        run_dir, deadline = self._run_dir, time.monotonic() + timeout_s
        refused: CertificateRefused | None = None
        while True:
            address = run_dir.address()
            if address is not None:
                try:
                    return self._ask(address, request, max(0.0, deadline - time.monotonic()))
                except TokenRefused:
                    if not run_dir.runs():
                        raise  # else another job has the port for now: the next coordinator takes another
                except _Unreachable:
                    refused = tls.refusal(run_dir, self._tls, address)
                    if refused is not None and refused.final:
                        raise refused from None
                except _Away:
                    pass
                self._disconnect()  # a connection that failed would wait before it tries again
            if not run_dir.runs():
                raise JobNotFound(f"{run_dir.path} does not run; shoal status says how it ended")
            if time.monotonic() >= deadline:
                raise refused or JobNotFound(
                    f"the job in {run_dir.path} gives no answer within {timeout_s:g} s; try again, or end it"
                )
            time.sleep(_ASK_AGAIN_S)

    def _ask(self, address: str, request: Any, timeout_s: float) -> dict[str, Any]:
        import grpc

        if address != self._address:
            self._disconnect()
            self._address, self._channel = address, tls.channel(self._tls, address)
        call = self._channel.unary_unary(
            f"/{protocol.SERVICE}/Command",
            request_serializer=protocol.to_bytes,
            response_deserializer=CommandReply.FromString,
        )
        try:
            reply = call(request, metadata=protocol.credentials(self._token), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise TokenRefused(f"{address} refused the token; use the one in the job's run directory") from None
            raise (_Unreachable if error.code() is grpc.StatusCode.UNAVAILABLE else _Away) from None
        if reply.error:
            raise SettingsContradict(reply.error)
        answer: dict[str, Any] = json.loads(reply.status_json)
        return answer

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._address, self._channel = "", None
