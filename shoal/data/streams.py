"""Reads streams: data sets that can be iterated over and nothing else.

Every worker reads the whole stream and uses its share of each step, so the stream must give the same samples in the
same order wherever and whenever it is read. What is not committed yet is kept where it was read: when workers come or
go, the same samples are split anew and nobody reads them twice.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import worker as torch_loader_process

from shoal.data import ledger, randomness
from shoal.data.ledger import Cursor, GlobalBatch, Ids, Pass
from shoal.errors import DataUnusable


@dataclass(frozen=True)
class StreamRequest:
    """A micro-batch of one rank's share of a step. The step may be shorter than `batch`: its reader knows."""

    split_index: int
    batch: GlobalBatch
    rank: int
    size: int
    micro: int


class StreamRead(NamedTuple):
    """What came of a request: the range [lo, hi) of the stream. Without a batch, the epoch ended first, at `end`."""

    data: Any
    ids: Ids
    batch: GlobalBatch | None
    lo: int
    hi: int
    first: int  # a digest of the step's first sample
    end: int


class Stream(Dataset[Any]):
    """A user's stream, read by requests that go forward within an epoch, or start again where all is committed."""

    def __init__(self, dataset: Iterable[Any], pass_: Pass, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._pass = dataset, pass_
        self._collate = collate_fn or default_collate
        # Shared with the loader processes: the newest split, and the epoch and position that is next to be committed.
        self._shared = memoryview(mmap.mmap(-1, 24)).cast("q")
        self._epoch = -1
        self._samples: Iterator[Any] = iter(())
        self._randomness = randomness.states()
        self._kept: list[Any] = []  # read and not committed
        self._first = 0  # position of the first that is kept
        self._next = 0  # position of the next to be read
        self._end: int | None = None  # position behind the last, once it is known
        self._problem: Exception | None = None  # that the stream has raised in this epoch

    def new_split(self) -> int:
        self._shared[0] += 1
        return self._shared[0]

    def committed_to(self, epoch: int, position: int) -> None:
        """Whatever comes before this is never asked for again."""
        self._shared[1], self._shared[2] = epoch, position

    def requests(self, split_index: int, cursor: Cursor, rank: int, size: int) -> Iterator[StreamRequest]:
        """Every micro-batch of this rank from the cursor on, if the split stays as it is and the epoch has no end."""
        batch = ledger.take(self._pass, cursor, size)
        while batch is not None:
            for micro in range(self._pass.accumulate):
                yield StreamRequest(split_index, batch, rank, size, micro)
            cursor = ledger.advance(cursor, batch)
            batch = ledger.take(self._pass, cursor, size)

    def __getitems__(self, request: StreamRequest) -> StreamRead:
        """The DataLoader's way in: it gives a whole element of the batch sampler to this method."""
        return self.read(request)

    def read(self, request: StreamRequest) -> StreamRead:
        nothing = StreamRead(None, np.empty(0, np.int64), None, 0, 0, 0, 0)
        batch, ahead = request.batch, self._pass.too_few(request.size)
        if self._stale(request.split_index):
            return nothing
        if batch.epoch != self._epoch:
            self._open(batch.epoch)
        self._drop_committed()
        self._read_to(batch.hi + ahead, request.split_index)
        if self._stale(request.split_index):
            return nothing
        self._check_as_long_as_before()
        hi = batch.hi if self._end is None else min(batch.hi, self._end)
        if hi - batch.lo < (ahead if batch.lo == 0 else 1):
            return nothing._replace(end=hi)
        batch = replace(batch, hi=hi, last=self._end is not None and self._end - hi < ahead)
        lo, hi = ledger.micro(*ledger.split(batch, request.rank, request.size), self._pass.accumulate)[request.micro]
        samples = self._kept[lo - self._first : hi - self._first]
        data = None
        if samples:
            with randomness.untouched():
                randomness.seed(self._pass.sample_seed(batch.epoch, lo))
                data = self._collate(samples)
        first = fingerprint(self._kept[batch.lo - self._first])
        return StreamRead(data, np.arange(lo, hi, dtype=np.int64), batch, lo, hi, first, hi)

    def _open(self, epoch: int) -> None:
        """Begin an epoch, or come into it where the job is."""
        self._epoch, self._end, self._problem, self._kept = epoch, None, None, []
        at_epoch, position = self._shared[1], self._shared[2]
        self._first = position if at_epoch == epoch else 0
        self._next = 0
        stream = self._dataset
        with self._its_randomness():
            randomness.seed(ledger.seed_for(self._pass.seed, self._pass.index, epoch))
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(epoch)
            if self._first and hasattr(stream, "skip"):
                stream, self._next = stream.skip(self._first), self._first
            self._samples = iter(stream)

    def _drop_committed(self) -> None:
        if self._shared[1] == self._epoch and (gone := self._shared[2] - self._first) > 0:
            del self._kept[:gone]  # another loader process may have read further than this one
            self._first += gone

    def _read_to(self, position: int, split_index: int) -> None:
        """Have all samples before the position, or know the end."""
        if self._next >= position or self._end is not None:
            return
        if self._problem is not None:
            raise self._problem  # who asked for it before may not have listened; and there is no end behind it
        with self._its_randomness():
            while self._next < position and not self._stale(split_index):
                try:
                    sample = next(self._samples)
                except StopIteration:
                    self._end = self._next
                    break
                except Exception as problem:
                    self._problem = problem
                    raise
                if self._next >= self._first:
                    self._kept.append(sample)
                self._next += 1

    def _check_as_long_as_before(self) -> None:
        if self._end is not None and self._end < self._first:
            raise DataUnusable(
                f"pass {self._pass.index}: {type(self._dataset).__name__} ended after {self._end} samples and the job "
                f"has used {self._first} of it; a stream must give the same samples whenever it is read"
            )

    @contextmanager
    def _its_randomness(self) -> Iterator[None]:
        """The stream draws its random numbers by itself, whatever else the process draws, and does not know in which
        of a loader's processes it is read: each of them reads all of it."""
        info, torch_loader_process._worker_info = torch_loader_process._worker_info, None
        with randomness.untouched():
            randomness.set_states(self._randomness)
            try:
                yield
            finally:
                self._randomness = randomness.states()
                torch_loader_process._worker_info = info

    def _stale(self, split_index: int) -> bool:
        return split_index != self._shared[0]


def fingerprint(sample: Any) -> int:
    """A number for what a sample holds, the same in every process; objects it cannot look into are left out."""
    total = 0
    for part in _bytes_of(sample):
        total = zlib.crc32(part, total)
    return total


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to_dense().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, (str, int, float, complex, np.generic, type(None))):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _bytes_of(key)
            yield from _bytes_of(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _bytes_of(part)
