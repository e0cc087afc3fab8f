"""The step: gradients → everyone ready → one verdict → exchange and step → commit → the model moves on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal import errors
from shoal.data.fed import AuditWriter, Fed, digest
from shoal.data.ledger import Cursor, Pass, advance, split
from shoal.metrics import fault_point
from shoal.sync.group import Group
from shoal.sync.hosts import RECORD
from shoal.sync.record import Record, Records
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync, Verdict
from shoal.train.attempt import Attempt, Policy, not_finite
from shoal.train.ballot import EDIT, FOUND, FRESH, TRAIN, Ballot, Tally
from shoal.train.checkpoint import Restored
from shoal.train.evaluate import Results, summed
from shoal.train.schedules import last_change


@dataclass(frozen=True)
class StepReport:
    """A step that was committed, as every worker sees it."""

    step: int
    epoch: int
    loss: float  # mean over the step's samples
    metrics: dict[str, float]  # likewise
    samples: int
    workers: int
    generation: int
    rank: int  # of this worker in the group that committed it; what must be done once is done by rank 0
    skipped: bool
    learning_rate: float
    gradient_norm: float | None
    duration_s: float


class Stepper:
    def __init__(self, sync: Sync, replica: Replica, records: Records, audit: AuditWriter, policy: Policy) -> None:
        self._sync, self._replica, self._records, self._audit, self._policy = sync, replica, records, audit, policy
        self._ballot = Ballot(replica, policy, sync.model)
        self._text, self._placed = b"", (0, 0)
        self.fresh = False  # a newcomer, until its first commit
        self.newest_pass = 0  # of the last step that was voted on
        self._greeted = 0  # the generation whose newcomers know the hyperparameters
        self.edits = 0  # that the script made outside of passes
        # For the lowest rank, with whether the step is the last of its pass: whether it is to be checked.
        self.wants_check: Callable[[bool], bool] = lambda last: False
        self.before_ready: Callable[[int], None] = lambda seq: None  # called with the commit that is made ready for
        self.pending: StepReport | None = None

    def train(
        self, group: Group, record: Record, cursor: Cursor, pass_: Pass, attempt: Attempt
    ) -> tuple[StepReport | None, bool]:
        """Commit the step this worker's gradients belong to. None: an edit was committed instead, and the step
        comes again. True: all members now enter a newer generation. Changed: this worker does not know; if `pending`
        is set, what is committed in the next generation says whether it was this."""
        self.pending = None
        if (editor := self._vote(group, pass_, attempt)) is not None:
            return None, self._commit_edit(group, record, editor)
        after = advance(cursor, attempt.batch)
        tally = self._ballot.tally(group)
        if not tally.finite and self._policy.nan == "stop":
            raise _not_finite(group, attempt, tally, after.step)
        factor = self._policy.factor(record, group.size, after.step, after.epoch)
        verdict = Verdict(tally.finite, self._policy.clip_norm, factor)
        norm = self._sync.prepare(group, verdict)
        if group.leads:
            self._write_record(group, record, after, tally)
        self._write_audit(group, pass_, attempt, skipped=not tally.finite)
        self.pending = report = StepReport(
            step=after.step,
            epoch=attempt.batch.epoch,
            loss=tally.loss,
            metrics=tally.metrics,
            samples=attempt.batch.hi - attempt.batch.lo,
            workers=group.size,
            generation=group.generation.number,
            rank=group.rank,
            skipped=not tally.finite,
            learning_rate=float(self._replica.optimizer.param_groups[0].get("lr", math.nan))
            * verdict.learning_rate_factor,
            gradient_norm=norm,
            duration_s=time.perf_counter() - attempt.began_s,
        )
        last = attempt.batch.last and attempt.batch.epoch + 1 == pass_.epochs
        planned = self._commit(group, check=group.rank == 0 and self.wants_check(last))
        self.pending, self.fresh = None, False
        self._sync.settle(group)
        return report, planned

    def evaluate(
        self, group: Group, record: Record, cursor: Cursor, pass_: Pass, attempt: Attempt, results: Results
    ) -> tuple[bool, bool]:
        """Commit that this worker's samples are counted. False, first: an edit was committed instead, and they come
        again. True, second: all members now enter a newer generation."""
        self.pending = None
        if (editor := self._vote(group, pass_, attempt)) is not None:
            return False, self._commit_edit(group, record, editor)
        after = replace(advance(cursor, attempt.batch), step=cursor.step, samples=cursor.samples)
        tally, begun = self._ballot.tally(group), record.pass_index == pass_.index
        samples = attempt.batch.hi - attempt.batch.lo
        totals = summed(record.totals if begun else (), list(tally.metrics), tally.metrics, samples)
        self._sync.prepare(group, Verdict(apply=False, clip_norm=None, gradients=False))
        if group.leads:
            self._place_text(record)
            counted = replace(
                record,
                pass_index=pass_.index,
                epoch=after.epoch,
                position=after.position,
                text_place=self._placed[0],
                text_bytes=self._placed[1],
                totals=tuple(totals),
            )
            self._records.write(group.seq + 1, counted)
            if attempt.batch.last and group.rank == 0:
                results.write(pass_.index, dict(zip(tally.metrics, totals, strict=True)), attempt.batch.hi)
        self._write_audit(group, pass_, attempt, skipped=False)
        planned = self._commit(group)
        self.fresh = False
        self._sync.settle(group)
        return True, planned

    def _vote(self, group: Group, pass_: Pass, attempt: Attempt) -> int | None:
        """Everybody says what it brings to the next commit. The rank of an editor, if there is one: its edit is
        committed instead."""
        fault_point("lane")
        if group.rank == 0 and not self.fresh:
            self._greet(group)
        self._ballot.post(group, FRESH if self.fresh else TRAIN, attempt)
        self._sync.offer(group, trains=pass_.train)
        self.before_ready(group.seq + 1)
        group.ready()
        self.newest_pass = self._ballot.newest_pass(group)
        if self.fresh and self.newest_pass == pass_.index:
            self._take_greeting(group)
        editor = self._ballot.editor(group)
        if editor is not None:
            self._sync.enter(group)  # buffers that the forward moved are not kept: it comes again
        else:
            self._ballot.check(group, fresh=attempt if self.fresh else None)
        return editor

    def edit(self, group: Group, record: Record) -> bool:
        """Commit parameters that this worker changed privately. True: all members now enter a newer generation."""
        self._ballot.post(group, EDIT)
        self._sync.offer(group, trains=False)
        self.before_ready(group.seq + 1)
        group.ready()
        editor = self._ballot.editor(group)
        assert editor is not None
        return self._commit_edit(group, record, editor)

    def found(self, group: Group, restored: Restored | None = None) -> bool:
        """Commit rank 0's first state, which may be that of a checkpoint. True: all members now enter a newer
        generation."""
        start = Record()
        if restored is not None:
            group.seq, start = restored.seq, restored.record
        self._ballot.post(group, FOUND)
        group.ready()
        self._ballot.check(group)
        self._sync.found(group)
        if group.leads:
            place, size = self._records.write_text(Record(), self._replica.text())
            self._records.write(group.seq + 1, replace(start, text_place=place, text_bytes=size, edits=self.edits))
        planned = self._commit(group)
        self._sync.settle(group)
        return planned

    def transfer(self, group: Group) -> None:
        """Between hosts, once a generation is entered: give or take the state of commit `group.seq`, where some host is
        behind. Changed: the generation is over."""
        if group.far is None or not group.seq:
            return
        if group.behind and group.leads and group.takes is None:
            if group.followers_know:
                group.renew("whoever has the state is about to be a member")
            raise errors.ShoalError(
                f"nobody in generation {group.generation.number} has the state of commit {group.seq}"
            )
        for slot in group.gives:
            group.far.post_checked(slot, group.seq, RECORD, [memoryview(self._records.pack(group.seq))])
        if group.takes is not None:
            packed = bytearray(self._records.packed_bytes)
            group.far.take_checked(group.takes, group.seq, RECORD, [memoryview(packed)])
            self._records.unpack(group.seq, packed)
        self._sync.transfer(group)
        if group.behind:
            group.adopt()

    def _commit(self, group: Group, *, check: bool = False) -> bool:
        """The record of the commit is written on every host; followers get it too."""
        if group.followers and group.rank == 0:
            assert group.far is not None
            for slot in group.followers:
                packed = memoryview(self._records.pack(group.seq + 1))
                group.far.post_checked(slot, group.seq + 1, RECORD, [packed])
        return group.commit(check=check)

    def enter(self, record: Record) -> None:
        """The record's text is the committed one from here on."""
        self._placed = record.text_place, record.text_bytes
        self._text = self._records.text(*self._placed)

    def _place_text(self, record: Record) -> None:
        """Have hyperparameters and schedulers written down as they are now."""
        text = self._replica.text()
        if text != self._text:
            self._text, self._placed = text, self._records.write_text(record, text)

    def _greet(self, group: Group) -> None:
        """Tell newcomers the hyperparameters as they are, after whatever callbacks have done since the last commit."""
        if self._greeted != group.generation.number:
            self._greeted = group.generation.number
            text = self._replica.text()
            group.words.greet(self._greeted, text)
            if group.far is not None:
                group.far.tell_greeting(text)

    def _take_greeting(self, group: Group) -> None:
        generation, text = group.words.greeting
        if generation == group.generation.number:  # if not, rank 0 is as new as this worker
            self._replica.take_text(text)

    def _commit_edit(self, group: Group, record: Record, editor: int) -> bool:
        goes_on = self._sync.give_up(group)
        self._sync.edit(group, editor)
        if self.fresh and group.leads:
            self._take_greeting(group)  # it writes them down for this host, and has none of its own yet
        if group.rank == editor if group.far is None else group.leads:
            self._place_text(record)
            place, size = self._placed
            edited = replace(record, text_place=place, text_bytes=size, edits=self.edits)
            self._records.write(group.seq + 1, edited)
        # An empty entry: an attempt at a step with the same number, in an earlier generation, was not committed.
        at = record.position
        self._audit.write(Fed(
            generation=group.generation.number, seq=group.seq + 1, pass_index=record.pass_index, epoch=record.epoch,
            step_lo=at, step_hi=at, lo=at, hi=at, ids_digest=digest([]), skipped=False,
        ))  # fmt: skip
        planned = self._commit(group)
        if not goes_on:
            assert group.far is not None
            group.far.renew("an edit came between")
            planned = True
        self._sync.enter(group)  # not only settle: buffers and hyperparameters are the editor's now, on every rank
        self.enter(self._records.read(group.seq))
        self._greeted = 0
        return planned

    def _write_record(self, group: Group, record: Record, after: Cursor, tally: Tally) -> None:
        self._place_text(record)
        changed_at, before = last_change(record, group.size, after.step)
        self._records.write(
            group.seq + 1,
            Record(
                pass_index=after.pass_index,
                epoch=after.epoch,
                position=after.position,
                step=after.step,
                samples=after.samples,
                skipped=record.skipped + (not tally.finite),
                size=group.size,
                size_before=before,
                changed_at=changed_at,
                text_place=self._placed[0],
                text_bytes=self._placed[1],
                edits=record.edits,
                loss=tally.loss,
            ),
        )

    def _write_audit(self, group: Group, pass_: Pass, attempt: Attempt, skipped: bool) -> None:
        batch = attempt.batch
        self._audit.write(Fed(
            generation=group.generation.number, seq=group.seq + 1, pass_index=pass_.index, epoch=batch.epoch,
            step_lo=batch.lo, step_hi=batch.hi, lo=attempt.lo, hi=attempt.hi,
            ids_digest=digest(attempt.ids), skipped=skipped, last=batch.last,
        ))  # fmt: skip


def _not_finite(group: Group, attempt: Attempt, tally: Tally, step: int) -> errors.LossNotFinite:
    worst = next((rank for rank, value in enumerate(tally.losses) if not math.isfinite(value)), 0)
    lo, hi = split(attempt.batch, worst, group.size)
    loss = f"step {step} is {tally.losses[worst]} on {group.members[worst].worker_id}"
    return not_finite(loss, attempt.batch.epoch, lo, hi)
