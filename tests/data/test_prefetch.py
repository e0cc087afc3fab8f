"""Batches on a device: the same ones, in the same order, also after a new split."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

from shoal.data import prefetch
from shoal.data.batches import Loader
from shoal.data.ledger import Cursor, Pass
from shoal.data.prefetch import Prefetch
from shoal.errors import LoaderLost

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PASS = Pass(0, 40, 1, 0, True, False, None, 4, 1)


class Sample(NamedTuple):
    value: torch.Tensor
    more: dict[str, torch.Tensor]


class Samples(Dataset[Sample]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        return Sample(torch.full((3,), float(index)), {"id": torch.tensor(index)})


def loader(device: str, workers: int = 0) -> Prefetch:
    pin = device == "cuda"
    return Prefetch(Loader(Samples(), PASS, num_workers=workers, pin_memory=pin), torch.device(device), ahead=True)


@pytest.mark.parametrize("small_bytes", [0, prefetch._SMALL_BYTES])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_batch_comes_on_the_device_with_the_ids_it_was_read_by(
    device: str, workers: int, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_SMALL_BYTES", small_bytes)
    ours = loader(device, workers)
    ours.start(Cursor(0), rank=0, size=1)
    seen = []
    while (fetched := ours.next()) is not None:
        assert fetched.data.value.device.type == device
        assert fetched.data.more["id"].tolist() == fetched.ids.tolist() == fetched.data.value[:, 0].tolist()
        seen += fetched.ids.tolist()
    ours.close()
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_read_ahead_is_thrown_away_by_a_new_split(device: str) -> None:
    ours = loader(device)
    ours.start(Cursor(0), rank=0, size=1)
    first = ours.next()
    assert first is not None
    ours.start(Cursor(0), rank=1, size=2)
    again = ours.next()
    ours.close()
    assert again is not None
    assert (again.lo, again.hi) == (4, 8)
    assert again.data.more["id"].tolist() == again.ids.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of torch's thread, about the same
def test_a_killed_loader_process_is_named_and_the_thread_that_pins_ends() -> None:
    threads = set(threading.enumerate())
    ours = loader("cuda", workers=1)
    ours.start(Cursor(0), rank=0, size=1)
    assert ours.next() is not None
    [process] = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LoaderLost, match=f"loader process {process.pid} ended with SIGKILL"):
        deque(iter(ours.next, None), maxlen=0)
    pinning = set(threading.enumerate()) - threads
    ours.close()
    for thread in pinning:
        thread.join(20.0)
        assert not thread.is_alive()
