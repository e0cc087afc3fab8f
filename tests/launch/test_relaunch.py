"""Lost workers are replaced: at once if they were healthy, ever later if they die young, and not for ever."""

from __future__ import annotations

import pytest

from shoal import errors
from shoal.launch.exits import Exit, Failure
from shoal.launch.relaunch import GiveUp, Relaunch, Start, Succession, default_restarts, ends_job


def fail(state: Relaunch, worker_id: str, lived_s: float, now: float) -> tuple[Relaunch, Start | GiveUp]:
    state, decisions = state.on_start(worker_id, now - lived_s).on_exit(worker_id, clean=False, now=now)
    (decision,) = decisions
    return state, decision


def test_worker_that_left_cleanly_is_not_replaced():
    state, decisions = Relaunch().on_start("w0", 0.0).on_exit("w0", clean=True, now=1.0)
    assert decisions == []
    assert state == Relaunch()


def test_healthy_worker_is_replaced_at_once():
    _, decision = fail(Relaunch(), "w0", lived_s=100.0, now=100.0)
    assert decision == Start(0.0)


def test_delay_doubles_with_each_worker_that_dies_young_up_to_a_longest():
    state, delays = Relaunch(restarts=100, first_delay_s=1.0, longest_delay_s=5.0), []
    for number in range(5):
        state, decision = fail(state, f"w{number}", lived_s=1.0, now=10.0 + number)
        assert isinstance(decision, Start)
        delays.append(decision.delay_s)
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_delay_starts_anew_after_a_worker_has_lived_long_enough():
    state, _ = fail(Relaunch(first_delay_s=1.0), "w0", lived_s=1.0, now=10.0)
    state, _ = fail(state, "w1", lived_s=1.0, now=12.0)
    state, healthy = fail(state, "w2", lived_s=10.0, now=30.0)
    state, young = fail(state, "w3", lived_s=1.0, now=40.0)
    assert (healthy, young) == (Start(0.0), Start(1.0))


def test_one_failure_more_than_the_budget_within_the_window_gives_up_and_says_the_numbers():
    state = Relaunch(restarts=3, window_s=60.0)
    for number in range(3):
        state, decision = fail(state, f"w{number}", lived_s=1.0, now=10.0 * number)
        assert isinstance(decision, Start)
    state, decision = fail(state, "w3", lived_s=1.0, now=30.0)
    assert isinstance(decision, GiveUp)
    assert "4 workers failed within 60 s, the budget is 3" in decision.reason


def test_failures_older_than_the_window_are_forgiven():
    state = Relaunch(restarts=2, window_s=60.0)
    for number in range(20):
        state, decision = fail(state, f"w{number}", lived_s=1.0, now=31.0 * number)
        assert isinstance(decision, Start)
    assert len(state.failed_at) == 2


def test_budget_of_none_gives_up_at_the_first_failure():
    _, decision = fail(Relaunch(restarts=0), "w0", lived_s=1000.0, now=1000.0)
    assert isinstance(decision, GiveUp)
    assert decision.reason.startswith("1 worker failed")


def test_only_live_workers_are_remembered():
    state = Relaunch(restarts=10_000, window_s=5.0)
    for number in range(1000):
        state, _ = fail(state, f"w{number}", lived_s=1.0, now=float(number))
    assert state.started_at == {}
    assert len(state.failed_at) <= 5


def test_default_budget_grows_with_the_job():
    assert [default_restarts(target) for target in (1, 4, 64)] == [10, 12, 192]


def test_exit_says_how():
    assert [str(Exit("w0", 1)), str(Exit("w0", signal=9)), str(Exit("w0"))] == [
        "exit status 1",
        "signal 9",
        "exit status unknown",
    ]


def test_failure_becomes_the_named_error_or_a_failed_script():
    assert isinstance(Failure("w0", "ModelUnusable", "no parameters").as_error(), errors.ModelUnusable)
    for kind in ("ValueError", "annotations", "__name__"):
        error = Failure("w0", kind, "text").as_error()
        assert isinstance(error, errors.ScriptFailed)
        assert str(error) == f"{kind}: text"


def test_only_what_every_worker_would_meet_ends_the_job():
    failed, crashed = Exit("w0", exit_code=1), Exit("w0", signal=9)
    script = Failure("w0", "ScriptFailed", "train.py, line 3: ValueError: bad")
    mistake = Failure("w0", "ModelUnusable", "no parameters")
    machine = Failure("w0", "CoordinatorLost", "silence")
    assert ends_job(Exit("w0", exit_code=0), None, "stop") is None
    assert ends_job(crashed, None, "stop") is None
    assert ends_job(Exit("w0"), None, "stop") is None
    assert ends_job(failed, machine, "stop") is None
    assert str(ends_job(failed, script, "stop")) == script.message
    assert ends_job(failed, script, "relaunch") is None
    assert str(ends_job(failed, mistake, "relaunch")) == "no parameters"
    assert "exit status 1" in str(ends_job(failed, None, "stop"))
    assert ends_job(failed, None, "relaunch") is None


def test_worker_that_is_excused_does_not_end_the_job_however_it_ends():
    failed = Exit("w3", exit_code=2)
    for failure in (None, Failure("w3", "OutOfSharedMemory", "no room"), Failure("w3", "ScriptFailed", "bad")):
        assert ends_job(failed, failure, "stop") is not None
        assert ends_job(failed, failure, "stop", excused=True) is None


def test_a_killed_coordinator_is_followed_at_once_however_often():
    succession = Succession()
    for _ in range(100):
        succession, decision = succession.on_end(killed=True, served=True, lived_s=0.5)
        assert decision == Start(0.0)


@pytest.mark.parametrize("served", [False, True])
def test_coordinators_that_end_by_themselves_are_followed_later_each_time_and_then_no_more(served):
    succession, delays = Succession(attempts=4), []
    for _ in range(3):
        succession, decision = succession.on_end(killed=False, served=served, lived_s=0.5)
        delays.append(decision.delay_s)
    assert delays == [0.1, 0.2, 0.4]
    assert succession.on_end(killed=True, served=True, lived_s=0.5) == (Succession(attempts=4), Start(0.0))
    assert succession.on_end(killed=False, served=True, lived_s=3600.0)[1] == Start(0.0)
    assert isinstance(succession.on_end(killed=False, served=served, lived_s=0.5)[1], GiveUp)
    assert isinstance(succession.on_end(killed=True, served=False, lived_s=0.5)[1], GiveUp)
