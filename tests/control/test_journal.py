from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.control.journal import Entry, Journal, JournalDamaged, put_aside
from shoal.control.membership.settling import settle
from shoal.control.membership.values import Membership, found
from shoal.control.membership.workers import on_join, on_leave, on_ready
from shoal.metrics import EventLog


def running(workers: int) -> Membership:
    membership = found(1, 8, workers)
    for index in range(workers):
        membership, _ = on_join(membership, f"w{index}", "here", 0.0)
        membership, _ = on_ready(membership, f"w{index}")
    return settle(membership)[0]


def test_a_new_journal_holds_no_membership(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.load(0.0) is None
    journal.close()


def test_what_was_recorded_is_there_for_the_next_coordinator(tmp_path: Path) -> None:
    membership = running(3)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.record(membership)
    journal.record(on_leave(membership, "w1")[0], ["one line", "another"], 101)
    again = Journal(tmp_path / "journal.sqlite")  # the first was never closed: it was killed
    entry = again.load(7.0)
    assert entry == Entry(on_leave(membership, "w1")[0], ("one line", "another"), 101)
    assert {worker.life.alive_at for worker in entry.membership.workers} == {7.0}
    again.close()
    journal.close()


def test_a_journal_does_not_grow_with_the_number_of_changes(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    membership = running(8)
    sizes = []
    for _ in range(2):
        for number in range(1000):
            journal.record(replace(membership, number=number), ["a line"], number)
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert sizes[0] == sizes[1]
    journal.close()


@pytest.mark.parametrize("damage", ["overwritten", "cut", "row"])
def test_a_damaged_journal_is_said_to_be_one_and_put_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.record(running(3))
    journal.close()
    if damage == "overwritten":
        path.write_bytes(b"garbage" * 1000)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        database = sqlite3.connect(path)
        database.execute("UPDATE journal SET membership = '{}'")
        database.commit()
        database.close()
    for number in (1, 2):
        kept = path.read_bytes()
        with pytest.raises(JournalDamaged):
            Journal(path).load(0.0)
        assert put_aside(path) == tmp_path / f"journal.damaged-{number}"
        fresh = Journal(path)
        assert fresh.load(0.0) is None
        fresh.close()
        path.write_bytes(kept)
    path.unlink()
    assert put_aside(path) is None


@pytest.mark.parametrize("written", [0, 5, 6, 8, 13, 15, 19])
def test_lines_of_the_event_log_that_a_killed_coordinator_did_not_write_are_written_once(
    tmp_path: Path, written: int
) -> None:
    path = tmp_path / "events.jsonl"
    lines = ["third", "fourth", "fifth"]
    path.write_text("first\nsecond\n" + "third\nfourth\nfifth\nlater\n"[:written])
    log = EventLog(path)
    log.mend(lines, len("first\nsecond\n"))
    log.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\nfifth\n"
