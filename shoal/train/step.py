"""The step: gradients → everyone ready → one verdict → exchange and step → commit → the model moves on."""

from __future__ import annotations

import json
import math
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from shoal import errors
from shoal.data.audit import AuditWriter, Fed, digest
from shoal.data.ledger import Cursor, GlobalBatch, Pass, advance, split, take
from shoal.metrics import fault_point
from shoal.sync import words as w
from shoal.sync.group import Group
from shoal.sync.record import Record, Records
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync, Verdict
from shoal.train.schedules import Schedule, Situation

# What a worker brings to a commit. FRESH: a step, by a newcomer that takes its hyperparameters from rank 0.
TRAIN, EDIT, FOUND, FRESH = 1, 2, 3, 4


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
    skipped: bool
    learning_rate: float
    gradient_norm: float | None
    duration_s: float


@dataclass
class Attempt:
    """What this worker has done so far for one step: micro-batches of its share."""

    batch: GlobalBatch
    lo: int
    hi: int
    began_s: float
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    counted: int = 0  # samples that gave a loss
    loss: float = 0.0  # summed over them
    metrics: dict[str, float] = field(default_factory=dict)  # likewise

    def add(self, samples: int, loss: float, metrics: dict[str, float]) -> None:
        self.counted += samples
        self.loss += loss * samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value) * samples


@dataclass(frozen=True)
class Tally:
    loss: float  # mean over the step's samples
    metrics: dict[str, float]
    losses: list[float]  # of each rank, summed over its samples
    finite: bool


@dataclass(frozen=True)
class Policy:
    """What `Worker.attach` was told about steps."""

    loss: Literal["mean", "sum"] = "mean"
    clip_norm: float | None = None
    nan: Literal["stop", "skip"] = "stop"
    schedule: Schedule | None = None


class Stepper:
    def __init__(self, sync: Sync, replica: Replica, records: Records, audit: AuditWriter, policy: Policy) -> None:
        self._sync, self._replica, self._records, self._audit, self._policy = sync, replica, records, audit, policy
        self._policy_digest = zlib.crc32(repr(policy).encode())
        self._text, self._placed = b"", (0, 0)
        self.fresh = False  # a newcomer, until its first commit
        self.pending: StepReport | None = None
        self.is_mean = policy.loss == "mean"

    def gradients(self, loss: torch.Tensor, attempt: Attempt, samples: int) -> None:
        """Add one micro-batch's gradients, weighted so that all workers' together are the global batch's."""
        share, batch = attempt.hi - attempt.lo, attempt.batch.hi - attempt.batch.lo
        self._sync.backward(loss, self._sync.weight(samples, share, batch) if self.is_mean else 1.0)

    def train(
        self, group: Group, record: Record, cursor: Cursor, pass_: Pass, attempt: Attempt
    ) -> tuple[StepReport | None, bool]:
        """Commit the step this worker's gradients belong to. None: somebody's edit was committed instead, and the step
        comes again. True: all members now enter a newer generation. Changed: this worker does not know; if `pending`
        is set, what is committed in the next generation says whether it was this."""
        self.pending = None
        fault_point("lane")
        if group.rank == 0 and not self.fresh:
            self._greet(group, record)
        self._post(group, FRESH if self.fresh else TRAIN, attempt, pass_.index)
        group.ready()
        if self.fresh:
            self._take_greeting(group)
            self._post(group, TRAIN, attempt, pass_.index)
        if (writer := self._agree(group, TRAIN)) is not None:
            return None, self._commit_edit(group, record, writer)
        after = advance(cursor, attempt.batch)
        tally = self._tally(group, attempt)
        if not tally.finite and self._policy.nan == "stop":
            raise _not_finite(group, attempt, tally, after.step)
        verdict = Verdict(tally.finite, self._policy.clip_norm, self._factor(group, record, after))
        norm = self._sync.prepare(group, verdict)
        if group.rank == 0:
            self._write_record(group, record, after, pass_, tally)
        self._write_audit(group, pass_, attempt, skipped=not tally.finite)
        self.pending = report = StepReport(
            step=after.step,
            epoch=attempt.batch.epoch,
            loss=tally.loss,
            metrics=tally.metrics,
            samples=attempt.batch.hi - attempt.batch.lo,
            workers=group.size,
            generation=group.generation.number,
            skipped=not tally.finite,
            learning_rate=float(self._replica.optimizer.param_groups[0].get("lr", math.nan))
            * verdict.learning_rate_factor,
            gradient_norm=norm,
            duration_s=time.perf_counter() - attempt.began_s,
        )
        planned = group.commit()
        self.pending, self.fresh = None, False
        self._sync.settle(group)
        return report, planned

    def edit(self, group: Group, record: Record) -> bool:
        """Commit parameters that this worker changed privately. True: all members now enter a newer generation."""
        self._post(group, EDIT)
        group.ready()
        writer = self._agree(group, EDIT)
        assert writer is not None
        return self._commit_edit(group, record, writer)

    def found(self, group: Group) -> bool:
        """Commit rank 0's first state. True: all members now enter a newer generation."""
        self._post(group, FOUND)
        group.ready()
        self._agree(group, FOUND)
        self._sync.found(group)
        if group.rank == 0:
            place, size = self._records.write_text(Record(), self._replica.text())
            self._records.write(group.seq + 1, Record(text_place=place, text_bytes=size))
        planned = group.commit()
        self._sync.settle(group)
        return planned

    def enter(self, record: Record) -> None:
        """The record's text is the committed one from here on."""
        self._placed = record.text_place, record.text_bytes
        self._text = self._records.text(*self._placed)

    def _place_text(self, record: Record) -> None:
        """Have hyperparameters and schedulers written down as they are now."""
        text = self._replica.text()
        if text != self._text:
            self._text, self._placed = text, self._records.write_text(record, text)

    def _greet(self, group: Group, record: Record) -> None:
        """Tell newcomers the hyperparameters as they are, after whatever callbacks have done since the last commit."""
        if group.words.greeting[0] != group.generation.number:
            self._place_text(record)
            group.words.greeting = (group.generation.number, *self._placed)

    def _take_greeting(self, group: Group) -> None:
        generation, place, size = group.words.greeting
        if generation == group.generation.number:  # if not, rank 0 is as new as this worker
            self._replica.take_text(self._records.text(place, size))

    def _commit_edit(self, group: Group, record: Record, writer: int) -> bool:
        self._sync.edit(group, writer)
        if group.rank == writer:
            self._place_text(record)
            placed = {"text_place": self._placed[0], "text_bytes": self._placed[1]}
            self._records.write(group.seq + 1, replace(record, **placed))
        # An empty entry: an attempt at a step with the same number, in an earlier generation, was not committed.
        at = record.position
        self._audit.write(Fed(
            generation=group.generation.number, seq=group.seq + 1, pass_index=record.pass_index, epoch=record.epoch,
            step_lo=at, step_hi=at, lo=at, hi=at, ids_digest=digest([]), skipped=False,
        ))  # fmt: skip
        planned = group.commit()
        self._sync.settle(group)
        return planned

    def _post(self, group: Group, kind: int, attempt: Attempt | None = None, pass_index: int = 0) -> None:
        """Say what this worker brings to the next commit, and with which hyperparameters."""
        words, slot = group.words, group.slot
        digest = self._replica.options_digest() ^ self._policy_digest
        if kind == FOUND:
            digest ^= self._sync.layout_digest
        if attempt is not None:  # workers must also bring the same samples to the step
            digest ^= zlib.crc32(repr((pass_index, attempt.batch)).encode())
        words.put(slot, w.OPTIONS, kind << 32 | digest)
        if attempt is not None:
            names = sorted(attempt.metrics)
            text = json.dumps(names).encode()
            if len(names) > w.MAX_METRICS or len(text) > w.MAX_NAMES_BYTES:
                raise errors.SettingsContradict(
                    f"{len(names)} metrics with names of {len(text)} bytes in one step: at most {w.MAX_METRICS}, with "
                    f"{w.MAX_NAMES_BYTES} bytes, are averaged; leave some out"
                )
            words.put(slot, w.NAMES, zlib.crc32(text) if attempt.counted else 0)
            if group.rank == 0 and text != words.names:
                words.names = text
            words.set_value(slot, w.WEIGHT, attempt.counted)
            words.set_value(slot, w.LOSS, attempt.loss)
            for index, name in enumerate(names):
                words.set_value(slot, w.METRICS + index, attempt.metrics[name])

    def _agree(self, group: Group, kind: int) -> int | None:
        """The lowest rank that edits, if anybody does. WorkersDiffer when hyperparameters are not the same."""
        words = group.words
        mine = words.get(group.slot, w.OPTIONS), words.get(group.slot, w.NAMES)
        editor = None
        for rank, slot in reversed(list(enumerate(group.slots))):
            options, names = words.get(slot, w.OPTIONS), words.get(slot, w.NAMES)
            if options >> 32 == EDIT:
                editor = rank
            elif options >> 32 == FRESH:
                continue  # it looks at the others' and takes them
            elif kind != EDIT and (options != mine[0] or (names and mine[1] and names != mine[1])):
                raise self._differ(group, rank, kind, only_metrics=options == mine[0])
        return editor

    def _differ(self, group: Group, rank: int, kind: int, *, only_metrics: bool) -> errors.WorkersDiffer:
        here, there = group.members[group.rank].worker_id, group.members[rank].worker_id
        if kind == FOUND:
            what = "names, shapes or dtypes of their model's tensors, hyperparameters, or settings of attach()"
        elif only_metrics:
            what = "names of metrics"
        else:
            what = "samples, hyperparameters, or settings of attach()"
        return errors.WorkersDiffer(
            f"{here} and {there} differ in {what} ({here} has {self._replica.options()}): every worker must run the "
            f"same script with the same settings; change a learning rate on all of them, or in a scheduler"
        )

    def _tally(self, group: Group, attempt: Attempt) -> Tally:
        """Everybody's losses and metrics, read while nobody can move on."""
        words = group.words
        names: list[str] = json.loads(words.names)  # rank 0's: a worker with an empty share has none of its own
        samples = sum(words.value(slot, w.WEIGHT) for slot in group.slots) or 1.0
        losses = [words.value(slot, w.LOSS) for slot in group.slots]
        # A slot whose worker counted nothing has not written its values.
        counted = [slot for slot in group.slots if words.value(slot, w.WEIGHT)]
        sums = [words.values(slot, w.METRICS, len(names)) for slot in counted]
        metrics = {name: sum(values[index] for values in sums) / samples for index, name in enumerate(names)}
        loss = sum(losses) / samples
        return Tally(loss, metrics, losses, math.isfinite(loss))

    def _factor(self, group: Group, record: Record, after: Cursor) -> float:
        if self._policy.schedule is None:
            return 1.0
        changed_at, before = _last_change(group, record, after)
        return self._policy.schedule.factor(
            Situation(after.step, after.epoch, group.size, before, after.step - changed_at)
        )

    def _write_record(self, group: Group, record: Record, after: Cursor, pass_: Pass, tally: Tally) -> None:
        self._place_text(record)
        changed_at, before = _last_change(group, record, after)
        following = take(pass_, after, group.size)
        ended = following is None or following.epoch > after.epoch
        self._records.write(
            group.seq + 1,
            Record(
                pass_index=after.pass_index,
                epoch=after.epoch,
                # Decided here and not by whoever is there next: with drop_last, the end depends on their number.
                position=pass_.num_samples if ended else after.position,
                step=after.step,
                samples=after.samples,
                skipped=record.skipped + (not tally.finite),
                size=group.size,
                size_before=before,
                changed_at=changed_at,
                text_place=self._placed[0],
                text_bytes=self._placed[1],
                loss=tally.loss,
            ),
        )

    def _write_audit(self, group: Group, pass_: Pass, attempt: Attempt, skipped: bool) -> None:
        batch = attempt.batch
        self._audit.write(Fed(
            generation=group.generation.number, seq=group.seq + 1, pass_index=pass_.index, epoch=batch.epoch,
            step_lo=batch.lo, step_hi=batch.hi, lo=attempt.lo, hi=attempt.hi,
            ids_digest=digest(attempt.ids), skipped=skipped,
        ))  # fmt: skip


def _last_change(group: Group, record: Record, after: Cursor) -> tuple[int, int]:
    """The step at which the number of workers last changed, and the number before."""
    if group.size != record.size:
        return after.step, record.size
    return record.changed_at, record.size_before


def _not_finite(group: Group, attempt: Attempt, tally: Tally, step: int) -> errors.LossNotFinite:
    worst = next((rank for rank, value in enumerate(tally.losses) if not math.isfinite(value)), 0)
    lo, hi = split(attempt.batch, worst, group.size)
    return errors.LossNotFinite(
        f"the loss of step {step} is {tally.losses[worst]} on {group.members[worst].worker_id} (epoch "
        f"{attempt.batch.epoch}, positions {lo} to {hi}): lower the learning rate, or attach with nan='skip'"
    )
