"""Several workers as threads of one process: real arenas, words and groups, no control plane. For the arithmetic."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.control.generation import Generation, Member
from shoal.data.fed import AuditWriter
from shoal.data.ledger import GlobalBatch, Pass, micro, split
from shoal.sync.allreduce import AllReduce
from shoal.sync.collectives import Collectives
from shoal.sync.described import check_alike
from shoal.sync.group import Group
from shoal.sync.hosts import Relay
from shoal.sync.memory import create
from shoal.sync.notice import Notice
from shoal.sync.record import Records
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync
from shoal.sync.words import PORT, Words
from shoal.train.attempt import Attempt, Policy
from shoal.train.step import Stepper, StepReport

JOIN_S = 60.0


class SharedMemory:
    """One host's memory for threads: the same name is the same descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}

    def open(self, name: str, size_bytes: int) -> int:
        with self._lock:
            if name not in self._fds:
                self._fds[name] = create(name, size_bytes)
            return os.dup(self._fds[name])

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


_made: list[ThreadWorker] = []


def free_all() -> None:
    """Give back the memory of every worker made so far. A hook on a parameter is a cycle that no collector sees."""
    for worker in _made:
        worker._audit.close()
        worker.collectives.close()
        if worker.relay is not None:
            worker.relay.close()
        for parameter in worker.model.parameters():
            if parameter._post_accumulate_grad_hooks is not None:
                parameter._post_accumulate_grad_hooks.clear()
    _made.clear()
    gc.collect()


class ThreadWorker:
    """A worker without a process. `loss(model, ids)` is the user's code."""

    def __init__(
        self,
        host: Host,
        slot: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: Sync | None = None,
        policy: Policy | None = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.host = host
        self.words = Words(host.memory)
        self.notice = Notice(self.words)
        self.relay = Relay(self.words, self.notice, "127.0.0.1", self._broken) if host.networked else None
        self.broken: list[tuple[int, int]] = []  # generations and slots of connections that ended
        self.incumbent = False
        self.records = Records(self.words.record)
        self.sync = sync or AllReduce()
        self.replica = Replica(model, optimizer, schedulers)
        self.sync.bind(self.replica, host.memory, self.words, slot, partial(host.agree, f"w{slot}"))
        self._audit = AuditWriter(host.folder, f"w{slot}")
        self.policy = policy or Policy()
        self.stepper = Stepper(self.sync, self.replica, self.records, self._audit, self.policy)
        self.collectives = Collectives(self.notice, f"w{slot}")
        self.words.put(slot, PORT, self.collectives.port)
        _made.append(self)
        self.slot = slot
        self.reports: list[StepReport] = []
        self.metrics: dict[str, Callable[[torch.Tensor], float]] = {}

    def _broken(self, generation: int, slot: int, why: str) -> None:
        self.broken.append((generation, slot))

    @property
    def member(self) -> Member:
        return Member(f"w{self.slot}", self.slot, self.host.name, self.relay.address if self.relay else "")

    def enter(self, number: int, slots: Sequence[int]) -> None:
        members = tuple(Member(f"w{slot}", slot, self.host.name) for slot in slots)
        self.enter_generation(Generation(number, members))

    def enter_with(self, number: int, workers: Sequence[ThreadWorker]) -> None:
        """Workers of several hosts."""
        self.enter_generation(Generation(number, tuple(worker.member for worker in workers), key=b"k" * 32))

    def enter_generation(self, generation: Generation) -> None:
        self.group = Group(
            self.words, self.notice, generation, f"w{self.slot}", spin=False, relay=self.relay
        )  # fmt: skip
        self.group.enter(incumbent=self.incumbent)
        self.collectives.enter(self.group)
        self.stepper.transfer(self.group)
        self.sync.enter(self.group)
        if not self.group.seq:
            self.stepper.found(self.group)
        self.incumbent = True
        self.record = self.records.read(self.group.seq)
        self.stepper.enter(self.record)

    def step(
        self, ids: Sequence[int], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor | None], accumulate: int = 1
    ) -> StepReport:
        """One step over the global batch `ids`, of which this worker takes its share."""
        batch = GlobalBatch(0, 0, len(ids))
        lo, hi = split(batch, self.group.rank, self.group.size)
        attempt = Attempt(0, batch, lo, hi, 0.0)
        self.sync.begin()
        for index, (start, end) in enumerate(micro(lo, hi, accumulate)):
            mine = torch.tensor(ids[start:end])
            attempt.ids.append(np.array(ids[start:end], dtype=np.int64))
            if len(mine) and (value := loss(self.model, mine)) is not None:
                metrics = {name: measure(mine) for name, measure in self.metrics.items()}
                last = index + 1 == accumulate
                attempt.learn(self.sync, self.policy, value, metrics, len(mine), last=last)
        cursor = self.record.cursor
        pass_ = Pass(0, 10**6, 10**6, 0, True, False, len(ids), None, accumulate)
        report, _ = self.stepper.train(self.group, self.record, cursor, pass_, attempt)
        assert report is not None
        self.record = self.records.read(self.group.seq)
        self.reports.append(report)
        return report


class Host:
    """Where thread workers meet."""

    def __init__(self, folder: Path, name: str = "here", *, networked: bool = False) -> None:
        self.memory = SharedMemory()
        self.folder, self.name, self.networked = folder, name, networked
        self._tensors: dict[str, str] = {}

    def agree(self, worker_id: str, tensors: dict[str, str]) -> None:
        self._tensors = self._tensors or tensors
        check_alike(worker_id, tensors, self._tensors)

    @staticmethod
    def together(workers: Sequence[ThreadWorker], do: Callable[[ThreadWorker], Any]) -> list[Any]:
        """Run `do` for all workers at once; the first problem of any of them is raised here."""
        results: dict[int, Any] = {}

        def body(index: int, worker: ThreadWorker) -> None:
            results[index] = do(worker)

        together(*(partial(body, index, worker) for index, worker in enumerate(workers)))
        return [results[index] for index in range(len(workers))]


def together(*bodies: Callable[[], Any]) -> None:
    """Run all of them at once; the first problem of any is raised here."""
    problems: list[BaseException] = []

    def guarded(body: Callable[[], Any]) -> None:
        try:
            body()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    if problems:
        raise problems[0]
    assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
