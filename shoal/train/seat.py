"""A worker's seat in the job, which it has before it has a model: a slot, a line to the coordinator, a way between
generations. And where it is from then on: its group, its pass, the newest commit."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from dataclasses import replace

from shoal import metrics, process
from shoal.control.client import Client, Progress
from shoal.control.commands import status
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data import ledger
from shoal.data.ledger import ENDED, Cursor, Pass
from shoal.metrics import fault_point
from shoal.seconds import Seconds
from shoal.sync.collectives import Collectives
from shoal.sync.described import check_alike
from shoal.sync.group import Group
from shoal.sync.hosts import LOOPBACK, Relay
from shoal.sync.memory import HostMemory
from shoal.sync.notice import Notice
from shoal.sync.record import Record, Records
from shoal.sync.words import PORT, Words
from shoal.train.metrics_file import MetricsFile
from shoal.train.reconfigure import Parking, Placement
from shoal.train.step import StepReport


class Seat:
    """The training thread writes what is here, the client's thread reads it with every beat."""

    def __init__(
        self, worker_id: str, host: str, run_dir: RunDir, memory: HostMemory, timeouts: Timeouts,
        placement: Placement | None, address: str = "",
    ) -> None:  # fmt: skip
        """`address`: of this host, to listen at for workers of other hosts."""
        self.worker_id, self.run_dir, self.memory, self.timeouts = worker_id, run_dir, memory, timeouts
        self._placement = placement
        self.seconds = Seconds(process.age_s())
        self.words = Words(memory)
        self.notice = Notice(self.words)
        self.records = Records(self.words.record)
        self.group: Group | None = None  # None until it is a member
        self.record = Record()  # of the newest commit that it knows
        self.looked_at = 0  # the commit that it looked at without joining
        self.pass_: Pass | None = None
        self.asked_in = False
        self._averages: dict[str, float] = {}  # the metrics of the newest step
        self.metrics = MetricsFile(run_dir.metrics / f"{worker_id}.jsonl", run_dir.settings()["created"])
        told = (self._on_broken, self._on_unreached)
        self._relay = Relay(self.words, self.notice, address, *told, timeouts.budget_s) if address else None
        reached_at = "" if self._relay is None else self._relay.address
        self.client = Client(run_dir, worker_id, host, timeouts, self._beat, self.notice.tell, reached_at)
        self.collectives = Collectives(self.notice, worker_id, address or LOOPBACK, self._on_broken, timeouts.budget_s)
        self.slot = self.client.connect()
        self.words.put(self.slot, PORT, self.collectives.port)
        self.parking = Parking(
            self.client, self.words, self.notice, self.seconds, worker_id, self.slot, timeouts.budget_s, run_dir.runs,
            self._relay,
        )  # fmt: skip

    def _on_broken(self, generation: int, slot: int, why: str) -> None:
        self.client.broken(generation, slot, why)

    def _on_unreached(self, generation: int, slot: int) -> None:
        self.client.broken(generation, slot, "there is none", unreached=True)

    def agree(self, tensors: dict[str, str]) -> None:
        """WorkersDiffer where the job's model has other tensors; if it has none yet, it is this one."""
        said = self.client.model(zlib.compress(json.dumps(tensors).encode()))
        check_alike(self.worker_id, tensors, json.loads(zlib.decompress(said)))

    @property
    def rank(self) -> int:
        """-1 while it is no member and has not to do what rank 0 does."""
        if self.group is not None:
            return self.group.rank
        return 0 if self._alone() else -1

    def _alone(self) -> bool:
        """Whether this worker, which is no member, has to do what rank 0 does: nobody else is there, or has been."""
        state = status(self.run_dir, self.timeouts.command_s)
        others = [it for it in state["workers"] if it["worker_id"] != self.worker_id and it["state"] != "parted"]
        nobody_comes = bool(self.words.commit) or state["target"] == 1
        return nobody_comes and not others and state["phase"] != "finishing"

    @property
    def generation(self) -> int:
        return self.group.generation.number if self.group else 0

    def cursor(self, pass_: Pass) -> Cursor:
        """Where the job is in this pass."""
        return ledger.begin(self.record.cursor, pass_.index)

    def ask_in(self, *, follows: bool = False) -> None:
        """Say that this worker can be a member, or get the state for its host before."""
        fault_point("join")
        self.asked_in = True
        self.client.ready(follows=follows and self._relay is not None)

    def enter(self, above: int, *, meet: bool = True) -> Group:
        """As `Parking.enter`; the group is this worker's from here on."""
        self.group = self.parking.enter(above, meet=meet)
        self.collectives.enter(self.group)
        return self.group

    @property
    def outdated(self) -> bool:
        """Whether there is a newer generation than this worker's."""
        newest = self.client.newest
        return newest is not None and newest.number > self.generation

    def place(self, group: Group) -> None:
        """Take this worker's part of the host's cores."""
        if self._placement is not None:
            self._placement.apply(group)

    def tell(self, report: StepReport) -> None:
        """A step was committed."""
        self._averages = report.metrics
        if report.rank == 0:
            self.metrics.step(report)

    def progress(self) -> Progress:
        notice, record = self.notice, self.record
        waited_s = time.monotonic() - notice.awaited_since_s if notice.awaited is not None else 0.0
        waiting = (notice.awaited_id,) if waited_s > self.timeouts.beat_s else ()
        seq = self.group.seq if self.group else 0
        seconds = self.seconds.snapshot()
        now = Progress(seq, record.step, record.epoch, record.samples, record.loss, waiting, seconds, self._averages)
        pass_ = self.pass_
        if pass_ is None or pass_.train:
            return now
        position = record.position if record.pass_index == pass_.index else 0
        return replace(
            now, evaluating=pass_.index, evaluated=(pass_.num_samples or 0) if position == ENDED else position
        )

    def _beat(self) -> Progress:
        progress = self.progress()
        self.metrics.seconds(self.generation, progress.step, progress.seconds)
        return progress

    def in_loader(self) -> None:
        """First thing in a loader process: it answers to this worker only, and holds nothing of the job open."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        metrics.arm(None)
        with open(self.run_dir.loaders, "a") as known:  # the launcher clears away what a killed one leaves
            known.write(f"{os.getpid()}\n")
        self.client.close_in_child()
        self.collectives.close_in_child()
        if self._relay is not None:
            self._relay.close_in_child()

    def close(self) -> None:
        self.client.close()
        self.collectives.close()
        if self._relay is not None:
            self._relay.close()
        self.metrics.close(self.generation, self.record.step, self.seconds.snapshot())
