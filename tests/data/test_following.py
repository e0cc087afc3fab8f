"""A loader that reads ranges as they are named, not a split to the end of the pass."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from shoal.data.batches import Fetched, Loader
from shoal.data.ledger import Pass
from shoal.data.loader_processes import in_flight

PASS = Pass(0, 50, 3, 5, True, False, None, 4, 1, leased=True)


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index**2)


@pytest.fixture(params=[0, 2], ids=["here", "in processes"])
def loader(request: pytest.FixtureRequest) -> Iterator[Loader]:
    made = Loader(Squares(), PASS, num_workers=request.param)
    made.follow()
    yield made
    made.close()


def drained(loader: Loader) -> list[Fetched]:
    found = []
    while (fetched := loader.next()) is not None:
        found.append(fetched)
    return found


def test_what_is_added_is_read_step_by_step_in_its_order(loader: Loader) -> None:
    loader.add(1, 8, 20)
    loader.add(0, 44, 50)
    assert loader.left == 5
    found = drained(loader)
    assert [(it.batch.epoch, it.lo, it.hi) for it in found] == [
        (1, 8, 12), (1, 12, 16), (1, 16, 20), (0, 44, 48), (0, 48, 50),
    ]  # fmt: skip
    for it in found:
        assert it.ids.tolist() == PASS.order(it.batch.epoch)[it.lo : it.hi].tolist()
        assert it.data.tolist() == [index**2 for index in it.ids.tolist()]


def test_a_loader_that_has_run_dry_goes_on_when_there_is_more(loader: Loader) -> None:
    assert loader.next() is None
    for epoch in range(3):
        loader.add(epoch, 0, 48)
        assert len(drained(loader)) == 12
        assert loader.left == 0
        assert loader.next() is None


def test_more_that_comes_while_some_is_left_is_read_ahead_again(loader: Loader) -> None:
    loader.add(0, 0, 4)
    loader.add(0, 4, 40)
    assert loader.next() is not None
    if loader.depth:
        assert in_flight(loader._processes._iterator) == loader.depth
    assert len(drained(loader)) == 9


class Overtaken(Dataset[Any]):
    """The first batch of the one process is read after two of the other."""

    def __init__(self) -> None:
        self._others = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        if index == PASS.order(0)[15]:
            self._others.set()
        elif index == PASS.order(0)[0]:
            assert self._others.wait(60)
        return torch.tensor(index**2)


def test_more_that_comes_after_a_batch_that_was_overtaken_is_read_in_its_order() -> None:
    loader = Loader(Overtaken(), PASS, num_workers=2)
    loader.follow()
    loader.add(0, 0, 40)
    first = loader.next()
    assert first is not None
    loader.add(0, 40, 50)
    assert [it.lo for it in (first, *drained(loader))] == list(range(0, 50, 4))
    loader.close()


def test_steps_are_cut_in_micro_batches_of_which_some_may_be_empty() -> None:
    pass_ = Pass(0, 50, 1, 5, True, False, None, 4, 3, leased=True)
    loader = Loader(Squares(), pass_)
    loader.follow()
    loader.add(0, 36, 50)
    assert [(it.lo, it.hi, it.micro) for it in drained(loader)] == [
        (36, 40, 0), (40, 44, 1), (44, 48, 2), (48, 49, 0), (49, 50, 1), (50, 50, 2),
    ]  # fmt: skip
    loader.close()
