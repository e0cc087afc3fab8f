from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data import ledger
from shoal.data.batches import Fetched, Loader
from shoal.data.indexed import samples_in
from shoal.data.ledger import ENDED, Cursor, Pass
from shoal.data.streams import fingerprint
from shoal.errors import DataUnusable

STREAM = Pass(
    index=0,
    num_samples=None,
    epochs=2,
    seed=5,
    shuffle=False,
    drop_last=False,
    global_batch=6,
    worker_batch=None,
    accumulate=1,
)
LOADERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


class Numbers(IterableDataset[Any]):
    """0, 1, … with a draw from each source of randomness; in another order in each epoch."""

    def __init__(self, count: int = 20) -> None:
        self._count, self._epoch = count, 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None, "a stream that splits itself among loader processes"
        for number in range(self._count):
            self.read += 1
            draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
            yield number + 1000 * self._epoch, torch.tensor(draws, dtype=torch.float64)


class Skipping(Numbers):
    def skip(self, count: int) -> Iterator[Any]:
        return iter([(number, torch.zeros(3)) for number in range(count, self._count)])


def numbers(fetched: Fetched) -> list[int]:
    return [] if fetched.data is None else list(fetched.data[0].tolist())


def used(
    make: Callable[[], Any], pass_: Pass, sizes: list[int], num_workers: int = 0, stay: int = 1
) -> tuple[list[int], list[Cursor]]:
    """All samples in the order of the steps, when the group has these sizes by turns, for `stay` steps each; and the
    cursor after each step. Each rank has its own reader, as each worker has."""
    loaders = [Loader(make(), pass_, num_workers=num_workers) for _ in range(max(sizes))]
    cursor, found, cursors = Cursor(), list[int](), list[Cursor]()
    try:
        while True:
            size = sizes[len(cursors) // stay % len(sizes)]
            if len(cursors) % stay == 0:
                for rank in range(size):
                    loaders[rank].start(cursor, rank, size)
            parts = [[loaders[rank].next() for _ in range(pass_.accumulate)] for rank in range(size)]
            if parts[0][0] is None:
                assert all(part == [None] * pass_.accumulate for part in parts)
                return found, cursors
            batch = parts[0][0].batch
            for fetched in (one for part in parts for one in part):
                assert fetched is not None
                assert fetched.batch == batch
                assert fetched.first == parts[0][0].first
                assert fetched.ids.tolist() == list(range(fetched.lo, fetched.hi))
                found += numbers(fetched)
            cursor = ledger.advance(cursor, batch)
            cursors.append(cursor)
    finally:
        for loader in loaders:
            loader.close()


@LOADERS
@pytest.mark.parametrize("sizes", [[1], [3], [2, 1, 4, 3]])
@pytest.mark.parametrize("count", [6, 18, 20])
def test_every_sample_comes_once_in_the_stream_s_order(num_workers: int, sizes: list[int], count: int) -> None:
    found, cursors = used(lambda: Numbers(count), STREAM, sizes, num_workers)
    assert found == [*range(count), *range(1000, 1000 + count)]
    steps = -(-count // 6)
    assert [cursor.position == ENDED for cursor in cursors] == ([False] * (steps - 1) + [True]) * 2
    assert cursors[-1].samples == 2 * count


@LOADERS
def test_a_group_that_stays_reads_ahead_and_finds_the_end(num_workers: int) -> None:
    found, _ = used(Numbers, replace(STREAM, accumulate=2), [3], num_workers, stay=100)
    assert found == [*range(20), *range(1000, 1020)]


def test_batch_size_gives_steps_that_follow_the_number_of_workers() -> None:
    found, cursors = used(Numbers, replace(STREAM, global_batch=None, worker_batch=3, epochs=1), [1, 2, 4])
    assert found == list(range(20))
    assert [cursor.position for cursor in cursors] == [3, 9, ENDED]


@LOADERS
@pytest.mark.parametrize(("count", "kept"), [(20, 18), (18, 18), (11, 6)])
def test_drop_last_leaves_the_ragged_end_out_and_the_step_before_knows_it(
    num_workers: int, count: int, kept: int
) -> None:
    found, cursors = used(lambda: Numbers(count), replace(STREAM, drop_last=True), [2, 3], num_workers)
    assert found == [*range(kept), *range(1000, 1000 + kept)]
    assert [cursor.position == ENDED for cursor in cursors] == ([False] * (kept // 6 - 1) + [True]) * 2


def test_drop_last_leaves_out_what_is_too_little_for_the_workers_of_the_step_before() -> None:
    pass_ = replace(STREAM, drop_last=True, global_batch=None, worker_batch=3, epochs=1)
    found, cursors = used(Numbers, pass_, [2])
    assert found == list(range(18))
    assert [cursor.position for cursor in cursors] == [6, 12, ENDED]
    found, cursors = used(Numbers, pass_, [2, 2, 4])
    assert found == list(range(20))
    assert [cursor.position for cursor in cursors] == [6, 12, ENDED]


@LOADERS
def test_a_step_that_comes_again_is_not_read_again(num_workers: int) -> None:
    stream = Numbers()
    loader = Loader(stream, STREAM, num_workers=num_workers)
    try:
        loader.start(Cursor(), rank=0, size=2)
        first = loader.next()
        second = loader.next()
        assert first is not None
        assert second is not None
        cursor = ledger.advance(Cursor(), first.batch)
        loader.start(cursor, rank=0, size=1)  # the second step was not applied, and its samples are one worker's now
        again = loader.next()
        assert again is not None
        assert again.batch == second.batch
        assert numbers(again) == list(range(6, 12))
        assert torch.equal(again.data[1][: len(numbers(second))], second.data[1]), "the same samples with other draws"
    finally:
        loader.close()
    if num_workers == 0:
        assert stream.read == 13  # two steps and one sample ahead, each once


@LOADERS
@pytest.mark.parametrize("make", [Numbers, Skipping])
def test_a_newcomer_comes_in_where_the_job_is(num_workers: int, make: Callable[[], Numbers]) -> None:
    stream = make()
    loader = Loader(stream, STREAM, num_workers=num_workers)
    try:
        loader.start(Cursor(position=12, step=2, samples=12), rank=1, size=2)
        fetched = loader.next()
        assert fetched is not None
        assert numbers(fetched) == [15, 16, 17]
    finally:
        loader.close()
    if num_workers == 0:
        assert stream.read == (0 if make is Skipping else 19)


class Breaking(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample[0] == 14:
                raise OSError("the connection was lost")
            yield sample


@LOADERS
def test_what_a_stream_raises_is_no_end_of_it_though_nobody_listened_at_first(num_workers: int) -> None:
    loader = Loader(Breaking(), STREAM, num_workers=num_workers)
    try:
        loader.start(Cursor(), rank=0, size=1)
        first = loader.next()  # loader processes read ahead, and meet the error
        assert first is not None
        cursor = ledger.advance(Cursor(), first.batch)
        for size in (2, 1):  # what they had read ahead is thrown away
            loader.start(cursor, rank=0, size=size)
            fetched = loader.next()
            assert fetched is not None
        for _ in range(2):
            with pytest.raises(OSError, match="the connection was lost"):
                loader.next()
            loader.start(ledger.advance(cursor, fetched.batch), rank=0, size=1)
    finally:
        loader.close()


def test_what_the_stream_draws_is_its_own_and_leaves_the_script_s_randomness_alone() -> None:
    def draws(disturbed: bool) -> list[Any]:
        loader = Loader(Numbers(), STREAM)
        loader.start(Cursor(), 0, 1)
        found = []
        while (fetched := loader.next()) is not None:
            found.append(fetched.data[1].tolist())
            if disturbed:
                torch.rand(3)
                random.random()
        return found

    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert draws(False) == draws(True)
    torch.manual_seed(1)
    loader = Loader(Numbers(), STREAM)
    loader.start(Cursor(), 0, 1)
    loader.next()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_that_is_shorter_than_before_is_told() -> None:
    loader = Loader(Numbers(10), STREAM)
    loader.start(Cursor(position=12), 0, 1)
    with pytest.raises(DataUnusable, match="ended after 10 samples and the job has used 12"):
        loader.next()


@pytest.mark.parametrize(
    ("stream", "pass_", "epoch"),
    [(Numbers(0), STREAM, 0), (iter(range(20)), STREAM, 1), (Numbers(5), replace(STREAM, drop_last=True), 0)],
)
def test_an_epoch_without_a_step_is_told(stream: Any, pass_: Pass, epoch: int) -> None:
    loader = Loader(stream, pass_)
    loader.start(Cursor(), 0, 1)
    with pytest.raises(DataUnusable, match=f"in epoch {epoch}, too few for a step"):
        list(iter(loader.next, None))


def test_what_a_stream_cannot_have_is_refused() -> None:
    with pytest.raises(DataUnusable, match="its own order; set shuffle=False"):
        replace(STREAM, shuffle=True)


def test_a_stream_is_what_can_only_be_iterated_over() -> None:
    assert samples_in(Numbers()) is None
    assert samples_in(number for number in range(3)) is None  # type: ignore[arg-type]
    assert samples_in([1, 2, 3]) == 3  # type: ignore[arg-type]
    with pytest.raises(DataUnusable, match="neither read by index nor iterated over"):
        samples_in(3)  # type: ignore[arg-type]


def test_a_fingerprint_tells_samples_apart_by_what_they_hold() -> None:
    image, text = torch.arange(6.0), "a"
    assert fingerprint((image, text)) == fingerprint([image.clone(), "a"])
    others = [(image + 1, text), (image, "b"), {"x": image, "y": text}, (image.numpy()[:5], text), (image, 1)]
    assert len({fingerprint(other) for other in [(image, text), *others]}) == 6
    for dtype in (torch.bool, torch.bfloat16, torch.int64):
        assert fingerprint(torch.zeros((), dtype=dtype)) != fingerprint(torch.ones((), dtype=dtype))
