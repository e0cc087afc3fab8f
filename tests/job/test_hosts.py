"""The sweeps of kills and stops again, on several hosts: names of this machine, each with memory and a launcher of its
own, so that everything between them goes over sockets."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shoal.control.rundir import RunDir
from shoal.data import fed
from shoal.metrics import POINTS
from shoal.testing import FaultPlan, JobResult, LocalJob
from tests.job.test_faults import MANY, SCRIPT, check
from tests.job.training import Case

LAYOUTS = {"2 x 2": "localhost/a:2,localhost/b:2", "3 x 1": "localhost/a:1,localhost/b:1,localhost/c:1"}


def job_on(hosts: str, case: Case, tmp_path: Path, plan: FaultPlan) -> LocalJob:
    Path(case.out).mkdir(exist_ok=True)
    slots = sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
    options = ("-H", hosts, *MANY)
    return LocalJob(SCRIPT, case.args(), workers=slots, directory=tmp_path / "run", plan=plan, options=options)


def test_two_hosts_lose_a_worker_each_and_nothing_shows_in_the_result(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"), batchnorm=False, clip_norm=0.5, epochs=8)
    plan = FaultPlan().kill("a-w1", step=5, during="reduce").kill("b-w0", step=20, during="before_commit")
    result = job_on(LAYOUTS["2 x 2"], case, tmp_path, plan).run()
    check(case, result)
    assert {event["worker_id"] for event in result.of("lost")} == {"a-w1", "b-w0"}


def steps_followed(result: JobResult, folder: Path) -> int:
    """How many commits there were while somebody followed."""
    numbers = {event["number"] for event in result.of("generation") if event["followers"]}
    records = fed.read(RunDir(folder).audit)
    return len({int(it["seq"]) for it in records if int(it["generation"]) in numbers})


def test_a_host_that_comes_gets_the_state_while_the_others_train(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"), optimizer="sgd", epochs=5, width=20_000, clip_norm=5.0, scheduler=True)
    plan = FaultPlan().kill("b-w0", step=8, during="reduce").kill("b-w1", step=None, during="follow")
    result = job_on("localhost/a:2,localhost/b:1", case, tmp_path, plan).run()
    check(case, result)
    assert {event["worker_id"] for event in result.of("lost")} == {"b-w0", "b-w1"}
    assert result.of("caught_up")[-1]["worker_id"] == "b-w2"
    assert steps_followed(result, tmp_path / "run") > 1


@pytest.mark.slow
def test_random_kills_while_hosts_get_the_state(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"), optimizer="sgd", epochs=150, width=8_000, scheduler=True)
    plan = FaultPlan().chaos(seed=5, rate=0.004, limit=40).chaos(seed=6, rate=0.2, limit=40, during=["follow"])
    result = job_on(LAYOUTS["3 x 1"], case, tmp_path, plan).run(600)
    check(case, result)
    assert len(result.of("lost")) >= 30
    assert result.of("caught_up")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "victim"), [("2 x 2", "a-w0"), ("3 x 1", "b-w0")])
def test_a_worker_killed_at_each_named_point(tmp_path: Path, layout: str, victim: str) -> None:
    for point in POINTS:
        folder = tmp_path / point
        folder.mkdir()
        case = Case(str(folder / "out"), epochs=3)
        step = None if point in ("join", "park") else 8
        result = job_on(LAYOUTS[layout], case, folder, FaultPlan().kill(victim, step=step, during=point)).run()
        check(case, result)
        assert [fault["during"] for fault in result.faults] == [point]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "loaders", "optimizer"), [("2 x 2", 0, "adamw"), ("3 x 1", 2, "sgd")])
def test_thirty_random_kills(tmp_path: Path, layout: str, loaders: int, optimizer: str) -> None:
    case = Case(str(tmp_path / "out"), optimizer=optimizer, epochs=400, loader_workers=loaders, scheduler=True)
    plan = FaultPlan().chaos(seed=11 + loaders, rate=0.003, limit=30)
    result = job_on(LAYOUTS[layout], case, tmp_path, plan).run(900)
    check(case, result)
    assert len(result.of("lost")) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path, layout: str) -> None:
    case = Case(str(tmp_path / "out"), epochs=40)
    plan = FaultPlan().stop("b-w0", step=10)
    result = job_on(LAYOUTS[layout], case, tmp_path, plan).run(240)
    check(case, result)
    assert {event["worker_id"] for event in result.of("lost")} == {"b-w0"}


@pytest.mark.slow
def test_a_whole_host_is_lost(tmp_path: Path) -> None:
    """Its launcher is killed, and with it all it started."""
    case = Case(str(tmp_path / "out"), epochs=400)
    job = job_on(LAYOUTS["2 x 2"], case, tmp_path, FaultPlan())
    job.start()
    job.wait_until(lambda: bool(job.events("generation")) and job.status().get("step", 0) > 20)
    launchers = [it for it in psutil.Process(job.process.pid).children() if "join" in " ".join(it.cmdline())]
    assert len(launchers) == 2
    launchers[1].kill()
    result = job.wait(240)
    check(case, result)
    assert result.of("lost")
