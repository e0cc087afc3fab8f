"""Logs as they are read while they grow, and while their heads are taken off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch import tail as tails
from shoal.launch.tail import Tail, bound, older_part

WRITES = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for number in range(100_000):
    os.write(fd, b"line %d\\n" % number)
"""


def test_tail_gives_every_line_once_and_half_a_line_only_at_the_end(tmp_path):
    path = tmp_path / "w0.log"
    tail = Tail(path)
    assert tail.lines() == []
    with path.open("w") as log:
        for text, seen in (("one\ntw", ["one"]), ("o\n", ["two"]), ("three", [])):
            log.write(text)
            log.flush()
            assert tail.lines() == seen
    assert tail.lines(last=True) == ["three"]
    assert tail.lines(last=True) == []
    tail.close()


def test_tail_leaves_out_what_lies_behind_the_cut(tmp_path):
    path = tmp_path / "w0.log"
    path.write_text("one\ntwo\nTraceback\n")
    tail = Tail(path)
    tail.cut(len("one\ntwo\n"))
    assert tail.lines(last=True) == ["one", "two"]
    tail.close()


@pytest.mark.parametrize(
    ("count", "seen"), [(0, []), (1, ["three"]), (2, ["two", "three"]), (9, ["one", "two", "three"])]
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_tail_begins_with_the_last_lines(tmp_path, count, seen, end):
    path = tmp_path / "w0.log"
    path.write_text("one\ntwo\nthree" + end)
    tail = Tail(path, last_lines=count)
    assert tail.lines(last=True) == seen
    tail.close()


@pytest.mark.parametrize("collapses", [True, False])
def test_head_that_is_taken_off_is_the_older_part_and_the_tail_goes_on(tmp_path, monkeypatch, collapses):
    if not collapses:
        monkeypatch.setattr(tails, "_collapse", lambda *_: False)
    path = tmp_path / "w0.log"
    written = [f"line {number}" for number in range(5000)]
    seen: list[str] = []
    tail = Tail(path)
    with path.open("a") as log:
        for number, line in enumerate(written):
            print(line, file=log, flush=True)
            if number % 700 == 0:
                seen += tail.lines()
            if number % 1100 == 1099:
                assert bound(path, 8000)
                assert not bound(path, 8000)
    assert seen + tail.lines(last=True) == written
    tail.close()
    kept = (older_part(path).read_text() + path.read_text()).splitlines()
    assert kept[1:] == written[1 - len(kept) :]  # the oldest line has lost its beginning
    assert sorted(os.listdir(tmp_path)) == ["w0.log", "w0.log.1"]


def test_cut_moves_with_the_head(tmp_path):
    path = tmp_path / "w0.log"
    before = "".join(f"line {number}\n" for number in range(2000))
    path.write_text(before + "Traceback\n")
    tail = Tail(path)
    tail.cut(len(before))
    assert tail.lines()[-1] == "line 1999"
    assert bound(path, 8000)
    assert tail.lines(last=True) == []
    tail.close()


def test_cut_is_by_the_file_as_it_is_when_its_head_has_just_been_taken_off(tmp_path):
    path = tmp_path / "w0.log"
    before = [f"line {number}" for number in range(2000)]
    path.write_text("\n".join(before[:10]) + "\n")
    tail = Tail(path)
    assert tail.lines() == before[:10]
    with path.open("a") as log:
        log.write("\n".join(before[10:]) + "\n")
    assert bound(path, 8000)
    tail.cut(path.stat().st_size)
    with path.open("a") as log:
        log.write("Traceback\n")
    assert tail.lines(last=True) == before[10:]
    tail.close()


def test_tail_of_a_file_that_somebody_emptied_begins_anew(tmp_path):
    path = tmp_path / "w0.log"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert tail.lines() == ["one", "two"]
    path.write_text("three\n")
    assert tail.lines() == []  # it may be a head on its way to the older part
    assert tail.lines() == ["three"]
    tail.close()


def test_disk_too_full_for_a_copy_keeps_no_older_part(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tails, "_copy", full)
    path = tmp_path / "w0.log"
    path.write_text("x" * 10_000)
    assert bound(path, 8000)
    assert (path.stat().st_size, older_part(path).stat().st_size) == (0, 0)


def _collapses(path: Path) -> bool:
    path.write_bytes(bytes(1 << 20))
    with path.open("rb+") as file:
        return tails._collapse(file.fileno(), 1 << 19)


def test_worker_that_writes_while_heads_are_taken_off_loses_nothing(tmp_path):
    if not _collapses(tmp_path / "probe"):
        pytest.skip("this file system cannot take a range out of a file")
    path = tmp_path / "w0.log"
    path.touch()
    seen: list[str] = []
    tail = Tail(path)
    taken_off = 0
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)]) as writer:
        while writer.poll() is None:
            taken_off += bound(path, 50_000)
            seen += tail.lines()
    seen += tail.lines(last=True)
    tail.close()
    assert taken_off > 1
    assert seen == [f"line {number}" for number in range(100_000)]
