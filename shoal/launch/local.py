"""Workers on this machine: forked by the fork server, watched by pidfd, with the host's shared memory held here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal import errors
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import Committed, finite
from shoal.launch.exits import Evidence, Exit, Failure
from shoal.launch.forkserver import PACKET_BYTES, ForkServer, Request
from shoal.launch.settings import JobSettings
from shoal.sync.memory import create

# A death is told at once; how it came about is worth this short a wait for the fork server's word.
_STATUS_WAIT_S = 0.05
_KILL_WAIT_S = 10.0
_BUSY_WAIT_S = 0.1
_LAST_WORD_S = 5.0  # of one that has just finished what it was busy with


def clear_shared_memory(loaders: Path) -> None:
    """Remove what data sets that share tensors themselves have left in /dev/shm, in loader processes that were killed:
    torch names a piece after its maker, and takes the name away at once, unless it is killed in between. All of them
    are dead by now."""
    pids = loaders.read_text().split() if loaders.exists() else []
    for pid in pids:
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)


class HeldMemory:
    """The shared memory of a job on this host, by name. It lives as long as the launcher holds it, and no longer."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._regions: dict[str, tuple[int, asyncio.Future[int]]] = {}

    async def open(self, name: str, size_bytes: int) -> int:
        """The descriptor of that name; the first who asks makes it. Fails with OutOfSharedMemory, or with
        WorkersDiffer if it was made with another size."""
        if name not in self._regions:
            free_bytes = None
            if self._limit_bytes is not None:
                free_bytes = self._limit_bytes - sum(size for size, _ in self._regions.values())
            # In a thread: to zero gigabytes takes seconds, and a death in that time must be told at once.
            making = asyncio.ensure_future(asyncio.to_thread(create, name, size_bytes, free_bytes))
            self._regions[name] = size_bytes, making
        existing_bytes, made = self._regions[name]
        if existing_bytes != size_bytes:
            raise errors.WorkersDiffer(
                f"{name} of this host has {existing_bytes:,} bytes, another worker wants {size_bytes:,}: "
                f"every worker must build the same model and optimizer"
            )
        try:
            return await asyncio.shield(made)
        except errors.OutOfSharedMemory:
            self._regions.pop(name, None)
            raise

    async def committed(self) -> Committed | None:
        """The newest commit. It is certain when every worker is dead: nobody else knows what the last one did."""
        try:
            fd = await self._regions["words"][1]
        except (KeyError, errors.OutOfSharedMemory):
            return None
        # Not at the top of the file: it takes numpy, and with it a tenth of a second of every command.
        from shoal.sync.record import Records
        from shoal.sync.words import Words, seq_of

        words = Words(_Copy(fd))
        seq = seq_of(words.commit)
        if not seq:
            return None
        record = Records(words.record).read(seq)
        return Committed(seq, record.step, record.epoch, record.samples, finite(record.loss))

    async def close(self) -> None:
        for _, made in self._regions.values():
            with contextlib.suppress(errors.OutOfSharedMemory):
                os.close(await made)
        self._regions.clear()


@dataclass(frozen=True)
class _Copy:
    """Gives memory that is there already, as the launcher gives it to a worker."""

    fd: int

    def open(self, name: str, size_bytes: int) -> int:
        return os.dup(self.fd)


@dataclass
class _Worker:
    worker_id: str
    pid: int
    pidfd: int
    channel: socket.socket
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    exit: Exit | None = None

    @property
    def gone(self) -> bool:
        if self.dead.is_set():
            return True
        poll = select.poll()  # not select(), which takes no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Server(Protocol):
    """Where the processes come from; see `ForkServer`."""

    async def ready(self) -> int: ...
    async def fork(self, request: Request, channel: socket.socket) -> tuple[int, int]: ...
    def close(self) -> None: ...


class LocalLauncher:
    """Starts and stops the workers of one machine, all of the same script. Every worker ends in exactly one call of
    `on_exit`, after which its process is certainly dead; what it said before it failed comes first, by `on_failure`.
    `on_lost` is called when the launcher itself cannot go on."""

    def __init__(
        self,
        script: Path,
        args: Sequence[str],
        logs: Path,
        *,
        memory_limit_bytes: int | None,
        on_exit: Callable[[Exit], None],
        on_failure: Callable[[Failure], None],
        on_lost: Callable[[errors.ShoalError], None],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env`: what workers have beside what this process has."""
        self.on_exit = on_exit
        self.on_failure = on_failure
        self.on_lost = on_lost
        self._script, self._args, self._logs = script, tuple(args), logs
        self._env = dict(env or {})
        self._memory = HeldMemory(memory_limit_bytes)
        self._workers: dict[str, _Worker] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._early: dict[str, Exit] = {}  # reaped before the reply to its start was handled
        self._server: Server | None = None

    async def open(self) -> None:
        """Make ready to start workers. Fails with a ShoalError that says why it cannot."""
        self._server = self._make_server()
        await self._server.ready()

    def _make_server(self) -> Server:
        return ForkServer(self._logs / "forkserver.log", self._on_reaped, self.on_lost, self._env)

    async def start(self, environment: WorkerEnvironment) -> int:
        """Start the worker of that name, which nobody has started before; its pid, for people to read. Fails with a
        ShoalError if the machine refuses."""
        assert self._server is not None, "open() comes first"
        worker_id = environment.worker_id
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = Request(
            worker_id=worker_id,
            script=str(self._script),
            args=self._args,
            env={**self._env, **environment.to_env()},
            log=str(self._logs / f"{worker_id}.log"),
        )
        try:
            with theirs:
                pid, pidfd = await self._server.fork(request, theirs)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._workers[worker_id] = worker = _Worker(worker_id, pid, pidfd, ours)
        worker.exit = self._early.pop(worker_id, None)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._read, worker)
        loop.add_reader(pidfd, self._on_dead, worker)
        return pid

    def signal(self, worker_id: str, signum: int) -> None:
        """Send a signal; a worker that is gone already is left alone."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signum)

    async def fence(self, worker_id: str) -> None:
        """Return once the worker can write nothing any more: killed, and seen to be dead."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self.signal(worker_id, signal.SIGKILL)
            await worker.dead.wait()

    def evidence(self, worker_id: str) -> Evidence | None:
        """What is known of its life now; None when it is gone."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        try:
            stat = Path(f"/proc/{worker.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if worker.gone:  # only now is it certain that what was read was this process and not a later one
            return None
        fields = stat.rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Evidence(worker_id, cpu_s, stopped=fields[0] in "Tt")

    async def stop(self, grace_s: float, busy: Callable[[], bool] = lambda: False) -> None:
        """Ask every worker to leave, and end after `grace_s` those that have not, but not while `busy()`."""
        workers = list(self._workers.values())
        for worker in workers:
            self.signal(worker.worker_id, signal.SIGTERM)
        await self._all_dead(workers, grace_s)
        if busy():
            while busy() and not all(worker.dead.is_set() for worker in workers):
                await self._all_dead(workers, _BUSY_WAIT_S)
            await self._all_dead(workers, _LAST_WORD_S)
        for worker in workers:
            self.signal(worker.worker_id, signal.SIGKILL)
        await self._all_dead(workers, _KILL_WAIT_S)

    async def close(self) -> Committed | None:
        """End whatever is left: nothing this launcher started lives on. What the job had committed by then, if
        anything."""
        workers = list(self._workers.values())
        for worker in workers:
            self.signal(worker.worker_id, signal.SIGKILL)
        await self._all_dead(workers, _KILL_WAIT_S)
        if self._server is not None:
            self._server.close()
        for answer in self._answers:
            answer.cancel()
        committed = await self._memory.committed()
        await self._memory.close()
        return committed

    async def _all_dead(self, workers: Sequence[_Worker], timeout_s: float) -> None:
        waiting = [asyncio.ensure_future(worker.dead.wait()) for worker in workers]
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=timeout_s)
        finally:
            for one in waiting:
                one.cancel()

    # ---- how it ends

    def _on_reaped(self, exit: Exit) -> None:
        worker = self._workers.get(exit.worker_id)
        if worker is None:
            self._early[exit.worker_id] = exit
            return
        worker.exit = exit
        self._on_dead(worker)

    def _on_dead(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.pidfd)
        if worker.exit is not None:
            self._bury(worker)
        else:
            loop.call_later(_STATUS_WAIT_S, self._bury, worker)

    def _bury(self, worker: _Worker) -> None:
        if worker.dead.is_set():
            return
        self._read(worker)  # its last words
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.dead.set()
        del self._workers[worker.worker_id]
        worker.channel.close()
        os.close(worker.pidfd)
        self.on_exit(worker.exit or Exit(worker.worker_id))

    # ---- what it asks for

    def _read(self, worker: _Worker) -> None:
        while True:
            try:
                data = worker.channel.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(worker.channel)
                return
            packet = json.loads(data)
            if "memory" in packet:
                answer = asyncio.ensure_future(self._give_memory(worker, packet["memory"], packet["bytes"]))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            elif "error" in packet:
                said = (packet["error"], packet["message"], packet.get("traceback"), packet.get("log_bytes"))
                self.on_failure(Failure(worker.worker_id, *said))

    async def _give_memory(self, worker: _Worker, name: str, size_bytes: int) -> None:
        reply: dict[str, Any] = {"bytes": size_bytes}
        fds: list[int] = []
        try:
            fds = [await self._memory.open(name, size_bytes)]
        except errors.UserMistake as mistake:
            reply = {"error": type(mistake).__name__, "message": str(mistake)}
        with contextlib.suppress(ConnectionError):  # it died meanwhile
            if not worker.dead.is_set():
                socket.send_fds(worker.channel, [json.dumps(reply).encode()], fds)


def launcher_of(
    settings: JobSettings, logs: Path, launcher: Callable[..., LocalLauncher]
) -> Callable[..., LocalLauncher]:
    """For the workers of this job; to be called with on_exit, on_failure and on_lost."""
    return functools.partial(
        launcher,
        Path(settings.script),
        list(settings.args),
        logs,
        memory_limit_bytes=settings.memory_bytes,
        env=settings.env,
    )
