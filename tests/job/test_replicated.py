"""Each worker has its own replica, on its own device: they die and come, and nothing shows in the result.

On CPUs with connections of our own, on GPUs with NCCL; where there are fewer GPUs than workers, they share one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.control.rundir import RunDir
from shoal.metrics import POINTS
from shoal.testing import FaultPlan, LocalJob
from tests.job.test_faults import MANY, SCRIPT, check, job_of, run, survivors_kept_their_processes
from tests.job.training import Case, Gate

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_replicas_lose_two_workers_and_gain_one_and_all_end_with_the_same_bits(tmp_path: Path, device: str) -> None:
    case = Case(str(tmp_path / "out"), scheduler=True, clip_norm=0.5, accumulate=2, replicated=device)
    plan = FaultPlan().kill("w1", step=9, during="backward").join(at_step=17).kill("w0", step=33, during="before_done")
    result = run(case, tmp_path, plan, workers=3)
    check(case, result, tolerance=1e-9)
    assert survivors_kept_their_processes(result, {"w0", "w1"})


@pytest.mark.parametrize(
    "hosts", ["localhost/a:1,localhost/b:1", pytest.param("localhost/a:2,localhost/b:1", marks=pytest.mark.slow)]
)
def test_replicas_of_several_hosts_lose_a_worker_each_and_newcomers_get_the_state(tmp_path: Path, hosts: str) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), scheduler=True, clip_norm=0.5, replicated="cpu", gate=str(gate.path))
    plan = FaultPlan().kill("b-w0", step=9, during="reduce").kill("a-w0", step=30, during="before_commit")
    Path(case.out).mkdir()
    options = ("-H", hosts, *MANY, "--device", "cpu")
    workers = sum(int(host[-1]) for host in hosts.split(","))
    job = LocalJob(SCRIPT, case.args(), workers=workers, directory=tmp_path / "run", plan=plan, options=options)
    job.start()
    gate.open(20)
    job.wait_until(lambda: "b-w1" in job.events("generation")[-1]["members"] if job.events("generation") else False)
    gate.open(1000)
    result = job.wait()
    check(case, result, tolerance=1e-9)
    assert survivors_kept_their_processes(result, {"a-w0", "b-w0"})


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_a_replica_killed_at_each_named_point_leaves_the_result_of_an_undisturbed_run(
    tmp_path: Path, device: str
) -> None:
    plan, victim, killed = FaultPlan(), 1, set()
    for index, point in enumerate(POINTS):
        step = None if point in ("join", "park") else 3 + 4 * index
        plan = plan.kill(f"w{victim}", step=step, during=point)
        killed.add(f"w{victim}")
        victim = victim + 2 if victim == 1 else victim + 1
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), epochs=100, gate=str(gate.path), replicated=device)
    job = job_of(case, tmp_path, plan, workers=3)
    job.start()

    def each_point_was_met() -> bool:
        gate.open(20 * len(job.events("generation")))
        faults = RunDir(job.directory).faults
        return faults.exists() and len(faults.read_text().splitlines()) == len(POINTS)

    job.wait_until(each_point_was_met, timeout_s=240.0)
    gate.open(1000)
    result = job.wait(240.0)
    check(case, result, tolerance=1e-9)
    assert {fault["during"] for fault in result.faults} == set(POINTS)
    assert survivors_kept_their_processes(result, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "loaders", "optimizer"), [(4, 0, "sgd"), (5, 0, "adamw"), (4, 2, "adafactor")])
def test_random_kills_of_replicas(tmp_path: Path, workers: int, loaders: int, optimizer: str) -> None:
    case = Case(
        str(tmp_path / "out"),
        epochs=150,
        optimizer=optimizer,
        loader_workers=loaders,
        scheduler=True,
        replicated="cpu",
    )
    plan = FaultPlan().chaos(seed=workers, rate=0.001, limit=20)
    result = run(case, tmp_path, plan, workers=workers, timeout_s=400)
    check(case, result)
    assert len(result.of("lost")) >= 10


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_batchnorm_over_all_workers_is_that_of_one_process_while_they_die_and_come(tmp_path: Path, device: str) -> None:
    case = Case(str(tmp_path / "out"), batchnorm=True, replicated=device)
    plan = FaultPlan().kill("w1", step=9, during="forward").join(at_step=15).kill("w0", step=30, during="before_done")
    plan = plan.kill("w2", step=40, during="reduce")
    result = run(case, tmp_path, plan, workers=3)
    check(case, result, tolerance=1e-9)
    assert survivors_kept_their_processes(result, {"w0", "w1", "w2"})


@pytest.mark.slow
def test_replicas_that_were_killed_as_a_whole_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), epochs=20, scheduler=True, gate=str(gate.path), replicated="cpu")
    Path(case.out).mkdir()
    options = ("--threads", "1", "--backoff", "0", "--checkpoint-every", "7", "--device", "cpu", "--quiet")
    job = LocalJob(SCRIPT, case.args(), workers=2, directory=tmp_path / "run", options=options)
    job.start()
    gate.open(40)
    job.wait_until(lambda: bool(job.events("checkpointed")))
    job.kill()
    gate.open(1000)
    job.resume(workers=3)
    check(case, job.wait())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_where_there_is_none_is_one_line(tmp_path: Path) -> None:
    result = run(Case(str(tmp_path / "out"), replicated="cuda"), tmp_path, FaultPlan(), workers=1)
    assert result.exit_code == 2
    assert result.output.startswith("shoal: DeviceMissing: --device cuda: ")
    assert len(result.output.splitlines()) == 1


@pytest.mark.slow
def test_when_all_who_had_the_model_die_the_job_says_so_in_one_line(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"), replicated="cpu")
    plan = FaultPlan().kill("w0", step=9, during="lane").kill("w1", step=9, during="lane")
    result = run(case, tmp_path, plan, workers=2)
    assert result.exit_code == 2
    assert result.output.startswith("shoal: StateLost: every worker that had the model of commit 9 on its device")
    assert len(result.output.splitlines()) == 1
