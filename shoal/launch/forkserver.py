"""A process with torch imported that forks workers: importing torch takes seconds, forking takes milliseconds.

`python -m shoal.launch.forkserver FD PARENT_PID` is the server; `ForkServer` is the launcher's end of its socket.
Packets are JSON on a SOCK_SEQPACKET socket, descriptors beside them:

    to the server     {"start": worker_id, "script", "args", "env", "log"} + [the worker's channel]
    from the server   {"ready": threads of the server} or {"failed": text}, once
                      {"started": worker_id, "pid"} + [pidfd] or {"refused": worker_id, "message"}
                      {"exited": worker_id, "exit_code", "signal"}

The server runs one thread and no parallel region, gRPC call or autograd before it forks: a lock that another thread
held, or a pool whose threads did not come along, would hang the worker at a place nobody looks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.control.environment import WorkerEnvironment
from shoal.launch.exits import Exit
from shoal.process import die_with
from shoal.train.failure import last_words, one_line

PACKET_BYTES = 256 * 1024  # more than a socket of this kind takes in one packet by default
_FULL_S = 0.01


@dataclass(frozen=True)
class Request:
    """One worker to fork."""

    worker_id: str
    script: str
    args: Sequence[str]
    env: Mapping[str, str]
    log: str


# ---- the launcher's end ----------------------------------------------------------------------------------------------


class ForkServer:
    """Starts the server and speaks with it. `on_exited` is called for each worker it reaped, `on_lost` once if the
    server itself ends; its workers are dead or dying by then."""

    def __init__(
        self,
        log: Path,
        on_exited: Callable[[Exit], None],
        on_lost: Callable[[errors.ForkServerLost], None],
        env: Mapping[str, str],
    ) -> None:
        """`env`: what the server, and so each worker, has beside what this process has; libraries look there when they
        are imported."""
        self._on_exited = on_exited
        self._on_lost = on_lost
        self._log = log
        self._replies: dict[str, asyncio.Future[tuple[int, int]]] = {}
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        command = [sys.executable, "-m", "shoal.launch.forkserver", str(theirs.fileno()), str(os.getpid())]
        with theirs, open(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only, which drains
                # numpy's OpenBLAS would start its threads on import. Where somebody names a number, each worker has as
                # many: it ends them before a fork, and starts them again when they are needed.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **env},
            )
        asyncio.get_running_loop().add_reader(self._sock, self._read)

    async def ready(self) -> int:
        """The server's number of threads, once it can fork. Fails with ScriptFailed if torch or shoal do not import."""
        return await self._ready

    async def fork(self, request: Request, channel: socket.socket) -> tuple[int, int]:
        """The worker's (pid, pidfd)."""
        reply: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._replies[request.worker_id] = reply
        fields = asdict(request)
        packet = {"start": fields.pop("worker_id"), **fields}
        try:
            await self._send(json.dumps(packet).encode(), channel)
            return await reply
        except OSError as problem:
            raise errors.ForkServerLost(f"the fork server takes no request ({problem}); see {self._log}") from problem
        finally:
            self._replies.pop(request.worker_id, None)

    async def _send(self, packet: bytes, channel: socket.socket) -> None:
        """The server takes requests one by one: a scale-up by hundreds fills the socket for a while."""
        while True:
            try:
                socket.send_fds(self._sock, [packet], [channel.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)  # a server that ended is another error

    def close(self) -> None:
        """End the server and with it every worker it forked."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, 4)
            except BlockingIOError:
                return
            except ConnectionError:
                data, fds = b"", []
            if not data:
                return self._lost()
            self._take(json.loads(data), fds)

    def _take(self, packet: dict[str, Any], fds: list[int]) -> None:
        if "exited" in packet:
            self._on_exited(Exit(packet["exited"], packet["exit_code"], packet["signal"]))
        elif "started" in packet:
            reply = self._replies.get(packet["started"])
            if reply is None or reply.done():  # nobody waits any more: the job is ending, and close() ends the worker
                os.close(fds[0])
            else:
                reply.set_result((packet["pid"], fds[0]))
        elif "refused" in packet:
            reply = self._replies.get(packet["refused"])
            if reply is not None and not reply.done():
                reply.set_exception(errors.ShoalError(packet["message"]))
        elif "ready" in packet:
            self._ready.set_result(packet["ready"])
        elif "failed" in packet:
            self._ready.set_exception(errors.ScriptFailed(packet["failed"]))

    def _lost(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock)
        lost = errors.ForkServerLost(
            f"the fork server ended with {Exit.of('', self._process.wait())}; its log may say why: {self._log}; "
            f"go on with shoal resume {self._log.parent.parent}"
        )
        waiting: list[asyncio.Future[Any]] = [*self._replies.values(), self._ready]
        for reply in waiting:
            if not reply.done():
                reply.set_exception(lost)
        self._on_lost(lost)


# ---- the server ------------------------------------------------------------------------------------------------------


def _preload() -> None:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    importlib.import_module("shoal.control.protocol")  # sets gRPC's options, so it comes before gRPC
    importlib.import_module("grpc")
    importlib.import_module("shoal.train.run")
    # The first optimizer of a process imports 800 modules (torch._dynamo), more than a second of every worker's start.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    gc.collect()
    gc.freeze()  # a collection in a worker must not touch, and so copy, the pages that all workers share


def _serve(sock: socket.socket) -> tuple[Request, int]:
    """Fork for each request until the launcher is gone. Returns in each child, with its request and channel."""
    server_pid = os.getpid()
    workers: dict[int, tuple[str, int]] = {}  # pidfd → worker id, pid
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in workers:
                selector.unregister(key.fd)
                _reap(sock, key.fd, *workers.pop(key.fd))
                continue
            data, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES, 4)
            if not data:
                sys.exit(0)
            packet = json.loads(data)
            request = Request(worker_id=packet.pop("start"), **packet)
            try:
                pid = os.fork()
            except OSError as problem:
                os.close(fds[0])
                message = f"{request.worker_id} cannot be forked: {problem.strerror}; use fewer workers"
                sock.send(json.dumps({"refused": request.worker_id, "message": message}).encode())
                continue
            if pid == 0:
                die_with(server_pid)
                selector.close()
                sock.close()
                for pidfd in workers:
                    os.close(pidfd)
                return request, fds[0]
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            workers[pidfd] = request.worker_id, pid
            selector.register(pidfd, selectors.EVENT_READ)
            socket.send_fds(sock, [json.dumps({"started": request.worker_id, "pid": pid}).encode()], [pidfd])


def _reap(sock: socket.socket, pidfd: int, worker_id: str, pid: int) -> None:
    # What the worker started (data loaders) is in its process group. Until it is reaped its pid, and so the group's
    # number, can belong to nobody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    assert result is not None
    exited = result.si_code == os.CLD_EXITED
    packet = {
        "exited": worker_id,
        "exit_code": result.si_status if exited else None,
        "signal": None if exited else result.si_status,
    }
    sock.send(json.dumps(packet).encode())


# ---- a worker, from the fork to the user's script --------------------------------------------------------------------


def _become(request: Request, channel: int) -> None:
    os.setpgid(0, 0)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(channel, False)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)
    os.environ.update(replace(WorkerEnvironment.from_env(request.env), channel_fd=channel).to_env())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or every worker would draw the server's numbers
    sys.argv = [request.script, *request.args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(request.script))


def _run_script(script: str, channel: socket.socket) -> int:
    """The exit status of the script, after its failure, if any, was written to the log and told to the launcher."""
    try:
        runpy.run_path(script, run_name="__main__")
        return 0
    except Exception as error:  # the outermost frame of user code
        packet, status = last_words(error, script)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Told before it is written: the launcher shows it once, and echoes no worker's log beyond this place.
    told = {**packet, "log_bytes": os.fstat(2).st_size}
    with contextlib.suppress(ConnectionError):
        channel.send(json.dumps(told).encode())
    sys.stderr.write(packet.get("traceback", f"{packet['error']}: {packet['message']}\n"))
    return status


def main() -> None:
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent_pid)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    try:
        _preload()
    except ImportError as problem:
        sock.send(
            json.dumps(
                {"failed": f"torch or shoal does not import here: {one_line(problem)}; {sys.executable} must have both"}
            ).encode()
        )
        raise
    sock.send(json.dumps({"ready": len(os.listdir("/proc/self/task"))}).encode())
    request, channel = _serve(sock)
    _become(request, channel)
    # A copy: the descriptor itself is the script's, which may close it.
    sys.exit(_run_script(request.script, socket.socket(fileno=os.dup(channel))))


if __name__ == "__main__":
    main()
