"""Reads a worker's share of each step: torch's DataLoader, with an order that the ledger decides."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data import ledger, loader_processes
from shoal.data.indexed import NO_IDS, Indexed, Piece, Request, plan
from shoal.data.ledger import ENDED, Cursor, GlobalBatch, Ids, Pass
from shoal.data.loader_processes import LoaderProcesses
from shoal.data.streams import Stream, StreamRequest
from shoal.errors import DataUnusable, SettingsContradict
from shoal.wording import counted

_NEVER = object()


@dataclass(frozen=True)
class Fetched:
    """One micro-batch of this worker's share: the range [lo, hi) of the epoch's order.

    `ids` were written down where the data set was read. An empty micro-batch has no data.
    """

    data: Any
    ids: Ids
    batch: GlobalBatch
    lo: int
    hi: int
    micro: int
    micros: int
    first: int | None = None  # a digest of the step's first sample, of a stream


class Loader:
    """The micro-batches of one worker over a pass, in order.

    With `num_workers` the data set is read ahead in that many loader processes, which outlive a change of the split and
    die with this process. `in_child` runs first thing in each of them. Call `start` from a thread that lives as long as
    the loader: the kernel takes the end of that thread for the end of the process. What the data set raises comes
    out of `next`, with its traceback. A loader process that was killed is LoaderLost in the next call.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        pass_: Pass,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        in_child: Callable[[], None] | None = None,
    ) -> None:
        if num_workers < 0:
            raise SettingsContradict(f"num_workers is {num_workers}; ask for 0 (read in this process) or more")
        if prefetch_factor is not None and num_workers == 0:
            raise SettingsContradict(f"prefetch_factor={prefetch_factor} needs loader processes; set num_workers too")
        if prefetch_factor is not None and prefetch_factor < 1:
            raise SettingsContradict(f"prefetch_factor is {prefetch_factor}; ask for 1 or more")
        self._pass = pass_
        self._source: Indexed | Stream
        if pass_.num_samples is None:
            self._source = Stream(cast(Iterable[Any], dataset), pass_, collate_fn)
        else:
            self._source = Indexed(dataset, pass_, collate_fn)
        self._requests = _Requests(self._source)
        self._split = (0, 1)
        self._plan: Iterator[Piece] | None = None
        self._added = _Queue()
        self._fetched: Iterator[Any] = iter(())
        pin_memory = pin_memory and torch.cuda.is_available()
        self._torch_loader: DataLoader[Any] | None = None
        self._processes = LoaderProcesses(f"pass {pass_.index}")
        # In this process a DataLoader would only add its own time, except for pinning.
        if num_workers > 0 or pin_memory:
            self._torch_loader = DataLoader(
                self._source,
                batch_sampler=self._requests,  # type: ignore[arg-type]  # requests stand for lists of indices
                num_workers=num_workers,
                collate_fn=_as_is,
                pin_memory=pin_memory,
                prefetch_factor=prefetch_factor,
                persistent_workers=num_workers > 0,
                # Not spawn: `in_child` and the counter of splits are inherited, and the data set need not be pickled.
                multiprocessing_context="fork" if num_workers > 0 else None,
                worker_init_fn=partial(loader_processes.enter, os.getpid(), in_child),
                # Each iterator draws a seed; from the global generator it would disturb the user's randomness.
                generator=torch.Generator(),
            )

    @property
    def is_stream(self) -> bool:
        return isinstance(self._source, Stream)

    def start(self, cursor: Cursor, rank: int, size: int) -> None:
        """Go on from here with this split. What was read ahead is thrown away."""
        split_index = self._source.new_split()
        if self._torch_loader is not None and self._torch_loader.num_workers and not self._processes:
            with loader_processes.inheriting():
                self._processes.take_over(iter(self._torch_loader))  # there are no requests yet
        self._split = (rank, size)
        self._plan = plan(self._pass, cursor, rank, size)
        if isinstance(self._source, Stream):
            ended = cursor.position == ENDED
            self._source.committed_to(cursor.epoch + ended, 0 if ended else cursor.position)
        self._requests.restart(split_index, cursor, rank, size)
        if self._torch_loader is None:
            read: Callable[[Any], Any] = self._source.read
            self._fetched = map(read, self._requests)
        else:
            # Not its own way to give them, of which half the time goes to tell a profiler.
            loader = self._torch_loader
            self._fetched = self._processes.watched(lambda: iter(iter(loader)._next_data, _NEVER))

    def follow(self) -> None:
        """Read what `add` names, in that order, instead of a split."""
        self._added, self._requests.added = _Queue(), _Queue()
        self.start(Cursor(self._pass.index), rank=0, size=1)
        self._plan = self._added

    def add(self, epoch: int, lo: int, hi: int) -> None:
        """Read the range [lo, hi) of the epoch's order too, by steps of one worker."""
        asked_for = self._requests.added
        assert asked_for is not None, "add() before follow()"
        step_samples = self._pass.step_samples(size=1)
        for at in range(lo, hi, step_samples):
            batch = GlobalBatch(epoch, at, min(at + step_samples, hi))
            cuts = ledger.micro(batch.lo, batch.hi, self._pass.accumulate)
            pieces = [Piece(batch, *cut, index) for index, cut in enumerate(cuts)]
            self._added.pieces.extend(pieces)
            asked_for.pieces.extend(piece for piece in pieces if piece.hi > piece.lo)
        if self._processes:
            self._processes.watched(lambda: self._processes.keep_asking(self.depth, lambda: asked_for.pieces))

    @property
    def depth(self) -> int:
        """How many micro-batches are read ahead."""
        loader = self._torch_loader
        return 0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0)

    @property
    def left(self) -> int:
        """How many micro-batches were added that `next` has not given."""
        return len(self._added.pieces)

    def next(self) -> Fetched | None:
        """The next micro-batch; None at the end of the pass, or of what was added so far."""
        assert self._plan is not None, "next() before start()"
        if isinstance(self._source, Stream):
            return self._next_of_stream(self._source)
        piece = next(self._plan, None)
        if piece is None:
            return None
        empty = (None, NO_IDS)
        data, ids = self._processes.watched(lambda: next(self._fetched) if piece.hi > piece.lo else empty)
        assert len(ids) == piece.hi - piece.lo, f"{piece} came with {len(ids)} ids"
        return Fetched(data, ids, piece.batch, piece.lo, piece.hi, piece.micro, self._pass.accumulate)

    def _next_of_stream(self, stream: Stream) -> Fetched | None:
        while (piece := next(self._plan or iter(()), None)) is not None:
            read = self._processes.watched(lambda: next(self._fetched))
            if read.batch is not None:
                if piece.micro == 0:
                    stream.committed_to(read.batch.epoch, read.batch.lo)
                micros = self._pass.accumulate
                return Fetched(read.data, read.ids, read.batch, read.lo, read.hi, piece.micro, micros, read.first)
            epoch = piece.batch.epoch
            if piece.batch.lo == 0:
                raise DataUnusable(
                    f"pass {self._pass.index}: the stream gave {counted(read.end, 'sample')} in epoch {epoch}, too few "
                    "for a step; one that can be read once only needs to be made anew for each pass of one epoch"
                )
            self.start(Cursor(self._pass.index, epoch + 1), *self._split)
        return None

    def close(self) -> None:
        """End the loader processes. A sample that is being read is waited for, but for seconds at most."""
        self._source.new_split()
        self._plan, self._fetched = iter(()), iter(())
        self._torch_loader = None
        self._processes.end()


class _Requests:
    """The batch sampler."""

    def __init__(self, source: Indexed | Stream) -> None:
        self._source = source
        self._from: tuple[int, Cursor, int, int] | None = None
        self.added: _Queue | None = None  # what is asked for instead of a split

    def restart(self, split_index: int, cursor: Cursor, rank: int, size: int) -> None:
        self._from = (split_index, cursor, rank, size)

    def __iter__(self) -> Iterator[Request | StreamRequest]:
        if self._from is None:
            return iter(())
        if self.added is not None and isinstance(self._source, Indexed):
            # Not a generator: that would have ended for good when there is nothing for now.
            return map(partial(self._source.request, self._from[0]), self.added)
        return self._source.requests(*self._from)


class _Queue:
    """Gives what was added, ends while there is nothing, and goes on when there is again."""

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if not self.pieces:
            raise StopIteration
        return self.pieces.popleft()


def _as_is(read: Any) -> Any:
    """The collate function of the DataLoader: the source has collated already, under the seed of the samples."""
    return read
