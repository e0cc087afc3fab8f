"""One worker where the sync is not in lockstep: it borrows shards of the data, steps at its own pace, and says what it
has used."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict

from shoal import errors
from shoal.control.client import Client
from shoal.data.batches import Fetched, Loader
from shoal.data.fed import AuditWriter, Fed, declare, digest
from shoal.data.leases import Lease, extent_of
from shoal.data.ledger import Pass
from shoal.metrics import fault_point
from shoal.seconds import COMPUTE, EXCHANGE, INPUT, WAIT
from shoal.sync.group import Group
from shoal.sync.record import Record
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync, Verdict
from shoal.train.attempt import Attempt, Batch, Policy, not_finite
from shoal.train.callbacks import Callbacks
from shoal.train.pace import Pace, Use, begun_inside
from shoal.train.reconfigure import Leave
from shoal.train.schedules import last_change
from shoal.train.seat import Seat
from shoal.train.step import StepReport

# How long a lease lasts at this worker's pace. Shorter ones would be more messages, longer ones a longer wait for the
# slowest worker at the end of a pass.
LEASE_S = 0.5
MOST_STEPS = 1024
# The next is asked for when this part of one is left, or its last step: the answer takes a few milliseconds.
ASK_AT = 0.25


def refuse(what: str, instead: str) -> errors.SettingsContradict:
    return errors.SettingsContradict(f"{what} needs workers in lockstep, and this sync has none; {instead}")


class Lessee:
    """The loop of a pass: begin, then fetch → (gradients) → step, over and over; where fetch gives nothing, `over` says
    whether the pass is, and `wait` waits for what ends that. Then leave."""

    def __init__(self, client: Client, audit: AuditWriter, sync: Sync, replica: Replica, policy: Policy) -> None:
        self._client, self._audit, self._sync, self._replica, self._policy = client, audit, sync, replica, policy
        self._borrowed = client.borrowed
        self._pass: Pass  # set by `begin`
        self._in_pass = False
        self._leases: list[Lease] = []  # taken and not used up, in the order of their use
        self._step_s: float | None = None  # how long a step of this pass takes, from one to the next
        self._stepped_at: float | None = None

    def begin(self, pass_: Pass, loader: Loader) -> None:
        if self._in_pass:
            self.leave(self._pass)  # by `break`, and somebody still holds on to it
        self._pass, self._loader, self._in_pass = pass_, loader, True
        self._step_s = self._stepped_at = None
        self.epoch: int | None = None  # the highest that this worker has seen in the pass
        loader.follow()
        self._borrowed.begin(extent_of(asdict(pass_)))

    def fetch(self) -> Fetched | None:
        """The next micro-batch; None while there is none."""
        for lease in self._borrowed.take():
            self._leases.append(lease)
            self._loader.add(lease.shard.epoch, lease.shard.lo, lease.shard.hi)
        steps = 1 if self._step_s is None else round(min(max(LEASE_S / self._step_s, 1), MOST_STEPS))
        enough = self._pass.accumulate * max(1, round(ASK_AT * steps)) + self._loader.depth
        if self._loader.left <= enough and self._borrowed.ask(steps):
            self._client.tell_leases()
        return self._loader.next()

    @property
    def over(self) -> bool:
        return self._borrowed.over and not self._leases

    def wait(self, generation: int, timeout_s: float) -> None:
        """Until there is a lease, the pass is over, or a newer generation; with the timeout at the latest."""
        self._stepped_at = None  # it is not this worker's pace
        self._client.wait_for_lease(generation, timeout_s)

    def step(self, group: Group, record: Record, attempt: Attempt) -> tuple[Record, StepReport]:
        """Apply the gradients to this worker's model: the step is its own, and nobody can take it back."""
        batch, lease = attempt.batch, self._leases[0]
        assert lease.shard.epoch == batch.epoch, f"{batch} is not of {lease}"
        assert lease.shard.lo <= batch.lo < batch.hi <= lease.shard.hi, f"{batch} is not of {lease}"
        loss = attempt.loss / (attempt.counted or 1)
        metrics = {name: value / (attempt.counted or 1) for name, value in attempt.metrics.items()}
        skipped = not math.isfinite(loss)
        after = self._after(group, record, attempt, loss, skipped)
        if skipped and self._policy.nan == "stop":
            raise not_finite(f"step {after.step} of {lease.worker_id} is {loss}", batch.epoch, batch.lo, batch.hi)
        factor = self._policy.factor(record, group.size, after.step, batch.epoch)
        fault_point("optimizer")
        norm = self._sync.prepare(group, Verdict(not skipped, self._policy.clip_norm, factor))
        group.seq += 1
        self._sync.settle(group)
        fault_point("before_done")
        # Before it is told: of what counts as used, the audit has a record.
        self._audit.write(Fed(
            generation=group.generation.number, seq=lease.number, pass_index=self._pass.index, epoch=batch.epoch,
            step_lo=lease.shard.lo, step_hi=lease.shard.hi, lo=batch.lo, hi=batch.hi, ids_digest=digest(attempt.ids),
            skipped=skipped,
        ))  # fmt: skip
        fault_point("after_done")
        if self._borrowed.use(lease.number, batch.hi):
            self._leases.pop(0)
            self._client.tell_leases()
        fault_point("after_commit")
        self._note_pace()
        return after, StepReport(
            step=after.step,
            epoch=batch.epoch,
            loss=loss,
            metrics=metrics,
            samples=batch.hi - batch.lo,
            workers=group.size,
            generation=group.generation.number,
            rank=group.rank,
            skipped=skipped,
            learning_rate=float(self._replica.optimizer.param_groups[0].get("lr", math.nan)) * factor,
            gradient_norm=norm,
            duration_s=time.perf_counter() - attempt.began_s,
        )

    def mark_complete(self, group: Group) -> None:
        """Write it down if the coordinator has declared the pass complete."""
        if not self._borrowed.complete:
            return
        self._audit.write(Fed(
            generation=group.generation.number, seq=max(1, self._borrowed.heard), pass_index=self._pass.index,
            epoch=self._pass.epochs, step_lo=0, step_hi=0, lo=0, hi=0, ids_digest=digest([]), skipped=False,
        ))  # fmt: skip

    def tell(self) -> None:
        """Say how far this worker is, before it may leave."""
        self._client.tell_leases()

    def is_in(self, pass_: Pass) -> bool:
        return self._in_pass and self._pass is pass_

    def leave(self, pass_: Pass) -> bool:
        """The pass is complete, or is left early: what is not used of it goes back. False: it was left before."""
        if not self.is_in(pass_):
            return False
        self._in_pass = False
        self._leases.clear()
        self._borrowed.leave()
        self._client.tell_leases()
        return True

    def _after(self, group: Group, record: Record, attempt: Attempt, loss: float, skipped: bool) -> Record:
        """What is known of this worker's own training after the step."""
        batch, step = attempt.batch, record.step + 1
        changed_at, size_before = last_change(record, group.size, step)
        return Record(
            pass_index=self._pass.index,
            epoch=batch.epoch,
            step=step,
            samples=record.samples + batch.hi - batch.lo,
            skipped=record.skipped + skipped,
            size=group.size,
            size_before=size_before,
            changed_at=changed_at,
            loss=loss,
        )

    def _note_pace(self) -> None:
        now_s = time.perf_counter()
        if self._stepped_at is not None:
            took_s = now_s - self._stepped_at
            self._step_s = took_s if self._step_s is None else 0.8 * self._step_s + 0.2 * took_s
        self._stepped_at = now_s


class Leased(Pace):
    """The passes of a worker that steps by itself."""

    def __init__(self, seat: Seat, sync: Sync, callbacks: Callbacks, lessee: Lessee) -> None:
        super().__init__(seat, sync, callbacks)
        self._lessee = lessee
        seat.client.on_checkpoint = self._refuse_checkpoint

    def batches(self, pass_: Pass, loader: Loader) -> Iterator[Batch]:
        seat, lessee = self._seat, self._lessee
        try:
            declare(seat.run_dir.audit, pass_)
            seat.pass_ = pass_
            if seat.group is None:
                seat.ask_in()
                self._enter(above=0)
            lessee.begin(pass_, loader)
            while True:
                self._seconds.switch(INPUT)
                if seat.outdated and self._attempt is None:
                    lessee.tell()
                    self._reconfigure()
                fetched = lessee.fetch()
                if fetched is None and not lessee.over:
                    self._sync.rest()
                    self._seconds.switch(WAIT)
                    lessee.wait(seat.generation, seat.timeouts.beat_s)
                    continue
                self._seconds.switch(COMPUTE)
                epoch = pass_.epochs if fetched is None else fetched.batch.epoch
                if lessee.epoch is not None:
                    for ended in range(lessee.epoch, epoch):
                        self._end_epoch(ended)
                if fetched is None:
                    assert seat.group is not None
                    lessee.mark_complete(seat.group)
                    return
                lessee.epoch = max(epoch, lessee.epoch or 0)
                batch = fetched.batch
                yield from self._hand_out(pass_, fetched, (batch.lo, batch.hi), (batch.epoch, batch.lo))
                if not lessee.is_in(pass_):
                    raise begun_inside()
        finally:
            if lessee.leave(pass_):
                self._attempt = self._batch = None
            self._sync.rest()
            loader.close()
            if not self._seconds.starting:
                self._seconds.switch(COMPUTE)

    def _contribute(self, group: Group, attempt: Attempt, batch: Batch, use: Use) -> bool:
        use(attempt, batch)
        if batch.fetched.micro + 1 < batch.fetched.micros:
            return False
        self._seconds.switch(EXCHANGE)
        self._seat.record, report = self._lessee.step(group, self._seat.record, attempt)
        self._attempt = None
        self._committed(report)
        return True

    def _enter(self, above: int) -> bool:
        """Each has a state of its own: there is nothing to agree on, and nobody to wait for."""
        while True:
            try:
                group = self._seat.enter(above, meet=False)
            except Leave:
                self._sync.rest()
                raise
            group.seq, above = self._seat.record.step, group.generation.number
            self._seat.place(group)
            try:
                self._sync.enter(group)
            except errors.Changed:
                continue
            return True

    def _refuse_checkpoint(self) -> None:
        text = "no checkpoint: workers are not in lockstep, so that there is no state of all"
        self._seat.client.note("checkpoint_failed", text, {"step": self._seat.record.step})
