"""One worker: what a user's script holds while it trains."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shoal import errors, metrics, process
from shoal.checkpoints import Every
from shoal.control.client import Client, Progress, status
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data import ledger
from shoal.data.audit import AuditWriter, declare
from shoal.data.batches import Fetched, Loader, samples_in
from shoal.data.ledger import ENDED, Cursor, Pass
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import CHECKPOINT, COMPUTE, EXCHANGE, INPUT, RECONFIGURE, WAIT, Seconds
from shoal.sync.allreduce import AllReduce
from shoal.sync.group import Group, Notice
from shoal.sync.memory import HostMemory
from shoal.sync.record import Record, Records
from shoal.sync.replica import Replica, Scheduler
from shoal.sync.sync import Sync
from shoal.sync.words import ACK, Words, generation_of, seq_of
from shoal.train.attempt import Attempt, Batch, Policy
from shoal.train.checkpoint import Moment, Restored, Saver, start_from
from shoal.train.evaluate import Results, Rows
from shoal.train.leased import Lessee, refuse
from shoal.train.metrics_file import MetricsFile
from shoal.train.reconfigure import Leave, Parking, Placement, Reconfiguration
from shoal.train.schedules import Schedule
from shoal.train.step import Stepper, StepReport

OnStep = Callable[[StepReport], None]
OnEpoch = Callable[[int], None]


OnReconfigure = Callable[[Reconfiguration], None]

# A newcomer that reads what is new in a stream within this is not waited for long.
_CAUGHT_UP_S = 0.05

_log = logging.getLogger("shoal.worker")


class Worker:
    """Made by `shoal.run`; not by hand."""

    def __init__(
        self, worker_id: str, host: str, run_dir: RunDir, memory: HostMemory, timeouts: Timeouts,
        placement: Placement | None, environment: WorkerEnvironment | None = None,
    ) -> None:  # fmt: skip
        """Without an environment, no checkpoints are taken."""
        self.id = worker_id
        self.seconds = Seconds(process.age_s())
        self._run_dir = run_dir
        self._memory = memory
        self._timeouts = timeouts
        self._placement = placement
        self._environment = environment
        self._restored: Restored | None = None  # the checkpoint that the job goes on from, until it has done so
        self._saver: Saver | None = None
        self._results = Results(run_dir.results)
        self._edits = 0  # that the script made outside of passes
        self._in_pass = False
        self._words = Words(memory)
        self._notice = Notice(self._words)
        self._records = Records(self._words.record)
        self._group: Group | None = None
        self._record = Record()
        self._averages: dict[str, float] = {}  # the metrics of the newest step
        self._seq = 0  # of the commit this worker looked at without joining
        self._stepper: Stepper | None = None
        self._lessee: Lessee | None = None  # where the sync is not in lockstep
        self._attempt: Attempt | None = None
        self._current: Batch | None = None
        self._pass: Pass | None = None
        self._passes = 0
        self._split_is_new = True  # the loader has to be started again
        self._asked_in = False
        self.left_by = int(signal.SIGTERM)  # the signal that made it leave
        self._metrics = MetricsFile(run_dir.metrics / f"{worker_id}.jsonl", run_dir.settings()["created"])
        self._client = Client(run_dir, worker_id, host, timeouts, self._beat, self._notice.tell)
        self._slot = self._client.connect()
        self._parking = Parking(
            self._client,
            self._words,
            self._notice,
            self.seconds,
            worker_id,
            self._slot,
            timeouts.budget_s,
            run_dir.runs,
        )

    # What a script asks.

    @property
    def rank(self) -> int:
        """This worker's index in the present generation, which may change between steps; 0 always exists. -1 while it
        is no member: before the first batch, and in code after a pass that the others did without it."""
        if self._group is not None:
            return self._group.rank
        return 0 if self._alone() else -1

    def _alone(self) -> bool:
        """Whether this worker, which is no member, has to do what rank 0 does: nobody else is there, or has been."""
        state = status(self._run_dir, self._timeouts.command_s)
        others = [other for other in state["workers"] if other["worker_id"] != self.id and other["state"] != "parted"]
        nobody_comes = bool(self._words.commit) or state["target"] == 1
        return nobody_comes and not others and state["phase"] != "finishing"

    @property
    def size(self) -> int:
        return self._group.size if self._group else 1

    @property
    def generation(self) -> int:
        return self._group.generation.number if self._group else 0

    @property
    def steps(self) -> int:
        """Steps committed in this job so far."""
        return self._record.step

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync: Sync | None = None,
        *,
        loss: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        accumulate: int = 1,
        schedulers: Sequence[Scheduler] = (),
        epoch_schedulers: Sequence[Scheduler] = (),
        schedule: Schedule | None = None,
        nan: Literal["stop", "skip"] = "stop",
        on_step: OnStep | None = None,
        on_epoch: OnEpoch | None = None,
        on_reconfigure: OnReconfigure | None = None,
    ) -> None:
        """Share the model and its optimizer with the job's other workers.

        loss: whether the loss given to `step` is a mean or a sum over its samples. clip_norm: bound of the norm of the
        whole gradient. accumulate: micro-batches a step. schedulers are stepped at every commit, epoch_schedulers at
        the end of every epoch. schedule: a factor of the learning rate that sees the number of workers. nan: what a
        loss that is not finite does.
        """
        if self._stepper is not None:
            raise errors.SettingsContradict("attach() was called before: a worker trains one model")
        if clip_norm is not None and clip_norm <= 0:
            raise errors.SettingsContradict(f"clip_norm is {clip_norm}: give a positive bound, or none")
        if accumulate < 1:
            raise errors.SettingsContradict(f"accumulate is {accumulate}: a step has at least one micro-batch")
        if nan not in ("stop", "skip") or loss not in ("mean", "sum"):
            raise errors.SettingsContradict(
                f"nan={nan!r}, loss={loss!r}: nan is 'stop' or 'skip', loss 'mean' or 'sum'"
            )
        self._sync = sync or AllReduce()
        self._start_from(model, optimizer)
        self._replica = Replica(model, optimizer, (*schedulers, *epoch_schedulers))
        self._each_step, self._epoch_schedulers = tuple(schedulers), tuple(epoch_schedulers)
        self._accumulate = accumulate
        self._on_step, self._on_epoch, self._on_reconfigure = on_step, on_epoch, on_reconfigure
        self._sync.bind(self._replica, self._memory, self._words, self._slot)
        if self._restored is not None:
            self._restored.apply_training(self._replica)
        self._audit = AuditWriter(self._run_dir.audit, self.id)
        self._policy = policy = Policy(loss, clip_norm, nan, schedule)
        self._stepper = Stepper(self._sync, self._replica, self._records, self._audit, policy)
        if not self._sync.lockstep:
            self._lessee = Lessee(self._client, self._audit, self._sync, self._replica, policy)
            self._client.on_checkpoint = self._refuse_checkpoint
            if self._slot == 0:  # one of all is enough to say it
                print("shoal: workers are not in lockstep, no checkpoints are taken", file=sys.stderr)
        elif self._environment is not None:
            every = Every.parse(self._environment.checkpoint_every)
            keep, began_at = self._environment.checkpoint_keep, self._run_dir.settings()["created"]
            self._saver = Saver(self._run_dir.checkpoints, every, keep, began_at, self._client.note)
            self._stepper.before_ready = self._saver.before
            self._client.on_checkpoint = self._saver.ask

    def _start_from(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the checkpoint or the weights that the job begins with, unless it has begun already."""
        if self._environment is None or self._words.commit:
            return
        if self._environment.resume:
            if not self._sync.lockstep:
                raise refuse("to go on from a checkpoint", "begin anew with shoal run --init-from")
            self._restored = Restored(Path(self._environment.resume), model, optimizer)
            self._record = self._restored.record
        elif self._environment.init_from:
            start_from(Path(self._environment.init_from), model)

    def batches(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Batch]:
        """This worker's micro-batches of a pass over the data: every sample of every epoch once, over all workers.

        batch_size is one worker's (a step takes batch_size × workers × accumulate), global_batch the whole step's
        whatever the number of workers. Call `step` once for each batch. A data set that can only be iterated over is a
        stream: every worker reads all of it and uses its share, so it must give the same samples in the same order
        everywhere. The others are shuffled unless told not to.
        """
        self._need_attached("batches")
        samples = samples_in(dataset)
        if self._lessee is not None and global_batch is not None:
            raise refuse(f"global_batch={global_batch}", "give batch_size, of one worker's step")
        if self._lessee is not None and samples is None:
            raise refuse("a stream", "give a data set with __len__ and __getitem__")
        pass_ = Pass(
            self._next_pass(),
            samples,
            epochs,
            seed,
            samples is not None if shuffle is None else shuffle,
            drop_last,
            global_batch,
            batch_size,
            self._accumulate,
            leased=self._lessee is not None,
        )
        return self._run_pass(
            pass_,
            Loader(
                dataset, pass_, num_workers=num_workers, pin_memory=pin_memory, prefetch_factor=prefetch_factor,
                collate_fn=collate_fn, in_child=self._in_loader,
            ),
        )  # fmt: skip

    def evaluate(
        self,
        dataset: Dataset[Any],
        score: Callable[[Batch], Mapping[str, float | torch.Tensor]],
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """The means of `score(batch)` over all samples, the same on every worker: each sample is counted once, while
        workers come and go. The model is in eval mode meanwhile, without gradients."""
        index = self._use_all(dataset, lambda batch: score(batch), batch_size, num_workers, collate_fn)
        return self._results.read(index)

    def predict(
        self,
        dataset: Dataset[Any],
        predict: Callable[[Batch], Any],
        out: Path | str,
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Write `predict(batch)`, an array with a row for each sample, to the `.npy` file `out`: a row for each sample
        of the data set, in its order, each written once while workers come and go."""
        samples = samples_in(dataset)
        if samples is None:
            raise errors.DataUnusable(
                f"{type(dataset).__name__} does not say how many rows there will be; give a data set with __len__ and "
                "__getitem__"
            )
        rows = Rows(Path(out).absolute(), samples, job=f"{self._run_dir.settings()['created']}-{self._passes}")

        def write(batch: Batch) -> Mapping[str, float]:
            rows.write(batch.fetched.lo, predict(batch), len(batch))
            return {}

        self._use_all(dataset, write, batch_size, num_workers, collate_fn)
        rows.close()

    def _use_all(
        self,
        dataset: Dataset[Any],
        use: Callable[[Batch], Mapping[str, float | torch.Tensor]],
        batch_size: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> int:
        """Call `use` for the batches of a pass that trains nothing; the pass's number."""
        self._need_attached("evaluate() and predict")
        if self._lessee is not None:
            raise refuse("evaluate() or predict()", "each worker has its own model, and can use it without")
        samples = samples_in(dataset)
        batch_size = min(batch_size, samples or batch_size)
        pass_ = Pass(self._next_pass(), samples, 1, 0, False, False, None, batch_size, 1, train=False)
        loader = Loader(dataset, pass_, num_workers=num_workers, collate_fn=collate_fn, in_child=self._in_loader)
        modes = [(module, module.training) for module in self._replica.model.modules()]
        self._replica.model.eval()
        try:
            for batch in self._run_pass(pass_, loader):
                with torch.inference_mode():
                    metrics = use(batch)
                self._contribute(partial(_count, metrics))
        finally:
            for module, training in modes:
                module.training = training
        return pass_.index

    def _next_pass(self) -> int:
        self._passes += 1
        return self._passes - 1

    def step(self, loss: torch.Tensor | None, /, **metrics: float | torch.Tensor) -> bool:
        """Backward, and with the last micro-batch of a step the step itself, together with all other workers.

        True: a step was committed. False: either micro-batches of it are left, or workers came or went; then the same
        samples come again from `batches`, split anew. `metrics` are averaged over all samples of the step for
        `on_step`. None as loss: these samples count as used and give no gradient.
        """

        def learn(attempt: Attempt, batch: Batch) -> None:
            if loss is not None:
                _check_loss(loss)
                attempt.learn(self._sync, self._policy, loss, metrics, len(batch))

        return self._contribute(learn)

    def _contribute(self, work: Callable[[Attempt, Batch], None]) -> bool:
        """What `step` does, with whatever a micro-batch is used for."""
        batch, attempt, group = self._current, self._attempt, self._group
        if batch is None or attempt is None or group is None:
            raise errors.SettingsContradict("step() needs a batch: call it once for each batch of worker.batches()")
        self._current = None
        try:
            if group.changed and self._lessee is None:
                raise Changed
            work(attempt, batch)
            if batch.fetched.micro + 1 < batch.fetched.micros:
                return False
            self.seconds.switch(EXCHANGE)
            return self._exchange(group, attempt) if self._lessee is None else self._step_alone(group, attempt)
        except Changed:
            return self._resume(group)
        finally:
            self.seconds.switch(COMPUTE)

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, the model's parameters may be written to in place (load_state_dict, clamping, surgery). Every worker
        runs the same edit at the same place of its script; it is committed as a whole. Call it between steps."""
        self._need_attached("edit")
        if self._lessee is not None:
            raise refuse("edit()", "each worker has its own parameters, which may be written to between steps")
        assert self._stepper is not None
        if not self._in_pass:
            self._edits += 1
        self._stepper.edits = self._edits
        if self._group is None:
            yield  # not shared yet: the first state is made of this
            if self._restored is not None and self._edits <= self._restored.record.edits:
                self._restored.apply_weights()  # which have it in already
            return
        self._sync.open_edit()
        if self._stepper.fresh:  # a newcomer on its way to the others, who have made this edit before
            try:
                yield
            finally:
                self._sync.enter(self._group)
            return
        try:
            yield
        except BaseException:
            self._sync.enter(self._group)  # back to what is committed
            raise
        edited = [(parameter, parameter.data) for parameter in self._replica.model.parameters()]
        buffers = [(flat, flat.clone()) for flat in self._replica.buffers.gather()]
        while True:
            group = self._group
            try:
                if group.changed:
                    raise Changed
                with self.seconds.during(EXCHANGE):
                    planned = self._stepper.edit(group, self._record)
                break
            except Changed:
                self._reconfigure(attempted=group.seq + 1)
                if self._group.seq > group.seq:
                    return  # somebody had seen every done word before the generation ended
                for parameter, data in edited:
                    parameter.data = data
                for flat, values in buffers:
                    flat.copy_(values)
        self._record = self._records.read(group.seq)
        if planned:
            self._reconfigure()

    # One pass.

    def _run_pass(self, pass_: Pass, loader: Loader) -> Iterator[Batch]:
        if self._lessee is not None:
            yield from self._run_leased(self._lessee, pass_, loader)
            return
        try:
            self._in_pass = True
            if self._passed(pass_):
                if self._restored is not None and not self._words.commit:
                    # The job went on from behind this pass: what follows is still to be done by workers with ranks.
                    self._become_member(pass_)
                return
            declare(self._run_dir.audit, pass_)
            self._pass = pass_
            if self._group is None:
                # All lower slots are taken. One too many finds out here: as a member it would take the others with it.
                pass_.check(self._slot + 1)
                self._catch_up(pass_, loader)
                self._become_member(pass_)
            assert self._group is not None
            pass_.check(self._group.size)
            self._split_is_new = True
            while True:
                self.seconds.switch(INPUT)
                if self._group.changed:
                    self._reconfigure(attempted=self._group.seq + 1 if self._attempt is not None else None)
                if self._stepper is not None and self._stepper.fresh and self._stepper.newest_pass > pass_.index:
                    return  # the others left this pass early, before this newcomer's first step
                if self._split_is_new:
                    loader.start(self._cursor(pass_), self._group.rank, self._group.size)
                    self._split_is_new, self._attempt = False, None
                fetched = loader.next()
                if fetched is None:
                    return
                yield from self._hand_out(pass_, fetched)
        finally:
            self._in_pass = False
            loader.close()
            if not self.seconds.starting:
                self.seconds.switch(COMPUTE)

    def _catch_up(self, pass_: Pass, loader: Loader) -> None:
        """Read a stream to where the job is, while the others need not wait for it; and again as far as they have come
        meanwhile, as long as that gets less."""
        before_s = math.inf
        while pass_.num_samples is None and self._words.commit and not self._passed(pass_):
            began_s = time.monotonic()
            loader.start(self._cursor(pass_), 0, max(1, self._record.size))
            loader.next()
            took_s = time.monotonic() - began_s
            if took_s < _CAUGHT_UP_S or took_s > 0.8 * before_s:
                return
            before_s = took_s

    def _hand_out(self, pass_: Pass, fetched: Fetched) -> Iterator[Batch]:
        """The batch, for the script's loop; of an empty share there is none, and the step is made without it."""
        self._current = batch = self._open(pass_, fetched)
        if self.seconds.starting:
            self.seconds.started()
        self.seconds.switch(COMPUTE)
        if not len(batch):
            self.step(None)
            return
        yield batch
        if self._current is not None:
            raise errors.SettingsContradict(
                f"the batch of step {batch.step} was not stepped: call worker.step(loss) once for each batch, "
                f"or worker.step(None) to use none of it"
            )

    def _run_leased(self, lessee: Lessee, pass_: Pass, loader: Loader) -> Iterator[Batch]:
        """As `_run_pass`, at this worker's own pace."""
        try:
            declare(self._run_dir.audit, pass_)
            self._pass = pass_
            if self._group is None:
                self._become_member(pass_)
            lessee.begin(pass_, loader)
            while True:
                self.seconds.switch(INPUT)
                assert self._group is not None
                newest, known = self._client.newest, self._group.generation.number
                if newest is not None and newest.number > known and self._attempt is None:
                    lessee.tell()
                    self._reconfigure()
                fetched = lessee.fetch()
                if fetched is None and not lessee.over:
                    self.seconds.switch(WAIT)
                    lessee.wait(known, self._timeouts.beat_s)
                    continue
                self.seconds.switch(COMPUTE)
                epoch = pass_.epochs if fetched is None else fetched.batch.epoch
                if lessee.epoch is not None:
                    for ended in range(lessee.epoch, epoch):
                        self._end_epoch(ended)
                if fetched is None:
                    lessee.mark_complete(self._group)
                    return
                lessee.epoch = max(epoch, lessee.epoch or 0)
                yield from self._hand_out(pass_, fetched)
        finally:
            if lessee.leave(pass_):
                self._attempt = self._current = None
            loader.close()
            if not self.seconds.starting:
                self.seconds.switch(COMPUTE)

    def _step_alone(self, group: Group, attempt: Attempt) -> bool:
        assert self._lessee is not None
        assert self._pass is not None
        self._record, report = self._lessee.step(group, self._record, attempt)
        self._attempt = None
        self._committed(self._pass, report)
        return True

    def _open(self, pass_: Pass, fetched: Fetched) -> Batch:
        assert self._group is not None
        cursor = self._cursor(pass_)
        if fetched.micro == 0 or self._attempt is None:
            lo, hi = fetched.batch.lo, fetched.batch.hi
            if not pass_.leased:
                lo, hi = ledger.split(fetched.batch, self._group.rank, self._group.size)
            self._attempt = Attempt(pass_.index, fetched.batch, lo, hi, time.perf_counter(), fetched.first)
            self.seconds.begin_attempt()
            self._sync.begin()
        self._attempt.ids.append(fetched.ids)
        # Randomness is a function of the step and of the place in its split: there is nothing to restore after a
        # change.
        place = (fetched.batch.epoch, fetched.batch.lo) if pass_.leased else (cursor.step, self._group.rank)
        _seed_everything(ledger.seed_for(pass_.seed, pass_.index, *place, fetched.micro))
        fault_point("forward")
        return Batch(fetched, cursor.step + 1)

    def _exchange(self, group: Group, attempt: Attempt) -> bool:
        assert self._stepper is not None
        assert self._pass is not None
        at = (group, self._record, self._cursor(self._pass), self._pass, attempt)
        report: StepReport | None = None
        if self._pass.train:
            report, planned = self._stepper.train(*at)
            committed = report is not None
        else:
            committed, planned = self._stepper.evaluate(*at, self._results)
        self._attempt = None
        self._record = self._records.read(group.seq)
        if not committed:
            self._split_is_new = True
            self.seconds.give_up()
        if report is not None:
            self._committed(self._pass, report)
        if planned and self._group is group:  # an edit in a callback may have moved on already
            self._reconfigure()
        return committed

    def _resume(self, ended: Group) -> bool:
        """The generation of a step ended before this worker knew that it was committed. Whether it was."""
        assert self._stepper is not None
        assert self._pass is not None
        pending, self._stepper.pending = self._stepper.pending, None
        self._reconfigure(attempted=ended.seq + 1)
        assert self._group is not None
        if pending is None or self._group.seq == ended.seq:
            return False
        self._stepper.fresh = False
        self._committed(self._pass, pending)
        return True

    def _committed(self, pass_: Pass, report: StepReport) -> None:
        self.seconds.switch(COMPUTE)  # what follows is the user's
        self._step_schedulers(self._each_step)
        self._averages = report.metrics
        if report.rank == 0:
            self._metrics.step(report)
        if self._on_step is not None:
            self._on_step(report)
        if self._epoch_ended(pass_):
            self._end_epoch(report.epoch)
        if self._saver is not None and self.rank == 0 and self._saver.due(self._record.step):
            with self.seconds.during(CHECKPOINT):
                self._save()

    def _refuse_checkpoint(self) -> None:
        text = "no checkpoint: workers are not in lockstep, so that there is no state of all"
        self._client.note("checkpoint_failed", text, {"step": self._record.step})

    def _save(self) -> None:
        """Start a checkpoint of what is committed."""
        assert self._saver is not None
        assert self._group is not None
        seq = self._group.seq
        moment = Moment(seq, generation_of(self._words.commit), self._record, self._replica.text())
        self._saver.take(self._sync.state(seq), moment)

    def _save_last(self) -> None:
        """All workers leave, and the job with them: the first of them keeps what is committed."""
        newest, saver, group = self._client.newest, self._saver, self._group
        if saver is None or group is None or newest is None or newest.members:
            return
        if not newest.leavers or newest.leavers[0].worker_id != self.id:
            return
        deadline_s = time.monotonic() + self._timeouts.budget_s
        while any(self._words.get(leaver.slot, ACK) < newest.number for leaver in newest.leavers):
            if time.monotonic() > deadline_s:
                return  # somebody may still be committing
            time.sleep(0.001)
        group.seq, before = seq_of(self._words.commit), group.seq
        if group.seq > before:  # committed, but this worker was told to leave before it knew
            step, self._record = self._record.step, self._records.read(group.seq)
            if self._record.step > step:
                self._step_schedulers(self._each_step)
                if self._record.position == ENDED:
                    self._step_schedulers(self._epoch_schedulers)
        self._save_and_wait()

    def _save_and_wait(self) -> None:
        assert self._saver is not None
        assert self._group is not None
        with self.seconds.during(CHECKPOINT):
            self._saver.finish()
            if self._record.step and self._saver.saved_seq != self._group.seq:
                self._save()
                self._saver.finish()

    def _step_schedulers(self, schedulers: Sequence[Scheduler]) -> None:
        self._replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it
        for scheduler in schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self._record.loss)
            else:
                scheduler.step()

    def _epoch_ended(self, pass_: Pass) -> bool:
        """Whether the newest commit was the last of its epoch."""
        return self._record.pass_index < pass_.index or self._record.position == ENDED

    def _end_epoch(self, epoch: int) -> None:
        self._step_schedulers(self._epoch_schedulers)
        if self._on_epoch is not None:
            self._on_epoch(epoch)

    def _cursor(self, pass_: Pass) -> Cursor:
        return ledger.begin(self._record.cursor, pass_.index)

    # Between generations.

    def _passed(self, pass_: Pass) -> bool:
        """Whether the job has finished this pass already; a worker that is not in yet looks without joining."""
        if self._group is not None:
            return ledger.complete(pass_, self._cursor(pass_), self._group.size)
        while commit := self._words.commit:
            self._seq = seq_of(commit)
            self._record = self._records.read(self._seq)
            passed = ledger.complete(pass_, self._cursor(pass_), max(1, self._record.size))
            if passed:  # the script goes on without this pass, and must not go on with the model as it built it
                self._sync.look(self._seq)
            if self._words.commit == commit:
                return passed
        # Before the job goes on from a checkpoint, that says where it is.
        return self._restored is not None and ledger.complete(pass_, self._cursor(pass_), max(1, self._record.size))

    def _become_member(self, pass_: Pass) -> None:
        fault_point("join")
        self._asked_in = True
        self._client.ready()
        assert self._stepper is not None
        self._stepper.fresh = True
        if self._enter(above=0):
            self._stepper.fresh = False
            self._restored = None
        else:
            self._restored = None
            # Hyperparameters and schedulers as they were in the newest step; then what its commit did to everybody's.
            self._replica.take_text(self._records.text(self._record.text_place, self._record.text_bytes))
            if self._record.step and not self._record.totals:
                self._step_schedulers(self._each_step)
                if self._epoch_ended(pass_):
                    self._step_schedulers(self._epoch_schedulers)

    def _reconfigure(self, attempted: int | None = None) -> None:
        """Enter the next generation. `attempted`: the commit this worker worked towards, which may have happened."""
        assert self._group is not None
        began_s = time.perf_counter()
        was = self.seconds.switch(RECONFIGURE)
        trained = self._attempt is not None
        self._attempt = self._current = None
        self._enter(above=self._group.generation.number)
        redone = attempted is not None and self._group.seq < attempted
        redone_s, waited_s = self.seconds.give_up() if trained and redone else (0.0, 0.0)
        change = Reconfiguration(
            generation=self.generation,
            workers=tuple(member.worker_id for member in self._group.members),
            rank=self.rank,
            step=self._record.step,
            redone=redone,
            took_s=time.perf_counter() - began_s,
            redone_s=redone_s,
            waited_s=waited_s,
        )
        self._metrics.reconfigured(change)
        _log.info("%s: %s", self.id, change)
        if self._on_reconfigure is not None:
            self._on_reconfigure(change)
        self.seconds.switch(was)

    def _enter(self, above: int) -> bool:
        """Enter the newest generation with the state that is committed. Where there is none, commit the first one;
        true then."""
        assert self._stepper is not None
        self._split_is_new = True
        founded = False
        if self._saver is not None:
            self._saver.hold()  # whoever comes next may overwrite what is being copied
        if self._lessee is not None:
            # Each has a state of its own: there is nothing to agree on, and nobody to wait for.
            self._group = group = self._parking.enter(above, meet=False)
            group.seq = self._record.step
            if self._placement is not None:
                self._placement.apply(group)
            self._sync.enter(group)
            return True
        while True:
            try:
                self._group = group = self._parking.enter(above)
            except Leave:
                self._save_last()
                raise
            above = group.generation.number
            if self._stepper.fresh and not founded and group.seq and group.generation.finishing:
                self._client.leave()  # let in by the last step of the others: there is nothing to do for a newcomer
                continue
            if self._placement is not None:
                self._placement.apply(group)
            self._sync.enter(group)
            if group.seq:
                break
            try:
                founded = True
                self._stepper.edits = self._edits
                if not self._stepper.found(group, self._restored):
                    break
            except Changed:
                continue
        self._record = self._records.read(group.seq)
        self._stepper.enter(self._record)
        return founded

    # The client's side.

    def progress(self) -> Progress:
        notice, record = self._notice, self._record
        waited_s = time.monotonic() - notice.awaited_since_s if notice.awaited is not None else 0.0
        waiting = (notice.awaited_id,) if waited_s > self._timeouts.beat_s else ()
        seq = self._group.seq if self._group else 0
        seconds = self.seconds.snapshot()
        now = Progress(seq, record.step, record.epoch, record.samples, record.loss, waiting, seconds, self._averages)
        pass_ = self._pass
        if pass_ is None or pass_.train:
            return now
        position = record.position if record.pass_index == pass_.index else 0
        return replace(
            now, evaluating=pass_.index, evaluated=(pass_.num_samples or 0) if position == ENDED else position
        )

    def _beat(self) -> Progress:
        progress = self.progress()
        self._metrics.seconds(self.generation, progress.step, progress.seconds)
        return progress

    def _in_loader(self) -> None:
        """First thing in a loader process: it answers to this worker only, and holds nothing of the job open."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        metrics.arm(None)
        with open(self._run_dir.loaders, "a") as known:  # the launcher clears away what a killed one leaves
            known.write(f"{os.getpid()}\n")
        self._client.close_in_child()

    def _need_attached(self, what: str) -> None:
        if self._stepper is None:
            raise errors.SettingsContradict(f"{what}() before attach(): attach the model and its optimizer first")

    # The life of the process, driven by `run`.

    def on_sigterm(self, signum: int, *_: object) -> None:
        """Drain: finish the step, leave, exit 0. A worker that is not in a group yet has nothing to finish."""
        self.left_by = signum
        self._client.leave()
        if not self._asked_in:
            raise Leave

    def scale(self, target: int, *, relative: bool = False) -> None:
        """Ask for another number of workers, as `shoal scale` does."""
        self._client.scale(target, relative)

    def finish(self) -> None:
        """The script's main returned: leave for good, and tell what the state is."""
        self.seconds.switch(RECONFIGURE)
        group, record = self._group, self._record
        if self._saver is not None and group is not None and group.rank == 0:
            self._save_and_wait()
        seq = group.seq if group else self._seq
        digest = self._sync.digest(seq) if seq else ""
        report = {"loss": record.loss, "samples": record.samples, "skipped": record.skipped}
        self._client.finished(digest, record.step, seq, report)
        self._parking.leave(group.generation.number if group else 0)

    def fail(self, problem: Exception) -> None:
        """Tell the coordinator that this worker cannot go on. A fault of the machine is not told: like any death, it is
        seen by the launcher, and another worker takes this one's place."""
        if isinstance(problem, errors.ShoalError) and not isinstance(problem, errors.UserMistake):
            return
        kind = type(problem).__name__ if isinstance(problem, errors.ShoalError) else "ScriptFailed"
        self._client.failed(kind, str(problem), "".join(traceback.format_exception(problem)))

    def close(self) -> None:
        if self._stepper is not None:
            self._audit.close()
        if self._saver is not None:
            self._saver.finish()
        self._client.close()
        self._metrics.close(self.generation, self._record.step, self.seconds.snapshot())


def _count(metrics: Mapping[str, float | torch.Tensor], attempt: Attempt, batch: Batch) -> None:
    attempt.add(len(batch), 0.0, metrics)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise errors.SettingsContradict(
            f"the loss is a {type(loss).__name__}: give the tensor, so that it can be derived"
        )
    if loss.dim() != 0:
        raise errors.SettingsContradict(
            f"the loss has shape {tuple(loss.shape)}: reduce it to one number, by mean or sum"
        )
    if not loss.requires_grad:
        raise errors.SettingsContradict(
            "the loss depends on no parameter that is trained: was it detached, or all frozen?"
        )


def _seed_everything(seed: int) -> None:
    # Not torch.manual_seed: while CUDA is not initialised it writes down a traceback at each call, which takes 2 ms.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
