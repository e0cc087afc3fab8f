from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.control import rundir
from shoal.control.rundir import RunDir
from shoal.errors import JobNotFound, RunDirUnusable


def test_a_new_run_directory_is_its_owners_alone_and_keeps_the_settings(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "a" / "run", {"script": "train.py"})
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.token_file.stat().st_mode) == 0o600
    assert len(run_dir.token()) >= 32
    assert run_dir.settings()["script"] == "train.py"
    assert run_dir.settings()["created"] > 0
    assert run_dir.logs.is_dir()
    assert run_dir.audit.is_dir()


def test_tokens_of_two_runs_differ(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path / "a", {}).token() != RunDir.create(tmp_path / "b", {}).token()


def test_a_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", {})
    with pytest.raises(RunDirUnusable, match="another job"):
        RunDir.create(tmp_path / "run", {})


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(RunDirUnusable, match="not empty"):
        RunDir.create(tmp_path, {})
    assert os.listdir(tmp_path) == ["notes"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirUnusable, match="choose another --dir"):
        RunDir.create(tmp_path / "run", {})


def test_what_is_no_run_directory_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(RunDirUnusable, match="not a run directory"):
        RunDir.open(tmp_path)


def test_the_address_is_unknown_until_it_is_written(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert run_dir.address() is None
    run_dir.write_address("127.0.0.1:4711")
    assert RunDir.open(run_dir.path).address() == "127.0.0.1:4711"
    assert not [name for name in os.listdir(run_dir.path) if name.startswith(".")]


def test_a_job_is_found_by_path_by_name_and_as_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    older = RunDir.create(rundir.default_path("models/old.py", now=0.0), {})
    newer = RunDir.create(rundir.default_path("new.py", now=0.0), {})
    os.utime(older.job_file, (1, 1))
    assert older.path.name.startswith("old-19")
    assert rundir.find(str(older.path)) == older
    assert rundir.find(older.path.name) == older
    assert rundir.find() == newer


def test_a_job_that_is_nowhere_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobNotFound, match="start one with shoal run"):
        rundir.find()
    with pytest.raises(JobNotFound, match="nobody"):
        rundir.find("nobody")


def test_a_run_directory_has_one_coordinator_at_a_time_and_knows_whether_it_serves(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert run_dir.coordinator() == (0, False)
    claim = run_dir.claim()
    assert run_dir.coordinator() == (os.getpid(), False)
    claim.write("serves")
    assert run_dir.coordinator() == (os.getpid(), True)
    with pytest.raises(RunDirUnusable, match="another coordinator"):
        run_dir.claim()
    claim.release()
    run_dir.claim().release()
    assert run_dir.coordinator() == (os.getpid(), False)


def test_a_job_lives_as_long_as_its_launcher_holds_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert not run_dir.runs()
    with run_dir.held():
        assert run_dir.runs()
        assert run_dir.runs(), "to look changes nothing"
    assert not run_dir.runs()


def test_what_killed_processes_had_not_finished_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    run_dir.write_address("127.0.0.1:1")
    run_dir.results.mkdir()
    run_dir.checkpoints.mkdir()
    kept = sorted(run_dir.path.rglob("*"))
    unfinished = [
        run_dir.checkpoints / f".draft-{os.getpid()}-step-000000007-g1",
        run_dir.checkpoints / ".gone-1-step-1-g1",
    ]
    for folder in unfinished:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    for draft in (".address.77", ".committed.json.77", "audit/.pass-0.json.abcd", "results/.pass-3.json.77"):
        (run_dir.path / draft).write_text("half")
    (run_dir.path / ".gitignore").write_text("somebody else's")
    run_dir.remove_drafts()
    assert sorted(run_dir.path.rglob("*")) == sorted([*kept, run_dir.path / ".gitignore"])
