"""Each process of a job is killed, alone and with all others, at any moment: the job ends as if nothing had happened,
and nothing of it is left."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import shoal
from shoal import errors
from shoal.control import commands
from shoal.control.coordinator.server import Coordinator
from shoal.control.environment import COORDINATOR_PLUGIN
from shoal.control.rundir import RunDir
from shoal.testing import LocalJob
from tests.job import training
from tests.job.test_checkpoints import assert_as_undisturbed
from tests.job.test_faults import MANY
from tests.job.traces import Traces
from tests.job.training import Case, Gate
from tests.job.watched import AHEAD, Watched

SCRIPT = Path(training.__file__)
SEEDS = range(6)
WORKER, WORKERS, COORDINATOR, COUNTED, LAUNCHER, FORK_SERVER, EVERYTHING = (
    "a worker", "all workers", "the coordinator", "the coordinator alone", "the launcher", "the fork server",
    "everything",
)  # fmt: skip
# Of one job. COUNTED is the coordinator of a job that has nothing else to mend, and steps are counted until the next.
KILLS = {WORKER: 4, WORKERS: 3, COORDINATOR: 2, COUNTED: 3, LAUNCHER: 2, FORK_SERVER: 1, EVERYTHING: 2}
UNTIL_THE_NEXT = 40  # steps from one kill to the next, at most
WITHOUT = 20  # steps to be made while there is no coordinator
STEPS_AN_EPOCH = 10
EPOCHS = 180
HELD = "held"  # a file in the run directory: while it is there, no coordinator begins to serve


def plan(seed: int) -> list[str]:
    kinds = [kind for kind, times in KILLS.items() for _ in range(times)]
    random.Random(seed).shuffle(kinds)
    return kinds


def test_the_seeds_make_a_hundred_kills_of_all_kinds_and_each_comes_before_the_end() -> None:
    kills = Counter(kind for seed in SEEDS for kind in plan(seed))
    assert kills.total() >= 100
    assert min(kills.values()) >= 6
    assert len(plan(0)) * (UNTIL_THE_NEXT + AHEAD) + KILLS[COUNTED] * (WITHOUT + AHEAD) < EPOCHS * STEPS_AN_EPOCH - 200


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_is_killed_the_job_ends_as_if_undisturbed_and_leaves_nothing(
    tmp_path: Path, seed: int, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(shoal.__file__).parents[1]))
    monkeypatch.setenv(COORDINATOR_PLUGIN, f"{__name__}:hold_back")
    draw = random.Random(seed)
    (tmp_path / "out").mkdir()
    gate = Gate(tmp_path / "gate")
    case = Case(
        str(tmp_path / "out"), epochs=EPOCHS, scheduler=True, loader_workers=2 * (seed % 3 == 0), gate=str(gate.path)
    )
    options = (*MANY, "--checkpoint-every", str(draw.randrange(3, 30)))
    job = LocalJob(SCRIPT, case.args(), workers=draw.randrange(1, 5), directory=tmp_path / "run", options=options)
    done: Counter[str] = Counter()
    job.start()
    with Watched(job, gate) as watched:
        for kind in plan(seed):
            watched.reach(draw.randrange(1, UNTIL_THE_NEXT))
            traces.note(job)
            if kill(watched, kind, draw):
                job.resume(workers=draw.randrange(1, 5), options=["--quiet"])
            done[kind] += 1
        watched.reach(1)
        gate.open(EPOCHS * STEPS_AN_EPOCH)
        result = job.wait()
    assert done == KILLS
    assert_as_undisturbed(case, result)
    assert result.steps == EPOCHS * STEPS_AN_EPOCH
    assert len(set(result.digests.values())) == 1, result.digests
    assert len(result.of("resumed")) == KILLS[LAUNCHER] + KILLS[FORK_SERVER] + KILLS[EVERYTHING]
    assert len(result.of("restarted")) >= KILLS[COUNTED]
    assert len(result.of("lost")) >= KILLS[WORKERS]
    assert traces.left(job) == []


def kill(watched: Watched, kind: str, draw: random.Random) -> bool:
    """Whether that is the end of the job, which has to be resumed."""
    job = watched.job
    if kind == COORDINATOR:
        job.kill_coordinator()
    elif kind == COUNTED:
        kill_the_coordinator_alone(watched)
    elif kind == WORKER:
        draw.choice(watched.workers()).kill()
    elif kind == WORKERS:
        for worker in watched.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
    elif kind == LAUNCHER:
        job.kill()
    elif kind == FORK_SERVER:
        watched.fork_server().kill()
        ended = job.wait()
        assert ended.exit_code != 0
        assert "ForkServerLost" in ended.output
    elif kind == EVERYTHING:
        everything = [job.process, *psutil.Process(job.process.pid).children(recursive=True)]
        draw.shuffle(everything)
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):  # it died with another one
                process.kill()
        job.kill()
    return kind in (LAUNCHER, FORK_SERVER, EVERYTHING)


def kill_the_coordinator_alone(watched: Watched) -> None:
    """It dies when there is nothing to be changed, and another one comes when steps were made without it."""
    watched.settle()
    job, held = watched.job, watched.job.directory / HELD
    held.touch()
    before = job.coordinator()
    job.kill_coordinator()
    died_at = watched.commit()[1].step
    watched.reach(WITHOUT)
    assert watched.commit()[1].step - died_at >= WITHOUT
    assert RunDir(job.directory).coordinator() == (before, True), "another one came meanwhile"
    with pytest.raises(errors.JobNotFound):
        commands.status(RunDir(job.directory), timeout_s=0.1)
    held.unlink()
    assert job.coordinator() != before


def hold_back(coordinator: Coordinator) -> None:
    """In every coordinator, before it serves."""
    while (coordinator.run_dir.path / HELD).exists():
        time.sleep(0.005)
