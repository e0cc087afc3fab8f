from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control import pieces
from shoal.control.rundir import RunDir


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("audit/b-w0.bin", True),
        ("metrics/b-w12.jsonl", True),
        ("logs/b-w0.log", True),
        ("audit/pass-3.json", True),
        ("audit/a-w0.bin", False),
        ("audit/b-w0.bin/../../token", False),
        ("audit/../token", False),
        ("/etc/passwd", False),
        ("token", False),
        ("logs/b-w0.log\n", False),
        ("journal.sqlite", False),
    ],
)
def test_a_host_writes_only_files_of_its_own_workers(path: str, known: bool) -> None:
    assert pieces.is_known("b", path) is known


def test_a_host_with_a_path_for_a_name_writes_nothing() -> None:
    assert not pieces.is_known("../../b", "audit/../../b-w0.bin")


def test_a_piece_that_comes_twice_or_too_early_changes_nothing_and_is_told_where_to_go_on(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    path = "audit/b-w0.bin"
    assert pieces.take(run_dir, path, 0, b"one") == 3
    assert pieces.take(run_dir, path, 0, b"one") == 3
    assert pieces.take(run_dir, path, 6, b"three") == 3
    assert pieces.take(run_dir, path, 3, b"two") == 6
    assert (run_dir.path / path).read_bytes() == b"onetwo"


def test_a_file_that_is_written_once_is_kept_as_the_first_host_wrote_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert pieces.take(run_dir, "results/pass-1.json", 0, b"{}") == 2
    assert pieces.take(run_dir, "results/pass-1.json", 0, b"[1]") == 3
    assert (run_dir.results / "pass-1.json").read_text() == "{}"
