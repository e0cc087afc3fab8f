"""The command line: one line for every mistake, and no torch for anything but training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import cli, errors
from shoal.control import commands
from shoal.control.rundir import Committed, RunDir
from shoal.launch.job import Size, parse_size
from shoal.metrics import EventLog
from shoal.view import state


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").touch()
    RunDir.create(tmp_path / "other", {})


def shoal(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


MISTAKES = {
    "run nowhere.py": "ScriptFailed: nowhere.py does not exist",
    "run taken": "ScriptFailed: taken cannot be read: Is a directory",
    "run broken.py": "ScriptFailed: broken.py, line 2: SyntaxError",
    "run -n 0 train.py": "SettingsContradict: -n 0 has no worker",
    "run -n 0:4 train.py": "SettingsContradict: -n 0:4 has no worker",
    "run -n -3 train.py": "SettingsContradict: -n -3 has no worker",
    "run -n 8:2 train.py": "SettingsContradict: -n 8:2 asks for more at least than at most; write -n 2:8",
    "run -n x train.py": "SettingsContradict: -n x is not a number of workers",
    "run -n 1:2:3 train.py": "SettingsContradict: -n 1:2:3 is not a number of workers",
    "run -n 1000 train.py": "SettingsContradict: -n 1000 is more than one host takes",
    "run --dir taken train.py": "RunDirUnusable:",
    "run --dir other train.py": "RunDirUnusable:",
    "run --dir train.py train.py": "RunDirUnusable:",
    "run --budget 0 train.py": "SettingsContradict: --budget is 0; it must",
    "run --budget 0.01 train.py": "SettingsContradict:",
    "run --budget nan train.py": "SettingsContradict:",
    "run --budget soon train.py": "SettingsContradict: Invalid value for '--budget'",
    "run --on-error ignore train.py": "SettingsContradict: Invalid value for '--on-error'",
    "run --restarts -1 train.py": "SettingsContradict: --restarts -1 is below 0",
    "run --threads 0 train.py": "SettingsContradict: --threads 0 is below 1",
    "run --memory much train.py": "SettingsContradict: --memory much is not a number of bytes",
    "run --memory 0 train.py": "SettingsContradict: --memory 0 is not a number of bytes",
    "run --log-size 0 train.py": "SettingsContradict: --log-size 0 is not a number of bytes",
    "run --metrics-port http train.py": "SettingsContradict: --metrics-port http is not a port",
    "run --metrics-port 70000 train.py": "SettingsContradict: --metrics-port 70000 is not a port",
    "run": "SettingsContradict: Missing argument 'SCRIPT'",
    "run --no-such train.py": "SettingsContradict: No such option: --no-such",
    "dance": "SettingsContradict: No such command 'dance'",
    "status nowhere": "JobNotFound:",
    "status": "JobNotFound:",
    "stop": "JobNotFound:",
    "audit nowhere": "JobNotFound:",
    "report nowhere": "JobNotFound:",
    "status /nowhere": "JobNotFound: no job at /nowhere; name a run directory",
    "events nowhere": "JobNotFound:",
    "top nowhere": "JobNotFound:",
    "logs nowhere": "JobNotFound:",
    "logs other": "JobNotFound: no log in",
    "logs other --worker w9": "JobNotFound: no log of w9 in",
    "scale other 2": "JobNotFound: other has ended",
    "scale other two": "SettingsContradict: cannot scale to two",
    "scale other 0": "SettingsContradict: cannot scale to 0",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistake_is_one_line_and_exit_code_2(command, capsys):
    assert shoal(*command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"shoal: {MISTAKES[command]}")
    assert err.count("\n") == 1
    assert not Path("shoal-runs").exists()


@pytest.mark.parametrize(
    ("text", "cores", "size"),
    [
        ("4", 2, Size(1, 256, 4)),
        ("1", 64, Size(1, 256, 1)),
        ("2:8", 4, Size(2, 8, 4)),
        ("2:8", 1, Size(2, 8, 2)),
        ("2:8", 64, Size(2, 8, 8)),
        ("3:3", 64, Size(3, 3, 3)),
    ],
)
def test_number_of_workers_is_a_target_or_a_range(text, cores, size):
    assert parse_size(text, cores) == size


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("2G", 2 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("100", 100), ("1 KB", 1024)]
)
def test_memory_is_read_in_powers_of_1024(text, size_bytes):
    assert cli.parse_bytes(text) == size_bytes


def test_error_that_is_no_mistake_of_the_user_exits_with_1(monkeypatch, capsys):
    def lose(*_: object) -> RunDir:
        raise errors.CoordinatorLost("silent\nfor 5 s")

    monkeypatch.setattr(cli.rundir, "find", lose)
    assert shoal("stop") == 1
    assert capsys.readouterr().err == "shoal: CoordinatorLost: silent for 5 s\n"


def test_status_of_a_job_that_is_over_says_where_it_was(capsys):
    run_dir = RunDir.create("shoal-runs/done", {"target": 2, "min": 1, "max": 4})
    events = EventLog(run_dir.events)
    events.write(1.0, "generation", number=7, members=["w0"], leavers=[], fault=False, paused=False, cause="w0 joined")
    events.write(2.0, "finished", worker_id="w0", text="", step=30, seq=31, digest="", report={})
    events.close()
    run_dir.write_committed(Committed(seq=31, step=30, epoch=2, samples=960, loss=0.125))
    assert shoal("status", "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["phase"], state["generation"], state["target"]) == ("finished", 7, 2)
    where = {name: state[name] for name in ("seq", "step", "epoch", "samples", "loss")}
    assert where == {"seq": 31, "step": 30, "epoch": 2, "samples": 960, "loss": 0.125}
    assert shoal("status", "done") == 0
    assert capsys.readouterr().out.startswith("done: finished, generation 7, epoch 3, step 30, 960 samples")


def test_status_of_a_job_that_failed_says_why(capsys):
    run_dir = RunDir.create("shoal-runs/broken", {})
    events = EventLog(run_dir.events)
    events.write(1.0, "failed", worker_id="w1", text="ValueError: one", traceback="")
    events.write(1.1, "stopping", text="w1 failed")
    assert shoal("status") == 0
    assert capsys.readouterr().out.startswith("broken: failed (w1 failed: ValueError: one), ")
    events.write(1.2, "over", phase="failed", text="ScriptFailed: train.py, line 3: ValueError: one")
    events.close()
    assert shoal("status") == 0
    assert capsys.readouterr().out.startswith("broken: failed (ScriptFailed: train.py, line 3: ValueError: one), ")


def test_job_that_runs_and_does_not_answer_is_not_taken_for_an_ended_one(capsys, monkeypatch):
    for patient in (state.live, commands.stop):
        monkeypatch.setattr(patient, "__defaults__", (0.2,))  # seconds for an answer
    run_dir = RunDir.create("shoal-runs/silent", {})
    with run_dir.held():
        assert shoal("status") == 0
        assert capsys.readouterr().out.startswith("silent: starting, ")
        run_dir.write_address("127.0.0.1:1")
        assert shoal("status") == 0
        assert capsys.readouterr().out.startswith("silent: not answering (")
        assert shoal("stop") == 2
        assert "gives no answer within 0.2 s" in capsys.readouterr().err


def test_stopping_a_job_that_has_ended_is_no_error(capsys):
    run_dir = RunDir.create("shoal-runs/done", {})
    events = EventLog(run_dir.events)
    events.write(1.0, "over", phase="finished", text="")
    assert shoal("stop") == 0
    assert capsys.readouterr() == ("done has ended (finished)\n", "")
    events.write(2.0, "over", phase="ended", text="stopped: SIGTERM")
    events.close()
    assert shoal("stop") == 0
    assert capsys.readouterr() == ("done has ended (stopped: SIGTERM)\n", "")


def test_audit_exits_with_1_when_not_clean(monkeypatch, capsys):
    from shoal.data import audit

    RunDir.create("shoal-runs/done", {})
    assert shoal("audit") == 0
    assert "0 lost, 0 repeated" in capsys.readouterr().out
    found = audit.AuditReport(3, 30, 1, 0, 0, 0, ["epoch 0: sample 7 is missing"])
    monkeypatch.setattr(audit, "audit", lambda *_: found)
    assert shoal("audit", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["lost"], report["mismatches"]) == (False, 1, ["epoch 0: sample 7 is missing"])


def test_command_line_does_not_import_torch_numpy_or_grpc():
    code = "import sys, shoal.cli; print([name for name in ('torch', 'numpy', 'grpc') if name in sys.modules])"
    path = str(Path(cli.__file__).parents[1])
    said = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_importing_shoal_leaves_the_logging_of_a_script_alone():
    code = "import logging, shoal, shoal.train.worker, shoal.control.coordinator; print(logging.root.handlers)"
    path = str(Path(cli.__file__).parents[1])
    said = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_help_has_examples_and_runs_as_a_module():
    path = str(Path(cli.__file__).parents[1])
    command = [sys.executable, "-m", "shoal", "run", "--help"]
    said = subprocess.run(command, cwd=path, capture_output=True, text=True, check=True)
    assert "shoal run -n 2:8 train.py" in said.stdout


@pytest.mark.parametrize("command", [each.callback.__name__ for each in cli.app.registered_commands])
def test_every_command_has_examples(command, capsys):
    assert shoal(command, "--help") == 0
    assert f"shoal {command}" in capsys.readouterr().out.partition("Examples")[2]


@pytest.mark.parametrize(
    ("words", "found"),
    [("shoal sta", "status"), ("shoal audit do", "done"), ("shoal logs --worker w", "w0\nw10")],
)
def test_shell_completes_commands_jobs_and_workers(words, found, monkeypatch, capsys):
    run_dir = RunDir.create("shoal-runs/done", {})
    for name in ("w10", "w0", "coordinator"):
        (run_dir.logs / f"{name}.log").touch()
    monkeypatch.setenv("_SHOAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert shoal() == 0
    assert capsys.readouterr().out.split() == found.split()
