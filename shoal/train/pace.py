"""How one worker goes over its passes: with all others (`lockstep.py`), or by itself (`leased.py`). Here is what both
do: a batch goes to the script and comes back, a step is told, a generation is entered."""

from __future__ import annotations

import logging
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from shoal import errors
from shoal.data import ledger
from shoal.data.batches import Fetched, Loader
from shoal.data.ledger import Pass
from shoal.metrics import fault_point
from shoal.seconds import COMPUTE, RECONFIGURE
from shoal.sync.group import Group
from shoal.sync.sync import Sync
from shoal.train.attempt import Attempt, Batch
from shoal.train.callbacks import Callbacks
from shoal.train.reconfigure import Reconfiguration
from shoal.train.seat import Seat
from shoal.train.step import StepReport

Use = Callable[[Attempt, Batch], None]  # what a batch is for: it adds to the attempt

_log = logging.getLogger("shoal.worker")


class Pace(ABC):
    def __init__(self, seat: Seat, sync: Sync, callbacks: Callbacks) -> None:
        self._seat, self._sync, self._callbacks = seat, sync, callbacks
        self._seconds = seat.seconds
        self._attempt: Attempt | None = None
        self._batch: Batch | None = None  # that the script has, until it steps

    @abstractmethod
    def batches(self, pass_: Pass, loader: Loader) -> Iterator[Batch]:
        """This worker's batches of the pass. Call `contribute` once for each."""

    def contribute(self, use: Use) -> bool:
        """Use the batch that the script has; with the last micro-batch of a step, make the step. False: micro-batches
        are left, or the step comes again."""
        batch, attempt, group = self._batch, self._attempt, self._seat.group
        if batch is None or attempt is None or group is None:
            raise errors.SettingsContradict("step() needs a batch: call it once for each batch of worker.batches()")
        self._batch = None
        try:
            return self._contribute(group, attempt, batch, use)
        finally:
            self._seconds.switch(COMPUTE)

    def regroup(self) -> None:
        """As `Worker.regroup`."""
        if self._batch is not None or self._seat.group is None:
            raise errors.SettingsContradict(
                "regroup() is for scripts without a loop over batches, and for what comes after one: inside, step() "
                "does it"
            )
        if self._seat.outdated:
            self._reconfigure()

    @abstractmethod
    def _contribute(self, group: Group, attempt: Attempt, batch: Batch, use: Use) -> bool: ...

    @abstractmethod
    def _enter(self, above: int) -> bool:
        """Enter the newest generation, which is above number `above`. True: the state it goes on with is the one that
        this worker brought, or brought with others. Leave, when this worker is to leave the job."""

    def _hand_out(
        self, pass_: Pass, fetched: Fetched, share: tuple[int, int], place: tuple[int, int]
    ) -> Iterator[Batch]:
        """The batch, for the script's loop; of an empty share there is none, and the step is made without it. `share`:
        of the step's samples. `place`: two numbers that no other share of the pass has."""
        self._batch = batch = self._open(pass_, fetched, share, place)
        if self._seconds.starting:
            self._seconds.started()
        self._seconds.switch(COMPUTE)
        if not len(batch):
            self.contribute(lambda attempt, batch: None)
            return
        yield batch
        if self._batch is not None:
            raise errors.SettingsContradict(
                f"the batch of step {batch.step} was not stepped: call worker.step(loss) once for each batch, "
                f"or worker.step(None) to use none of it"
            )

    def _open(self, pass_: Pass, fetched: Fetched, share: tuple[int, int], place: tuple[int, int]) -> Batch:
        if fetched.micro == 0 or self._attempt is None:
            self._attempt = Attempt(
                pass_.index, fetched.batch, *share, time.perf_counter(), fetched.first, pass_.settings
            )
            self._seconds.begin_attempt()
            self._sync.begin()
            if self._sync.needs_all and pass_.train:
                self._check_all_have_samples(pass_, fetched)
        self._attempt.ids.append(fetched.ids)
        # Randomness is a function of the step and of the place in its split: there is nothing to restore after a
        # change.
        _seed_everything(ledger.seed_for(pass_.seed, pass_.index, *place, fetched.micro))
        fault_point("forward")
        return Batch(fetched, self._seat.record.step + 1)

    def _check_all_have_samples(self, pass_: Pass, fetched: Fetched) -> None:
        size, samples = self._seat.group.size if self._seat.group else 1, fetched.batch.hi - fetched.batch.lo
        if samples < size * pass_.accumulate:
            raise errors.SettingsContradict(
                f"a step of {samples} samples leaves some of {size} workers without, and SyncBatchNorm needs one of "
                "each: use drop_last=True, or a larger batch"
            )

    def _committed(self, report: StepReport) -> None:
        self._seconds.switch(COMPUTE)  # what follows is the user's
        self._callbacks.step_schedulers(self._seat.record.loss)
        self._seat.tell(report)
        if self._callbacks.on_step is not None:
            self._callbacks.on_step(report)

    def _end_epoch(self, epoch: int) -> None:
        self._callbacks.step_epoch_schedulers(self._seat.record.loss)
        if self._callbacks.on_epoch is not None:
            self._callbacks.on_epoch(epoch)

    def _reconfigure(self, attempted: int | None = None) -> None:
        """Enter the next generation. `attempted`: the commit this worker worked towards, which may have happened."""
        seat, seconds = self._seat, self._seconds
        began_s = time.perf_counter()
        was = seconds.switch(RECONFIGURE)
        trained = self._attempt is not None
        self._attempt = self._batch = None
        self._enter(above=seat.generation)
        group = seat.group
        assert group is not None
        redone = attempted is not None and group.seq < attempted
        redone_s, waited_s = seconds.give_up() if trained and redone else (0.0, 0.0)
        change = Reconfiguration(
            generation=group.generation.number,
            workers=tuple(member.worker_id for member in group.members),
            rank=group.rank,
            step=seat.record.step,
            redone=redone,
            took_s=time.perf_counter() - began_s,
            redone_s=redone_s,
            waited_s=waited_s,
        )
        seat.metrics.reconfigured(change)
        _log.info("%s: %s", seat.worker_id, change)
        if self._callbacks.on_reconfigure is not None:
            self._callbacks.on_reconfigure(change)
        seconds.switch(was)


def begun_inside() -> errors.SettingsContradict:
    return errors.SettingsContradict(
        "evaluate(), predict() or another batches() was called inside this loop, and its pass cannot go on after that: "
        "call them between loops, for example with one batches() for each epoch"
    )


def _seed_everything(seed: int) -> None:
    # Not torch.manual_seed: while CUDA is not initialised it writes down a traceback at each call, which takes 2 ms.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
