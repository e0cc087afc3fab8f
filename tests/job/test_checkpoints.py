"""Jobs that are killed as a whole, and go on from what is on the disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoints
from shoal.control import commands
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import RunDir
from shoal.testing import FaultPlan, LocalJob
from tests.job import training
from tests.job.training import Case, Gate
from tests.job.watched import Watched

SCRIPT = Path(training.__file__)
SCENES = SCRIPT.with_name("scenes.py")


def job(tmp_path: Path, case: Case, workers: int = 2, every: str = "7", **options: Any) -> LocalJob:
    (tmp_path / "out").mkdir(exist_ok=True)
    given = ["--threads", "1", "--backoff", "0", "--checkpoint-every", every, *options.pop("options", ())]
    return LocalJob(SCRIPT, case.args(), workers=workers, directory=tmp_path / "run", options=given, **options)


def assert_as_undisturbed(case: Case, result: Any) -> None:
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    expected, _ = training.reference(case)
    for state in training.results(case).values():
        for name, tensor in expected.items():
            torch.testing.assert_close(state["state"][name], tensor, rtol=1e-10, atol=1e-10)


def saved(running: LocalJob) -> int:
    return len(running.events("checkpointed"))


@pytest.mark.slow
def test_a_job_that_was_killed_as_a_whole_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(out=str(tmp_path / "out"), epochs=80, scheduler=True, gate=str(gate.path))
    running = job(tmp_path, case)
    running.start()
    Watched(running, gate).step_until(lambda: saved(running) >= 2)  # while one is being written, none is begun
    running.kill()
    folder = RunDir(tmp_path / "run").checkpoints
    newest = checkpoints.listed(folder)[0]
    (newest / checkpoints.TRAINING).write_bytes(b"torn")  # so that the one before is used
    gate.open(60)
    running.resume(workers=3)
    running.wait_until(lambda: running.status().get("step", 0) > 30)
    running.scale(4)  # a newcomer of a job that went on
    running.wait_until(lambda: len(running.events("generation")[-1]["members"]) == 4)
    gate.open(800)
    result = running.wait()
    assert f"checkpoint {newest.name} is damaged" in result.output
    assert_as_undisturbed(case, result)
    numbers = [event["number"] for event in result.of("generation")]
    assert len(set(numbers)) == len(numbers), "a generation's number was used twice"
    joined = [event["worker_id"] for event in result.of("joined")]
    assert len(set(joined)) == len(joined), "a worker's name was used twice"
    # What the job ended with is a checkpoint too, and plain safetensors.
    final, damaged = checkpoints.newest_whole(folder)
    assert final is not None
    assert not damaged
    assert final.step == result.steps
    load_file = pytest.importorskip("safetensors.torch").load_file
    expected, _ = training.reference(case)
    net = training.model(case)
    net.load_state_dict(load_file(final.path / checkpoints.MODEL))
    for name, tensor in expected.items():
        torch.testing.assert_close(net.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)


def test_a_stopped_job_loses_no_step_and_a_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(out=str(tmp_path / "out"), epochs=30, gate=str(gate.path))
    running = job(tmp_path, case, every="off")
    running.start()
    gate.open(40)
    running.wait_until(lambda: running.status().get("step", 0) == 40)
    commands.checkpoint(RunDir(running.directory))
    gate.open(80)
    running.wait_until(lambda: saved(running) == 1)
    (asked,) = running.events("checkpointed")
    assert (Path(asked["path"]) / checkpoints.MANIFEST).exists()
    running.wait_until(lambda: running.status().get("step", 0) > asked["step"])
    os.kill(running.process.pid, signal.SIGTERM)
    stopped = running.wait()
    assert stopped.exit_code == 128 + signal.SIGTERM, stopped.output
    newest, _ = checkpoints.newest_whole(RunDir(tmp_path / "run").checkpoints)
    assert newest is not None
    assert newest.step == stopped.steps > asked["step"]
    gate.open(300)
    running.resume()
    result = running.wait()
    assert_as_undisturbed(case, result)
    assert result.audit.redone == 0, "steps that were committed before the stop were done again"


@pytest.mark.slow
def test_a_script_that_ran_alone_goes_on_with_two_workers(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(out=str(tmp_path / "out"), epochs=80, gate=str(gate.path))
    (tmp_path / "out").mkdir()
    gate.open(40)
    environment = WorkerEnvironment(dir=str(tmp_path / "run"), checkpoint_every="5").to_env()
    alone = subprocess.Popen([sys.executable, str(SCRIPT), *case.args()], env={**os.environ, **environment})
    folder = RunDir(tmp_path / "run").checkpoints
    while not checkpoints.listed(folder):
        assert alone.poll() is None
        time.sleep(0.01)
    alone.kill()
    alone.wait()
    gate.open(800)
    again = job(tmp_path, case)
    again.resume(workers=2)
    result = again.wait()
    assert_as_undisturbed(case, result)
    assert len(result.digests) == 2


def test_a_disk_that_refuses_does_not_stop_the_training(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(out=str(tmp_path / "out"), epochs=6, gate=str(gate.path))
    running = job(tmp_path, case)
    running.start()
    running.wait_until(lambda: (tmp_path / "run" / "audit").exists())
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    gate.open(60)
    result = running.wait()
    assert_as_undisturbed(case, result)
    assert "no checkpoint of step" in result.output
    assert result.of("checkpoint_failed")


@pytest.mark.slow
def test_a_job_that_went_on_behind_its_last_step_still_has_a_rank_0(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    running = LocalJob(
        SCENES, ["ranks", str(tmp_path / "out")], workers=2, directory=tmp_path / "run", options=("--threads", "1")
    )
    first = running.run()
    assert first.exit_code == 0, first.output
    running.resume(workers=2)
    again = running.wait()
    assert again.exit_code == 0, again.output
    assert again.steps == first.steps
    after = [json.loads((tmp_path / "out" / f"{worker}.json").read_text()) for worker in ("w2", "w3")]
    assert sorted(after) == [[-1, 0, 0, 0], [-1, 1, 1, 1]]
    assert "generation 0 → 1" not in again.output, "what happened before was told again"


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stream_goes_on_where_the_checkpoint_was(tmp_path: Path, loader_workers: int) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(out=str(tmp_path / "out"), epochs=80, stream=True, loader_workers=loader_workers, gate=str(gate.path))
    running = job(tmp_path, case, workers=2)
    running.start()
    Watched(running, gate).step_until(lambda: saved(running) > 2)
    running.kill()
    gate.open(800)
    running.resume(workers=3)
    assert_as_undisturbed(case, running.wait())


def test_a_run_directory_in_use_and_one_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    running = job(tmp_path, case := Case(out=str(tmp_path / "out"), gate=str(gate.path)))
    running.start()
    gate.open(20)
    running.wait_until(lambda: running.status().get("step", 0) > 0)
    second = job(tmp_path, case)
    second.resume()
    refused = second.wait()
    assert refused.exit_code == 2
    assert "RunDirUnusable: a job is running in" in refused.output
    running.kill()
    settings = RunDir(tmp_path / "run").job_file
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "version": "99.0"}))
    second.resume()
    refused = second.wait()
    assert refused.exit_code == 2
    assert "RunDirUnusable: the job was run by shoal 99.0" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_everything_is_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    gate = Gate(tmp_path / "gate")
    case = Case(
        out=str(tmp_path / "out"),
        epochs=250,
        scheduler=True,
        loader_workers=draw.choice([0, 2]),
        gate=str(gate.path),
    )
    plan = FaultPlan().kill("w1", step=draw.randrange(5, 100), during="reduce")
    running = job(tmp_path, case, workers=draw.randrange(1, 4), every=str(draw.randrange(3, 40)), plan=plan)
    running.start()
    with Watched(running, gate) as watched:
        for _ in range(8):
            watched.reach(draw.randrange(1, 200))
            running.kill()
            running.resume(workers=draw.randrange(1, 5))
        gate.open(2500)
        result = running.wait()
    assert_as_undisturbed(case, result)
