"""The worker's, the launcher's and the command line's end of the control plane.

Training never waits for the coordinator: a stream that breaks is opened again in the background, and what was said
on the old one is said again. Where the coordinator is says the run directory, anew at each attempt: another one may
have another port. gRPC is imported when the first stream is opened, not with this module.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.control import protocol
from shoal.control.borrowed import Borrowed
from shoal.control.membership import Generation, SetTarget, Stop
from shoal.control.protocol import CommandReply, CommandRequest, FromLauncher, FromWorker, ToLauncher, ToWorker
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.leases import Said
from shoal.errors import CoordinatorLost, JobNotFound, SettingsContradict, TokenRefused

_ASK_AGAIN_S = 0.05


@dataclass(frozen=True)
class Progress:
    """Where a worker is, read at each beat. `samples` counts what the whole job has committed."""

    seq: int = 0
    step: int = 0
    epoch: int = 0
    samples: int = 0
    loss: float = math.nan
    waiting_for: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # of this worker's life so far, by category
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the newest step
    evaluating: int | None = None  # the index of the evaluation it is in
    evaluated: int = 0  # samples of it so far


class Link:
    """One stream, kept open from a thread of its own until `close`.

    Every time it is opened, `opening()` and then whatever was said with `keep` go out first. `beat`, if given, makes a
    message whenever the beat interval has passed. `hear` is called on the link's thread, and no call is made with a
    lock held.
    """

    def __init__(
        self,
        run_dir: RunDir,
        method: str,
        response: Any,
        timeouts: Timeouts,
        opening: Callable[[], Any],
        hear: Callable[[Any], None],
        beat: Callable[[], Any] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._token = run_dir.token()
        self._method = method
        self._response = response
        self._timeouts = timeouts
        self._opening = opening
        self._hear = hear
        self._beat = beat
        self._lock = threading.RLock()  # the handler of a signal may speak while the thread it interrupts does
        self._kept: dict[str, Any] = {}
        self._outbox: queue.SimpleQueue[Any] | None = None
        self._call: Any = None
        self._closing = threading.Event()
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-{method.lower()}", daemon=True)
        self.token_refused = threading.Event()
        self.address = run_dir.address() or "127.0.0.1:0"  # of the newest attempt
        self.answered = False  # the coordinator has said something on the present stream

    def start(self) -> None:
        self._thread.start()

    def keep(self, key: str, message: Any) -> None:
        """Say it now, and again on every later stream; a later message under the same key replaces it."""
        with self._lock:
            self._kept[key] = message
            if self._outbox is not None:
                self._outbox.put(message)

    def drop(self, key: str) -> None:
        """Do not say it again."""
        with self._lock:
            self._kept.pop(key, None)

    def say(self, message: Any) -> None:
        """Say it once, if the stream is open; one that breaks just then loses it. What can be called is made only when
        its turn comes: it is not older than a beat before it."""
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(message)

    def close(self, patience_s: float = 0.0) -> None:
        """Deliver what was said, as long as that takes no more than a beat, and end. While there is no stream, wait
        that patiently for one."""
        self._open.wait(patience_s)
        self._closing.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(None)
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(self._timeouts.beat_s)
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._thread.join(self._timeouts.budget_s)

    def _run(self) -> None:
        pause_s = self._timeouts.backoff_first_s
        while not self._closing.is_set():
            if self._converse():
                pause_s = self._timeouts.backoff_first_s
            # Jitter: the workers of a job lose the coordinator at the same moment.
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timeouts.backoff_max_s)

    def _converse(self) -> bool:
        """Open a stream and listen until it ends. Whether anything was heard."""
        import grpc

        # A reader of gRPC's wakes up ten times a second to see whether it was interrupted, which takes more than all
        # beats; what it waits for wakes it at once, however long this is.
        grpc._common.MAXIMUM_WAIT_TIMEOUT = self._timeouts.budget_s
        heard = False
        self.address = self._run_dir.address() or self.address
        with grpc.insecure_channel(self.address, options=protocol.CHANNEL_OPTIONS) as channel:
            outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            with self._lock:
                for message in self._kept.values():
                    outbox.put(message)
                self._outbox = outbox
                if self._closing.is_set():
                    outbox.put(None)
                method = channel.stream_stream(
                    f"/{protocol.SERVICE}/{self._method}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=self._response.FromString,
                )
                self._call = method(self._outgoing(outbox), metadata=protocol.credentials(self._token))
            try:
                for message in self._call:
                    heard = self.answered = True
                    self._open.set()
                    self._hear(message)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self.token_refused.set()
            finally:
                with self._lock:
                    self._outbox = self._call = None
                    self.answered = False
                    self._open.clear()
                outbox.put(None)
        return heard

    def _outgoing(self, outbox: queue.SimpleQueue[Any]) -> Iterator[Any]:
        """gRPC asks for the next message when the last one is out, so no beats pile up while a coordinator hangs."""
        # Made only now that whatever is said goes to this stream's outbox: nothing falls between the two.
        yield self._opening()
        due = time.monotonic()  # a coordinator that has just come knows nothing of how far the job is
        while True:
            try:
                message = outbox.get(timeout=max(0.0, due - time.monotonic()) if self._beat else None)
            except queue.Empty:
                assert self._beat is not None
                message = self._beat()
                due = time.monotonic() + self._timeouts.beat_s
            if message is None:
                return
            yield message() if callable(message) else message


class Client:
    """A worker's link to the coordinator.

    `on_generation` is called on the client's thread for every generation that lists this worker, in order.
    """

    def __init__(
        self,
        run_dir: RunDir,
        worker_id: str,
        host: str,
        timeouts: Timeouts,
        progress: Callable[[], Progress],
        on_generation: Callable[[Generation], None],
    ) -> None:
        self._run_dir = run_dir
        self._worker_id = worker_id
        self._host = host
        self._timeouts = timeouts
        self._progress = progress
        self._on_generation = on_generation
        self._news = threading.Condition()
        self._slot: int | None = None
        self._refused = ""
        self._last_fault = 0
        self._numbers = itertools.count(1)  # of wishes and notes, which come from several threads
        self.newest: Generation | None = None
        self.dismissed = False  # the coordinator said Bye
        self.on_checkpoint: Callable[[], None] = lambda: None  # called when somebody asks for one
        self.borrowed = Borrowed()
        self._link = Link(run_dir, "Work", ToWorker, timeouts, self._join, self._hear, self._beat)

    def connect(self) -> int:
        """Blocks until welcomed; this worker's slot. Raises TokenRefused, SettingsContradict, or CoordinatorLost after
        the join timeout."""
        self._link.start()
        deadline = time.monotonic() + self._timeouts.join_s
        with self._news:
            while self._slot is None:
                if self._link.token_refused.is_set() and not self._run_dir.runs():  # see _command
                    raise TokenRefused(
                        f"{self._link.address} refused the token; use the one in the job's run directory"
                    )
                if self._refused:
                    raise SettingsContradict(f"{self._worker_id} cannot join: {self._refused}")
                if time.monotonic() > deadline:
                    raise CoordinatorLost(
                        f"no welcome from {self._link.address} within {self._timeouts.join_s:g} s; "
                        "is the job still running (shoal status)?"
                    )
                self._news.wait(self._timeouts.backoff_first_s)
            return self._slot

    def ready(self) -> None:
        self._link.keep("ready", FromWorker(ready={}))

    def leave(self) -> None:
        self._link.keep("leave", FromWorker(leave={}))

    def parked(self, generation: int) -> None:
        """This worker is a leaver of `generation` and has acknowledged it."""
        self._link.keep("parked", FromWorker(parked={"generation": generation}))

    def finished(self, digest: str, step: int, seq: int, report: dict[str, Any]) -> None:
        body = {"digest": digest, "step": step, "seq": seq, "report_json": json.dumps(report)}
        self._link.keep("finished", FromWorker(finished=body))

    def failed(self, kind: str, message: str, traceback: str) -> None:
        """The user's code raised. Call `close` afterwards: it delivers this."""
        cut = protocol.TRACEBACK_CHARS
        body = {"kind": kind, "message": message[:cut], "traceback": traceback[-cut:]}
        self._link.keep("failed", FromWorker(failed=body))

    def scale(self, target: int, relative: bool = False) -> None:
        """Ask for another number of workers, until it is heard."""
        number = next(self._numbers)
        body = {"target": target, "relative": relative, "number": number}
        self._link.keep(f"wish {number}", FromWorker(scale=body))

    def note(self, kind: str, text: str, fields: dict[str, Any]) -> None:
        """Something for the event log, told until it is heard; if a coordinator dies just then, it is there twice."""
        number = next(self._numbers)
        body = {"kind": kind, "text": text, "fields_json": json.dumps(fields), "number": number}
        self._link.keep(f"wish {number}", FromWorker(note=body))

    def tell_leases(self) -> None:
        """Say what this worker has on lease. If the stream breaks, the next one opens with it."""
        self._link.say(lambda: FromWorker(leases=protocol.said_to_wire(self.borrowed.said() or Said())))

    def wait_for_lease(self, number: int, timeout_s: float) -> None:
        """Until there is news of leases, a generation above `number`, or the timeout."""
        with self._news:
            self._news.wait_for(
                lambda: self.borrowed.has_news or self.dismissed or self._newest_above(number) is not None, timeout_s
            )

    def wait_newer(self, number: int, timeout_s: float) -> Generation | None:
        """The newest generation once it is above `number`; None after the timeout, or when dismissed meanwhile.

        Its `fault` says whether any generation above `number` came from a fault.
        """
        with self._news:
            self._news.wait_for(lambda: self.dismissed or self._newest_above(number) is not None, timeout_s)
            return self._newest_above(number)

    def close(self) -> None:
        self._link.close()

    def close_in_child(self) -> None:
        """In a forked loader worker: close the sockets to the coordinator, so that its end sees ours end with us."""
        close_inherited(self._link.address)

    def _newest_above(self, number: int) -> Generation | None:
        if self.newest is None or self.newest.number <= number:
            return None
        return replace(self.newest, fault=self._last_fault > number)

    def _join(self) -> Any:
        """All that this worker knows: without a journal, the coordinator knows no more than its workers do."""
        with self._news:
            newest = None if self.newest is None else protocol.to_wire(self.newest)
            return FromWorker(
                join={
                    "worker_id": self._worker_id,
                    "host": self._host,
                    "pid": os.getpid(),
                    "version": protocol.VERSION,
                    "newest": newest,
                    "last_fault": self._last_fault,
                    "slot": self._slot,
                    "dismissed": self.dismissed,
                    "leases": protocol.said_to_wire(self.borrowed.said()),
                }
            )

    def _beat(self) -> Any:
        progress = self._progress()
        return FromWorker(
            beat={
                "seq": progress.seq,
                "step": progress.step,
                "epoch": progress.epoch,
                "samples": progress.samples,
                "loss": progress.loss,
                "waiting_for": progress.waiting_for,
                "seconds": progress.seconds,
                "metrics": progress.metrics,
                "leases": protocol.said_to_wire(self.borrowed.said()),
                "evaluating": progress.evaluating,
                "evaluated": progress.evaluated,
            }
        )

    def _hear(self, message: Any) -> None:
        kind, body = protocol.kind_of(message)
        if kind == "generation":
            generation = protocol.from_wire(body)
            if self.newest is not None and generation.number <= self.newest.number:
                return
            with self._news:
                self.newest = generation
                if generation.fault:
                    self._last_fault = generation.number
                self._news.notify_all()
            self._on_generation(generation)
        elif kind == "checkpoint":
            self.on_checkpoint()
        elif kind == "heeded":
            self._link.drop(f"wish {body.number}")
        elif kind == "settled":
            self.borrowed.on_settled(body.numbers)
        else:
            with self._news:
                if kind == "granted":
                    unwanted = not self.borrowed.on_granted(protocol.lease_from_wire(body, self._worker_id))
                elif kind == "pass_over":
                    self.borrowed.on_pass_over(body.pass_index, body.complete)
                elif kind == "welcome":
                    self._slot = body.slot
                elif kind == "bye":
                    self.dismissed = True
                elif kind == "refused":
                    self._refused = body.reason
                self._news.notify_all()
            if kind == "granted" and unwanted:
                self.tell_leases()


class LauncherClient:
    """A launcher's link to the coordinator. The callbacks are called on the link's thread.

    `live` gives worker_id and pid of every process that has not been reported gone; it is read at each reconnect, on a
    thread of gRPC's, and whoever is missing there counts as dead.
    """

    def __init__(
        self,
        run_dir: RunDir,
        host: str,
        timeouts: Timeouts,
        live: Callable[[], Iterable[tuple[str, int]]],
        on_target: Callable[[SetTarget], None],
        on_fence: Callable[[str], None],  # worker_id: kill it, then report it gone
        on_probe: Callable[[str], None],  # worker_id: report evidence
        on_excuse: Callable[[str], None],  # worker_id: it needs no replacement however it ends
        on_stop: Callable[[Stop], None],
    ) -> None:
        self._host = host
        self._live = live
        self._on_target = on_target
        self._on_fence = on_fence
        self._on_probe = on_probe
        self._on_excuse = on_excuse
        self._on_stop = on_stop
        self._gone: set[str] = set()
        self._target: Any = None  # as last heard
        self._stop: Any = None
        self._link = Link(run_dir, "Launch", ToLauncher, timeouts, self._hello, self._hear)

    def start(self) -> None:
        self._link.start()

    def started(self, worker_id: str, pid: int) -> None:
        """Call it when `live` already lists the worker: while there is no stream, the next one opens with that."""
        self._gone.discard(worker_id)
        self._link.drop(f"gone {worker_id}")
        self._link.say(FromLauncher(started={"worker_id": worker_id, "pid": pid}))

    def gone(self, worker_id: str, reason: str, failed: tuple[str, str] | None = None) -> None:
        """The process is dead: its pidfd said so. `failed`: the class and text of an error that may cost the job the
        worker only; whether it does, the coordinator decides."""
        self._gone.add(worker_id)
        failure = None if failed is None else {"kind": failed[0], "message": failed[1][: protocol.TRACEBACK_CHARS]}
        body = {"worker_id": worker_id, "reason": reason, "failed": failure}
        self._link.keep(f"gone {worker_id}", FromLauncher(gone=body))

    def evidence(self, worker_id: str, stopped: bool, cpu_time_s: float) -> None:
        body = {"worker_id": worker_id, "stopped": stopped, "cpu_time_s": cpu_time_s}
        self._link.say(FromLauncher(evidence=body))

    @property
    def answered(self) -> bool:
        """Whether there is a coordinator that has heard who lives, and has said what it wants."""
        return self._link.answered

    def close(self, patience_s: float = 0.0) -> None:
        """Deliver the last deaths. While the coordinator is away, wait that long for its return."""
        self._link.close(patience_s)

    def _hello(self) -> Any:
        gone = sorted(self._gone)
        workers = [{"worker_id": worker_id, "pid": pid} for worker_id, pid in self._live() if worker_id not in gone]
        body = {"host": self._host, "workers": workers, "gone": gone, "target": self._target, "stop": self._stop}
        return FromLauncher(hello=body)

    def _hear(self, message: Any) -> None:
        kind, body = protocol.kind_of(message)
        if kind == "target":
            self._target = body
            self._on_target(SetTarget(body.n, body.finishing, body.number))
        elif kind == "fence":
            self._on_fence(body.worker_id)
        elif kind == "probe":
            self._on_probe(body.worker_id)
        elif kind == "excuse":
            self._on_excuse(body.worker_id)
        elif kind == "stop":
            self._stop = body
            self._on_stop(Stop(body.reason, body.failed, body.kind))


# Commands may be told twice, when a coordinator dies before its answer: each says how things are to be, not what to
# change.


def status(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """What the coordinator knows of the job. Raises JobNotFound, TokenRefused."""
    return _command(run_dir, CommandRequest(status={}), timeout_s)


def scale(run_dir: RunDir, target: int, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Raises JobNotFound, TokenRefused, SettingsContradict when the target is out of range."""
    return _command(run_dir, CommandRequest(scale={"target": target}), timeout_s)


def stop(run_dir: RunDir, reason: str, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Drain every worker and end the job. Raises JobNotFound, TokenRefused."""
    return _command(run_dir, CommandRequest(stop={"reason": reason}), timeout_s)


def checkpoint(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """Ask for a checkpoint of the next commit. Raises JobNotFound, TokenRefused."""
    return _command(run_dir, CommandRequest(checkpoint={}), timeout_s)


def _command(run_dir: RunDir, request: Any, timeout_s: float) -> dict[str, Any]:
    with Commands(run_dir) as commands:
        return commands.say(request, timeout_s)


class _Away(Exception):
    """There is no coordinator at the address, or it gave no answer."""


class Commands:
    """Commands over one connection; for whoever looks again and again, since a connection costs more than an answer."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
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
        TokenRefused, and SettingsContradict for what the coordinator will not do."""
        run_dir, deadline = self._run_dir, time.monotonic() + timeout_s
        while True:
            address = run_dir.address()
            if address is not None:
                try:
                    return self._ask(address, request, max(0.0, deadline - time.monotonic()))
                except TokenRefused:
                    if not run_dir.runs():
                        raise  # else another job has the port for now: the next coordinator takes another
                except _Away:
                    pass
                self._disconnect()  # a connection that failed would wait before it tries again
            if not run_dir.runs():
                raise JobNotFound(f"{run_dir.path} does not run; shoal status says how it ended")
            if time.monotonic() >= deadline:
                raise JobNotFound(
                    f"the job in {run_dir.path} gives no answer within {timeout_s:g} s; try again, or end it"
                )
            time.sleep(_ASK_AGAIN_S)

    def _ask(self, address: str, request: Any, timeout_s: float) -> dict[str, Any]:
        import grpc

        if address != self._address:
            self._disconnect()
            self._address, self._channel = address, grpc.insecure_channel(address, options=protocol.CHANNEL_OPTIONS)
        call = self._channel.unary_unary(
            f"/{protocol.SERVICE}/Command",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=CommandReply.FromString,
        )
        try:
            reply = call(request, metadata=protocol.credentials(self._run_dir.token()), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise TokenRefused(f"{address} refused the token; use the one in the job's run directory") from None
            raise _Away from None
        if reply.error:
            raise SettingsContradict(reply.error)
        answer: dict[str, Any] = json.loads(reply.status_json)
        return answer

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._address, self._channel = "", None


def close_inherited(address: str) -> None:
    """Close every socket of this process that is connected to `address`, or that a server there left behind.

    For a forked child only: gRPC's own state in it still names these descriptors and must not be used.
    """
    host, _, port = address.rpartition(":")
    end = (host, int(port))
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                ours = end in (_plain(copy.getsockname()), _peer(copy))
            if ours:
                os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself, or one that is no internet socket


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        return _plain(connection.getpeername())
    except OSError:
        return None


def _plain(name: Any) -> tuple[str, int] | None:
    """Host and port of a socket's name, with an IPv4 address inside IPv6 written as IPv4."""
    return (name[0].removeprefix("::ffff:"), name[1]) if isinstance(name, tuple) and len(name) >= 2 else None
