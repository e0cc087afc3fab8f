"""Workers that somebody else has started: processes come to a hall, and wait there until the job makes them workers.

Where they come to is an abstract address; only processes of the same user are let in, and they look who lets them in.
Packets are JSON on a SOCK_SEQPACKET socket, descriptors beside them:

    to the guest     {"env": what a worker is told} + [its channel], once; the end of the stream is the end of the job
    from the guest   {"asked": signal} when it was asked to end, {"left": exit code} when it is no worker any more
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal.launch.exits import Exit
from shoal.launch.forkserver import PACKET_BYTES, Request
from shoal.launch.local import LocalLauncher

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_EMPTY_S = 5.0  # whoever starts the guests does not bring one alone, later
_NOBODY = "no process of torchrun is here any more"
_ALONE_S = 5.0  # from the end of whoever started the guests to their own


@dataclass(eq=False)
class _Guest:
    connection: socket.socket
    pid: int
    pidfd: int
    worker_id: str = ""  # once it is one


class Hall:
    """Stands in for a fork server. `host`: the process that started the guests. `on_asked` is called the first time
    that one of them was asked to end; `on_lost` when nobody is here any more, or the host of them has ended."""

    def __init__(
        self,
        address: str,
        host: int,
        on_exited: Callable[[Exit], None],
        on_asked: Callable[[], None],
        on_lost: Callable[[errors.ShoalError], None],
    ) -> None:
        self._on_exited, self._on_asked, self._on_lost = on_exited, on_asked, on_lost
        self._guests: set[_Guest] = set()
        self._waiting: asyncio.Queue[_Guest] = asyncio.Queue()
        self._loop = loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        try:
            self._listener.bind(address)
        except OSError as problem:
            self._listener.close()
            raise errors.ShoalError(f"another job has the processes of this torchrun: {problem.strerror}") from None
        self._listener.listen(256)
        loop.add_reader(self._listener, self._accept)
        self._empty = loop.call_later(_EMPTY_S, self._lose, _NOBODY)
        self._alone: asyncio.TimerHandle | None = None
        self._host = -1
        try:
            self._host = os.pidfd_open(host)
            loop.add_reader(self._host, self._host_ended)
        except ProcessLookupError:
            self._host_ended()

    async def ready(self) -> int:
        return 0

    async def fork(self, request: Request, channel: socket.socket) -> tuple[int, int]:
        """Make the guest that has waited longest a worker: its (pid, pidfd). Waits until there is one."""
        packet = json.dumps({"env": dict(request.env)}).encode()
        while True:
            guest = await self._waiting.get()
            if guest in self._guests:
                with contextlib.suppress(OSError):  # it has just died
                    socket.send_fds(guest.connection, [packet], [channel.fileno()])
                    guest.worker_id = request.worker_id
                    return guest.pid, os.dup(guest.pidfd)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._host >= 0:
            self._loop.remove_reader(self._host)
            os.close(self._host)
        for guest in list(self._guests):
            self._forget(guest)
        self._empty.cancel()
        if self._alone is not None:
            self._alone.cancel()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        try:
            if uid != os.getuid():
                raise PermissionError
            pidfd = os.pidfd_open(pid)
        except OSError:  # not ours, or it has died
            return connection.close()
        connection.setblocking(False)
        guest = _Guest(connection, pid, pidfd)
        self._guests.add(guest)
        self._empty.cancel()
        self._loop.add_reader(connection, self._hear, guest)
        self._waiting.put_nowait(guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        said: dict[str, Any] = json.loads(data) if data else {}
        if "asked" in said:
            return self._on_asked()
        if guest.worker_id and "left" in said:
            self._on_exited(Exit(guest.worker_id, exit_code=said["left"]))
        self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._loop.remove_reader(guest.connection)
        guest.connection.close()
        os.close(guest.pidfd)
        self._guests.discard(guest)
        if not self._guests:
            self._empty = self._loop.call_later(_EMPTY_S, self._lose, _NOBODY)

    def _host_ended(self) -> None:
        if self._host >= 0:
            self._loop.remove_reader(self._host)
        self._alone = self._loop.call_later(_ALONE_S, self._lose, "torchrun has ended")

    def _lose(self, why: str) -> None:
        self._on_lost(errors.HostLost(f"{why}; go on with shoal resume"))


class HallLauncher(LocalLauncher):
    """Workers of one machine that come to a hall, at `address`, from the process `host`. The first who is asked to end
    ends the job as SIGTERM does, unless it is ending already."""

    def __init__(self, *args: Any, address: str, host: int, **others: Any) -> None:
        super().__init__(*args, **others)
        self._address, self._host = address, host
        self._heeds = True

    def _make_server(self) -> Hall:
        return Hall(self._address, self._host, self._on_reaped, self._asked, self.on_lost)

    async def stop(self, grace_s: float, busy: Callable[[], bool] = lambda: False) -> None:
        self._heeds = False  # from now on it is this launcher that asks them
        await super().stop(grace_s, busy)

    def _asked(self) -> None:
        if self._heeds:
            self._heeds = False
            signal.raise_signal(signal.SIGTERM)
