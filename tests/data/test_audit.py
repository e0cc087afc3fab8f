from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import ledger
from shoal.data.audit import AuditReport, audit
from shoal.data.fed import AuditWriter, Fed, declare, digest
from shoal.data.ledger import Cursor, GlobalBatch, Ids, Pass
from shoal.errors import WorkersDiffer

RECORD_BYTES = 88


@dataclass(frozen=True)
class Part:
    """What a worker fed, so that a test can plant a fault in it."""

    worker: int
    fed: Fed

    def but(self, **changes: Any) -> Part:
        return replace(self, fed=self.fed._replace(**changes))


def taken(pass_: Pass, cursor: Cursor, size: int) -> GlobalBatch | None:
    """The samples of a step, also of a stream: it has 50."""
    batch = ledger.take(pass_, cursor, size)
    if batch is None or pass_.num_samples is not None or batch.hi < 50:
        return batch
    return replace(batch, hi=50, last=True)


def trained(pass_: Pass, sizes: list[int], first_seq: int = 1, redo: frozenset[int] = frozenset()) -> list[Part]:
    """What the workers of a job without faults feed. Steps in `redo` are attempted by one more worker before."""
    cursor, records, generation = ledger.begin(Cursor(), pass_.index), [], 1
    for number in range(10_000):
        attempts = [sizes[number % len(sizes)]]
        if number in redo:
            attempts.insert(0, attempts[0] + 1)
        for size in attempts:
            generation += 1
            if (batch := taken(pass_, cursor, size)) is None:
                continue
            for rank in range(size):
                lo, hi = ledger.split(batch, rank, size)
                ids = digest([pass_.ids(batch.epoch, lo, hi)])
                where = (generation, first_seq + number, pass_.index, batch.epoch, batch.lo, batch.hi, lo, hi)
                # The last worker of an attempt that is done again dies before it has written its record.
                if size == attempts[-1] or rank < size - 1:
                    records.append(Part(rank, Fed(*where, ids, skipped=False, last=batch.last)))
        if (batch := taken(pass_, cursor, attempts[-1])) is None:
            return records
        cursor = ledger.advance(cursor, batch)
    raise AssertionError("the pass does not end")


def written(directory: Path, records: list[Part], *passes: Pass) -> Path:
    for pass_ in passes:
        declare(directory, pass_)
    writers: dict[int, AuditWriter] = {}
    for r in records:
        if r.worker not in writers:
            writers[r.worker] = AuditWriter(directory, f"w{r.worker}")
        writers[r.worker].write(r.fed)
    for writer in writers.values():
        writer.close()
    return directory


PASS = Pass(
    index=0,
    num_samples=50,
    epochs=3,
    seed=3,
    shuffle=True,
    drop_last=False,
    global_batch=8,
    worker_batch=None,
    accumulate=1,
)
STREAM = replace(PASS, num_samples=None, shuffle=False)
BY_WORKER = replace(PASS, global_batch=None, worker_batch=4)
NEWEST = 1_000_000


def test_a_job_without_faults_is_clean(tmp_path: Path) -> None:
    report = audit(written(tmp_path, trained(PASS, [3, 1, 4]), PASS), NEWEST)
    assert report == AuditReport(21, 150, 0, 0, 0, 0, [])
    assert report.epoch == 2
    assert report.clean
    assert str(report) == "audit: 0 lost, 0 repeated, 0 skipped (21 steps, 150 samples, 0 steps redone)"


@given(
    st.sampled_from([PASS, BY_WORKER]),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.frozensets(st.integers(0, 20), max_size=6),
)
def test_workers_that_come_and_go_and_steps_done_again_leave_it_clean(
    tmp_path_factory: pytest.TempPathFactory, pass_: Pass, drop_last: bool, sizes: list[int], redo: frozenset[int]
) -> None:
    pass_ = replace(pass_, drop_last=drop_last)
    records = trained(pass_, sizes, redo=redo)
    report = audit(written(tmp_path_factory.mktemp("audit"), records, pass_), NEWEST)
    assert report.mismatches == []
    assert report.clean
    assert report.steps == len({r.fed.seq for r in records})
    assert report.redone == len({(r.fed.seq, r.fed.generation) for r in records}) - report.steps


def test_a_lost_share_is_found(tmp_path: Path) -> None:
    records = trained(PASS, [2])
    gone = records.pop(7)
    report = audit(written(tmp_path, records, PASS), NEWEST)
    assert (report.lost, report.repeated) == (4, 0)
    assert report.mismatches == [f"pass 0, epoch 0: nobody fed [{gone.fed.lo}, {gone.fed.hi}) of the order"]


def test_the_lost_share_of_the_very_last_step_is_found(tmp_path: Path) -> None:
    report = audit(written(tmp_path, trained(PASS, [2])[:-1], PASS), NEWEST)
    assert (report.lost, report.repeated) == (1, 0)


def test_a_lost_step_is_found_in_the_middle_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    records = trained(PASS, [2])
    without = [r for r in records if r.fed.seq not in (2, 7)]
    report = audit(written(tmp_path, without, PASS), NEWEST)
    assert (report.lost, report.repeated) == (8 + 2, 0)


def test_a_whole_lost_epoch_is_found(tmp_path: Path) -> None:
    records = [r for r in trained(PASS, [2]) if r.fed.epoch != 1]
    assert audit(written(tmp_path, records, PASS), NEWEST).lost == 50


def test_a_repeated_step_is_found(tmp_path: Path) -> None:
    records = trained(PASS, [2])
    again = [r.but(seq=90, generation=99) for r in records if r.fed.seq == 3]
    report = audit(written(tmp_path, records + again, PASS), NEWEST)
    assert (report.lost, report.repeated) == (0, 8)
    assert "seq 90: [16, 20) of pass 0, epoch 0 was fed before" in report.mismatches


def test_a_share_fed_by_two_workers_is_found(tmp_path: Path) -> None:
    records = trained(PASS, [2])
    report = audit(written(tmp_path, [*records, replace(records[6], worker=5)], PASS), NEWEST)
    assert (report.lost, report.repeated) == (0, 4)


def test_a_wrong_id_is_found(tmp_path: Path) -> None:
    records = trained(PASS, [2])
    ids = PASS.order(0)[20:24].copy()
    ids[1] = ids[0]
    records[5] = records[5].but(ids_digest=digest([ids]))
    report = audit(written(tmp_path, records, PASS), NEWEST)
    assert (report.lost, report.repeated) == (4, 4)
    assert report.mismatches == ["seq 3: w1 fed other ids than pass 0, epoch 0 has in [20, 24)"]
    assert not report.clean


def test_the_right_ids_in_another_order_are_found(tmp_path: Path) -> None:
    records = trained(PASS, [1])
    records[2] = records[2].but(ids_digest=digest([PASS.order(0)[16:24][::-1]]))
    assert not audit(written(tmp_path, records, PASS), NEWEST).clean


def test_too_much_dropped_at_the_end_of_an_epoch_is_found(tmp_path: Path) -> None:
    pass_ = replace(PASS, drop_last=True)
    records = trained(pass_, [2])
    assert audit(written(tmp_path / "right", records, pass_), NEWEST).clean
    short = [r for r in records if not (r.fed.epoch == 0 and r.fed.step_hi == 48)]
    assert audit(written(tmp_path / "short", short, pass_), NEWEST).lost == 10


@pytest.mark.parametrize("torn_bytes", [1, RECORD_BYTES - 1])
def test_the_torn_record_of_a_killed_worker_is_left_out_and_the_next_one_is_whole(
    tmp_path: Path, torn_bytes: int
) -> None:
    records = trained(PASS, [2])
    halfway = [r for r in records if r.fed.seq <= 4]
    written(tmp_path, halfway, PASS)
    torn = tmp_path / "w1.bin"
    torn.write_bytes(torn.read_bytes() + b"\xff" * torn_bytes)
    assert audit(tmp_path, 4) == AuditReport(4, 32, 0, 0, 0, 0, [])
    # The worker comes back under its name and goes on in the same file.
    written(tmp_path, [r for r in records if r.fed.seq > 4], PASS)
    assert audit(tmp_path, NEWEST) == AuditReport(21, 150, 0, 0, 0, 0, [])


def test_the_newest_step_counts_only_when_it_is_known_to_be_committed(tmp_path: Path) -> None:
    records = [r for r in trained(PASS, [2]) if r.fed.seq <= 4]
    written(tmp_path, records[:-1], PASS)  # one of two members has written its record of seq 4, then all died
    assert audit(tmp_path, None) == AuditReport(3, 24, 0, 0, 0, 0, [])
    assert audit(tmp_path, 3) == AuditReport(3, 24, 0, 0, 0, 0, [])
    assert audit(tmp_path, 4).lost == 4


def test_edits_use_no_samples_also_after_the_dropped_end_of_an_epoch(tmp_path: Path) -> None:
    pass_ = replace(PASS, drop_last=True)
    records = [r.but(seq=r.fed.seq * 2) for r in trained(pass_, [2])]
    edits = []
    for r in records:
        at = 50 if r.fed.step_hi == 48 else r.fed.step_hi  # an epoch that is over is at its end
        edits.append(r.but(seq=r.fed.seq + 1, step_lo=at, step_hi=at, lo=at, hi=at))
    report = audit(written(tmp_path, records + edits, pass_), NEWEST)
    assert report == AuditReport(18, 144, 0, 0, 0, 0, [])


def test_an_edit_takes_the_place_of_a_step_that_was_not_committed(tmp_path: Path) -> None:
    records = [r for r in trained(PASS, [2]) if r.fed.seq <= 3]
    edit = [r.but(generation=99, step_lo=16, step_hi=16, lo=16, hi=16) for r in records[-2:]]
    assert audit(written(tmp_path, records + edit, PASS), NEWEST) == AuditReport(2, 16, 0, 0, 0, 1, [])


def test_passes_are_checked_each_by_its_own_order_and_may_be_left_early(tmp_path: Path) -> None:
    second = replace(PASS, index=1, num_samples=33)
    records = [r for r in trained(PASS, [2]) if r.fed.seq <= 10] + trained(second, [3], first_seq=11)
    report = audit(written(tmp_path, records, PASS, second), NEWEST)
    assert report == AuditReport(10 + 15, 50 + 24 + 99, 0, 0, 0, 0, [])


def test_steps_of_a_pass_that_learns_nothing_are_counted_apart(tmp_path: Path) -> None:
    scored = replace(PASS, index=1, num_samples=33, epochs=1, train=False)
    records = trained(PASS, [2]) + trained(scored, [3], first_seq=22)
    report = audit(written(tmp_path, records, PASS, scored), NEWEST)
    assert report == AuditReport(21 + 5, 150 + 33, 0, 0, 0, 0, [], evaluated_steps=5, evaluated_samples=33)
    assert (report.trained_steps, report.trained_samples) == (21, 150)


def test_skipped_steps_are_counted_once(tmp_path: Path) -> None:
    records = [r.but(skipped=r.fed.seq in (3, 9)) for r in trained(PASS, [2])]
    report = audit(written(tmp_path, records, PASS), NEWEST)
    assert report.clean
    assert report.skipped_steps == 2


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (lambda r: r.but(step_hi=25), "seq 3: step_hi is 24 at w0 and 25 at w1"),
        (lambda r: r.but(skipped=True), "seq 3: skipped is 0 at w0 and 1 at w1"),
        (lambda r: r.but(epoch=7), "seq 3: w1 fed epoch 7 of pass 0, which has 3 epochs"),
        (lambda r: r.but(pass_index=4), "pass 4: has records and was never declared, so they cannot be checked"),
        (lambda r: r.but(hi=26), "seq 3: w1 fed [20, 26), outside of the step [16, 24)"),
    ],
)
def test_records_that_contradict_each_other_are_found(tmp_path: Path, plant: Callable[[Part], Part], line: str) -> None:
    records = trained(PASS, [2])
    records[5] = plant(records[5])
    report = audit(written(tmp_path, records, PASS), NEWEST)
    assert line in report.mismatches
    assert not report.clean


def test_an_empty_directory_has_nothing_to_report(tmp_path: Path) -> None:
    assert audit(tmp_path, None) == audit(tmp_path, 7) == AuditReport(0, 0, 0, 0, 0, 0, [])


def test_many_findings_are_cut_short(tmp_path: Path) -> None:
    pass_ = replace(PASS, global_batch=1)
    records = [r.but(ids_digest=0) for r in trained(pass_, [1])]
    report = audit(written(tmp_path, records, pass_), NEWEST)
    assert report.lost == report.repeated == 150
    assert report.mismatches[-1] == "and 130 more"


def test_a_digest_does_not_know_how_a_share_was_cut() -> None:
    ids: Ids = np.arange(10, dtype=np.int64)
    assert digest([ids]) == digest([ids[:3], ids[3:3], ids[3:]])
    assert digest([ids]) != digest([ids[::-1]])
    assert digest([ids[::2]]) == digest([ids[::2].copy()])


def test_a_record_is_one_small_write(tmp_path: Path) -> None:
    written(tmp_path, trained(PASS, [1])[:3])
    assert (tmp_path / "w0.bin").stat().st_size == 3 * RECORD_BYTES


def test_a_pass_is_declared_once_and_alike(tmp_path: Path) -> None:
    declare(tmp_path, PASS)
    declare(tmp_path, PASS)
    with pytest.raises(WorkersDiffer) as raised:
        declare(tmp_path, replace(PASS, num_samples=60, seed=4))
    assert "pass 0: num_samples is 60 here and 50 at the first worker, seed is 4 here and 3 at" in str(raised.value)
    assert os.listdir(tmp_path) == ["pass-0.json"]


def test_a_pass_may_be_made_of_numpys_numbers(tmp_path: Path) -> None:
    declare(tmp_path, replace(PASS, seed=np.int64(3)))  # type: ignore[arg-type]
    declare(tmp_path, PASS)
    assert audit(written(tmp_path, trained(PASS, [2])), NEWEST).clean


def test_a_record_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AuditWriter(tmp_path, "w0")
    monkeypatch.setattr(os, "write", lambda fd, data: RECORD_BYTES // 2)
    with pytest.raises(OSError, match=r"w0\.bin: a record was cut short, the disk is full"):
        writer.write(Fed(1, 1, 0, 0, 0, 1, 0, 1, 0, False))
    monkeypatch.undo()
    writer.close()


def test_a_stream_is_clean_and_what_is_missing_at_its_end_is_found(tmp_path: Path) -> None:
    records = trained(STREAM, [3, 1, 4], redo=frozenset({2, 9}))
    report = audit(written(tmp_path / "whole", records, STREAM), NEWEST)
    assert report == AuditReport(21, 150, 0, 0, 0, 2, [])
    cut = [part for part in records if not (part.fed.epoch == 1 and part.fed.step_lo >= 40)]
    report = audit(written(tmp_path / "cut", cut, STREAM), NEWEST)
    assert report.lost == 1
    assert report.mismatches == ["pass 0, epoch 1: nobody fed what comes after 40 in the stream"]
    gap = [part for part in records if not (part.fed.epoch == 0 and part.fed.lo == 16)]
    assert audit(written(tmp_path / "gap", gap, STREAM), NEWEST).lost > 0
