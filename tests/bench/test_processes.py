from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from shoal.bench.bodies import Buffer, Training, body
from shoal.bench.processes import ProcessGroup, placement
from shoal.bench.runner import compare
from shoal.errors import ScriptFailed, SettingsContradict

WORK = Buffer(200_000)


def cpu_s(group: ProcessGroup) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in group.pids]
    return sum(time.user + time.system for time in times)


def test_placement_is_disjoint_and_in_order() -> None:
    assert placement({7, 3, 5, 1}, 2, 2) == [frozenset({1, 3}), frozenset({5, 7})]


def test_more_cores_than_the_machine_has_are_refused_with_the_numbers() -> None:
    with pytest.raises(SettingsContradict, match="3 workers × 2 cores do not fit the 4 cores"):
        placement(range(4), 3, 2)


def test_every_worker_stays_on_its_core_with_the_threads_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN_DIR", str(tmp_path))
    n_workers = min(2, len(os.sched_getaffinity(0)))
    group = ProcessGroup("tests.bench.planted_bodies:cores", WORK)
    try:
        group.start(n_workers, 1)
        group.measure(1)
    finally:
        group.stop()
    expected = placement(os.sched_getaffinity(0), n_workers, 1)
    seen = [(tmp_path / str(rank)).read_text() for rank in range(n_workers)]
    assert seen == [f"{sorted(cores)} 1 1" for cores in expected]


def test_a_group_with_twice_the_work_takes_twice_as_long() -> None:
    variants = {
        "single": ProcessGroup("tests.bench.planted_bodies:digest", Buffer(400_000)),
        "double": ProcessGroup("tests.bench.planted_bodies:digest", Buffer(800_000)),
    }
    result = compare("digest", variants, baseline="single", n_workers=1, cores_per_worker=1, rounds=9, turn_s=0.02)
    # The machine may be busy: the planted ratio is asked for, not a narrow interval.
    assert result.against("double").time_ratio.value == pytest.approx(2.0, rel=0.25)


def test_a_group_burns_no_cpu_while_another_has_its_turn() -> None:
    idle, busy = (
        ProcessGroup("tests.bench.planted_bodies:digest", WORK),
        ProcessGroup("tests.bench.planted_bodies:digest", WORK),
    )
    try:
        idle.start(1, 1)
        busy.start(1, 1)
        idle.measure(10)
        idle_before, busy_before = cpu_s(idle), cpu_s(busy)
        while cpu_s(busy) - busy_before < 0.3:
            busy.measure(50)
        assert cpu_s(idle) - idle_before <= 0.02
    finally:
        idle.stop()
        busy.stop()


def test_a_worker_that_dies_is_reported_with_its_last_words_and_the_group_can_be_stopped() -> None:
    group = ProcessGroup("tests.bench.planted_bodies:dies_at_rank_1", WORK, share_cores=True)
    try:
        group.start(2, 1)
        with pytest.raises(ScriptFailed, match=r"worker 1 .* died when it was to run 3 steps(.|\n)*planted death"):
            group.measure(3)
        pids = group.pids
    finally:
        group.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_body_that_cannot_be_built_is_reported_at_the_start() -> None:
    group = ProcessGroup("tests.bench.planted_bodies:refuses", WORK)
    try:
        with pytest.raises(ScriptFailed, match=r"died when it was to come up(.|\n)*planted refusal"):
            group.start(1, 1)
    finally:
        group.stop()


def test_an_unknown_body_is_answered_with_the_bodies_there_are() -> None:
    with pytest.raises(SettingsContradict, match="independent, lockstep, ddp"):
        body("horovod")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("independent", "sgd", marks=pytest.mark.slow),
        pytest.param("lockstep", "sgd", marks=pytest.mark.slow),
        ("ddp", "adamw"),
    ],
)
def test_the_training_baselines_run_in_groups_of_two(name: str, optimizer: str) -> None:
    group = ProcessGroup(name, Training("tiny", 8, optimizer), keep_freed_memory=True, share_cores=True)
    try:
        group.start(2, 1)
        assert group.measure(2) > 0
    finally:
        group.stop()


@pytest.mark.parametrize("name", ["memcpy", pytest.param("gloo_allreduce", marks=pytest.mark.slow)])
def test_the_exchange_baselines_run_in_groups_of_two(name: str) -> None:
    group = ProcessGroup(name, Buffer(4096), share_cores=True)
    try:
        group.start(2, 1)
        assert group.measure(2) > 0
    finally:
        group.stop()
