"""The command line: one line for every mistake, and no torch for anything but training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from shoal import cli, errors
from shoal.cli import job
from shoal.cli.options import normalized, parse_bytes
from shoal.control import commands, rundir
from shoal.control.rundir import Committed, RunDir
from shoal.launch.job import Ending
from shoal.launch.settings import Size, parse_size
from shoal.metrics import EventLog
from shoal.view import state


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").touch()
    (tmp_path / "model.py").write_text("model = loss = optimizer = dataset = metrics = print\n")
    (tmp_path / "job.toml").write_text('[job]\nthreads = "two"\n')
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
    "run -n 1000 train.py": "SettingsContradict: -n 1000 is more than a job takes",
    "run --dir taken train.py": "RunDirUnusable:",
    "run --dir other train.py": "RunDirUnusable:",
    "run --dir train.py train.py": "RunDirUnusable:",
    "run --budget 0 train.py": "SettingsContradict: --budget is 0; it must",
    "run --budget 0.01 train.py": "SettingsContradict:",
    "run --budget nan train.py": "SettingsContradict:",
    "run --budget soon train.py": "SettingsContradict: Invalid value for '--budget'",
    "run --on-error ignore train.py": "SettingsContradict: Invalid value for '--on-error'",
    "run --restarts -1 train.py": "SettingsContradict: --restarts -1 is below 0",
    "run --threads 0 train.py": "SettingsContradict: --threads 0 is not from 1 to 1024",
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
    "status taken/../nowhere": "JobNotFound: no job at nowhere or shoal-runs/nowhere",
    "scale taken/../nowhere 2": "JobNotFound: no job at nowhere or shoal-runs/nowhere",
    "status /nowhere": "JobNotFound: no job at /nowhere; name a run directory",
    "events nowhere": "JobNotFound:",
    "top nowhere": "JobNotFound:",
    "logs nowhere": "JobNotFound:",
    "logs other": "JobNotFound: no log in",
    "logs other --worker w9": "JobNotFound: no log of w9 in",
    "scale other 2": "JobNotFound: other has ended",
    "scale other two": "SettingsContradict: cannot scale to two",
    "scale other 0": "SettingsContradict: cannot scale to 0: write a number of workers from 1 to 256",
    "scale other 257": "SettingsContradict: cannot scale to 257",
    "scale other -12": "SettingsContradict: -12 is taken for an option, which shoal scale does not have; write",
    "scale other 2 --no-such": "SettingsContradict: No such option: --no-such; see shoal scale --help",
    "resume other": "RunDirUnusable: the run directory does not say which script",
    "web other --port 99999": "SettingsContradict: --port 99999 cannot be; write a number from 0 to 65535",
    "web other --port -1": "SettingsContradict: --port -1 cannot be",
    "logs other -n -1": "SettingsContradict: --lines -1 cannot be; write 0 or more",
    "top other --interval 0": "SettingsContradict: --interval 0 cannot be",
    "top other --interval nan": "SettingsContradict: --interval nan cannot be",
    "run --backoff nan train.py": "SettingsContradict: --backoff nan is not a number of seconds",
    "run --keep 0 train.py": "SettingsContradict: --keep 0 is below 1",
    "run --checkpoint-every 0 train.py": "SettingsContradict: --checkpoint-every 0",
    "run taken/../nowhere.py": "ScriptFailed: nowhere.py does not exist",
    "train model.py --epochs 0": "SettingsContradict: epochs is 0; write 1 or more",
    "train model.py --batch-size 0": "SettingsContradict: batch_size is 0; write 1 or more",
    "train model.py --loaders -1": "SettingsContradict: loaders is -1; write 0 or more",
    "train model.py --set clip_norm=0": "SettingsContradict: clip_norm is 0; write a number above 0",
    "train model.py --set epochs=many": "SettingsContradict: --set has epochs = 'many'; write a whole number",
    "train model.py --set shuffle=False": "SettingsContradict: --set has shuffle = 'False'; write true or false",
    "train model.py --set on_error=go": "SettingsContradict: --set has on_error = 'go'; write stop or relaunch",
    "train model.py --set epocs=1": "SettingsContradict: --set has 'epocs'; there are accumulate, address, backoff_s",
    "train model.py --set min=1": "SettingsContradict: --set has 'min'; there are",
    "train model.py --set workers=0": "SettingsContradict: workers = 0 has no worker",
    "train model.py --set budget_s=0": "SettingsContradict: --budget is 0",
    "train model.py --set log_bytes=0": "SettingsContradict: log_bytes is 0; write a number of bytes from 1 up",
    "train model.py --set metrics_port=70000": "SettingsContradict: --metrics-port 70000 is not a port",
    "train model.py --config job.toml": "SettingsContradict: job.toml [job] has threads = 'two'; write a whole number",
    "train model.py --set env=1": "SettingsContradict: --set has env = 1; write a table",
    'train model.py --set env={"A":1}': "SettingsContradict: --env A is no variable",
    "topology show rng": "TopologyUnusable: there is no topology 'rng', did you mean ring; there are ring, star",
    "topology show ring(up)": "TopologyUnusable: ring(up): a ring goes both, left or right",
    "topology show one_peer(random_matching)": "TopologyUnusable: one_peer(random_matching): it takes a graph that",
    "topology show ring -n 0": "SettingsContradict: -n 0 cannot be; write a number from 1 to 256",
    "topology show ring --step -1": "SettingsContradict: --step -1 cannot be; write 0 or more",
    "topology show ring --weights heavy": "SettingsContradict: --weights heavy: there are uniform and metropolis",
    "topology show ring --hosts 4,x": "SettingsContradict: --hosts 4,x are not the sizes of hosts; write them as",
    "topology show ring --hosts 4,0": "SettingsContradict: --hosts 4,0 are not the sizes of hosts",
    "topology show ring -n 5 --hosts 4,3": "SettingsContradict: --hosts 4,3 has 7 workers, not -n 5; change one",
    "topology list --hosts 200,200": "SettingsContradict: --hosts 200,200 has 400 workers, not the most that a job",
    "topology show ring --svg no/ring.svg": "SettingsContradict: no/ring.svg cannot be written: No such file",
    "topology show": "SettingsContradict: Missing argument 'TOPOLOGY'; see shoal topology show --help",
    "topology dance": "SettingsContradict: No such command 'dance'",
    'train model.py --set env={"A":"b\\u0000c"}': "SettingsContradict: --env A has a zero byte",
    "predict model.py --from x --out no/p.npy": "SettingsContradict: --out no/p.npy: there is no folder no; make it",
    "predict model.py --from x --out taken/../taken": "SettingsContradict: --out taken is a folder; name a file in it",
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
    assert parse_bytes(text) == size_bytes


def test_error_that_is_no_mistake_of_the_user_exits_with_1(monkeypatch, capsys):
    def lose(*_: object) -> RunDir:
        raise errors.CoordinatorLost("silent\nfor 5 s")

    monkeypatch.setattr(rundir, "find", lose)
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


def test_status_of_a_job_that_was_killed_says_how_to_go_on(capsys):
    RunDir.create("runs/a", {})
    assert shoal("status", "runs/a") == 0
    said = capsys.readouterr().out
    assert said.startswith("runs/a: not running (it was killed, or has not begun; go on with shoal resume runs/a), ")


@pytest.mark.parametrize("command", ["status", "top", "audit", "report", "web"])
def test_records_of_a_newer_version_are_not_guessed_at(command, capsys):
    run_dir = RunDir.create("runs/a", {"version": "99.1"})
    assert shoal(command, "runs/a") == 2
    assert capsys.readouterr().err.startswith("shoal: RunDirUnusable: the job was run by shoal 99.1, this is ")
    assert not (run_dir.path / "report.html").exists()


def test_summary_tells_steps_that_train_apart_from_evaluations(monkeypatch):
    from shoal.data import audit

    run_dir = RunDir.create("runs/a", {})
    events = EventLog(run_dir.events)
    events.write(1.0, "generation", number=1, members=["w0"], leavers=[], fault=False, paused=False, cause="w0 joined")
    events.write(2.0, "finished", worker_id="w0")
    events.close()
    found = audit.AuditReport(40, 1200, 0, 0, 0, 0, [], evaluated_steps=15, evaluated_samples=900)
    monkeypatch.setattr(audit, "audit", lambda *_: found)
    line, audited = job._summary(run_dir, Ending(), 3.0)
    assert line == (
        "finished: trained 25 steps, 300 samples in 3.0 s; evaluated or predicted 15 steps, 900 samples; "
        "1 generation, 0 workers lost"
    )
    assert audited.endswith("(40 steps, 15 of them without training, 1,200 samples, 0 steps redone)")


@pytest.mark.parametrize("command", [each.callback.__name__ for each in cli.app.registered_commands if not each.hidden])
def test_no_two_options_of_a_command_have_the_same_name(command):
    params = typer.main.get_command(cli.app).commands[command].params
    names = [name for param in params for name in (*param.opts, *param.secondary_opts)]
    assert len(names) == len(set(names))


def test_a_path_is_shown_without_detours_unless_it_is_another_place_then(tmp_path):
    assert normalized(Path("a/./b/../c")) == Path("a/c")
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    assert normalized(Path("link/../c")) == Path("link/../c")


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
    path = str(Path(cli.__file__).parents[2])
    said = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_importing_shoal_leaves_the_logging_of_a_script_alone():
    code = "import logging, shoal, shoal.train.worker, shoal.control.coordinator; print(logging.root.handlers)"
    path = str(Path(cli.__file__).parents[2])
    said = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_help_has_examples_and_runs_as_a_module():
    path = str(Path(cli.__file__).parents[2])
    command = [sys.executable, "-m", "shoal", "run", "--help"]
    said = subprocess.run(command, cwd=path, capture_output=True, text=True, check=True)
    assert "shoal run -n 2:8 train.py" in said.stdout


@pytest.mark.parametrize("command", [each.callback.__name__ for each in cli.app.registered_commands if not each.hidden])
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
