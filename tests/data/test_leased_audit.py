"""What the audit says of a pass without lockstep: of what workers and coordinator cannot know of each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.data import leased_audit
from shoal.data.audit import AuditReport, audit
from shoal.data.fed import AuditWriter, Fed, declare, digest, roll_back
from shoal.data.leases import Lease, Shard
from shoal.data.ledger import Pass

PASS = Pass(0, 40, 2, 5, True, False, None, 4, 1, leased=True)
Part = tuple[str, Fed]


def fed(worker: str, number: int, epoch: int, shard: tuple[int, int], lo: int, hi: int) -> Part:
    ids = digest([PASS.order(epoch)[lo:hi]])
    return worker, Fed(1, number, 0, epoch, *shard, lo, hi, ids, False)


def lease(worker: str, number: int, epoch: int, lo: int, hi: int, used: int | None = None) -> list[Part]:
    """The records of a lease that was used up to there."""
    steps = range(lo, hi if used is None else used, 4)
    return [fed(worker, number, epoch, (lo, hi), at, min(at + 4, hi)) for at in steps]


def over(worker: str) -> Part:
    return worker, Fed(1, 9, 0, PASS.epochs, 0, 0, 0, 0, digest([]), False)


# w1 dies with its lease 2 half used, of which it has told nothing; w2 comes, and has the whole of it again.
COMPLETE = [
    *lease("w0", 1, 0, 0, 20),
    *lease("w1", 2, 0, 20, 40, used=28),
    *lease("w0", 3, 1, 0, 20),
    *lease("w2", 4, 0, 20, 40),
    *lease("w0", 5, 1, 20, 32),
    *lease("w2", 6, 1, 32, 40),
    over("w0"),
    over("w2"),
]


def audited(directory: Path, parts: list[Part]) -> AuditReport:
    declare(directory, PASS)
    for worker in {name for name, _ in parts}:
        writer = AuditWriter(directory, worker)
        for name, record in parts:
            if name == worker:
                writer.write(record)
        writer.close()
    return audit(directory, None)


def test_a_pass_in_which_a_worker_died_is_clean_and_its_untold_steps_count_as_redone(tmp_path: Path) -> None:
    report = audited(tmp_path, COMPLETE)
    assert report.clean, report.mismatches
    assert (report.steps, report.samples, report.redone) == (20, 80, 2)
    assert "0 lost, 0 repeated" in str(report)


def test_in_the_middle_of_a_pass_what_is_on_lease_is_not_lost(tmp_path: Path) -> None:
    report = audited(tmp_path, [*lease("w0", 1, 0, 0, 20, used=8), *lease("w1", 5, 1, 0, 20, used=4)])
    assert report.clean, report.mismatches
    assert report.samples == 12


def test_what_nobody_used_of_a_complete_pass_is_lost(tmp_path: Path) -> None:
    report = audited(tmp_path, [part for part in COMPLETE if part[1].seq != 6])
    assert (report.lost, report.repeated) == (8, 0)
    assert report.mismatches == ["pass 0, epoch 1: nobody fed [32, 40) of the order"]


def test_a_gap_inside_of_a_lease_is_found_while_the_pass_goes_on(tmp_path: Path) -> None:
    report = audited(tmp_path, [part for part in lease("w0", 1, 0, 0, 20) if part[1].lo != 8])
    assert report.lost == 4
    assert "lease 1: w0 fed [12, 16)" in report.mismatches[0]


def test_samples_that_one_lease_used_twice_are_repeated(tmp_path: Path) -> None:
    report = audited(tmp_path, [*COMPLETE, fed("w0", 1, 0, (0, 20), 8, 12)])
    assert report.repeated == 4
    assert "which it had fed before" in report.mismatches[0]


@pytest.mark.parametrize("sign", [over("w1"), *lease("w1", 7, 1, 0, 4)])
def test_samples_of_two_leases_are_repeated_if_the_worker_of_the_older_trained_on(tmp_path: Path, sign: Part) -> None:
    report = audited(tmp_path, [*COMPLETE, sign])
    assert report.repeated >= 8
    assert any("[20, 24)" in line and "w1 by lease 2" in line for line in report.mismatches)


def test_other_ids_than_those_of_the_order_are_found(tmp_path: Path) -> None:
    worker, record = COMPLETE[0]
    wrong = record._replace(ids_digest=digest([np.array([1, 2, 3, 4])]))
    report = audited(tmp_path, [(worker, wrong), *COMPLETE[1:]])
    assert (report.lost, report.repeated) == (4, 4)
    assert "fed other ids" in report.mismatches[0]


def test_one_number_for_two_leases_is_found(tmp_path: Path) -> None:
    report = audited(tmp_path, [*lease("w0", 1, 0, 0, 20), *lease("w1", 1, 0, 20, 40)])
    assert "another lease with that number" in report.mismatches[0]


def test_samples_outside_of_the_lease_are_found(tmp_path: Path) -> None:
    report = audited(tmp_path, [fed("w0", 1, 0, (0, 8), 0, 4), fed("w0", 1, 0, (0, 8), 4, 12)])
    assert "outside of its shard [0, 8)" in report.mismatches[0]


def test_a_job_that_begins_anew_takes_back_what_the_one_before_had_used(tmp_path: Path) -> None:
    audited(tmp_path, COMPLETE)
    roll_back(tmp_path, 1, 0)
    assert audit(tmp_path, None).samples == 0
    lent = leased_audit.lent(tmp_path, [], 0, begun=-1, losses=1)
    assert lent.used() == (0, 0)
    assert not lent.passes, "a pass that nobody has come to again"
    declare(tmp_path, PASS)
    assert [one.extent.pass_index for one in leased_audit.lent(tmp_path, [], 0, begun=0, losses=1).passes] == [0]


@pytest.mark.parametrize("newer", [[Lease(4, "w2", Shard(0, 0, 20, 28), 20)], []])
def test_without_a_journal_who_has_what_a_newer_lease_has_or_had_is_a_stranger(
    tmp_path: Path, newer: list[Lease]
) -> None:
    """It was silent when an earlier journal was lost."""
    audited(tmp_path, [*lease("w0", 1, 0, 0, 20), *([] if newer else lease("w2", 4, 0, 20, 28))])
    held = [Lease(2, "w1", Shard(0, 0, 20, 40), 24), Lease(3, "w0", Shard(0, 1, 20, 28), 20), *newer]
    lent = leased_audit.lent(tmp_path, held, 3, begun=0, losses=2)
    assert lent.strangers == ("w1",)
    assert [each.number for each in lent.leases] == [3, *(each.number for each in newer)]
