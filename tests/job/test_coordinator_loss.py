"""The coordinator dies for real, at any moment: training goes on, and nothing is decided twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.control.rundir import RunDir
from shoal.data.audit import audit
from shoal.data.fed import Fed
from shoal.testing import FaultPlan, JobResult, LocalJob
from shoal.testing.faults import JournalFate
from tests.job import training
from tests.job.test_faults import MANY, check
from tests.job.training import Case, Gate
from tests.job.watched import Watched

SCRIPT = Path(training.__file__)
SCENES = Path(__file__).with_name("scenes.py")


def endless(tmp_path: Path, plan: FaultPlan | None = None, workers: int | str = 2) -> LocalJob:
    """A job that has begun to train, and ends when it is stopped."""
    arguments = ["long", str(tmp_path), "0"]
    job = LocalJob(SCENES, arguments, workers=workers, directory=tmp_path / "run", plan=plan, options=MANY)
    job.start()
    job.wait_until(lambda: steps_fed(job) > 10)
    return job


def steps_fed(job: LocalJob) -> int:
    """How many steps the worker that saw most of them has fed: read from what workers write, not from whom we kill."""
    record_bytes = 8 * len(Fed._fields)
    return max((path.stat().st_size // record_bytes for path in (job.directory / "audit").glob("*.bin")), default=0)


def progress(job: LocalJob, steps: int = 20) -> None:
    before = steps_fed(job)
    job.wait_until(lambda: steps_fed(job) >= before + steps)


def pid_of(job: LocalJob, rank: int) -> int:
    """Of the member of that rank, once there is one."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [each["pid"] for each in job.status().get("workers", []) if each["rank"] == rank and each["pid"]]
        return bool(found)

    job.wait_until(look)
    return found[0]


def happened(job: LocalJob, kind: str, times: int = 1) -> Callable[[], bool]:
    return lambda: len(job.events(kind)) >= times


def end(job: LocalJob) -> JobResult:
    job.stop()
    return job.wait()


def check_decisions(result: JobResult) -> None:
    """No number is used twice, numbers only grow, and nobody joined twice or was in two slots."""
    numbers = [event["number"] for event in result.of("generation")]
    assert numbers == sorted(set(numbers)), numbers
    joined = [event["worker_id"] for event in result.of("joined")]
    assert len(joined) == len(set(joined)), joined


def test_steps_are_committed_while_there_is_no_coordinator(tmp_path: Path) -> None:
    job = endless(tmp_path, FaultPlan().stop_coordinator(during="returns"))
    job.kill_coordinator()
    job.wait_until(lambda: (job.directory / "faults.jsonl").exists())
    progress(job, 50)
    assert not job.events("restarted"), "50 steps were made before the next coordinator served"
    pid = int((job.directory / "coordinator").read_text().split()[0])
    os.kill(pid, signal.SIGCONT)
    job.wait_until(happened(job, "restarted"))
    progress(job)
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert result.audit.redone == 0, "a coordinator's death costs no step"
    assert len(result.of("generation")) == 2, "the founding and the stop"
    assert [event["text"] for event in result.of("restarted")] == ["after killed by SIGKILL"]
    check_decisions(result)


@pytest.mark.parametrize("journal", ["overwritten", pytest.param("kept", marks=pytest.mark.slow)])
def test_a_worker_and_the_coordinator_die_together(tmp_path: Path, journal: JournalFate) -> None:
    job = endless(tmp_path, workers=3)
    senior = pid_of(job, rank=0)
    job.kill_coordinator(journal)
    os.kill(senior, signal.SIGKILL)
    job.wait_until(lambda: any(sorted(event["members"]) == ["w1", "w2", "w3"] for event in job.events("generation")))
    progress(job)
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert [event["worker_id"] for event in result.of("lost")] == ["w0"]
    check_decisions(result)
    assert len(result.of("rebuilt")) == (journal != "kept")
    assert (tmp_path / "run" / "journal.damaged-1").exists() == (journal != "kept")


# Generation 1 is the founding, 2 follows a death, 3 lets the replacement in.
@pytest.mark.parametrize(
    ("generation", "point", "journal"),
    [
        (2, "decided", "kept"),
        (2, "told", "deleted"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (1, "decided", "deleted"),
                (1, "journaled", "kept"),
                (1, "told", "overwritten"),
                (2, "journaled", "kept"),
                (2, "journaled", "overwritten"),
                (2, "told", "kept"),
                (3, "decided", "overwritten"),
                (3, "journaled", "deleted"),
                (3, "told", "kept"),
            ]
        ),
    ],
)
def test_killed_at_each_point_of_a_decision_it_decides_once(
    tmp_path: Path, generation: int, point: str, journal: JournalFate
) -> None:
    plan = FaultPlan().kill("w1", step=20, during="reduce").kill_coordinator(generation, point, journal)
    job = endless(tmp_path, plan, workers=3)
    job.wait_until(lambda: any(sorted(event["members"]) == ["w0", "w2", "w3"] for event in job.events("generation")))
    progress(job)
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    check_decisions(result)
    assert len(result.of("restarted")) == 1
    assert {event["worker_id"] for event in result.of("lost")} == {"w1"}
    assert [fault["worker_id"] for fault in result.faults].count("coordinator") == 1


def test_a_scale_that_was_journaled_and_told_to_nobody_happens(tmp_path: Path) -> None:
    job = endless(tmp_path, FaultPlan().kill_coordinator(2, "journaled"), workers=3)
    job.scale(2)  # generation 2: the answer comes from the second coordinator
    job.wait_until(happened(job, "left"))
    job.scale(3)
    job.wait_until(lambda: sorted(job.events("generation")[-1]["members"]) == ["w0", "w1", "w3"])
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert not result.of("lost")
    assert [event["worker_id"] for event in result.of("joined")] == ["w0", "w1", "w2", "w3"]
    check_decisions(result)


@pytest.mark.parametrize("journal", ["deleted", pytest.param("kept", marks=pytest.mark.slow)])
def test_killed_while_the_job_stops_it_still_stops_and_says_why(tmp_path: Path, journal: JournalFate) -> None:
    job = endless(tmp_path, FaultPlan().kill_coordinator(2, "told", journal))
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert not result.of("lost")
    assert len(result.of("stopping")) == 1
    assert len(result.of("left")) == 2


@pytest.mark.slow
def test_killed_when_the_first_worker_has_finished_every_report_is_there_once(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "out"))
    Path(case.out).mkdir()
    plan = FaultPlan().kill_coordinator(2, "journaled")
    result = LocalJob(SCRIPT, case.args(), directory=tmp_path / "run", plan=plan, options=MANY).run()
    check(case, result)
    assert len(result.of("finished")) == 2
    assert len(result.of("ended")) == 1
    assert result.of("restarted")


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["kept", "overwritten"])
def test_killed_while_a_newcomer_is_on_its_way(tmp_path: Path, journal: JournalFate) -> None:
    job = endless(tmp_path)
    job.scale(3)
    job.wait_until(happened(job, "joined", 3))
    job.kill_coordinator(journal)
    job.wait_until(lambda: any("w2" in event["members"] for event in job.events("generation")))
    progress(job)
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert not result.of("lost")
    check_decisions(result)


@pytest.mark.slow
def test_a_coordinator_that_hangs_is_replaced_and_training_goes_on(tmp_path: Path) -> None:
    arguments = ["long", str(tmp_path), "0"]
    job = LocalJob(SCENES, arguments, directory=tmp_path / "run", options=(*MANY, "--budget", "1"))
    job.start()
    job.wait_until(lambda: steps_fed(job) > 10)
    os.kill(job.coordinator(), signal.SIGSTOP)
    job.wait_until(happened(job, "restarted"))
    progress(job)
    result = end(job)
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert [event["text"] for event in result.of("restarted")] == ["after no answer for 2 s"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_a_seeded_sweep_of_coordinator_kills(tmp_path: Path, workers: int) -> None:
    """At least 40 coordinators die in two jobs, a third of them with their journal, some together with a worker."""
    draw = random.Random(workers)
    gate = Gate(tmp_path / "gate")
    case = Case(str(tmp_path / "out"), epochs=200, scheduler=True, gate=str(gate.path))
    Path(case.out).mkdir()
    job = LocalJob(SCRIPT, case.args(), workers=workers, directory=tmp_path / "run", options=MANY)
    job.start()
    with Watched(job, gate) as watched:
        for _ in range(21):
            watched.reach(draw.randrange(1, 20))
            victim = draw.choice([None, None, draw.randrange(workers)])
            pid = None if victim is None else pid_of(job, victim)
            job.kill_coordinator(draw.choice(["kept", "kept", "kept", "kept", "deleted", "overwritten"]))
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        watched.reach(1)
        job.coordinator()
        gate.open(2000)
        result = job.wait(600)
    check(case, result)
    check_decisions(result)
    assert len(result.of("restarted")) >= 20
    assert result.of("rebuilt")
    assert result.of("lost")


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "stopped"])
def test_the_jobs_own_host_is_lost_and_its_coordinator_is_started_elsewhere(tmp_path: Path, ends: str) -> None:
    """Its launcher is killed, and with it the coordinator and the worker there. Those of hosts that joined train on."""
    (tmp_path / "out").mkdir()
    gate, run_dir = Gate(tmp_path / "out" / "gate"), RunDir(tmp_path / "run")
    gate.open(40)
    options = ("--address", "127.0.0.1", "--budget", "2", "--threads", "1")
    arguments = ["breaks", str(tmp_path / "out"), "gated"]
    home = LocalJob(SCENES, arguments, workers=1, directory=run_dir.path, options=options)
    home.start()
    home.wait_until(lambda: run_dir.address() is not None)
    others = []

    def start(name: str, *words: str) -> None:
        with open(tmp_path / name, "w") as output:
            command = [sys.executable, "-m", "shoal", *words]
            others.append(subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT))

    try:
        for name in ("a", "b"):
            start(name, "join", str(run_dir.invitation_file), "--slots", "1", "--host-name", name)
        home.wait_until(lambda: members(home) == {"w0", "a-w0", "b-w0"})
        before = {it["worker_id"]: it["pid"] for it in home.status()["workers"]}
        gate.open(100)
        home.wait_until(lambda: home.status().get("step", 0) >= 60)
        home.kill()
        start("heir", "coordinator", str(run_dir.path), "--address", "127.0.0.2")
        until(lambda: members(home) == {"a-w0", "b-w0"})
        assert str(run_dir.address()).startswith("127.0.0.2:")
        until(lambda: home.status().get("step", 0) >= 100)
        after = {it["worker_id"]: it["pid"] for it in home.status()["workers"]}
        assert after == {name: pid for name, pid in before.items() if name != "w0"}, "nobody was started again"
        if ends == "stopped":
            home.stop()
        gate.open(1000)
        for name, process in zip(("a", "b", "heir"), others, strict=True):
            assert process.wait(60) == 0, (name, (tmp_path / name).read_text(), (tmp_path / "heir").read_text())
    finally:
        for process in (home.process, *others):
            process.kill()
            process.wait()
    events = home.events()
    assert [event["worker_id"] for event in events if event["event"] == "lost"] == ["w0"]
    committed = run_dir.committed()
    assert committed is not None
    report = audit(run_dir.audit, committed.seq)
    assert report.clean, str(report)
    digests = {event["digest"] for event in events if event["event"] == "finished"}
    assert len(digests) == (1 if ends == "by itself" else 0)
    assert "audit: 0 lost, 0 repeated" in (tmp_path / "heir").read_text()


def members(job: LocalJob) -> set[str]:
    return set().union(*(event["members"] for event in job.events("generation")[-1:]))


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
