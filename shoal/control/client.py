"""The worker's and the launcher's end of the control plane. Training never waits for the coordinator."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.control import bounds, protocol
from shoal.control.borrowed import Borrowed
from shoal.control.drift import Told
from shoal.control.generation import MAX_SLOTS, Generation
from shoal.control.instructions import SetTarget, Stop
from shoal.control.link import Link, close_inherited
from shoal.control.protocol import FromLauncher, FromWorker, ToLauncher, ToWorker
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.leases import Said
from shoal.errors import CoordinatorLost, SettingsContradict, TokenRefused, UserMistake

_WHY_CHARS = 200


@dataclass(frozen=True)
class Progress:
    """Where a worker is, read at each beat, of which it is the body. `samples` counts what the whole job has
    committed."""

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
        address: str = "",
    ) -> None:
        """`address`: at which workers of other hosts reach this one."""
        self._run_dir = run_dir
        self._worker_id = worker_id
        self._host, self._address = host, address
        self._timeouts = timeouts
        self._progress = progress
        self._on_generation = on_generation
        self._news = threading.Condition()
        self._slot: int | None = None
        self._refused = ""
        self._model: bytes | None = None  # the job's
        self._last_fault = 0
        self._numbers = itertools.count(1)  # of wishes and notes, which come from several threads
        self.newest: Generation | None = None
        self.dismissed = False  # the coordinator said Bye
        self.on_checkpoint: Callable[[], None] = lambda: None  # called when somebody asks for one
        self.borrowed = Borrowed()
        self._link = Link(run_dir, "Work", ToWorker, timeouts, self._join, self._hear, self._beat)

    def connect(self) -> int:
        """Blocks until welcomed; this worker's slot. Raises TokenRefused, CertificateRefused, SettingsContradict, or
        CoordinatorLost after the join timeout."""
        self._link.start()
        deadline = time.monotonic() + self._timeouts.join_s
        with self._news:
            while self._slot is None:
                if self._link.token_refused.is_set() and not self._run_dir.runs():  # see Commands.say
                    raise TokenRefused(
                        f"{self._link.address} refused the token; use the one in the job's run directory"
                    )
                refused = self._link.refused
                if refused is not None and (self._link.refused_for_good or time.monotonic() > deadline):
                    raise refused
                if self._refused:
                    raise SettingsContradict(f"{self._worker_id} cannot join: {self._refused}")
                if time.monotonic() > deadline:
                    raise CoordinatorLost(
                        f"no welcome from {self._link.address} within {self._timeouts.join_s:g} s; "
                        "is the job still running (shoal status)?"
                    )
                self._news.wait(self._timeouts.backoff_first_s)
            return self._slot

    def model(self, tensors: bytes) -> bytes:
        """The job's model in words: this worker's, if it is the first to have one. Fails with CoordinatorLost after the
        join timeout."""
        self._link.keep("model", FromWorker(model={"tensors": tensors}))
        with self._news:
            if not self._news.wait_for(lambda: self._model is not None, self._timeouts.join_s):
                raise CoordinatorLost(
                    f"no word from {self._link.address} on the job's model; does it run (shoal status)?"
                )
        self._link.drop("model")
        assert self._model is not None
        return self._model

    def ready(self, *, follows: bool = False) -> None:
        """`follows`: where its host has no state yet, this worker can take it while others train."""
        self._link.keep("ready", FromWorker(ready={"follows": follows}))

    def caught_up(self) -> None:
        """This worker, a follower, has the state."""
        self._link.keep("caught up", FromWorker(caught_up={}))

    def leave(self) -> None:
        self._link.keep("leave", FromWorker(leave={}))

    def parked(self, generation: int) -> None:
        """This worker is a leaver of `generation` and has acknowledged it."""
        self._link.keep("parked", FromWorker(parked={"generation": generation}))

    def entered(self, generation: int) -> None:
        """This worker has heard of everybody in a generation of several hosts: its leavers may go."""
        self._link.keep("entered", FromWorker(entered={"generation": generation}))

    def broken(self, generation: int, slot: int, why: str, *, unreached: bool = False) -> None:
        """The connection to that slot's worker has ended, or for a budget there was none."""
        body = {"generation": generation, "slot": slot, "why": why[:_WHY_CHARS], "unreached": unreached}
        self._link.keep("broken", FromWorker(broken=body))

    def checked(self, told: Told) -> None:
        """The checksums of a state, to be compared with those that others have."""
        self._link.keep("checked", FromWorker(checked=protocol.told_to_wire(told)))

    def finished(self, digest: str, step: int, seq: int, report: dict[str, Any]) -> None:
        body = {"digest": digest, "step": step, "seq": seq, "report_json": json.dumps(report)}
        self._link.keep("finished", FromWorker(finished=body))

    def failed(self, kind: str, message: str, traceback: str, *, fresh: bool = False) -> None:
        """The user's code raised; `fresh`: before this worker had made a step with the others. Call `close` afterwards:
        it delivers this."""
        cut = protocol.TRACEBACK_CHARS
        body = {"kind": kind, "message": message[:cut], "traceback": traceback[-cut:], "fresh": fresh}
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
                    "address": self._address,
                }
            )

    def _beat(self) -> Any:
        progress = self._progress()
        metrics = [(name, value) for name, value in progress.metrics.items() if len(name) <= bounds.MAX_NAME]
        body = {**vars(progress), "metrics": dict(metrics[: bounds.MAX_METRICS])}
        return FromWorker(beat={**body, "leases": protocol.said_to_wire(self.borrowed.said())})

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
                elif kind == "model":
                    self._model = body.tensors
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
        on_dropped: Callable[[float], None] = lambda rest_s: None,  # the job goes on without this host
        on_refused: Callable[[str], None] = lambda reason: None,
        on_kept: Callable[[str, int], None] = lambda path, size_bytes: None,  # so much of the file is at home
        *,
        slots: int = MAX_SLOTS,
        home: bool = True,
        grow: bool = False,
    ) -> None:
        """`slots`: how many workers the host has room for; `grow`: so many more than before. `home`: this is the job's
        own launcher."""
        self._host = host
        self._slots, self._home, self._grow = slots, home, grow
        self._life = uuid.uuid4().hex
        self._on_dropped, self._on_refused, self._on_kept = on_dropped, on_refused, on_kept
        self._live = live
        self._on_target = on_target
        self._on_fence = on_fence
        self._on_probe = on_probe
        self._on_excuse = on_excuse
        self._on_stop = on_stop
        self._gone: set[str] = set()
        self._target: Any = None  # as last heard
        self._stop: Any = None
        beat = None if home else lambda: FromLauncher(alive={})
        self._link = Link(run_dir, "Launch", ToLauncher, timeouts, self._hello, self._hear, beat)

    def start(self) -> None:
        self._link.start()

    def started(self, worker_id: str, pid: int) -> None:
        """Call it when `live` already lists the worker: while there is no stream, the next one opens with that."""
        self._gone.discard(worker_id)
        self._link.drop("idle")
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

    def set_slots(self, slots: int) -> None:
        """The host has room for so many workers from now on; with none, those that are there are let go."""
        self._slots = slots
        self._link.say(lambda: FromLauncher(slots={"n": self._slots}))

    def idle(self) -> None:
        """All workers have ended of their own accord, and none is to come."""
        self._link.keep("idle", FromLauncher(idle={}))

    def failed(self, kind: str, message: str, traceback: str = "") -> None:
        """What ends the job, and no worker could say."""
        cut = protocol.TRACEBACK_CHARS
        body = {"kind": kind, "message": message[:cut], "traceback": traceback[-cut:]}
        self._link.keep("failed", FromLauncher(failed=body))

    def piece(self, path: str, offset: int, data: bytes) -> None:
        """Of a file that a worker has written; `on_kept` answers, unless the stream breaks."""
        self._link.say(FromLauncher(piece={"path": path, "offset": offset, "data": data}))

    @property
    def token_refused(self) -> bool:
        return self._link.token_refused.is_set()

    @property
    def refused(self) -> UserMistake | None:
        """Why the newest attempt failed, if for certificates."""
        return self._link.refused

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
        body = {
            "host": self._host,
            "workers": workers,
            "gone": gone,
            "target": self._target,
            "stop": self._stop,
            "slots": self._slots,
            "life": self._life,
            "home": self._home,
            "grow": self._grow,
            "versions": protocol.versions(),
        }
        return FromLauncher(hello=body)

    def _hear(self, message: Any) -> None:
        kind, body = protocol.kind_of(message)
        if kind == "target":
            self._target = body
            self._on_target(protocol.target_from_wire(body, self._host))
        elif kind == "fence":
            self._on_fence(body.worker_id)
        elif kind == "probe":
            self._on_probe(body.worker_id)
        elif kind == "excuse":
            self._on_excuse(body.worker_id)
        elif kind == "stop":
            self._stop = body
            self._on_stop(protocol.stop_from_wire(body))
        elif kind == "dropped":
            self._on_dropped(body.rest_s)
        elif kind == "refused":
            self._on_refused(body.reason)
        elif kind == "kept":
            self._on_kept(body.path, body.size)
