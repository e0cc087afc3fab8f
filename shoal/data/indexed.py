"""Reads data sets by index: which samples a rank's micro-batches have is known before any is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from shoal.data import ledger, randomness
from shoal.data.ledger import Cursor, GlobalBatch, Ids, Pass
from shoal.errors import DataUnusable

NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True)
class Piece:
    batch: GlobalBatch
    lo: int
    hi: int
    micro: int


def plan(pass_: Pass, cursor: Cursor, rank: int, size: int) -> Iterator[Piece]:
    """Every micro-batch of this rank to the end of the pass, if the split stays as it is."""
    while (batch := ledger.take(pass_, cursor, size)) is not None:
        cuts = ledger.micro(*ledger.split(batch, rank, size), pass_.accumulate)
        yield from (Piece(batch, lo, hi, index) for index, (lo, hi) in enumerate(cuts))
        cursor = ledger.advance(cursor, batch)


@dataclass(frozen=True)
class Request:
    """What travels to where the data set is read."""

    split_index: int
    epoch: int
    ids: Ids


class Indexed(Dataset[Any]):
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

    def requests(self, split_index: int, cursor: Cursor, rank: int, size: int) -> Iterator[Request]:
        """One for each micro-batch that is not empty."""
        for piece in plan(self._pass, cursor, rank, size):
            if piece.hi > piece.lo:
                yield self.request(split_index, piece)

    def request(self, split_index: int, piece: Piece) -> Request:
        return Request(split_index, piece.batch.epoch, self._pass.ids(piece.batch.epoch, piece.lo, piece.hi))

    def __getitems__(self, request: Request) -> tuple[Any, Ids]:
        """The DataLoader's way in: it gives a whole element of the batch sampler to this method."""
        return self.read(request)

    def read(self, request: Request) -> tuple[Any, Ids]:
        if self._stale(request):
            return None, NO_IDS
        indices = request.ids if self._to_index is None else self._to_index[request.ids]
        if self._tensors is not None:
            rows = torch.from_numpy(np.array(indices))
            return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors], request.ids
        if get_worker_info() is not None:  # a loader process has no randomness but the samples'
            return self._read_samples(request, indices)
        with randomness.untouched():
            return self._read_samples(request, indices)

    def _read_samples(self, request: Request, indices: Ids) -> tuple[Any, Ids]:
        samples = self._read_at_once(request, indices)
        if samples is None:
            samples = []
            for sample_id, index in zip(request.ids.tolist(), indices.tolist(), strict=True):
                if self._stale(request):
                    return None, NO_IDS
                self._seed(request.epoch, sample_id)
                samples.append(self._dataset[index])
        return self._collate(samples), request.ids

    def _read_at_once(self, request: Request, indices: Ids) -> list[Any] | None:
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

    def _stale(self, request: Request) -> bool:
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
