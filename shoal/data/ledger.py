"""Which samples a step takes, and which of them are whose: pure functions over frozen values.

The order of the samples is a permutation of (seed, pass, epoch) and knows nothing of the workers. A step takes the next
range of it from the cursor, and each worker a share of that range. A step that is done again takes the same range with
a new split, so that "every sample exactly once" is a property of the cursor.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from shoal.errors import DataUnusable

Ids = npt.NDArray[np.int64]

# The position of an epoch that is over. Whether it is, the step before decides and not whoever comes after it: how much
# is dropped depends on their number, and how long a stream is shows only when its end comes.
ENDED = 1 << 62


@dataclass(frozen=True)
class Pass:
    """What one call of `Worker.batches` goes over; DataUnusable when it would give no step.

    Without `num_samples` it is a stream: in an order of its own, and of a length that nobody knows.
    A step takes `global_batch` samples whatever the number of workers, or `worker_batch` × workers × `accumulate`.
    Exactly one of the two is set. Each worker's share is cut in `accumulate` micro-batches.
    """

    index: int
    num_samples: int | None
    epochs: int
    seed: int
    shuffle: bool
    drop_last: bool
    global_batch: int | None
    worker_batch: int | None
    accumulate: int
    train: bool = True  # or it is an evaluation: samples are used, and nothing is learned
    leased: bool = False  # workers do not move in lockstep: `leases` says which samples are whose, and not a cursor

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise self._unusable("the data set is empty", "give it at least one sample")
        if self.epochs < 1:
            raise self._unusable(f"epochs is {self.epochs}", "ask for 1 or more")
        if self.accumulate < 1:
            raise self._unusable(f"accumulate is {self.accumulate}", "ask for 1 or more")
        if (self.global_batch is None) == (self.worker_batch is None):
            both = f"global_batch is {self.global_batch} and batch_size is {self.worker_batch}"
            raise self._unusable(both, "set exactly one of them")
        name, batch = ("global_batch", self.global_batch) if self.global_batch else ("batch_size", self.worker_batch)
        if batch is None or batch < 1:
            raise self._unusable(f"the batch is {batch or 0} samples", "ask for 1 or more")
        if self.num_samples is None:
            if self.shuffle:
                raise self._unusable("a stream has its own order", "set shuffle=False, and shuffle where it is made")
        elif batch > self.num_samples:
            raise self._unusable(
                f"{name} is {batch}, the data has {self.num_samples} samples",
                f"lower it to {self.num_samples} or give more data",
            )
        self.check(size=1)

    def check(self, size: int) -> None:
        """DataUnusable when `size` workers cannot share this data."""
        if self.num_samples is None:
            return
        if size > self.num_samples:
            raise self._unusable(
                f"{size} workers would share {self.num_samples} samples", f"run at most {self.num_samples} workers"
            )
        if self.drop_last and self.step_samples(size) > self.num_samples:
            raise self._unusable(
                f"a step of {size} workers takes {self.step_samples(size)} samples, the data has {self.num_samples} "
                "and drop_last leaves no step",
                "lower the batch, accumulate or the number of workers, or set drop_last=False",
            )

    @cached_property
    def settings(self) -> str:
        """For a statement: hosts with run directories of their own cannot look what others have declared."""
        said = {name: value for name, value in asdict(self).items() if name != "index"}
        return "".join(f", {json.dumps(name)}: {json.dumps(value, default=int)}" for name, value in said.items())

    def step_samples(self, size: int) -> int:
        """How many samples a full step of `size` workers takes."""
        if self.global_batch is not None:
            return self.global_batch
        assert self.worker_batch is not None
        return self.worker_batch * size * self.accumulate

    def too_few(self, size: int) -> int:
        """Fewer samples than this are no step of `size` workers."""
        return self.step_samples(size) if self.drop_last else 1

    def order(self, epoch: int) -> Ids:
        """The ids in the order the epoch uses them. A second pass with the same seed has another order."""
        assert self.num_samples is not None, "a stream has its own order"
        return permutation(seed_for(self.seed, self.index), epoch, self.num_samples, self.shuffle)

    def ids(self, epoch: int, lo: int, hi: int) -> Ids:
        """The ids of a range of the order. Those of a stream are the places in it."""
        return np.arange(lo, hi, dtype=np.int64) if self.num_samples is None else self.order(epoch)[lo:hi]

    def sample_seed(self, epoch: int, sample_id: int) -> int:
        """What augmentation of one sample is seeded with, wherever and however often it is read."""
        return seed_for(self.seed, self.index, epoch, sample_id)

    def _unusable(self, what: str, next_: str) -> DataUnusable:
        return DataUnusable(f"pass {self.index}: {what}; {next_}")


@dataclass(frozen=True)
class Cursor:
    """Where the job is: the next sample's position in the epoch's order, and the steps and samples applied so far."""

    pass_index: int = 0
    epoch: int = 0
    position: int = 0
    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step: the range [lo, hi) of the epoch's order."""

    epoch: int
    lo: int
    hi: int
    last: bool = False  # of its epoch; of a stream's its reader knows


def take(pass_: Pass, cursor: Cursor, size: int) -> GlobalBatch | None:
    """The samples of the next step of `size` workers; None when the pass is complete. A stream may have fewer."""
    assert cursor.pass_index >= pass_.index, f"pass {pass_.index} has not begun at {cursor}"
    if cursor.pass_index > pass_.index:
        return None
    pass_.check(size)
    epoch, position = cursor.epoch, cursor.position
    if position == ENDED:
        epoch, position = epoch + 1, 0
    if epoch >= pass_.epochs:
        return None
    hi = position + pass_.step_samples(size)
    if pass_.num_samples is None:
        return GlobalBatch(epoch, position, hi)
    hi = min(hi, pass_.num_samples)
    return GlobalBatch(epoch, position, hi, last=pass_.num_samples - hi < pass_.too_few(size))


def advance(cursor: Cursor, batch: GlobalBatch) -> Cursor:
    """The cursor after `batch` was applied."""
    return Cursor(
        pass_index=cursor.pass_index,
        epoch=batch.epoch,
        position=ENDED if batch.last else batch.hi,
        step=cursor.step + 1,
        samples=cursor.samples + batch.hi - batch.lo,
    )


def complete(pass_: Pass, cursor: Cursor, size: int) -> bool:
    """Whether the pass has no step left for `size` workers."""
    return take(pass_, cursor, size) is None


def begin(cursor: Cursor, pass_index: int) -> Cursor:
    """The cursor at the start of a pass. A pass that the job has begun or finished is left where it is, so that a
    worker that joins late may begin it too."""
    if pass_index <= cursor.pass_index:
        return cursor
    return replace(cursor, pass_index=pass_index, epoch=0, position=0)


def split(batch: GlobalBatch, rank: int, size: int) -> tuple[int, int]:
    """The share [lo, hi) of one rank. It may be empty, but never rank 0's."""
    return _part(batch.lo, batch.hi, rank, size)


def micro(lo: int, hi: int, accumulate: int) -> list[tuple[int, int]]:
    """A share cut in micro-batches, of which the last may be empty."""
    return [_part(lo, hi, index, accumulate) for index in range(accumulate)]


def _part(lo: int, hi: int, index: int, parts: int) -> tuple[int, int]:
    base, rem = divmod(hi - lo, parts)
    start = lo + index * base + min(index, rem)
    return start, start + base + (index < rem)


# Two: the epoch that is trained and the one that is prefetched.
@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_samples: int, shuffle: bool) -> Ids:
    """The ids 0 … num_samples-1 in the order of the epoch; the identity when not shuffled. The array is read-only."""
    if shuffle:
        mixed = seed_for(seed, epoch)
        # RandomState and not a Generator: its streams are the same in every version of numpy.
        state = np.random.RandomState([mixed & 0xFFFFFFFF, mixed >> 32])
        ids = state.permutation(num_samples).astype(np.int64, copy=False)
    else:
        ids = np.arange(num_samples, dtype=np.int64)
    ids.setflags(write=False)
    return ids


def seed_for(*parts: int) -> int:
    """A number of 63 bits that depends on the parts only: the same in every process, version and machine."""
    text = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
