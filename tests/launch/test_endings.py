"""How jobs that train end: what is written down, who is told what, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal import cli
from shoal.control.rundir import RunDir
from shoal.testing import FaultPlan, LocalJob

LINEAR = """
import os, signal, sys
import torch
import shoal
from torch.utils.data import TensorDataset

def batches(worker, epochs, samples=60, **options):
    global net
    net = torch.nn.Linear(4, 1)
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    inputs = torch.arange(4.0 * samples).reshape(samples, 4) / samples
    return worker.batches(TensorDataset(inputs), epochs=epochs, **(options or {"global_batch": 12}))

def loss(batch):
    return net(batch.x).square().mean()
"""

FIVE_EPOCHS = """
def main(worker):
    for batch in batches(worker, epochs=5):
        worker.step(loss(batch))
"""

ENDLESS = """
def main(worker):
    for batch in batches(worker, epochs=1_000_000):
        worker.step(loss(batch))
"""

SAMPLES_FOR_TWO = """
def main(worker):
    for batch in batches(worker, epochs=1_000_000, samples=2, global_batch=2):
        worker.step(loss(batch))
"""

LARGE = """
def main(worker):
    global net
    net = torch.nn.Linear(1_000_000, 1)  # 4 MB, twice, and a lane for each worker
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    for batch in worker.batches(TensorDataset(torch.zeros(4, 1_000_000)), epochs=1_000_000, global_batch=4):
        worker.step(loss(batch))
"""

RUN = """
if __name__ == "__main__":
    shoal.run(main)
"""


def script_of(tmp_path: Path, main: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(LINEAR + main + RUN)
    return path


def job(
    tmp_path: Path, main: str, workers: int | str = 2, options: Sequence[str] = (), plan: FaultPlan | None = None
) -> LocalJob:
    script = script_of(tmp_path, main)
    quick = ("--threads", "1", "--backoff", "0", *options)
    return LocalJob(script, workers=workers, directory=tmp_path / "run", options=quick, plan=plan)


def last_line(output: str) -> str:
    return next(line for line in reversed(output.splitlines()) if line.strip())


def shoal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_status_of_a_finished_job_says_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = job(tmp_path, FIVE_EPOCHS).run()
    assert result.exit_code == 0, result.output
    state = json.loads(shoal(capsys, "status", str(tmp_path / "run"), "--json"))
    assert (state["phase"], state["seq"], state["step"], state["samples"]) == ("finished", 26, 25, 300)
    assert state["epoch"] == 4
    assert state["loss"] == result.of("finished")[0]["report"]["loss"]


@pytest.mark.parametrize("kill", [False, True])
def test_audit_of_a_stopped_job_covers_every_committed_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kill: bool
) -> None:
    running = job(tmp_path, ENDLESS, plan=FaultPlan().kill("w0", step=50, during="after_commit") if kill else None)
    running.start()
    running.wait_until(lambda: running.status().get("step", 0) > 60)
    running.process.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.committed is not None
    assert result.audit.clean, result.audit.mismatches
    assert result.audit.steps == result.committed.step == result.committed.seq - 1
    assert result.audit.samples == result.committed.samples == 12 * result.steps
    state = json.loads(shoal(capsys, "status", str(tmp_path / "run"), "--json"))
    assert (state["phase"], state["step"], state["loss"]) == ("ended", result.steps, result.committed.loss)
    report = json.loads(shoal(capsys, "audit", str(tmp_path / "run"), "--json"))
    assert (report["steps"], report["clean"]) == (result.steps, True)


def test_audit_of_a_job_under_way_goes_as_far_as_its_workers_have_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = job(tmp_path, ENDLESS)
    running.start()
    running.wait_until(lambda: running.status().get("seq", 0) > 1)
    told = running.status()["seq"]
    report = json.loads(shoal(capsys, "audit", str(tmp_path / "run"), "--json"))
    assert report["clean"]
    assert report["steps"] >= told - 1
    running.process.send_signal(signal.SIGTERM)
    running.wait()


def test_a_job_of_one_process_writes_down_where_it_was(tmp_path: Path) -> None:
    ran = alone(tmp_path, FIVE_EPOCHS)
    assert ran.returncode == 0, ran.stderr
    committed = RunDir.open(next((tmp_path / "shoal-runs").iterdir())).committed()
    assert committed is not None
    assert (committed.seq, committed.step, committed.epoch, committed.samples) == (26, 25, 4, 300)


@pytest.mark.slow
def test_a_worker_that_was_asked_to_leave_and_dies_instead_is_not_replaced(tmp_path: Path) -> None:
    # w1 hears SIGTERM in the middle of a step, stays there, and is killed once the job knows that it leaves.
    plan = FaultPlan().leave("w1", step=5, during="lane").slow("w1", step=5, during="ready", seconds=600.0)
    running = job(tmp_path, ENDLESS, plan=plan)
    running.start()
    running.wait_until(lambda: bool(running.events("leaving")))
    running.signal("w1", signal.SIGKILL)
    running.wait_until(lambda: bool(running.events("lost")))
    lost_at = running.status()["step"]
    running.wait_until(lambda: running.status()["step"] > lost_at)
    running.process.send_signal(signal.SIGTERM)
    result = running.wait()
    assert [event["worker_id"] for event in result.of("joined")] == ["w0", "w1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "options", "why"),
    [
        ("SAMPLES_FOR_TWO", (), "DataUnusable: pass 0: 3 workers would share 2 samples"),
        ("LARGE", ("--memory", "18M"), "OutOfSharedMemory: "),
    ],
)
def test_a_scale_up_that_cannot_be_costs_the_newcomer_and_not_the_job(
    tmp_path: Path, main: str, options: Sequence[str], why: str
) -> None:
    running = job(tmp_path, globals()[main], options=options)
    running.start()
    running.wait_until(lambda: running.status().get("step", 0) > 0)
    running.scale(3)
    running.wait_until(lambda: bool(running.events("lost")))
    lost_at = running.status()["step"]
    running.wait_until(lambda: running.status()["step"] > lost_at)
    assert running.status()["target"] == 2
    running.process.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.audit.clean
    (line,) = (line for line in result.output.splitlines() if "w2 refused" in line)
    assert line.startswith(f"w2 refused: {why}")
    assert line.endswith("the job goes on with 2 workers")
    assert [event["worker_id"] for event in result.of("joined")] == ["w0", "w1", "w2"]


def test_a_founder_that_has_no_room_ends_the_job(tmp_path: Path) -> None:
    result = job(tmp_path, SAMPLES_FOR_TWO, workers=3).run()
    assert result.exit_code == 2
    assert last_line(result.output).startswith("shoal: DataUnusable: pass 0: 3 workers would share 2 samples")


def test_the_others_leave_in_order_when_one_workers_code_raises(tmp_path: Path) -> None:
    result = job(tmp_path, ENDLESS, workers=3, plan=FaultPlan().fail("w1", step=5)).run()
    assert result.exit_code == 2
    assert [event["worker_id"] for event in result.of("lost")] == ["w1"]
    assert {event["worker_id"] for event in result.of("left")} == {"w0", "w2"}


EVALUATES_AT_THE_END = """
def main(worker):
    global net
    net, data, scores = torch.nn.Linear(4, 1), TensorDataset(torch.zeros(60, 4)), []
    def on_epoch(epoch):
        scores.append(worker.evaluate(data, lambda batch: {"loss": 1.0}, batch_size=6))
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3), on_epoch=on_epoch)
    for epoch in range(3):
        for batch in worker.batches(data, global_batch=12):
            worker.step(loss(batch))
    assert len(scores) == 3 and worker.steps == 15
"""

EVALUATES_INSIDE = """
def main(worker):
    for batch in batches(worker, epochs=5):
        worker.step(loss(batch))
        worker.evaluate(TensorDataset(torch.zeros(6, 4)), lambda batch: {"loss": 1.0}, batch_size=6)
"""

NEVER_STEPS = """
def main(worker):
    pass
"""

EXITS = """
def main(worker):
    for batch in batches(worker, epochs=20):
        if worker.id == "w1" and batch.step == 7:
            sys.exit(0)
        worker.step(loss(batch))
"""

RAISES = """
def main(worker):
    raise ValueError("the user's own mistake")
"""

MISTAKEN = """
def main(worker):
    worker.batches(None)
"""


def test_a_script_that_trains_nothing_is_told_what_to_do(tmp_path: Path) -> None:
    result = job(tmp_path, NEVER_STEPS).run()
    assert result.exit_code == 2
    assert last_line(result.output).startswith("shoal: ScriptFailed: train.py trained nothing: main(worker) must ")


def test_a_worker_that_exits_with_0_has_returned_and_the_others_go_on(tmp_path: Path) -> None:
    result = job(tmp_path, EXITS).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert not result.of("lost")
    assert {event["worker_id"]: event["step"] for event in result.of("finished")} == {"w0": 100, "w1": 6}


@pytest.mark.slow
def test_a_signal_in_the_closing_second_does_not_lose_the_summary(tmp_path: Path) -> None:
    script_of(tmp_path, FIVE_EPOCHS)
    code = """
import os, signal, sys
from shoal import cli
from shoal.cli import job

summary = job._summary

def interrupted(*given):
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), signum)
    return summary(*given)

job._summary = interrupted
cli.main(["run", "-n", "1", "--dir", "run", "--quiet", "train.py"])
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert ran.stderr.startswith("finished: trained 25 steps, 300 samples in ")


def test_a_job_of_one_process_says_where_its_run_directory_is(tmp_path: Path) -> None:
    ran = alone(tmp_path, FIVE_EPOCHS)
    (run_dir,) = (tmp_path / "shoal-runs").iterdir()
    assert ran.stderr == f"shoal: one worker, run directory {run_dir}\n"


@pytest.mark.slow
def test_a_job_of_one_process_ends_with_the_exit_codes_of_shoal_run(tmp_path: Path) -> None:
    raised = alone(tmp_path, RAISES)
    assert raised.returncode == 2
    assert raised.stderr.count("Traceback (most recent call last)") == 1
    assert last_line(raised.stderr) == "ValueError: the user's own mistake"
    mistaken = alone(tmp_path, MISTAKEN)
    assert mistaken.returncode == 2
    assert "Traceback" not in mistaken.stderr
    assert last_line(mistaken.stderr).startswith("shoal: SettingsContradict: batches() before attach()")
    fine = alone(tmp_path, EVALUATES_AT_THE_END)
    assert fine.returncode == 0, fine.stderr
    inside = alone(tmp_path, EVALUATES_INSIDE)
    assert inside.returncode == 2
    assert "SettingsContradict: evaluate(), predict() or another batches() was called in" in last_line(inside.stderr)
    idle = alone(tmp_path, NEVER_STEPS)
    assert idle.returncode == 2
    assert " trained nothing: main(worker) must go over worker.batches" in last_line(idle.stderr)


STAYS = """
def main(worker):
    for batch in batches(worker, epochs=1_000_000):
        worker.step(loss(batch))
        print("stepped", flush=True)
        while worker.steps == 3:
            import time
            time.sleep(0.05)  # not for long: the kernel may give a signal to a thread that is not the sleeping one
"""


@pytest.mark.parametrize("main", [ENDLESS + "        print(worker.steps, flush=True)\n", STAYS])
def test_ctrl_c_ends_a_job_of_one_process_at_a_step_and_a_second_one_at_once(
    tmp_path: Path, main: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(script_of(tmp_path, main))]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for _ in range(3):
            assert running.stdout.readline()
        running.send_signal(signal.SIGINT)
        while "Ctrl-C once more" not in running.stderr.readline():
            assert running.poll() is None
        if main is STAYS:
            running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=60)[1]
    assert running.returncode == 130, said
    assert "Traceback" not in said
    if main is not STAYS:
        (run_dir,) = (tmp_path / "shoal-runs").iterdir()
        assert "ended (stopped: SIGINT)" in shoal(capsys, "status", str(run_dir))
        assert len(list((run_dir / "checkpoints").iterdir())) == 1, "Ctrl-C takes a checkpoint, as `shoal stop` does"


def alone(tmp_path: Path, main: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script_of(tmp_path, main))]
    return subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60)
