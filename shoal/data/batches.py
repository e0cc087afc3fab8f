"""Reads a worker's share of each step: torch's DataLoader, with an order that the ledger decides."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from shoal.data import ledger, randomness
from shoal.data.ledger import ENDED, Cursor, GlobalBatch, Ids, Pass
from shoal.data.nameless import leave_no_names
from shoal.data.streams import Stream, StreamRequest
from shoal.errors import DataUnusable, LoaderLost, SettingsContradict
from shoal.process import die_with
from shoal.wording import counted

_DYING_S = 1.0
_NO_IDS: Ids = np.empty(0, np.int64)


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
        self._source: _Source | Stream
        if pass_.num_samples is None:
            self._source = Stream(cast(Iterable[Any], dataset), pass_, collate_fn)
        else:
            self._source = _Source(dataset, pass_, collate_fn)
        self._requests = _Requests(self._source)
        self._split = (0, 1)
        self._plan: Iterator[_Piece] | None = None
        self._added = _Queue()
        self._fetched: Iterator[Any] = iter(())
        pin_memory = pin_memory and torch.cuda.is_available()
        self._torch_loader: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
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
                worker_init_fn=partial(_enter_loader_process, os.getpid(), in_child),
                # Each iterator draws a seed; from the global generator it would disturb the user's randomness.
                generator=torch.Generator(),
            )

    def start(self, cursor: Cursor, rank: int, size: int) -> None:
        """Go on from here with this split. What was read ahead is thrown away."""
        split_index = self._source.new_split()
        if self._torch_loader is not None and self._torch_loader.num_workers and not self._processes:
            self._processes = _processes_of(iter(self._torch_loader))  # there are no requests yet
        self._split = (rank, size)
        self._plan = _plan(self._pass, cursor, rank, size)
        if isinstance(self._source, Stream):
            ended = cursor.position == ENDED
            self._source.committed_to(cursor.epoch + ended, 0 if ended else cursor.position)
        self._requests.restart(split_index, cursor, rank, size)
        if self._torch_loader is None:
            read: Callable[[Any], Any] = self._source.read
            self._fetched = map(read, self._requests)
        else:
            with self._watched():
                self._fetched = iter(self._torch_loader)

    def follow(self) -> None:
        """Read what `add` names, in that order, instead of a split."""
        self._added, self._requests.added = _Queue(), _Queue()
        self.start(Cursor(self._pass.index), rank=0, size=1)
        self._plan = self._added

    def add(self, epoch: int, lo: int, hi: int) -> None:
        """Read the range [lo, hi) of the epoch's order too, by steps of one worker."""
        assert self._requests.added is not None, "add() before follow()"
        step_samples = self._pass.step_samples(size=1)
        for at in range(lo, hi, step_samples):
            batch = GlobalBatch(epoch, at, min(at + step_samples, hi))
            cuts = ledger.micro(batch.lo, batch.hi, self._pass.accumulate)
            pieces = [_Piece(batch, *cut, index) for index, cut in enumerate(cuts)]
            self._added.pieces.extend(pieces)
            self._requests.added.pieces.extend(piece for piece in pieces if piece.hi > piece.lo)
        iterator: Any = self._fetched
        with self._watched():
            # torch asks for one request more with each batch that it gives, and does not ask again if there was none.
            while self._processes and self._requests.added.pieces and _in_flight(iterator) < self.depth:
                iterator._try_put_index()

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
        with self._watched():
            data, ids = next(self._fetched) if piece.hi > piece.lo else (None, _NO_IDS)
        assert len(ids) == piece.hi - piece.lo, f"{piece} came with {len(ids)} ids"
        return Fetched(data, ids, piece.batch, piece.lo, piece.hi, piece.micro, self._pass.accumulate)

    def _next_of_stream(self, stream: Stream) -> Fetched | None:
        while (piece := next(self._plan or iter(()), None)) is not None:
            with self._watched():
                read = next(self._fetched)
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
        if self._torch_loader is not None:
            iterator, self._torch_loader = self._torch_loader._iterator, None
            if iterator is None:
                return
            try:
                self._raise_if_one_ended()
                # What the iterator does when it is collected. A traceback may hold on to it for long.
                iterator._shutdown_workers()  # type: ignore[attr-defined]
            except LoaderLost:
                # One that was killed may have held a lock, for which torch's way to end them would wait for ever.
                iterator._shutdown = True  # type: ignore[attr-defined]
                for process in self._processes:
                    process.kill()
                    process.join()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """LoaderLost when a loader process has ended, before or inside."""
        if not self._processes:
            yield
            return
        try:
            with _on_end_of_a_child(self._wake_if_one_ended):
                self._wake_if_one_ended()
                yield
        except (_LoaderEnded, RuntimeError, OSError, EOFError):
            # Its sockets close before it is dead, and its sentinel closes with them.
            dying = wait([process.sentinel for process in self._processes], timeout=_DYING_S)
            for process in self._processes:
                if process.sentinel in dying:
                    process.join()
            self._raise_if_one_ended()
            raise

    def _wake_if_one_ended(self) -> None:
        if any(process.exitcode is not None for process in self._processes):
            raise _LoaderEnded

    def _raise_if_one_ended(self) -> None:
        for process in self._processes:
            if (code := process.exitcode) is not None:
                names = {known.value: known.name for known in signal.Signals}
                how = f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")
                raise LoaderLost(
                    f"pass {self._pass.index}: loader process {process.pid} ended with {how}; if memory or /dev/shm "
                    "ran out, lower num_workers, prefetch_factor or the batch"
                )


class _LoaderEnded(BaseException):
    """Not an Exception: torch catches those, and then waits for a lock that a killed process may have held."""


def _processes_of(iterator: Any) -> list[BaseProcess]:
    """The loader processes. torch no longer watches over them: its handler of SIGCHLD would raise wherever the thread
    is, in the middle of a commit too."""
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    return list(iterator._workers)


def _in_flight(iterator: Any) -> int:
    """Requests whose batch was not given yet; some may have come before their turn."""
    return int(iterator._send_idx - iterator._rcvd_idx)


@contextmanager
def _on_end_of_a_child(call: Callable[[], None]) -> Iterator[None]:
    """Inside, `call` when a child process ends. Other threads than the main one cannot ask for that, and find out when
    torch looks for itself, every five seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        if callable(before):
            before(signum, frame)
        try:
            call()
        except BaseException:
            signal.signal(signal.SIGCHLD, before)  # it may have come while the handler was being put back
            raise

    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@dataclass(frozen=True)
class _Piece:
    batch: GlobalBatch
    lo: int
    hi: int
    micro: int


def _plan(pass_: Pass, cursor: Cursor, rank: int, size: int) -> Iterator[_Piece]:
    """Every micro-batch of this rank to the end of the pass, if the split stays as it is."""
    while (batch := ledger.take(pass_, cursor, size)) is not None:
        cuts = ledger.micro(*ledger.split(batch, rank, size), pass_.accumulate)
        yield from (_Piece(batch, lo, hi, index) for index, (lo, hi) in enumerate(cuts))
        cursor = ledger.advance(cursor, batch)


@dataclass(frozen=True)
class _Request:
    """What travels to where the data set is read."""

    split_index: int
    epoch: int
    ids: Ids


class _Requests:
    """The batch sampler."""

    def __init__(self, source: _Source | Stream) -> None:
        self._source = source
        self._from: tuple[int, Cursor, int, int] | None = None
        self.added: _Queue | None = None  # what is asked for instead of a split

    def restart(self, split_index: int, cursor: Cursor, rank: int, size: int) -> None:
        self._from = (split_index, cursor, rank, size)

    def __iter__(self) -> Iterator[_Request | StreamRequest]:
        if self._from is None:
            return iter(())
        if self.added is not None and isinstance(self._source, _Source):
            # Not a generator: that would have ended for good when there is nothing for now.
            return map(partial(self._source.request, self._from[0]), self.added)
        return self._source.requests(*self._from)


class _Queue:
    """Gives what was added, ends while there is nothing, and goes on when there is again."""

    def __init__(self) -> None:
        self.pieces: deque[_Piece] = deque()

    def __iter__(self) -> Iterator[_Piece]:
        return self

    def __next__(self) -> _Piece:
        if not self.pieces:
            raise StopIteration
        return self.pieces.popleft()


class _Source(Dataset[Any]):
    """The user's data set, read by requests: gives the collated data and the ids it was read by."""

    def __init__(self, dataset: Dataset[Any], pass_: Pass, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        _check_readable(dataset, pass_)
        self._pass = pass_
        self._dataset, self._to_index = _without_subsets(dataset)
        self._read_many: Callable[[list[int]], list[Any]] | None = getattr(self._dataset, "__getitems__", None)
        self._collate = collate_fn or default_collate
        self._tensors: Sequence[torch.Tensor] | None = None
        if type(self._dataset) is TensorDataset and collate_fn is None:
            self._tensors = self._dataset.tensors
        # Shared with the loader processes, which skip what was asked for before the newest split.
        self._newest_split = memoryview(mmap.mmap(-1, 8)).cast("q")

    def new_split(self) -> int:
        self._newest_split[0] += 1
        return self._newest_split[0]

    def requests(self, split_index: int, cursor: Cursor, rank: int, size: int) -> Iterator[_Request]:
        """One for each micro-batch that is not empty."""
        for piece in _plan(self._pass, cursor, rank, size):
            if piece.hi > piece.lo:
                yield self.request(split_index, piece)

    def request(self, split_index: int, piece: _Piece) -> _Request:
        return _Request(split_index, piece.batch.epoch, self._pass.ids(piece.batch.epoch, piece.lo, piece.hi))

    def __getitems__(self, request: _Request) -> tuple[Any, Ids]:
        """The DataLoader's way in: it gives a whole element of the batch sampler to this method."""
        return self.read(request)

    def read(self, request: _Request) -> tuple[Any, Ids]:
        if self._stale(request):
            return None, _NO_IDS
        indices = request.ids if self._to_index is None else self._to_index[request.ids]
        if self._tensors is not None:
            rows = torch.from_numpy(np.array(indices))
            return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors], request.ids
        if get_worker_info() is not None:  # a loader process has no randomness but the samples'
            return self._read_samples(request, indices)
        with randomness.untouched():
            return self._read_samples(request, indices)

    def _read_samples(self, request: _Request, indices: Ids) -> tuple[Any, Ids]:
        samples = self._read_at_once(request, indices)
        if samples is None:
            samples = []
            for sample_id, index in zip(request.ids.tolist(), indices.tolist(), strict=True):
                if self._stale(request):
                    return None, _NO_IDS
                self._seed(request.epoch, sample_id)
                samples.append(self._dataset[index])
        return self._collate(samples), request.ids

    def _read_at_once(self, request: _Request, indices: Ids) -> list[Any] | None:
        """By the data set's own way to read many; None where it has none, or draws random numbers as it reads: those
        must be each sample's own, whichever others it is read with."""
        if self._read_many is None:
            return None
        seeded_by = request.epoch, int(request.ids[0])
        self._seed(*seeded_by)
        samples = self._read_many(indices.tolist())
        drawn_after = randomness.draw()
        self._seed(*seeded_by)
        if drawn_after == randomness.draw():
            return samples
        self._read_many = None
        return None

    def _seed(self, epoch: int, sample_id: int) -> None:
        randomness.seed(self._pass.sample_seed(epoch, sample_id))

    def _stale(self, request: _Request) -> bool:
        return request.split_index != self._newest_split[0]


def samples_in(dataset: Dataset[Any]) -> int | None:
    """The length of a data set that can be read by index, None of one that can only be iterated over; DataUnusable of
    any other."""
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset)
    if hasattr(dataset, "__iter__"):
        return None
    raise DataUnusable(
        f"{type(dataset).__name__} can be neither read by index nor iterated over; give a data set with __len__ and "
        "__getitem__, or with __iter__"
    )


def _check_readable(dataset: Dataset[Any], pass_: Pass) -> None:
    if (now := samples_in(dataset)) != pass_.num_samples:
        raise DataUnusable(
            f"pass {pass_.index}: {type(dataset).__name__} has {now} samples now and had {pass_.num_samples} "
            "when the pass began; a data set must not change its length"
        )


def _without_subsets(dataset: Dataset[Any]) -> tuple[Dataset[Any], Ids | None]:
    """The data set under plain Subsets, and the index there of each id: tensors that were split are still indexed at
    once."""
    to_index: Ids | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        to_index = indices if to_index is None else indices[to_index]
        dataset = dataset.dataset
    return dataset, to_index


def _as_is(read: Any) -> Any:
    """The collate function of the DataLoader: the source has collated already, under the seed of the samples."""
    return read


def _enter_loader_process(parent_pid: int, in_child: Callable[[], None] | None, loader_index: int) -> None:
    """Tie this process's life to the worker's, and let go of what it inherited."""
    die_with(parent_pid)
    leave_no_names()
    if in_child is not None:
        in_child()
    # An interrupt from the keyboard reaches the whole group of processes; the worker decides what becomes of it.
    # torch has already set its own handler of SIGTERM here, and one thread.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
