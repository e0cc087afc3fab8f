"""Workers die for real, at every named point of a step, and nothing shows in the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.control.rundir import RunDir
from shoal.metrics import POINTS
from shoal.testing import FaultPlan, JobResult, LocalJob
from tests.job import training
from tests.job.training import Case, Gate

SCRIPT = Path(training.__file__)
MANY = ("--restarts", "100000", "--backoff", "0", "--threads", "1", "--quiet")


def run(case: Case, tmp_path: Path, plan: FaultPlan, workers: int | str, timeout_s: float = 240.0) -> JobResult:
    return job_of(case, tmp_path, plan, workers).run(timeout_s)


def job_of(case: Case, tmp_path: Path, plan: FaultPlan, workers: int | str) -> LocalJob:
    Path(case.out).mkdir(exist_ok=True)
    options = (*MANY, "--device", case.replicated or "cpu")
    return LocalJob(SCRIPT, case.args(), workers=workers, directory=tmp_path / "run", plan=plan, options=options)


def check(case: Case, result: JobResult, tolerance: float = 1e-10) -> None:
    """Whoever was left ended with the same bits, every sample was used once, and the state is the undisturbed one."""
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert not result.of("drift")
    # Who came after the last step has nothing to tell of a state that is on the others' devices.
    seen = {it for it in result.digests.values() if it or not case.replicated}
    assert len(seen) == 1, result.digests
    state, losses = training.reference(case)
    assert result.steps == len(losses)
    found = training.results(case)
    assert found
    for worker_id, one in found.items():
        for name, value in state.items():
            assert torch.allclose(one["state"][name], value, rtol=0, atol=tolerance), (worker_id, name)
        for step, loss in one["losses"].items():
            assert loss == pytest.approx(losses[step - 1], abs=tolerance), (worker_id, step)


def survivors_kept_their_processes(result: JobResult, killed: set[str]) -> bool:
    return {event["worker_id"] for event in result.of("lost")} == killed


def test_a_worker_killed_at_each_named_point_leaves_the_result_of_an_undisturbed_run(tmp_path: Path) -> None:
    plan, victim, killed = FaultPlan(), 1, set()
    for index, point in enumerate(POINTS):
        # Three workers: w1 dies, its replacement is w3, that one's w4 and so on. `join` and `park` are passed once.
        step = None if point in ("join", "park") else 3 + 4 * index
        plan = plan.kill(f"w{victim}", step=step, during=point)
        killed.add(f"w{victim}")
        victim = victim + 2 if victim == 1 else victim + 1
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), epochs=100, gate=str(gate.path))
    job = job_of(case, tmp_path, plan, workers=3)
    job.start()

    def each_point_was_met() -> bool:
        gate.open(20 * len(job.events("generation")))  # some steps with each newcomer, and then the next one is awaited
        faults = RunDir(job.directory).faults
        return faults.exists() and len(faults.read_text().splitlines()) == len(POINTS)

    job.wait_until(each_point_was_met)
    gate.open(1000)
    result = job.wait()
    check(case, result)
    assert {fault["during"] for fault in result.faults} == set(POINTS)
    assert survivors_kept_their_processes(result, killed)


@pytest.mark.parametrize("point", ["reduce", "before_commit"])
def test_the_senior_worker_of_two_dies_and_the_other_goes_on_alone(tmp_path: Path, point: str) -> None:
    case = Case(str(tmp_path / "out"), optimizer="sgd", batchnorm=False)
    result = run(case, tmp_path, FaultPlan().kill("w0", step=7, during=point), workers=2)
    check(case, result)
    assert survivors_kept_their_processes(result, {"w0"})


def test_two_workers_die_in_the_same_step(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"), scheduler=True, clip_norm=0.5, accumulate=2)
    plan = FaultPlan().kill("w0", step=9, during="optimizer").kill("w2", step=9, during="after_done")
    result = run(case, tmp_path, plan, workers=3)
    check(case, result)


def test_a_step_that_one_worker_saw_committed_and_another_did_not_counts_once_for_both(tmp_path: Path) -> None:
    # w2 dies with its done word written. w1, who waits for w0, hears of it and parks; w0 was slow, finds all done words
    # and commits. A scheduler that w1 did not step would be seen as differing hyperparameters.
    case = Case(str(tmp_path / "out"), scheduler=True)
    plan = FaultPlan().kill("w2", step=7, during="after_done").slow("w0", step=7, during="before_done", seconds=1.0)
    result = run(case, tmp_path, plan, workers=3)
    check(case, result)
    assert result.audit.redone == 0
    for one in training.results(case).values():
        assert 7 in one["losses"] or min(one["losses"]) > 7


def test_workers_join_and_leave_at_step_boundaries_and_no_step_is_redone(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), epochs=60, gate=str(gate.path))
    job = job_of(case, tmp_path, FaultPlan().join(at_step=20, count=2).leave("w0", step=60), workers=2)
    job.start()
    gate.open(100)
    job.wait_until(lambda: any(sorted(event["members"]) == ["w1", "w2", "w3"] for event in job.events("generation")))
    gate.open(600)
    result = job.wait()
    check(case, result)
    assert result.audit.redone == 0
    assert not result.of("lost")
    assert sum(event["event"] == "joined" for event in result.events) == 4, (
        "who is rank 0 next asked for more once more"
    )
    assert len(result.digests) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "loaders"), [(2, 2), (3, 0)])
def test_a_seeded_sweep_of_random_kills(tmp_path: Path, workers: int, loaders: int) -> None:
    case = Case(str(tmp_path / "out"), epochs=30, loader_workers=loaders)
    result = run(case, tmp_path, FaultPlan().chaos(seed=workers, rate=0.01, limit=15), workers=workers)
    check(case, result)
    assert len(result.of("lost")) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "loaders", "optimizer"),
    [(2, 0, "sgd"), (3, 0, "adamw"), (5, 0, "adam"), (2, 2, "adamw"), (3, 2, "sgd"), (4, 2, "adafactor")],
)
def test_forty_random_kills_a_job(tmp_path: Path, workers: int, loaders: int, optimizer: str) -> None:
    """Six jobs, each with at least 40 deaths at points drawn from the seed."""
    case = Case(str(tmp_path / "out"), optimizer=optimizer, epochs=600, loader_workers=loaders, scheduler=True)
    plan = FaultPlan().chaos(seed=7 * workers + loaders, rate=0.002, limit=40)
    result = run(case, tmp_path, plan, workers=workers, timeout_s=900)
    check(case, result)
    assert len(result.of("lost")) >= 40
    assert {fault["worker_id"] for fault in result.faults} == {event["worker_id"] for event in result.of("lost")}


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_stream_is_used_once_while_workers_come_and_die(tmp_path: Path, loader_workers: int) -> None:
    case = Case(str(tmp_path / "out"), epochs=40, stream=True, loader_workers=loader_workers, accumulate=2)
    plan = FaultPlan().kill("w1", step=9, during="backward").join(at_step=17).kill("w0", step=63, during="before_done")
    plan = plan.kill("w2", step=110, during="reduce")
    result = run(case, tmp_path, plan, workers=3)
    check(case, result)
    assert survivors_kept_their_processes(result, {"w0", "w1", "w2"})
