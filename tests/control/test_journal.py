from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from shoal.control import membership as m
from shoal.control.journal import Journal


def running(workers: int) -> tuple[m.Membership, m.Publish]:
    membership = m.found(1, 8, workers)
    for index in range(workers):
        membership, _ = m.on_join(membership, f"w{index}", "here", 0.0)
        membership, _ = m.on_ready(membership, f"w{index}")
    membership, (publish,) = m.settle(membership)
    assert isinstance(publish, m.Publish)
    return membership, publish


def test_a_new_journal_holds_no_membership(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.load(0.0) is None
    journal.close()


def test_what_was_recorded_is_there_for_the_next_coordinator(tmp_path: Path) -> None:
    membership, publish = running(3)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.record(membership, [publish], 100.0)
    journal.record(m.on_leave(membership, "w1")[0], [], 101.0)
    again = Journal(tmp_path / "journal.sqlite")  # the first was never closed: it was killed
    loaded = again.load(7.0)
    assert loaded == m.on_leave(membership, "w1")[0]
    assert loaded is not None
    assert {worker.life.alive_at for worker in loaded.workers} == {7.0}
    assert again.generations() == [(1, "w0 joined, w1 joined, w2 joined")]
    again.close()
    journal.close()


def test_a_generation_number_cannot_be_recorded_twice(tmp_path: Path) -> None:
    membership, publish = running(1)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.record(membership, [publish], 100.0)
    with pytest.raises(sqlite3.IntegrityError):
        journal.record(m.found(1, 1, 1), [publish], 101.0)
    assert journal.load(0.0) == membership, "a record that failed leaves the one before"
    journal.close()
