from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import ledger
from shoal.data.ledger import Cursor, GlobalBatch, Pass
from shoal.errors import DataUnusable


def make_pass(**changes: Any) -> Pass:
    settings: dict[str, Any] = {
        "index": 0,
        "num_samples": 10,
        "epochs": 1,
        "seed": 7,
        "shuffle": True,
        "drop_last": False,
        "global_batch": 4,
        "worker_batch": None,
        "accumulate": 1,
    }
    return Pass(**{**settings, **changes})


@st.composite
def passes(draw: st.DrawFn, /, by_worker: bool | None = None) -> Pass:
    num_samples = draw(st.integers(8, 60))
    by_worker = draw(st.booleans()) if by_worker is None else by_worker
    accumulate = draw(st.integers(1, 3))
    # With drop_last the largest group of the tests (8 workers) must still get a step.
    drop_last = draw(st.booleans()) and not (by_worker and 8 * accumulate > num_samples)
    largest = num_samples // (8 * accumulate) if by_worker and drop_last else num_samples
    batch = draw(st.integers(1, max(1, largest)))
    return Pass(
        index=0,
        num_samples=num_samples,
        epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**63)),
        shuffle=draw(st.booleans()),
        drop_last=drop_last,
        global_batch=None if by_worker else batch,
        worker_batch=batch if by_worker else None,
        accumulate=accumulate,
    )


SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=30)


def train(pass_: Pass, sizes: list[int]) -> list[tuple[GlobalBatch, int]]:
    """Every step of the pass with the size that took it; the sizes come round again when they are used up."""
    cursor, steps = Cursor(), list[tuple[GlobalBatch, int]]()
    while (batch := ledger.take(pass_, cursor, size := sizes[len(steps) % len(sizes)])) is not None:
        steps.append((batch, size))
        cursor = ledger.advance(cursor, batch)
    assert cursor.step == len(steps)
    assert cursor.samples == sum(batch.hi - batch.lo for batch, _ in steps)
    return steps


@given(passes(), SIZES)
def test_every_epoch_uses_each_id_once_while_workers_come_and_go(pass_: Pass, sizes: list[int]) -> None:
    used: dict[int, list[int]] = {epoch: [] for epoch in range(pass_.epochs)}
    for batch, size in train(pass_, sizes):
        for rank in range(size):
            lo, hi = ledger.split(batch, rank, size)
            for micro_lo, micro_hi in ledger.micro(lo, hi, pass_.accumulate):
                used[batch.epoch] += pass_.order(batch.epoch)[micro_lo:micro_hi].tolist()
    for ids in used.values():
        assert len(set(ids)) == len(ids)
        dropped = pass_.num_samples - len(ids)
        assert dropped < pass_.step_samples(max(sizes)) if pass_.drop_last else dropped == 0


@given(passes(by_worker=False), SIZES, SIZES)
def test_global_batches_do_not_depend_on_the_workers(pass_: Pass, sizes: list[int], others: list[int]) -> None:
    assert [batch for batch, _ in train(pass_, sizes)] == [batch for batch, _ in train(pass_, others)]


@given(passes(by_worker=True))
def test_worker_batch_gives_each_worker_full_micro_batches_except_at_the_ragged_end(pass_: Pass) -> None:
    assert pass_.worker_batch is not None
    for batch, size in train(pass_, [3]):
        if batch.hi < pass_.num_samples:
            for rank in range(size):
                cuts = ledger.micro(*ledger.split(batch, rank, size), pass_.accumulate)
                assert [hi - lo for lo, hi in cuts] == [pass_.worker_batch] * pass_.accumulate


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 9), st.integers(1, 4))
def test_shares_and_micro_batches_tile_the_batch_in_order(lo: int, count: int, size: int, accumulate: int) -> None:
    batch = GlobalBatch(0, lo, lo + count)
    shares = [ledger.split(batch, rank, size) for rank in range(size)]
    cuts = [cut for share in shares for cut in ledger.micro(*share, accumulate)]
    assert [position for cut in cuts for position in range(*cut)] == list(range(batch.lo, batch.hi))
    assert shares[0][1] > shares[0][0]
    assert max(hi - lo for lo, hi in shares) - min(hi - lo for lo, hi in shares) <= 1


def test_a_step_done_again_with_fewer_workers_takes_the_same_samples() -> None:
    pass_, cursor = make_pass(), Cursor(position=4, step=1, samples=4)
    assert ledger.take(pass_, cursor, 3) == ledger.take(pass_, cursor, 2) == GlobalBatch(0, 4, 8)


def test_a_ragged_end_is_skipped_when_dropped_and_kept_otherwise() -> None:
    before = Cursor(position=4, step=1, samples=4)
    kept, dropped = make_pass(epochs=2), make_pass(epochs=2, drop_last=True)
    assert ledger.take(kept, before, 1) == GlobalBatch(0, 4, 8)
    assert ledger.take(kept, Cursor(position=8, step=2), 1) == GlobalBatch(0, 8, 10, last=True)
    batch = ledger.take(dropped, before, 1)
    assert batch == GlobalBatch(0, 4, 8, last=True)
    after = ledger.advance(before, batch)
    assert ledger.take(dropped, after, 1) == GlobalBatch(1, 0, 4)
    assert ledger.take(make_pass(epochs=1, drop_last=True), after, 1) is None


def test_what_a_step_has_left_for_its_workers_is_not_dropped_by_more_of_them() -> None:
    pass_ = make_pass(global_batch=None, worker_batch=2, drop_last=True)
    cursor = ledger.advance(Cursor(), GlobalBatch(0, 0, 6))  # of three workers, who need six again and have four
    assert ledger.take(pass_, Cursor(), 3) == GlobalBatch(0, 0, 6, last=True)
    cursor = ledger.advance(Cursor(), GlobalBatch(0, 0, 4))  # of two, who have six left for a step
    assert ledger.take(pass_, cursor, 2) == GlobalBatch(0, 4, 8, last=True)
    assert ledger.take(pass_, cursor, 4) == GlobalBatch(0, 4, 10, last=True)


def test_a_late_worker_begins_a_pass_where_the_job_is_and_gets_nothing_of_a_finished_one() -> None:
    job = Cursor(pass_index=1, epoch=2, position=4, step=9, samples=36)
    assert ledger.begin(job, 1) == ledger.begin(job, 0) == job
    assert ledger.take(make_pass(index=0), job, 2) is None
    assert ledger.begin(job, 2) == Cursor(pass_index=2, epoch=0, position=0, step=9, samples=36)


def test_orders_differ_between_epochs_seeds_and_passes() -> None:
    orders = [make_pass(num_samples=100, seed=s, index=i).order(e) for s in (0, 1) for i in (0, 1) for e in (0, 1)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert make_pass(shuffle=False).order(3).tolist() == list(range(10))


def test_the_streams_are_frozen() -> None:
    # Written down once: a change here breaks the resume of every job that was started before it.
    assert ledger.permutation(7, 0, 10, True).tolist() == [4, 1, 9, 0, 2, 7, 5, 6, 8, 3]
    assert ledger.seed_for(1, 2, 3) == ledger.seed_for(np.int64(1), 2, 3) == 1517167407554927345
    assert ledger.seed_for(12, 3) != ledger.seed_for(1, 23)


def test_a_permutation_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        ledger.permutation(7, 0, 10, True)[0] = 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_samples": 0}, "the data set is empty; give it at least one sample"),
        ({"epochs": 0}, "epochs is 0; ask for 1 or more"),
        ({"accumulate": 0}, "accumulate is 0; ask for 1 or more"),
        ({"global_batch": 0}, "the batch is 0 samples; ask for 1 or more"),
        ({"global_batch": None, "worker_batch": -1}, "the batch is -1 samples; ask for 1 or more"),
        ({"global_batch": 11}, "global_batch is 11, the data has 10 samples; lower it to 10 or give more data"),
        ({"worker_batch": 2}, "global_batch is 4 and batch_size is 2; set exactly one of them"),
        ({"global_batch": None}, "global_batch is None and batch_size is None; set exactly one of them"),
        (
            {"global_batch": None, "worker_batch": 6, "accumulate": 2, "drop_last": True},
            "a step of 1 workers takes 12 samples, the data has 10 and drop_last leaves no step; lower",
        ),
    ],
)
def test_unusable_data_says_what_and_what_next(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataUnusable) as raised:
        make_pass(**changes)
    assert f"pass 0: {text}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_more_workers_than_samples_is_refused() -> None:
    make_pass().check(10)
    with pytest.raises(DataUnusable, match="11 workers would share 10 samples; run at most 10 workers"):
        make_pass().check(11)


def test_a_group_too_large_for_a_full_step_is_refused_instead_of_dropping_every_sample() -> None:
    pass_ = make_pass(global_batch=None, worker_batch=3, drop_last=True)
    assert ledger.take(pass_, Cursor(), 3) == GlobalBatch(0, 0, 9, last=True)
    with pytest.raises(DataUnusable, match="a step of 4 workers takes 12 samples"):
        ledger.take(pass_, Cursor(), 4)
    assert ledger.take(replace(pass_, drop_last=False), Cursor(), 4) == GlobalBatch(0, 0, 10, last=True)


def test_ledger_and_audit_do_not_import_torch() -> None:
    code = "import sys, shoal.data.ledger, shoal.data.audit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
