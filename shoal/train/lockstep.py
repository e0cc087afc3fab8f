"""One worker where the sync is in lockstep: every step, and every edit, is a commit of all members."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from shoal.data import ledger
from shoal.data.batches import Loader
from shoal.data.fed import declare
from shoal.data.ledger import ENDED, Pass
from shoal.errors import Changed, WorkersDiffer
from shoal.seconds import CHECKPOINT, COMPUTE, EXCHANGE, INPUT
from shoal.sync.group import Group
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync
from shoal.sync.words import generation_of, seq_of
from shoal.train.attempt import Attempt, Batch
from shoal.train.callbacks import Callbacks
from shoal.train.check import Checker
from shoal.train.checkpoint import Moment, Restored, Saver
from shoal.train.evaluate import Results
from shoal.train.pace import Pace, Use, begun_inside
from shoal.train.reconfigure import Leave
from shoal.train.seat import Seat
from shoal.train.step import Stepper, StepReport

# A newcomer that reads what is new in a stream within this is not waited for long.
_CAUGHT_UP_S = 0.05


class Lockstep(Pace):
    def __init__(
        self, seat: Seat, sync: Sync, replica: Replica, stepper: Stepper, callbacks: Callbacks, saver: Saver | None,
        restored: Restored | None,
    ) -> None:  # fmt: skip
        """Without a saver, no checkpoints are taken. `restored`: the checkpoint that the job goes on from."""
        super().__init__(seat, sync, callbacks)
        self._replica, self._stepper, self._saver = replica, stepper, saver
        self._restored = restored  # until the job has gone on from it
        self._results = Results(seat.run_dir.results)
        self._edits = 0  # that the script made outside of passes
        self._in_pass: Pass | None = None
        self._split_is_new = True  # the loader has to be started again
        seat.parking.follow = sync.follow
        self._checker = Checker(seat.client.checked)
        self._copies: tuple[tuple[str, ...], ...] = ()  # of the state, in this generation
        stepper.wants_check = lambda last: bool(self._copies) and self._checker.due(last=last)
        stepper.before_ready = self._before_ready
        if saver is not None:
            seat.client.on_checkpoint = saver.ask

    def _before_ready(self, seq: int) -> None:
        self._checker.before(seq)
        if self._saver is not None:
            self._saver.before(seq)

    @property
    def fresh(self) -> bool:
        """Whether this worker is in, and has not made a step with the others yet."""
        return self._stepper.fresh

    # One pass.

    def batches(self, pass_: Pass, loader: Loader) -> Iterator[Batch]:
        seat = self._seat
        try:
            self._in_pass = pass_
            if self._passed(pass_):
                if self._restored is not None and not seat.words.commit:
                    # The job went on from behind this pass: what follows is still to be done by workers with ranks.
                    self._become_member(pass_)
                return
            declare(seat.run_dir.audit, pass_)
            seat.pass_ = pass_
            if seat.group is None:
                # All lower slots are taken. One too many finds out here: as a member it would take the others with it.
                pass_.check(seat.slot + 1)
                self._catch_up(pass_, loader)
                self._become_member(pass_)
                if seat.record.pass_index == pass_.index and seat.record.epoch >= pass_.epochs:
                    # Or it would come to the end of its script now, and that ends the job.
                    raise WorkersDiffer(
                        f"pass {pass_.index}: epochs is {pass_.epochs} here, and the job is in epoch "
                        f"{seat.record.epoch + 1}; give every worker the same arguments of batches()"
                    )
            assert seat.group is not None
            pass_.check(seat.group.size)
            self._split_is_new = True
            while True:
                self._seconds.switch(INPUT)
                if self._in_pass is not pass_:
                    if loader.next() is None:
                        return
                    raise begun_inside()
                if seat.group.changed:
                    self._reconfigure(attempted=seat.group.seq + 1 if self._attempt is not None else None)
                if self._stepper.fresh and self._stepper.newest_pass > pass_.index:
                    return  # the others left this pass early, before this newcomer's first step
                rank, size = seat.group.rank, seat.group.size
                if self._split_is_new:
                    loader.start(seat.cursor(pass_), rank, size)
                    self._split_is_new, self._attempt = False, None
                fetched = loader.next()
                if fetched is None:
                    return
                share, place = ledger.split(fetched.batch, rank, size), (seat.record.step, rank)
                yield from self._hand_out(pass_, fetched, share, place)
        finally:
            if self._in_pass is pass_:
                self._in_pass = None
            loader.close()
            if not self._seconds.starting:
                self._seconds.switch(COMPUTE)

    def _passed(self, pass_: Pass) -> bool:
        """Whether the job has finished this pass already; a worker that is not in yet looks without joining."""
        seat, words = self._seat, self._seat.words
        if seat.group is not None:
            return ledger.complete(pass_, seat.cursor(pass_), seat.group.size)
        while commit := words.commit:
            seat.looked_at = seq_of(commit)
            seat.record = seat.records.read(seat.looked_at)
            passed = ledger.complete(pass_, seat.cursor(pass_), max(1, seat.record.size))
            if passed:  # the script goes on without this pass, and must not go on with the model as it built it
                self._sync.look(seat.looked_at)
            if words.commit == commit:
                return passed
        # Before the job goes on from a checkpoint, that says where it is.
        return self._restored is not None and ledger.complete(pass_, seat.cursor(pass_), max(1, seat.record.size))

    def _catch_up(self, pass_: Pass, loader: Loader) -> None:
        """Read a stream to where the job is, while the others need not wait for it; and again as far as they have come
        meanwhile, as long as that gets less."""
        seat, before_s = self._seat, math.inf
        while pass_.num_samples is None and seat.words.commit and not self._passed(pass_):
            began_s = time.monotonic()
            loader.start(seat.cursor(pass_), 0, max(1, seat.record.size))
            loader.next()
            took_s = time.monotonic() - began_s
            if took_s < _CAUGHT_UP_S or took_s > 0.8 * before_s:
                return
            before_s = took_s

    # One step.

    def _contribute(self, group: Group, attempt: Attempt, batch: Batch, use: Use) -> bool:
        try:
            if group.changed or self._seat.collectives.over:
                raise Changed
            use(attempt, batch)
            if batch.fetched.micro + 1 < batch.fetched.micros:
                return False
            self._seconds.switch(EXCHANGE)
            return self._exchange(group, attempt)
        except Changed:
            return self._resume(group)

    def _exchange(self, group: Group, attempt: Attempt) -> bool:
        seat, pass_ = self._seat, self._seat.pass_
        assert pass_ is not None
        at = (group, seat.record, seat.cursor(pass_), pass_, attempt)
        report: StepReport | None = None
        if pass_.train:
            report, planned = self._stepper.train(*at)
            committed = report is not None
        else:
            committed, planned = self._stepper.evaluate(*at, self._results)
        self._attempt = None
        seat.record = seat.records.read(group.seq)
        if not committed:
            self._split_is_new = True
            self._seconds.give_up()
        if report is not None:
            if group.checked and seat.worker_id in [copy[0] for copy in self._copies]:
                sums = self._sync.checksums(group.seq)
                self._checker.take(seat.generation, group.seq, seat.record.step, self._copies, sums)
            self._trained(pass_, report)
        if planned and seat.group is group:  # an edit in a callback may have moved on already
            self._reconfigure()
        return committed

    def _resume(self, ended: Group) -> bool:
        """The generation of a step ended before this worker knew that it was committed. Whether it was."""
        seat, pass_ = self._seat, self._seat.pass_
        assert pass_ is not None
        pending, self._stepper.pending = self._stepper.pending, None
        self._reconfigure(attempted=ended.seq + 1)
        assert seat.group is not None
        if pending is None or seat.group.seq == ended.seq:
            return False
        self._stepper.fresh = False
        self._trained(pass_, pending)
        return True

    def _trained(self, pass_: Pass, report: StepReport) -> None:
        self._committed(report)
        if self._epoch_ended(pass_):
            self._end_epoch(report.epoch)
        seat, saver = self._seat, self._saver
        if saver is not None and seat.rank == 0 and saver.due(seat.record.step):
            with self._seconds.during(CHECKPOINT):
                self._save(saver)

    def _epoch_ended(self, pass_: Pass) -> bool:
        """Whether the newest commit was the last of its epoch."""
        record = self._seat.record
        return record.pass_index < pass_.index or record.position == ENDED

    # An edit.

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """As `Worker.edit`."""
        seat = self._seat
        if self._in_pass is None:
            self._edits += 1
        self._stepper.edits = self._edits
        if seat.group is None:
            yield  # not shared yet: the first state is made of this
            if self._restored is not None and self._edits <= self._restored.record.edits:
                self._restored.apply_weights()  # which have it in already
            return
        self._sync.open_edit()
        if self._stepper.fresh:  # a newcomer on its way to the others, who have made this edit before
            try:
                yield
            finally:
                self._sync.enter(seat.group)
            return
        try:
            yield
        except BaseException:
            self._sync.enter(seat.group)  # back to what is committed
            raise
        self._commit_edit()

    def _commit_edit(self) -> None:
        """Have the parameters committed that this worker holds privately, in whichever generation that can be."""
        seat = self._seat
        assert seat.group is not None
        edited = [(parameter, parameter.data) for parameter in self._replica.model.parameters()]
        buffers = [(flat, flat.clone()) for flat in self._replica.buffers.gather()]
        while True:
            group = seat.group
            try:
                if group.changed:
                    raise Changed
                with self._seconds.during(EXCHANGE):
                    planned = self._stepper.edit(group, seat.record)
                break
            except Changed:
                self._reconfigure(attempted=group.seq + 1)
                if seat.group.seq > group.seq:
                    return  # somebody had seen every done word before the generation ended
                for parameter, data in edited:
                    parameter.data = data
                for flat, values in buffers:
                    flat.copy_(values)
        seat.record = seat.records.read(group.seq)
        if planned:
            self._reconfigure()

    # Between generations.

    def _become_member(self, pass_: Pass) -> None:
        seat = self._seat
        seat.ask_in(follows=self._sync.follows)
        self._stepper.fresh = True
        if self._enter(above=0):
            self._stepper.fresh = False
            self._restored = None
        else:
            self._restored = None
            # Hyperparameters and schedulers as they were in the newest step; then what its commit did to everybody's.
            self._replica.take_text(seat.records.text(seat.record.text_place, seat.record.text_bytes))
            if seat.record.step and not seat.record.totals:
                self._callbacks.step_schedulers(seat.record.loss)
                if self._epoch_ended(pass_):
                    self._callbacks.step_epoch_schedulers(seat.record.loss)

    def _enter(self, above: int) -> bool:
        """With the state that is committed. Where there is none, commit the first one; true then."""
        seat = self._seat
        self._split_is_new = True
        founded = False
        self._checker.hold()
        if self._saver is not None:
            self._saver.hold()  # whoever comes next may overwrite what is being copied
        while True:
            try:
                group = seat.enter(above)
            except Leave:
                self._save_as_last()
                raise
            above = group.generation.number
            if self._stepper.fresh and not founded and group.seq and group.generation.finishing:
                seat.client.leave()  # let in by the last step of the others: there is nothing to do for a newcomer
                continue
            seat.place(group)
            try:
                self._stepper.transfer(group)
                self._sync.enter(group)
                seat.parking.incumbent = bool(group.seq)
                if group.seq:
                    break
                founded = True
                self._stepper.edits = self._edits
                if not self._stepper.found(group, self._restored):
                    break
            except Changed:
                continue
        seat.parking.incumbent = True
        self._copies = self._sync.copies(group)
        seat.record = seat.records.read(group.seq)
        self._stepper.enter(seat.record)
        return founded

    # Checkpoints.

    def finish(self) -> None:
        """The script has come to its end: the lowest rank keeps what is committed."""
        self._checker.hold()
        group = self._seat.group
        if self._saver is not None and group is not None and group.rank == 0:
            self._save_and_wait(self._saver)

    def _save_as_last(self) -> None:
        """All workers leave, and the job with them: the first of them keeps what is committed."""
        seat, group = self._seat, self._seat.group
        if self._saver is None or group is None or not seat.parking.all_left():
            return
        group.seq, before = seq_of(seat.words.commit), group.seq
        if group.seq > before:  # committed, but this worker was told to leave before it knew
            step, seat.record = seat.record.step, seat.records.read(group.seq)
            if seat.record.step > step:
                self._callbacks.step_schedulers(seat.record.loss)
                if seat.record.position == ENDED:
                    self._callbacks.step_epoch_schedulers(seat.record.loss)
        self._save_and_wait(self._saver)

    def _save_and_wait(self, saver: Saver) -> None:
        assert self._seat.group is not None
        with self._seconds.during(CHECKPOINT):
            saver.finish()
            if self._seat.record.step and saver.saved_seq != self._seat.group.seq:
                self._save(saver)
                saver.finish()

    def _save(self, saver: Saver) -> None:
        """Start a checkpoint of what is committed."""
        seat = self._seat
        assert seat.group is not None
        seq = seat.group.seq
        saver.take(
            self._sync.state(seq), Moment(seq, generation_of(seat.words.commit), seat.record, self._replica.text())
        )
