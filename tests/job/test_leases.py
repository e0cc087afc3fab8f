"""Workers without lockstep, as real processes: each at its own pace, and every sample of every epoch used once."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.data.fed import _RECORD
from shoal.report.read import read
from shoal.testing import FaultPlan, JobResult, LocalJob
from shoal.testing.faults import JournalFate
from shoal.view.state import state_of
from tests.job.test_coordinator_loss import check_decisions, pid_of
from tests.job.test_faults import MANY
from tests.job.training import SAMPLES

SCENES = Path(__file__).with_name("scenes.py")


def leased(
    tmp_path: Path, *paces: str, epochs: int, workers: int = 3, loaders: int = 0, plan: FaultPlan | None = None
) -> LocalJob:
    arguments = ["leased", str(tmp_path), str(epochs), str(loaders), *paces]
    return LocalJob(SCENES, arguments, workers=workers, directory=tmp_path / "run", plan=plan, options=MANY)


def check(result: JobResult, epochs: int) -> None:
    assert result.exit_code == 0, result.output
    assert result.audit.clean, (str(result.audit), result.audit.mismatches)
    assert result.audit.samples == epochs * SAMPLES
    check_decisions(result)


def fed(job: LocalJob) -> Counter[str]:
    """Samples by worker."""
    found: Counter[str] = Counter()
    for path in (job.directory / "audit").glob("*.bin"):
        records = np.fromfile(path, _RECORD)
        found[path.stem] = int((records["hi"] - records["lo"]).sum())
    return found


def progress(job: LocalJob, steps: int = 30) -> None:
    """Until all workers together have made that many steps more."""
    to = fed(job).total() + 10 * steps
    job.wait_until(lambda: fed(job).total() >= to)


def said(tmp_path: Path, worker_id: str) -> dict[str, list[int]]:
    answer: dict[str, list[int]] = json.loads((tmp_path / f"{worker_id}.json").read_text())
    return answer


@pytest.mark.slow
def test_a_slow_worker_keeps_nobody_waiting_and_the_others_use_more_samples(tmp_path: Path) -> None:
    job = leased(tmp_path, "w2=0.5", "else=0.01", epochs=12)
    job.start()
    job.wait_until(lambda: (job.status() or {"samples": 0})["samples"] > SAMPLES)
    status = job.status()
    assert status["step"] > 1.5 * max(worker["step"] or 0 for worker in status["workers"]), "summed over workers"
    result = job.wait()
    check(result, epochs=12)
    used = fed(job)
    assert min(used["w0"], used["w1"]) > 2 * used["w2"] > 0
    for worker_id in ("w0", "w1", "w2"):
        mine = said(tmp_path, worker_id)
        assert mine["steps"] == list(range(1, used[worker_id] // 10 + 1)), "steps are a worker's own"
        assert mine["epochs"] == list(range(12))
    assert read(RunDir.open(job.directory)).steps == result.audit.steps
    state = state_of(RunDir.open(job.directory))
    assert state["progress"]["done"] == state["progress"]["total"] == state["samples"] == 12 * SAMPLES
    assert "finished: trained 576 steps, 5,760 samples" in result.output
    told = [path.read_text().count("no checkpoints are taken") for path in RunDir(job.directory).logs.glob("*.log")]
    assert sum(told) == 1


@pytest.mark.slow
def test_workers_are_killed_at_seeded_points_and_others_come(tmp_path: Path) -> None:
    plan = FaultPlan().chaos(seed=5, rate=0.01, limit=8).join(at_step=5)
    job = leased(tmp_path, "else=0.005", epochs=20, plan=plan)
    result = job.run(120)
    check(result, epochs=20)
    assert len(result.of("lost")) >= 4  # of eight; joins count too, and each that becomes rank 0 asks for one
    assert result.of("returned")


@pytest.mark.slow
def test_a_worker_that_leaves_gives_back_what_it_has_not_used_and_interrupts_nobody(tmp_path: Path) -> None:
    job = leased(tmp_path, "else=0.1", epochs=20, loaders=1)
    job.start()
    progress(job)
    job.scale(2)
    job.wait_until(lambda: bool(job.events("left")))
    job.scale(3)
    job.wait_until(lambda: fed(job)["w3"] > 0)
    (tmp_path / "go").touch()
    result = job.wait()
    check(result, epochs=20)
    assert not result.of("lost")
    assert result.audit.redone == 0
    assert sum(event["samples"] for event in result.of("returned")) > 0
    assert said(tmp_path, "w0")["sizes"][-1] == 3


@pytest.mark.parametrize("journal", [pytest.param("kept", marks=pytest.mark.slow), "deleted"])
def test_the_coordinator_and_a_worker_die_together(tmp_path: Path, journal: JournalFate) -> None:
    job = leased(tmp_path, "else=0.1", epochs=20)
    job.start()
    progress(job)
    victim = pid_of(job, rank=1)
    job.kill_coordinator(journal)
    os.kill(victim, signal.SIGKILL)
    job.wait_until(lambda: fed(job)["w3"] > 0)
    (tmp_path / "go").touch()
    result = job.wait()
    check(result, epochs=20)
    assert [event["worker_id"] for event in result.of("lost")] == ["w1"]
    assert len(result.of("rebuilt")) == (journal != "kept")


def test_steps_have_what_they_have_in_lockstep_and_the_rest_is_refused_in_one_line(tmp_path: Path) -> None:
    job = LocalJob(SCENES, ["leased_steps", str(tmp_path)], workers=1, directory=tmp_path / "run", options=MANY)
    result = job.run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, result.audit.mismatches
    said = json.loads((tmp_path / "w0.json").read_text())
    # 34 full steps of 14 are in 480 samples; drop_last leaves out the other 4.
    assert said["samples"] == [20] * 7 + [14] * 68
    assert said["steps"] == list(range(1, 76))
    assert said["sizes"] == [10.0]
    assert said["skipped"] == 2
    assert said["finite"]
    assert said["rates"] == pytest.approx([0.1 * 0.99**step for step in range(75)])
    assert len(said["refused"]) == 4
    assert all("lockstep" in line for line in said["refused"])
    assert result.audit.skipped_steps == 2


@pytest.mark.slow
def test_a_global_batch_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    job = LocalJob(SCENES, ["leased_global", str(tmp_path)], workers=2, directory=tmp_path / "run", options=MANY)
    result = job.run()
    assert result.exit_code == 2
    assert "global_batch=48 needs workers in lockstep" in result.output


@pytest.mark.slow
def test_there_is_no_checkpoint_and_a_job_that_was_killed_begins_anew(tmp_path: Path) -> None:
    job = leased(tmp_path, "else=0.1", epochs=8, workers=2)
    job.start()
    progress(job)
    commands.checkpoint(RunDir.open(job.directory))
    job.wait_until(lambda: bool(job.events("checkpoint_failed")))
    assert "not in lockstep" in job.events("checkpoint_failed")[0]["text"]
    job.kill()
    (tmp_path / "go").touch()
    job.resume()
    result = job.wait()
    check(result, epochs=8)
    assert fed(job).total() > 8 * SAMPLES, "what was used before the kill is taken back"


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "loaders"), [(2, 2), (4, 0)])
def test_a_seeded_sweep_of_kills_of_coordinators_and_workers(tmp_path: Path, workers: int, loaders: int) -> None:
    draw = random.Random(workers)
    plan = FaultPlan().chaos(seed=workers, rate=0.004, limit=40)
    job = leased(tmp_path, "w1=0.05", "else=0.02", epochs=120, workers=workers, loaders=loaders, plan=plan)
    job.start()
    for _ in range(20):
        progress(job, draw.randrange(1, 40))
        job.kill_coordinator(draw.choice(["kept", "kept", "deleted", "overwritten"]))
    result = job.wait(600)
    check(result, epochs=120)
    assert len(result.of("lost")) >= 20
    assert len(result.of("restarted")) >= 15
    assert result.of("rebuilt")
