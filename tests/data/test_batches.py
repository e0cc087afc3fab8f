from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C import _set_worker_pids
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from shoal.data import ledger
from shoal.data.batches import Fetched, Loader
from shoal.data.ledger import Cursor, Pass
from shoal.data.loader_processes import LoaderProcesses
from shoal.errors import DataUnusable, LoaderLost, SettingsContradict

PASS = Pass(
    index=0,
    num_samples=20,
    epochs=2,
    seed=5,
    shuffle=True,
    drop_last=False,
    global_batch=6,
    worker_batch=None,
    accumulate=1,
)


class Numbers(Dataset[Any]):
    """Sample i is (i, the process that read it)."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


class Augmented(Dataset[Any]):
    """Sample i comes with a draw from each source of randomness."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return index, torch.tensor(draws, dtype=torch.float64)


@contextmanager
def loader_over(dataset: Any, pass_: Pass = PASS, **settings: Any) -> Iterator[Loader]:
    loader = Loader(dataset, pass_, **settings)
    try:
        yield loader
    finally:
        loader.close()


def rest_of(loader: Loader) -> list[Fetched]:
    return list(iter(loader.next, None))


def promised(pass_: Pass, cursor: Cursor, rank: int, size: int) -> list[list[int]]:
    """The ids of each micro-batch from the cursor on, as the ledger says."""
    shares = []
    while (batch := ledger.take(pass_, cursor, size)) is not None:
        for lo, hi in ledger.micro(*ledger.split(batch, rank, size), pass_.accumulate):
            shares.append(pass_.order(batch.epoch)[lo:hi].tolist())
        cursor = ledger.advance(cursor, batch)
    return shares


def draws_by_sample(fetched: list[Fetched]) -> dict[tuple[int, int], list[float]]:
    return {
        (f.batch.epoch, index): draws
        for f in fetched
        if f.data is not None
        for index, draws in zip(f.data[0].tolist(), f.data[1].tolist(), strict=True)
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_fetched_is_the_share_that_the_ledger_gives(num_workers: int) -> None:
    pass_ = replace(PASS, accumulate=2)
    with loader_over(Numbers(), pass_, num_workers=num_workers) as loader:
        loader.start(Cursor(), rank=1, size=3)
        fetched = rest_of(loader)
        assert loader.next() is None
    assert [f.ids.tolist() for f in fetched] == promised(pass_, Cursor(), 1, 3)
    assert all(f.data[0].tolist() == f.ids.tolist() for f in fetched if f.data is not None)
    assert [(f.micro, f.micros) for f in fetched] == [(0, 2), (1, 2)] * 8
    assert all(pass_.order(f.batch.epoch)[f.lo : f.hi].tolist() == f.ids.tolist() for f in fetched)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_empty_micro_batches_come_out_in_their_place_and_are_not_read(num_workers: int) -> None:
    pass_ = replace(PASS, num_samples=20, global_batch=3, accumulate=2)
    with loader_over(Numbers(), pass_, num_workers=num_workers) as loader:
        loader.start(Cursor(), rank=2, size=4)
        fetched = rest_of(loader)
    # A step of 3 samples gives rank 2 of 4 one sample: its second micro-batch is empty. The last step has 2 samples.
    assert [len(f.ids) for f in fetched] == ([1, 0] * 6 + [0, 0]) * 2
    assert all((f.data is None) == (f.lo == f.hi) for f in fetched)
    assert [f.ids.tolist() for f in fetched] == promised(pass_, Cursor(), 2, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_new_split_in_the_middle_goes_on_from_the_cursor_with_the_same_loader_processes(num_workers: int) -> None:
    with loader_over(Numbers(), num_workers=num_workers) as loader:
        loader.start(Cursor(), rank=0, size=2)
        before = [loader.next() for _ in range(2)]
        # The step of the second batch was not applied: it comes again, to one more worker.
        assert before[0] is not None
        cursor = ledger.advance(Cursor(), before[0].batch)
        loader.start(cursor, rank=2, size=3)
        after = rest_of(loader)
    assert before[1] is not None
    assert after[0].batch == before[1].batch
    assert [f.ids.tolist() for f in after] == promised(PASS, cursor, 2, 3)
    pids = {pid for f in [*before, *after] if f is not None and f.data for pid in f.data[1].tolist()}
    assert len(pids) == max(1, num_workers)
    assert (os.getpid() in pids) == (num_workers == 0)


def test_a_split_can_change_after_every_step_and_at_the_end_of_the_pass() -> None:
    with loader_over(Numbers(), num_workers=2) as loader:
        cursor, used = Cursor(), list[int]()
        for size in [2, 1, 3, 2, 4, 1, 2, 3]:
            loader.start(cursor, rank=0, size=size)
            fetched = loader.next()
            assert fetched is not None
            assert fetched.ids.tolist() == promised(PASS, cursor, 0, size)[0]
            cursor = ledger.advance(cursor, fetched.batch)
            used += range(fetched.batch.lo, fetched.batch.hi)
        assert used == [*range(20), *range(20)]
        loader.start(cursor, rank=0, size=1)
        assert loader.next() is None
        loader.start(Cursor(), rank=0, size=1)
        assert len(rest_of(loader)) == 8


def test_a_new_split_waits_for_the_sample_being_read_and_not_for_what_was_to_be_read_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = multiprocessing.get_context("fork")
    reading, split_anew, reads = fork.Event(), fork.Event(), fork.Value("q", 0)

    class Counted(Numbers):
        def __getitem__(self, index: int) -> Any:
            reading.set()
            split_anew.wait()
            with reads.get_lock():
                reads.value += 1
            return index

    with loader_over(Counted(), num_workers=1, prefetch_factor=4) as loader:
        loader.start(Cursor(), 0, 1)
        reading.wait()
        new_split = loader._source.new_split

        def new_split_then_go_on() -> int:
            index = new_split()
            split_anew.set()
            return index

        monkeypatch.setattr(loader._source, "new_split", new_split_then_go_on)
        last_step = Cursor(epoch=1, position=18)
        loader.start(last_step, 0, 1)
        assert [f.ids.tolist() for f in rest_of(loader)] == promised(PASS, last_step, 0, 1)
        assert reads.value == 1 + 2


def test_augmentation_is_random_and_a_function_of_epoch_and_sample_for_any_split_and_number_of_loaders() -> None:
    seen = []
    for num_workers, size, batch in [(0, 1, 6), (0, 3, 5), (2, 2, 4)]:
        pass_ = replace(PASS, global_batch=batch)
        with loader_over(Augmented(), pass_, num_workers=num_workers) as loader:
            draws: dict[tuple[int, int], list[float]] = {}
            for rank in range(size):
                loader.start(Cursor(), rank, size)
                draws |= draws_by_sample(rest_of(loader))
        seen.append(draws)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 40
    assert len({value for draws in seen[0].values() for value in draws}) == 3 * 40


def test_another_pass_or_seed_augments_anew() -> None:
    draws = []
    for pass_ in [PASS, replace(PASS, index=1), replace(PASS, seed=6)]:
        loader = Loader(Augmented(), pass_)
        loader.start(Cursor(pass_index=pass_.index), 0, 1)
        draws.append(draws_by_sample(rest_of(loader))[0, 3])
    assert len({tuple(values) for values in draws}) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.arange(20))])
def test_the_random_states_of_the_training_loop_are_left_alone(dataset: Any, num_workers: int) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]

    before = states()
    with loader_over(dataset, num_workers=num_workers) as loader:
        loader.start(Cursor(), 0, 1)
        loader.next()
        loader.start(Cursor(), 0, 2)
        rest_of(loader)
    assert states() == before


def test_the_random_states_are_put_back_when_the_data_set_raises() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise OSError("no such picture")

    before = torch.get_rng_state()
    loader = Loader(Broken(), PASS)
    loader.start(Cursor(), 0, 1)
    with pytest.raises(OSError, match="no such picture"):
        loader.next()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_the_data_set_raises_comes_out_with_its_traceback(num_workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            return self.open_picture(index)

        def open_picture(self, index: int) -> Any:
            raise OSError(f"picture {index} is cut short")

    with loader_over(Broken(), num_workers=num_workers) as loader:
        loader.start(Cursor(), 0, 1)
        with pytest.raises(OSError, match="is cut short") as raised:
            loader.next()
    where = str(raised.value) if num_workers else "".join(str(entry) for entry in raised.traceback)
    assert "open_picture" in where


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("in_subset", [False, True])
def test_tensors_are_indexed_at_once_and_look_as_a_data_loader_gives_them(num_workers: int, in_subset: bool) -> None:
    dataset: Any = TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40))
    dataset = Subset(Subset(dataset, range(39, -1, -1)), torch.arange(20).tolist()) if in_subset else dataset
    pass_ = replace(PASS, num_samples=len(dataset))
    with loader_over(dataset, pass_, num_workers=num_workers) as loader:
        loader.start(Cursor(), 0, 2)
        for fetched in rest_of(loader):
            (expected,) = DataLoader(dataset, batch_sampler=[fetched.ids.tolist()])
            assert type(fetched.data) is type(expected)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(fetched.data, expected, strict=True))


def test_a_kind_of_tensor_data_set_with_its_own_reading_is_read_its_own_way() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return self.tensors[0][index] * 2

    loader = Loader(Doubled(torch.arange(20)), PASS)
    loader.start(Cursor(), 0, 1)
    fetched = loader.next()
    assert fetched is not None
    assert fetched.data.tolist() == (fetched.ids * 2).tolist()


class Many(Augmented):
    """Reads many at once, with random draws for the indices that `draws_for` says."""

    def __init__(self, draws_for: Callable[[int], bool]) -> None:
        self.draws_for = draws_for
        self.reads_of_many = 0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if self.draws_for(index) else (index, torch.zeros(3, dtype=torch.float64))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.reads_of_many += 1
        return [self[index] for index in indices]


class PlainSubset(Subset[Any]):
    """Another type than torch's, which is not looked through."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Many(lambda index: True),
        lambda: Many(lambda index: index % 4 == 0),
        lambda: Subset(Augmented(), range(20)),
        lambda: Subset(Many(lambda index: True), range(20)),
        lambda: PlainSubset(Augmented(), range(20)),
    ],
)
def test_augmentation_by_a_data_set_that_reads_many_at_once_is_a_function_of_the_sample_for_1_2_and_3_workers(
    make: Callable[[], Dataset[Any]], num_workers: int
) -> None:
    def draws(size: int) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        for rank in range(size):
            with loader_over(make(), num_workers=num_workers) as loader:
                loader.start(Cursor(), rank, size)
                found |= draws_by_sample(rest_of(loader))
        return found

    alone = draws(1)
    assert len({tuple(values) for values in alone.values()} - {(0, 0, 0)}) in (40, 10)
    assert alone == draws(2) == draws(3)


def test_a_data_set_that_draws_random_numbers_is_asked_for_many_only_once() -> None:
    dataset = Many(lambda index: True)
    loader = Loader(dataset, PASS)
    loader.start(Cursor(), 0, 1)
    assert len(rest_of(loader)) == 8
    assert dataset.reads_of_many == 1


def test_samples_of_a_subset_keep_their_places() -> None:
    loader = Loader(Subset(Augmented(), range(3, 18)), replace(PASS, num_samples=15))
    loader.start(Cursor(), 0, 1)
    for fetched in rest_of(loader):
        assert fetched.data[0].tolist() == (fetched.ids + 3).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_reads_many_at_once_is_asked_so_and_the_users_collate_is_used(num_workers: int) -> None:
    class OnlyMany(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one at a time")

        def __getitems__(self, indices: list[int]) -> list[int]:
            assert all(type(index) is int for index in indices)
            return [index * 10 for index in indices]

    with loader_over(OnlyMany(), num_workers=num_workers, collate_fn=tuple) as loader:
        loader.start(Cursor(), 0, 1)
        for fetched in rest_of(loader):
            assert fetched.data == tuple((fetched.ids * 10).tolist())


class Deadly(Numbers):
    """Reading sample 7 ends the process that reads it."""

    def __init__(self, die: Callable[[], Any]) -> None:
        self.die = die

    def __getitem__(self, index: int) -> Any:
        return self.die() if index == 7 else index


def die_with_torchs_lock() -> None:
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (die_with_torchs_lock, "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "SIGBUS"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_a_loader_process_that_ends_is_an_error_that_says_how(die: Callable[[], Any], how: str) -> None:
    with loader_over(Deadly(die), num_workers=2) as loader:
        loader.start(Cursor(), 0, 1)
        with pytest.raises(LoaderLost, match=rf"pass 0: loader process \d+ ended with {how}; if memory"):
            rest_of(loader)


@pytest.mark.parametrize("then", [lambda loader: loader.next(), lambda loader: loader.start(Cursor(), 0, 2)])
def test_a_loader_process_killed_while_nobody_waits_for_it_is_an_error_in_the_next_call(
    then: Callable[[Loader], Any],
) -> None:
    with loader_over(Numbers(), num_workers=2) as loader:
        loader.start(Cursor(), 0, 1)
        fetched = loader.next()
        assert fetched is not None
        pid = int(fetched.data[1][0])
        # torch would raise in here, as it would in the middle of a commit.
        assert exits_within([pid], lambda: os.kill(pid, signal.SIGKILL), timeout_s=20)
        with pytest.raises(LoaderLost, match=f"loader process {pid} ended with SIGKILL"):
            then(loader)


@contextmanager
def watching() -> Iterator[tuple[LoaderProcesses, BaseProcess]]:
    """Those of a loader that has one, which waits for ever."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    before, processes = signal.getsignal(signal.SIGCHLD), LoaderProcesses("pass 0")
    try:
        iterator = SimpleNamespace(_workers=[process])
        _set_worker_pids(id(iterator), (process.pid,))
        processes.take_over(iterator)
        assert processes.watched(lambda: 1) == 1  # from here on a signal tells
        yield processes, process
    finally:
        signal.signal(signal.SIGCHLD, before)
        process.kill()
        process.join()


def instructions_of(call: Callable[[], object], at: int, act: Callable[[], None]) -> int:
    """How many instructions of Python code the call is; with the one of that number, `act` comes in between."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        frame.f_trace_opcodes = True
        if event == "opcode":
            passed += 1
            if passed == at:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return passed


def test_a_loader_process_killed_at_any_instruction_is_the_same_error_there_or_in_the_next_call() -> None:
    def dies(process: BaseProcess) -> None:
        process.kill()
        os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)  # the signal is there with it

    def dies_in_the_first_of_two(processes: LoaderProcesses, process: BaseProcess, instruction: int) -> None:
        instructions_of(lambda: processes.watched(lambda: 1), instruction, partial(dies, process))
        processes.watched(lambda: 1)

    with watching() as (processes, process):
        number = instructions_of(lambda: processes.watched(lambda: 1), 0, lambda: None)
    assert number > 20
    for instruction in range(1, number + 1):
        with watching() as (processes, process):
            lost = f"pass 0: loader process {process.pid} ended with SIGKILL"
            with pytest.raises(LoaderLost, match=lost):
                dies_in_the_first_of_two(processes, process, instruction)


entered = False


def enter() -> None:
    global entered
    entered = True


def test_loader_processes_run_in_child_compute_with_one_thread_and_leave_interrupts_to_the_worker() -> None:
    class Asked(Numbers):
        def __getitem__(self, index: int) -> Any:
            return entered, torch.get_num_threads(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    with loader_over(Asked(), num_workers=1, collate_fn=list, in_child=enter) as loader:
        loader.start(Cursor(), 0, 1)
        fetched = loader.next()
    assert fetched is not None
    assert set(fetched.data) == {(True, 1, True)}
    assert not entered


class Cyclic:
    """Can only be collected, not counted down to nothing. `ends` is what its end does."""

    ends = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.self = self

    def __del__(self) -> None:
        self.ends()


def test_loader_processes_do_not_collect_what_the_worker_threw_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of gRPC among it would wait for ever for its threads, which are the worker's."""
    collected = list[str]()

    class Collecting(Numbers):
        def __getitem__(self, index: int) -> Any:
            Cyclic()
            gc.collect()
            return list(collected)

    gc.collect()
    gc.disable()
    try:
        Cyclic()
        monkeypatch.setattr(Cyclic, "ends", staticmethod(lambda: collected.append("")))
        with loader_over(Collecting(), num_workers=1, collate_fn=list) as loader:
            loader.start(Cursor(), 0, 1)
            assert not gc.isenabled()
            fetched = loader.next()
    finally:
        gc.enable()
    assert fetched is not None
    assert [len(ends) for ends in fetched.data] == [1, 2, 3, 4, 5, 6]  # its own, and no other


def exits_within(pids: list[int], end: Callable[[], None], timeout_s: float) -> bool:
    """Whether all the processes are gone that soon after `end`; by pidfd, so that a pid used again does not count."""
    poll, left = select.poll(), {os.pidfd_open(pid) for pid in pids}
    for fd in left:
        poll.register(fd, select.POLLIN)
    try:
        end()
        while left and (ended := poll.poll(timeout_s * 1000)):
            for fd, _ in ended:
                poll.unregister(fd)
                os.close(fd)
                left.remove(fd)
        return not left
    finally:
        for fd in left:
            os.close(fd)


def test_close_ends_the_loader_processes() -> None:
    loader = Loader(Numbers(), PASS, num_workers=2)
    loader.start(Cursor(), 0, 1)
    pids = {pid for fetched in rest_of(loader) for pid in fetched.data[1].tolist()}
    assert len(pids) == 2
    held = loader._fetched  # as the traceback of an error would
    assert exits_within(sorted(pids), loader.close, timeout_s=0)
    loader.close()
    assert loader.next() is None
    del held


def test_a_loader_that_is_closed_before_it_starts_gives_nothing() -> None:
    loader = Loader(Numbers(), PASS, num_workers=2)
    loader.close()
    assert loader.next() is None


# After its first batches the data set blocks: only the kernel can end such a process, torch's own watch over the
# parent does not get its turn.
BLOCKING_JOB = """
    import json, os, signal, sys
    from shoal.data.batches import Loader
    from shoal.data.ledger import Cursor, Pass

    class Blocking:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index >= 2:
                signal.pause()
            return os.getpid()

    loader = Loader(Blocking(), Pass(0, 20, 1, 0, False, False, 1, None, 1), num_workers=2)
    loader.start(Cursor(), 0, 1)
    print(json.dumps([int(loader.next().data[0]) for _ in range(2)]), flush=True)
    signal.pause()
"""


def test_loader_processes_vanish_when_their_worker_is_killed() -> None:
    job = subprocess.Popen([sys.executable, "-c", textwrap.dedent(BLOCKING_JOB)], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout is not None
        pids = json.loads(job.stdout.readline())
        assert len({*pids, job.pid}) == 3
        assert exits_within(pids, job.kill, timeout_s=20)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Loader(Numbers(), replace(PASS, num_samples=21)),
            DataUnusable,
            "Numbers has 20 samples now and had 21",
        ),
        (lambda: Loader(Numbers(), PASS, num_workers=-1), SettingsContradict, "num_workers is -1; ask for 0"),
        (lambda: Loader(Numbers(), PASS, prefetch_factor=2), SettingsContradict, "prefetch_factor=2 needs loader"),
        (lambda: Loader(Numbers(), PASS, num_workers=1, prefetch_factor=0), SettingsContradict, "ask for 1 or more"),
    ],
)
def test_what_cannot_be_read_is_refused(make: Callable[[], Loader], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_pinning_is_asked_for_only_where_there_is_a_gpu() -> None:
    loader = Loader(TensorDataset(torch.arange(20)), PASS, pin_memory=True)
    loader.start(Cursor(), 0, 1)
    fetched = loader.next()
    assert fetched is not None
    assert fetched.data[0].is_pinned() == torch.cuda.is_available()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_reading_in_this_process_for_pinning_gives_the_same_and_leaves_randomness_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Loader(Augmented(), PASS)
    plain.start(Cursor(), 1, 2)
    expected, before = draws_by_sample(rest_of(plain)), torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with loader_over(Augmented(), pin_memory=True) as pinning:
        pinning.start(Cursor(), 0, 1)
        pinning.next()
        pinning.start(Cursor(), 1, 2)
        assert draws_by_sample(rest_of(pinning)) == expected
    assert torch.equal(torch.get_rng_state(), before)


class Views(Dataset[Any]):
    """Samples that a collate function may return as they are: tensors of the data set's own memory, and none."""

    rows = torch.arange(20.0).view(20, 1)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Views(), None),
        (TensorDataset(Views.rows), None),
        (
            Views(),
            lambda samples: {"rows": torch.cat(samples).view(-1, 1), "empty": torch.empty(0), "first": samples[0]},
        ),
    ],
)
def test_what_loader_processes_hand_over_has_no_name_in_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with loader_over(dataset, num_workers=2, collate_fn=collate) as loader:
        loader.start(Cursor(), rank=0, size=1)
        held = []
        for fetched in iter(loader.next, None):
            rows = (
                fetched.data["rows"] if collate else fetched.data[0] if isinstance(fetched.data, list) else fetched.data
            )
            assert rows.flatten().tolist() == fetched.ids.tolist()
            held.append(fetched)
            mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
            assert any("/memfd:shoal-batch" in name for name in mapped)
            assert not [name for name in mapped if "/dev/shm/torch_" in name]
        assert list(tmp_path.iterdir()) == [], "a killed loader process would leave this"


def test_a_view_of_something_large_comes_without_the_rest() -> None:
    class Views(Numbers):
        large = torch.zeros(20, 100_000)

        def __getitem__(self, index: int) -> Any:
            return self.large[index][:10]

    with loader_over(Views(), num_workers=1, collate_fn=list) as loader:
        loader.start(Cursor(), 0, 1)
        fetched = loader.next()
        assert fetched is not None
        assert {tensor.untyped_storage().nbytes() for tensor in fetched.data} == {40}
