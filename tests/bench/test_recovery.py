from __future__ import annotations

import time

from benchmarks.recovery import trial
from shoal.bench.recovery import StepDone, Typical, all_stepped_at, longest_gap_s, restarted, typical


def steps(worker: str, group_size: int, *times: float, pid: int = 1) -> list[StepDone]:
    return [StepDone(time, worker, pid, group_size) for time in times]


# c is killed at 2.0: a ends the step in flight, then both go on as two.
KILLED = [
    *steps("a", 3, 1.0, 1.5, 2.1),
    *steps("b", 3, 1.0, 1.5),
    *steps("c", 3, 1.0, 1.5),
    *steps("a", 2, 2.9, 3.0),
    *steps("b", 2, 2.8, 3.1),
]


def test_recovery_ends_when_the_last_survivor_stepped_in_the_new_group_and_not_with_the_step_in_flight() -> None:
    assert all_stepped_at(KILLED, ["a", "b"], group_size=2, after_s=2.0) == 2.9


def test_recovery_is_open_while_one_survivor_has_not_stepped() -> None:
    assert all_stepped_at(KILLED[:-2], ["a", "b"], group_size=2, after_s=2.0) is None


def test_the_stall_is_the_longest_gap_of_any_incumbent_in_the_window() -> None:
    assert longest_gap_s(KILLED, ["a"], begin_s=2.0, end_s=3.1) == 2.9 - 2.1
    assert longest_gap_s(KILLED, ["a", "b"], begin_s=2.0, end_s=3.1) == 2.8 - 1.5
    assert longest_gap_s(KILLED, ["a"], begin_s=0.0, end_s=1.2) == 0.5
    assert longest_gap_s([], ["a"], begin_s=0.0, end_s=1.0) is None


def test_a_worker_that_steps_under_another_pid_was_restarted() -> None:
    again = [*KILLED, *steps("b", 2, 4.0, pid=2)]
    assert not restarted(KILLED, ["a", "b"])
    assert restarted(again, ["a", "b"])
    assert not restarted(again, ["a"])


def test_what_did_not_happen_is_left_out_of_the_median_but_counted() -> None:
    assert typical([3.0, None, 1.0, 2.0]) == Typical(median_s=2.0, worst_s=3.0, count=3)
    assert typical([None]) is None


class Scripted:
    """Steps whenever it is looked at, as long as it has nothing to say about its end."""

    def __init__(self, ended_after_kill: str | None = None) -> None:
        self.workers, self.done, self.changes = ["a", "b", "c"], list[StepDone](), list[str]()
        self.gone, self.ended_after_kill = None, ended_after_kill

    def members(self) -> list[str]:
        return list(self.workers)

    def steps(self) -> list[StepDone]:
        if self.gone is None:
            self.done += [StepDone(time.monotonic(), worker, 1, len(self.workers)) for worker in self.workers]
        return list(self.done)

    def ended(self) -> str | None:
        return self.gone

    def kill(self, worker: str) -> float:
        self.workers.remove(worker)
        self.changes.append(f"{worker} killed")
        self.gone = self.ended_after_kill
        return time.monotonic()

    def stay(self) -> None:
        self.changes.append("stay")

    def join(self) -> float:
        self.workers.append("d")
        self.changes.append("d joins")
        return time.monotonic()


def test_a_trial_kills_the_youngest_and_then_lets_one_join() -> None:
    system = Scripted()
    found = trial(system, settle_s=0.0, timeout_s=10.0)
    assert system.changes == ["c killed", "stay", "d joins"]
    assert found.failure is None
    assert not found.survivors_restarted
    assert None not in (found.kill_to_step_s, found.join_to_step_s, found.stall_s)


def test_a_trial_of_a_system_that_gives_up_says_what_did_not_come_and_why() -> None:
    found = trial(Scripted(ended_after_kill="b ended with 1"), settle_s=0.0, timeout_s=10.0)
    assert found.failure == "steps after the kill: b ended with 1"
    assert found.kill_to_step_s is None
