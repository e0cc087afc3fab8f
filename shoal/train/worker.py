"""One worker: what a user's script holds while it trains."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shoal import errors
from shoal.checkpoints import Every
from shoal.control.client import Progress
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.batches import Loader
from shoal.data.fed import AuditWriter
from shoal.data.indexed import samples_in
from shoal.data.ledger import Pass
from shoal.data.prefetch import Prefetch
from shoal.seconds import RECONFIGURE
from shoal.sync.allreduce import AllReduce
from shoal.sync.batchnorm import SyncBatchNorm
from shoal.sync.collectives import Collectives
from shoal.sync.memory import HostMemory
from shoal.sync.replica import Replica, Scheduler
from shoal.sync.replicated import Replicated
from shoal.sync.scaling import LossScaler
from shoal.sync.sync import Sync
from shoal.train.attempt import Attempt, Batch, Policy
from shoal.train.callbacks import Callbacks, OnEpoch, OnReconfigure, OnStep
from shoal.train.checkpoint import Restored, Saver, start_from
from shoal.train.device import choose
from shoal.train.evaluate import Results, Rows
from shoal.train.failure import one_line
from shoal.train.leased import Leased, Lessee, refuse
from shoal.train.lockstep import Lockstep
from shoal.train.pace import Pace
from shoal.train.reconfigure import Leave, Placement
from shoal.train.schedules import Schedule
from shoal.train.seat import Seat
from shoal.train.step import Stepper


class Worker:
    """Made by `shoal.run`; not by hand."""

    def __init__(
        self, worker_id: str, host: str, run_dir: RunDir, memory: HostMemory, timeouts: Timeouts,
        placement: Placement | None, environment: WorkerEnvironment | None = None,
    ) -> None:  # fmt: skip
        """Without an environment, no checkpoints are taken."""
        self.id, self.host = worker_id, host
        self.left_by = int(signal.SIGTERM)  # the signal that made it leave
        self._run_dir = run_dir
        self._environment = environment
        self._pace: Pace | None = None  # once a model is attached
        self._audit: AuditWriter | None = None
        self._saver: Saver | None = None
        self._passes = 0
        address = "" if environment is None else environment.address
        self._seat = Seat(worker_id, host, run_dir, memory, timeouts, placement, address)

    # What a script asks.

    @property
    def rank(self) -> int:
        """This worker's index in the present generation, which may change between steps; 0 always exists. -1 while it
        is no member: before the first batch, and in code after a pass that the others did without it."""
        return self._seat.rank

    @property
    def size(self) -> int:
        return self._seat.group.size if self._seat.group else 1

    @property
    def generation(self) -> int:
        return self._seat.generation

    @property
    def steps(self) -> int:
        """Steps committed in this job so far."""
        return self._seat.record.step

    @property
    def device(self) -> torch.device:
        """Where this worker's model belongs: a GPU, of several the one that goes with its place on the host, or the
        CPU. As `shoal run --device` says; left to itself, a GPU where there is one. DeviceMissing where it is asked for
        and there is none."""
        return choose(self._environment.device if self._environment is not None else "auto", self._seat.slot)

    @property
    def collectives(self) -> Collectives:
        """Operations on any tensors with the other workers of the present generation, matched by name."""
        return self._seat.collectives

    def regroup(self) -> None:
        """Be in the newest generation, together with all its members. For a script that uses `collectives` without a
        loop over batches: every worker calls it first, and after Changed, and what they go on with is theirs to agree
        on. Inside a loop `step` does it."""
        seat = self._seat
        if self._pace is not None:
            self._pace.regroup()
            return
        if seat.group is None:
            seat.ask_in()
        elif not seat.outdated:
            return
        seat.place(seat.enter(above=seat.generation))

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
        scaler: LossScaler | None = None,
        on_step: OnStep | None = None,
        on_epoch: OnEpoch | None = None,
        on_reconfigure: OnReconfigure | None = None,
    ) -> None:
        """Share the model and its optimizer with the job's other workers.

        loss: whether the loss given to `step` is a mean or a sum over its samples. clip_norm: bound of the norm of the
        whole gradient. accumulate: micro-batches a step. schedulers are stepped at every commit, epoch_schedulers at
        the end of every epoch. schedule: a factor of the learning rate that sees the number of workers. nan: what a
        loss that is not finite does. scaler: of the loss, for float16 on a GPU.

        Without a sync, it is AllReduce for a model on the CPU and Replicated for one on a GPU. A model may be compiled
        before or after this.
        """
        if self._pace is not None:
            raise errors.SettingsContradict("attach() was called before: a worker trains one model")
        if self._seat.group is not None:
            raise errors.SettingsContradict("attach() after regroup(): attach the model first, and loop over batches")
        if clip_norm is not None and clip_norm <= 0:
            raise errors.SettingsContradict(f"clip_norm is {clip_norm}: give a positive bound, or none")
        if accumulate < 1:
            raise errors.SettingsContradict(f"accumulate is {accumulate}: a step has at least one micro-batch")
        if nan not in ("stop", "skip") or loss not in ("mean", "sum"):
            raise errors.SettingsContradict(
                f"nan={nan!r}, loss={loss!r}: nan is 'stop' or 'skip', loss 'mean' or 'sum'"
            )
        seat = self._seat
        model = getattr(model, "_orig_mod", model)  # of a compiled one: names in checkpoints are the model's own
        self._sync = sync or _sync_for(model)
        _check_device(self._sync, model)
        if scaler is not None:
            if not isinstance(self._sync, Replicated):
                raise errors.SettingsContradict(
                    f"scaler with {type(self._sync).__name__}: losses are scaled by sync=shoal.Replicated(), which is "
                    "what a model on a GPU has"
                )
            self._sync.scaler = scaler
        self._policy = Policy(loss, clip_norm, nan, schedule)
        self._accumulate = accumulate
        restored = self._start_from(model, optimizer)
        # What is scaled how belongs to a commit as the state of schedulers does.
        kept = (*schedulers, *epoch_schedulers, *((scaler,) if scaler is not None else ()))
        self._replica = Replica(model, optimizer, kept)
        self._sync.bind(self._replica, seat.memory, seat.words, seat.slot, seat.agree)
        if restored is not None:
            restored.apply_training(self._replica)
        self._audit = AuditWriter(self._run_dir.audit, self.id)
        callbacks = Callbacks(optimizer, tuple(schedulers), tuple(epoch_schedulers), on_step, on_epoch, on_reconfigure)
        if self._sync.lockstep:
            stepper = Stepper(self._sync, self._replica, seat.records, self._audit, self._policy)
            self._saver = self._make_saver()
            self._pace = Lockstep(seat, self._sync, self._replica, stepper, callbacks, self._saver, restored)
        else:
            lessee = Lessee(seat.client, self._audit, self._sync, self._replica, self._policy)
            self._pace = Leased(seat, self._sync, callbacks, lessee)
            if seat.slot == 0:  # one of all is enough to say it
                print("shoal: workers are not in lockstep, no checkpoints are taken", file=sys.stderr)

    def _start_from(self, model: nn.Module, optimizer: Optimizer) -> Restored | None:
        """Take the checkpoint or the weights that the job begins with, unless it has begun already."""
        if self._environment is None or self._seat.words.commit:
            return None
        if self._environment.resume:
            if not self._sync.lockstep:
                raise refuse("to go on from a checkpoint", "begin anew with shoal run --init-from")
            restored = Restored(Path(self._environment.resume), model, optimizer)
            self._seat.record = restored.record
            return restored
        if self._environment.init_from:
            start_from(Path(self._environment.init_from), model)
        return None

    def _make_saver(self) -> Saver | None:
        if self._environment is None:
            return None
        every = Every.parse(self._environment.checkpoint_every)
        keep, began_at = self._environment.checkpoint_keep, self._run_dir.settings()["created"]
        return Saver(self._run_dir.checkpoints, every, keep, began_at, self._seat.client.note)

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
        device: torch.device | str | None = None,
    ) -> Iterator[Batch]:
        """This worker's micro-batches of a pass over the data: every sample of every epoch once, over all workers.

        batch_size is one worker's (a step takes batch_size × workers × accumulate), global_batch the whole step's
        whatever the number of workers. Call `step` once for each batch. A data set that can only be iterated over is a
        stream: every worker reads all of it and uses its share, so it must give the same samples in the same order
        everywhere. The others are shuffled unless told not to. device: where the batches are to be; to a GPU they are
        copied from pinned memory while the one before is computed.
        """
        pace, samples = self._attached("batches"), samples_in(dataset)
        leased = isinstance(pace, Leased)
        if leased and global_batch is not None:
            raise refuse(f"global_batch={global_batch}", "give batch_size, of one worker's step")
        if leased and samples is None:
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
            leased=leased,
        )
        to = torch.device(device) if device is not None else None
        loader = Loader(
            dataset, pass_, num_workers=num_workers, pin_memory=pin_memory or (to is not None and to.type == "cuda"),
            prefetch_factor=prefetch_factor, collate_fn=collate_fn, in_child=self._seat.in_loader,
        )  # fmt: skip
        return pace.batches(pass_, loader if to is None else Prefetch(loader, to, ahead=not leased))

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
        return Results(self._run_dir.results).read(index)

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
        pace = self._attached("evaluate() and predict")
        if isinstance(pace, Leased):
            raise refuse("evaluate() or predict()", "each worker has its own model, and can use it without")
        samples = samples_in(dataset)
        batch_size = min(batch_size, samples or batch_size)
        pass_ = Pass(self._next_pass(), samples, 1, 0, False, False, None, batch_size, 1, train=False)
        loader = Loader(dataset, pass_, num_workers=num_workers, collate_fn=collate_fn, in_child=self._seat.in_loader)
        modes = [(module, module.training) for module in self._replica.model.modules()]
        self._replica.model.eval()
        try:
            for batch in pace.batches(pass_, loader):
                with torch.inference_mode():
                    metrics = use(batch)
                pace.contribute(partial(_count, metrics))
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
                last = batch.fetched.micro + 1 == batch.fetched.micros
                attempt.learn(self._sync, self._policy, loss, metrics, len(batch), last=last)

        return self._attached("step").contribute(learn)

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, the model's parameters may be written to in place (load_state_dict, clamping, surgery). Every worker
        runs the same edit at the same place of its script; it is committed as a whole. Call it between steps."""
        pace = self._attached("edit")
        if not isinstance(pace, Lockstep):
            raise refuse("edit()", "each worker has its own parameters, which may be written to between steps")
        with pace.edit():
            yield

    def _attached(self, what: str) -> Pace:
        if self._pace is None:
            raise errors.SettingsContradict(f"{what}() before attach(): attach the model and its optimizer first")
        return self._pace

    # The life of the process, driven by `run`.

    def on_sigterm(self, signum: int, *_: object) -> None:
        """Drain: finish the step, leave, exit 0. A worker that is not in a group yet has nothing to finish."""
        self.left_by = signum
        self._seat.client.leave()
        if not self._seat.asked_in:
            raise Leave

    def scale(self, target: int, *, relative: bool = False) -> None:
        """Ask for another number of workers, as `shoal scale` does."""
        self._seat.client.scale(target, relative)

    def progress(self) -> Progress:
        return self._seat.progress()

    def finish(self) -> None:
        """The script's main returned: leave for good, and tell what the state is."""
        seat = self._seat
        seat.seconds.switch(RECONFIGURE)
        if isinstance(self._pace, Lockstep):
            self._pace.finish()
        group, record = seat.group, seat.record
        seq = group.seq if group else seat.looked_at
        digest = self._sync.digest(seq) if seq else ""
        report = {"loss": record.loss, "samples": record.samples, "skipped": record.skipped}
        seat.client.finished(digest, record.step, seq, report)
        seat.parking.leave(seat.generation)

    def fail(self, problem: Exception) -> None:
        """Tell the coordinator that this worker cannot go on. A fault of the machine is not told: like any death, it is
        seen by the launcher, and another worker takes this one's place."""
        if isinstance(problem, errors.ShoalError) and not isinstance(problem, errors.UserMistake):
            return
        ours = isinstance(problem, errors.ShoalError)
        kind, message = (type(problem).__name__, str(problem)) if ours else ("ScriptFailed", one_line(problem))
        fresh = isinstance(self._pace, Lockstep) and self._pace.fresh
        self._seat.client.failed(kind, message, "".join(traceback.format_exception(problem)), fresh=fresh)

    def close(self) -> None:
        if self._audit is not None:
            self._audit.close()
        if self._saver is not None:
            self._saver.finish()
        self._seat.close()
        if self._pace is not None:
            self._sync.close()


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


def _sync_for(model: nn.Module) -> Sync:
    on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    return Replicated() if on_gpu else AllReduce()


def _check_device(sync: Sync, model: nn.Module) -> None:
    if not isinstance(sync, Replicated) and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise errors.SettingsContradict(
            f"SyncBatchNorm with {type(sync).__name__}: only shoal.Replicated() sums inside of a forward pass; give it "
            "as sync, or use BatchNorm"
        )
    for name, parameter in model.named_parameters():
        if isinstance(sync, AllReduce) and parameter.device.type == "cuda":
            raise errors.ModelUnusable(
                f"parameter {name} is on {parameter.device}, and AllReduce keeps the model in the host's memory: "
                "attach without a sync, or with shoal.Replicated()"
            )
