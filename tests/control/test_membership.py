"""The membership's promises: first one by one, then over random sequences of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.control.generation import MAX_SLOTS, Generation, Member
from shoal.control.hosts import Host
from shoal.control.instructions import Bye, Excuse, Fence, Instruction, Log, Probe, Publish, Refuse, SetTarget, Stop
from shoal.control.journal import from_json, to_json
from shoal.control.membership.failures import on_refused, refuses
from shoal.control.membership.finishing import on_finished, on_stop
from shoal.control.membership.hosts import on_host_lost, on_roster
from shoal.control.membership.liveness import on_beat, on_evidence, on_tick, on_waiting
from shoal.control.membership.settling import newest_for, settle
from shoal.control.membership.target import on_scale
from shoal.control.membership.values import Membership, Outcome, State, found
from shoal.control.membership.workers import on_caught_up, on_gone, on_join, on_leave, on_parked, on_ready
from shoal.control.timeouts import Timeouts
from shoal.errors import SettingsContradict


class Script:
    """Feeds events to a membership and keeps what came out since `take` was last called."""

    def __init__(self, min_size: int = 1, max_size: int = 8, target: int = 2) -> None:
        self.membership = found(min_size, max_size, target, Timeouts(10.0))
        self.out: list[Instruction] = []
        self.now = 0.0

    def feed(self, outcome: Outcome) -> None:
        self.membership, more = outcome
        self.out += more

    def come(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.feed(on_join(self.membership, worker_id, "here", self.now))
            self.feed(on_ready(self.membership, worker_id))

    def settle(self) -> Generation | None:
        """The generation published now, if any; other instructions stay in `out`."""
        self.membership, more = settle(self.membership)
        self.out += more
        published = [instruction.generation for instruction in more if isinstance(instruction, Publish)]
        assert len(published) <= 1
        return published[0] if published else None

    def tick_until(self, end: float, every: float = 1.0) -> None:
        while self.now < end:
            self.now += every
            self.feed(on_tick(self.membership, self.now))

    def take(self, *kinds: type) -> list[Instruction]:
        taken, self.out = [each for each in self.out if isinstance(each, kinds)], []
        return taken


def ids(members: tuple[Member, ...]) -> list[str]:
    return [member.worker_id for member in members]


def running(*worker_ids: str, min_size: int = 1) -> Script:
    script = Script(min_size=min_size, target=len(worker_ids))
    script.come(*worker_ids)
    assert script.settle() is not None
    script.take()
    return script


def test_the_first_generation_waits_for_all_founders() -> None:
    script = Script(target=3)
    script.come("w0", "w1")
    assert script.settle() is None
    script.come("w2")
    generation = script.settle()
    assert generation is not None
    assert (generation.number, ids(generation.members)) == (1, ["w0", "w1", "w2"])


def test_founders_go_on_with_fewer_when_one_died_on_the_way_and_nobody_is_coming() -> None:
    script = Script(target=3)
    script.feed(on_join(script.membership, "w2", "here", 0.0, launched=True))
    script.come("w0", "w1")
    script.feed(on_gone(script.membership, "w2"))
    script.feed(on_join(script.membership, "w3", "here", 0.0, launched=True))
    assert script.settle() is None, "its replacement is on the way"
    script.feed(on_gone(script.membership, "w3"))
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), generation.fault) == (["w0", "w1"], False)


def test_a_newcomer_is_last_in_rank_and_planned() -> None:
    script = running("w1", "w0")
    script.come("a")
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), generation.fault, generation.number) == (["w1", "w0", "a"], False, 2)


def test_several_changes_become_one_generation_that_is_a_fault_if_one_of_them_was() -> None:
    script = running("w0", "w1", "w2")
    script.come("w3")
    script.feed(on_gone(script.membership, "w1", reason="killed by signal 9"))
    script.feed(on_leave(script.membership, "w2"))
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), ids(generation.leavers)) == (["w0", "w3"], ["w2"])
    assert generation.fault
    assert script.settle() is None
    (publish,) = script.take(Publish)
    assert isinstance(publish, Publish)
    assert publish.cause == "w1 left (killed by signal 9), w2 leaves (asked to), w3 joined"


def test_the_lowest_free_slot_is_given_and_only_the_dead_free_one() -> None:
    script = running("w0", "w1", "w2")
    script.feed(on_leave(script.membership, "w0"))
    script.settle()
    script.feed(on_parked(script.membership, "w0", 2))
    script.come("w3")
    script.feed(on_gone(script.membership, "w0"))
    script.come("w4")
    slots = {worker.worker_id: worker.member.slot for worker in script.membership.workers}
    assert slots == {"w1": 1, "w2": 2, "w3": 3, "w4": 0}


def test_a_full_membership_refuses_the_next_worker() -> None:
    script = Script(max_size=256)
    script.come(*(f"w{index}" for index in range(MAX_SLOTS)))
    script.take()
    script.come("more")
    assert script.take(Refuse)
    assert script.membership.worker("more") is None


def test_a_leaver_parked_in_an_older_generation_must_park_again() -> None:
    script = running("w0", "w1")
    script.feed(on_leave(script.membership, "w1"))
    script.settle()
    script.come("w2")
    generation = script.settle()
    assert generation is not None
    assert (generation.number, ids(generation.leavers)) == (3, ["w1"])
    script.take()
    script.feed(on_parked(script.membership, "w1", 2))
    assert script.take(Bye) == []
    script.feed(on_parked(script.membership, "w1", 3))
    assert script.take(Bye) == [Bye("w1")]
    script.feed(on_gone(script.membership, "w1"))
    assert script.settle() is None, "who was told Bye is missed by nobody"


def test_the_first_of_the_leavers_is_whoever_was_a_member_last() -> None:
    script = running("w0", "w1", "w2")
    script.feed(on_leave(script.membership, "w0"))
    script.settle()
    script.feed(on_leave(script.membership, "w1"))
    script.feed(on_leave(script.membership, "w2"))
    generation = script.settle()
    assert generation is not None
    assert ids(generation.leavers) == ["w1", "w2", "w0"]
    script.feed(on_gone(script.membership, "w1"))
    generation = script.settle()
    assert generation is not None
    assert ids(generation.leavers) == ["w2", "w0"]


def test_a_leaver_that_dies_before_bye_is_a_fault() -> None:
    script = running("w0", "w1")
    script.feed(on_leave(script.membership, "w1"))
    script.settle()
    script.feed(on_gone(script.membership, "w1"))
    generation = script.settle()
    assert generation is not None
    assert (generation.fault, generation.leavers) == (True, ())


def test_a_member_that_is_gone_without_bye_is_a_fault_however_it_ended() -> None:
    script = running("w0", "w1")
    script.feed(on_gone(script.membership, "w1"))
    generation = script.settle()
    assert generation is not None
    assert generation.fault


def test_fewer_than_min_pause_and_one_more_goes_on() -> None:
    script = running("w0", "w1", min_size=2)
    script.feed(on_gone(script.membership, "w1"))
    paused = script.settle()
    assert paused is not None
    assert paused.paused
    script.come("w2")
    resumed = script.settle()
    assert resumed is not None
    assert not resumed.paused


def test_when_everybody_has_died_the_next_generation_still_tells_of_the_fault() -> None:
    script = running("w0")
    script.feed(on_gone(script.membership, "w0"))
    assert script.settle() is None
    script.come("w1")
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), generation.fault, generation.number) == (["w1"], True, 2)


def test_workers_that_finish_leave_without_a_pause_and_need_no_replacement() -> None:
    script = running("w0", "w1", min_size=2)
    script.feed(on_finished(script.membership, "w0"))
    generation = script.settle()
    assert generation is not None
    assert (generation.paused, ids(generation.leavers)) == (False, ["w0"])
    assert script.take(SetTarget) == [SetTarget(2, finishing=True)]
    script.feed(on_gone(script.membership, "w1"))
    after = script.settle()
    assert after is not None
    assert (after.fault, after.paused) == (True, False)


def test_who_comes_after_the_last_has_finished_is_sent_home() -> None:
    script = running("w0")
    script.feed(on_finished(script.membership, "w0"))
    script.settle()
    script.feed(on_parked(script.membership, "w0", 2))
    script.come("late")
    script.take()
    assert script.settle() is None
    assert script.take(Bye) == [Bye("late")]


def test_nobody_becomes_a_member_once_a_script_has_come_to_its_end() -> None:
    script = running("w0", "w1")
    script.feed(on_finished(script.membership, "w0"))
    script.come("late")
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), ids(generation.leavers), generation.finishing) == (["w1"], ["w0"], True)
    assert script.take(Bye) == [Bye("late")]


def test_newcomers_that_fail_together_are_not_all_refused() -> None:
    script = running("w0", "w1")
    for gone, comes in (("w0", "w2"), ("w1", "w3")):
        script.feed(on_gone(script.membership, gone))
        script.come(comes)
        script.settle()
    assert refuses(script.membership, "w2", "DataUnusable")
    script.feed(on_refused(script.membership, "w2", "no samples"))
    assert script.membership.target == 1
    assert not refuses(script.membership, "w3", "DataUnusable")  # w2 is there only until it is gone


def test_a_worker_that_returns_because_it_was_drained_does_not_end_the_job() -> None:
    script = running("w0", "w1")
    script.feed(on_leave(script.membership, "w1"))
    script.feed(on_finished(script.membership, "w1"))
    assert not script.membership.finishing


def test_scaling_down_sends_joiners_home_first_and_then_the_newest_members() -> None:
    script = running("w0", "w1", "w2")
    script.feed(on_join(script.membership, "w3", "here", 0.0))
    script.take()
    script.feed(on_scale(script.membership, 2))
    assert script.take(Excuse, Bye) == [Excuse("w3"), Bye("w3"), Excuse("w2")]
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), ids(generation.leavers)) == (["w0", "w1"], ["w2"])


def test_who_leaves_needs_no_replacement_and_a_launcher_that_is_back_hears_it_again() -> None:
    script = running("w0", "w1")
    script.feed(on_join(script.membership, "w1", "here", 0.0, launched=True))
    script.feed(on_leave(script.membership, "w1"))
    assert script.take(Excuse) == [Excuse("w1")]
    script.feed(on_roster(script.membership, Host("here"), ["w0", "w1"]))
    assert script.take(Excuse) == [Excuse("w1")]


def test_a_job_that_fails_lets_everybody_go_without_finishing_the_step() -> None:
    script = running("w0", "w1")
    script.feed(on_stop(script.membership, Stop("w0 failed", failed=True)))
    generation = script.settle()
    assert generation is not None
    assert (generation.members, ids(generation.leavers), generation.fault) == ((), ["w0", "w1"], True)


@pytest.mark.parametrize("becomes_member", [False, True])
def test_a_newcomer_is_refused_for_what_more_workers_bring_about(becomes_member: bool) -> None:
    script = running("w0", "w1")
    script.feed(on_scale(script.membership, 3))
    script.feed(on_join(script.membership, "w2", "here", 0.0))
    if becomes_member:
        script.feed(on_ready(script.membership, "w2"))
        script.settle()
    script.take()
    assert not refuses(script.membership, "w2", "ScriptFailed")
    assert not refuses(script.membership, "w1", "OutOfSharedMemory"), "a founder"
    assert refuses(script.membership, "w2", "OutOfSharedMemory")
    script.feed(on_refused(script.membership, "w2", "OutOfSharedMemory: no room"))
    assert script.take(Excuse, SetTarget) == [Excuse("w2"), SetTarget(2, finishing=False)]
    assert script.membership.target == 2
    script.feed(on_gone(script.membership, "w2"))
    generation = script.settle()
    assert (generation is not None) == becomes_member, "others may have waited for it"


def test_a_newcomer_the_job_cannot_do_without_is_not_refused() -> None:
    script = running("w0", "w1", min_size=2)
    script.feed(on_gone(script.membership, "w1"))
    script.come("w2")
    script.settle()
    assert not refuses(script.membership, "w2", "OutOfSharedMemory")


@pytest.mark.parametrize("target", [0, 9])
def test_a_target_out_of_range_is_refused(target: int) -> None:
    script = running("w0")
    with pytest.raises(SettingsContradict, match="1 to 8"):
        on_scale(script.membership, target)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 8, 1), (1, 2, 3), (1, 257, 1)])
def test_sizes_that_cannot_all_hold_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SettingsContradict, match="change -n"):
        found(*sizes)


def test_a_joiner_nobody_waits_for_is_never_suspect() -> None:
    script = running("w0")
    script.feed(on_join(script.membership, "w1", "here", 0.0))
    for _ in range(1000):
        script.tick_until(script.now + 1.0)
        script.feed(on_beat(script.membership, "w0", script.now))
    assert not script.take(Probe, Fence)


def test_members_that_are_all_silent_are_fenced_though_nobody_is_left_to_wait_for_them() -> None:
    script = running("w0", "w1")
    script.tick_until(30.0)
    assert sorted(each.worker_id for each in script.take(Fence)) == ["w0", "w1"]


def test_an_awaited_silent_worker_is_probed_and_fenced_at_the_budget_and_lost_only_when_gone() -> None:
    script = running("w0", "w1")
    for _ in range(12):
        script.tick_until(script.now + 1.0)
        script.feed(on_beat(script.membership, "w0", script.now))
        script.feed(on_waiting(script.membership, "w0", ["w1"], script.now))
        script.feed(on_evidence(script.membership, "w1", False, 3.0, script.now))
    probes = script.take(Probe, Fence)
    assert probes[0] == Probe("w1")
    assert [each for each in probes if isinstance(each, Fence)] == probes[-1:]
    worker = script.membership.worker("w1")
    assert worker is not None
    assert worker.fenced == "no sign of life for 10.0 s while awaited"
    assert script.settle() is None
    script.feed(on_gone(script.membership, "w1"))
    assert script.settle() is not None


@pytest.mark.parametrize(("stopped", "fenced"), [(False, False), (True, True)])
def test_cpu_time_that_advances_speaks_for_a_silent_worker_unless_it_is_stopped(stopped: bool, fenced: bool) -> None:
    script = running("w0", "w1")
    for _ in range(40):
        script.tick_until(script.now + 1.0)
        script.feed(on_waiting(script.membership, "w0", ["w1"], script.now))
        script.feed(on_beat(script.membership, "w0", script.now))
        script.feed(on_evidence(script.membership, "w1", stopped, script.now, script.now))
    assert bool(script.take(Fence)) == fenced


def with_a_leaver() -> Script:
    script = running("w0", "w1")
    script.feed(on_leave(script.membership, "w1"))
    script.settle()
    script.take()
    return script


def live_until(script: Script, end: float) -> None:
    """Time passes, and w0 beats."""
    while script.now < end:
        script.tick_until(script.now + 1.0)
        script.feed(on_beat(script.membership, "w0", script.now))


def test_a_leaver_long_silent_before_anybody_waited_is_not_fenced_before_it_was_probed() -> None:
    script = with_a_leaver()
    live_until(script, 100.0)
    script.feed(on_waiting(script.membership, "w0", ["w1"], script.now))
    live_until(script, 104.0)
    assert {type(each) for each in script.take(Fence, Probe)} == {Probe}
    live_until(script, 106.0)
    assert script.take(Fence)


def test_waiting_that_ended_takes_the_suspicion_away() -> None:
    script = with_a_leaver()
    script.feed(on_waiting(script.membership, "w0", ["w1"], 0.0))
    live_until(script, 8.0)
    script.feed(on_waiting(script.membership, "w0", [], script.now))
    live_until(script, 100.0)
    assert script.take(Fence) == []


def test_a_coordinator_that_was_held_up_itself_fences_nobody() -> None:
    script = running("w0", "w1")
    script.feed(on_waiting(script.membership, "w0", ["w1"], 0.0))
    script.tick_until(5.0)
    script.now = 500.0
    script.feed(on_tick(script.membership, script.now))
    script.tick_until(508.0)
    assert script.take(Fence) == []


def test_a_joiner_the_founding_waits_for_is_fenced_when_it_hangs() -> None:
    script = Script(target=2)
    script.come("w0")
    script.feed(on_join(script.membership, "w1", "here", 0.0))
    script.feed(on_join(script.membership, "w2", "here", 0.0, launched=True))
    script.tick_until(12.0)
    assert [each.worker_id for each in script.take(Fence) if isinstance(each, Fence)] == ["w1"]
    script.tick_until(61.0)
    assert [each.worker_id for each in script.take(Fence) if isinstance(each, Fence)] == ["w2"], (
        "after the join timeout"
    )


def test_a_joiner_that_imports_is_not_suspect() -> None:
    script = Script(target=2)
    script.feed(on_join(script.membership, "w0", "here", 0.0, launched=True))
    script.take()
    script.tick_until(30.0)
    assert [each.kind for each in script.take(Log)] == []  # type: ignore[union-attr]


def test_a_launcher_that_is_back_tells_who_died_unheard_and_hears_of_fences() -> None:
    script = running("w0", "w1", "w2")
    for worker_id in ("w0", "w1"):
        script.feed(on_join(script.membership, worker_id, "here", 0.0, launched=True))
    worker = script.membership.worker("w0")
    assert worker is not None
    fenced = replace(worker, fenced="silent")
    script.membership = replace(script.membership, workers=(fenced, *script.membership.workers[1:]))
    script.feed(on_roster(script.membership, Host("here"), ["w0"]))
    assert script.take(Fence) == [Fence("w0")]
    generation = script.settle()
    assert generation is not None
    assert (ids(generation.members), generation.fault) == (["w0", "w2"], True), "w2 is none of this launcher's"


def test_a_reconnecting_worker_learns_of_a_fault_it_missed() -> None:
    script = running("w0", "w1")
    script.feed(on_gone(script.membership, "w1"))
    script.settle()
    script.come("w2")
    newest = script.settle()
    assert newest is not None
    assert not newest.fault
    assert newest_for(script.membership, 1) == replace(newest, fault=True)
    assert newest_for(script.membership, 2) == newest


def test_numbers_a_worker_has_seen_are_not_used_again_even_without_a_journal() -> None:
    script = Script(target=1)
    script.feed(on_join(script.membership, "w0", "here", 0.0, generation=41))
    script.feed(on_ready(script.membership, "w0"))
    generation = script.settle()
    assert generation is not None
    assert generation.number == 42


def test_the_first_newcomer_of_a_host_without_the_state_follows_and_the_others_wait_for_it() -> None:
    script = Script(max_size=8, target=2)
    script.come("a-w0", "a-w1")
    script.settle()
    for worker_id in ("b-w0", "b-w1", "c-w0"):
        script.feed(on_join(script.membership, worker_id, worker_id[0], script.now))
        script.feed(on_ready(script.membership, worker_id, follows=True))
    followed = script.settle()
    assert followed is not None
    assert (ids(followed.members), ids(followed.followers)) == (["a-w0", "a-w1"], ["b-w0", "c-w0"])
    script.feed(on_join(script.membership, "d-w0", "d", script.now))
    script.feed(on_ready(script.membership, "d-w0", follows=True))
    assert script.settle() is None  # those who follow begin together
    script.feed(on_caught_up(script.membership, "b-w0"))
    joined = script.settle()
    assert joined is not None
    assert not joined.fault
    assert (ids(joined.members), ids(joined.followers)) == (["a-w0", "a-w1", "b-w0", "b-w1"], ["c-w0"])
    script.feed(on_gone(script.membership, "c-w0"))
    lost = script.settle()
    assert lost is not None
    assert lost.fault  # the members waited for its words
    assert ids(lost.followers) == ["d-w0"]


def test_a_follower_becomes_a_member_when_those_who_have_the_state_are_too_few() -> None:
    script = Script(min_size=2, max_size=8, target=2)
    script.come("a-w0", "a-w1")
    script.settle()
    script.feed(on_join(script.membership, "b-w0", "b", script.now))
    script.feed(on_ready(script.membership, "b-w0", follows=True))
    followed = script.settle()
    assert followed is not None
    assert ids(followed.followers) == ["b-w0"]
    script.feed(on_gone(script.membership, "a-w1"))
    joined = script.settle()
    assert joined is not None
    assert (ids(joined.members), ids(joined.followers), joined.paused) == (["a-w0", "b-w0"], [], False)


def following(*, hosts: Sequence[Host] = ()) -> Script:
    """a-w0 is the only member, b-w0 follows, b-w1 waits for it."""
    script = Script(max_size=8, target=1)
    script.membership = replace(script.membership, hosts=tuple(hosts))
    for worker_id in ("a-w0", "b-w0", "b-w1"):
        script.feed(on_join(script.membership, worker_id, worker_id[0], script.now))
        script.feed(on_ready(script.membership, worker_id, follows=True))
        script.settle()
    assert script.membership.newest is not None
    assert ids(script.membership.newest.followers) == ["b-w0"]
    return script


def test_where_all_that_have_the_state_are_dead_the_next_of_their_host_goes_on() -> None:
    script = following()
    script.feed(on_gone(script.membership, "a-w0"))
    assert script.settle() is None  # those of b have nothing to go on with
    script.feed(on_join(script.membership, "a-w1", "a", script.now))
    script.feed(on_ready(script.membership, "a-w1", follows=True))
    again = script.settle()
    assert again is not None
    assert again.fault
    assert (ids(again.members), ids(again.followers)) == (["a-w1"], ["b-w0"])


def test_a_host_that_has_caught_up_goes_on_alone() -> None:
    script = following()
    script.feed(on_caught_up(script.membership, "b-w0"))
    script.feed(on_gone(script.membership, "a-w0"))
    again = script.settle()
    assert again is not None
    assert ids(again.members) == ["b-w0", "b-w1"]


def test_when_the_host_with_the_state_is_lost_the_job_ends_and_says_so() -> None:
    script = following(hosts=[Host("a", 1, "life", share=1), Host("b", 2, "other", share=2)])
    script.feed(on_host_lost(script.membership, "a", "silent"))
    script.settle()
    (stop,) = script.take(Stop)
    assert isinstance(stop, Stop)
    assert (stop.failed, stop.kind) == (True, "StateLost")


def test_who_leaves_first_when_all_do_is_a_member_and_no_follower() -> None:
    script = following()
    script.feed(on_stop(script.membership, Stop("asked to")))
    left = script.settle()
    assert left is not None
    assert ids(left.leavers) == ["a-w0", "b-w0"]


def test_a_follower_that_is_to_leave_is_a_leaver() -> None:
    script = Script(max_size=8, target=1)
    script.come("a-w0")
    script.settle()
    script.feed(on_join(script.membership, "b-w0", "b", script.now))
    script.feed(on_ready(script.membership, "b-w0", follows=True))
    script.settle()
    script.feed(on_leave(script.membership, "b-w0"))
    left = script.settle()
    assert left is not None
    assert (ids(left.members), ids(left.leavers), left.fault) == (["a-w0"], ["b-w0"], False)


class AnySequence(RuleBasedStateMachine):
    """Events in any order, settled at any time, with a restart from the journal at any time."""

    @initialize(min_size=st.integers(1, 3), more=st.integers(0, 3), room=st.integers(0, 3), begun=st.booleans())
    def begin(self, min_size: int, more: int, room: int, begun: bool) -> None:
        target = min_size + more
        self.membership = found(min_size, target + room, target, Timeouts(10.0))
        self.now = 0.0
        self.published: list[Generation] = []
        self.gone: set[str] = set()
        self.owed: set[str] = set()  # members that died since the last generation
        self.became_member: list[str] = []
        self.byes: set[str] = set()
        self.count = 0
        if begun:
            for _ in range(target):
                self.arrive()
            self.settle()
            assert len(self.published) == 1

    def feed(self, outcome: Outcome) -> None:
        self.membership, instructions = outcome
        for instruction in instructions:
            if isinstance(instruction, Bye):
                assert instruction.worker_id not in self.gone
                self.byes.add(instruction.worker_id)
            assert not isinstance(instruction, Publish)

    def some(self, data: st.DataObject, *states: State) -> str:
        among = [worker.worker_id for worker in self.membership.in_state(*(states or tuple(State)))]
        return data.draw(st.sampled_from(among)) if among else "nobody"

    @precondition(lambda self: self.count < 12)
    @rule(launched=st.booleans(), host=st.sampled_from(["here", "there", "elsewhere"]))
    def join(self, launched: bool, host: str) -> None:
        self.feed(on_join(self.membership, f"w{self.count}", host, self.now, launched=launched))
        self.count += 1

    @precondition(lambda self: self.count < 12)
    @rule(host=st.sampled_from(["here", "there", "elsewhere"]), follows=st.booleans())
    def arrive(self, host: str = "here", follows: bool = False) -> None:
        worker_id = f"w{self.count}"
        self.join(launched=True, host=host)
        self.feed(on_ready(self.membership, worker_id, follows))

    @precondition(lambda self: self.membership.in_state(State.FOLLOWING))
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        self.feed(on_caught_up(self.membership, self.some(data, State.FOLLOWING)))

    @rule(data=st.data())
    def join_again(self, data: st.DataObject) -> None:
        worker_id = self.some(data)
        if worker_id != "nobody":
            slot = self.slot_of(worker_id)
            known = self.membership.worker(worker_id)
            assert known is not None
            self.feed(on_join(self.membership, worker_id, known.member.host, self.now, self.membership.number))
            assert self.slot_of(worker_id) == slot

    def slot_of(self, worker_id: str) -> int:
        worker = self.membership.worker(worker_id)
        assert worker is not None
        return worker.member.slot

    @precondition(lambda self: self.membership.in_state(State.JOINING))
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        self.feed(on_ready(self.membership, self.some(data, State.JOINING)))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.feed(on_leave(self.membership, self.some(data)))

    @precondition(lambda self: self.membership.in_state(State.LEAVING))
    @rule(data=st.data(), behind=st.integers(0, 1))
    def parked(self, data: st.DataObject, behind: int) -> None:
        worker_id = self.some(data, State.LEAVING)
        before = set(self.byes)
        self.feed(on_parked(self.membership, worker_id, self.membership.number - behind))
        if self.byes != before:
            assert behind == 0
            assert self.published[-1].leaves(worker_id)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker_id = self.some(data)
        if worker_id == "nobody":
            return
        listed = bool(self.published) and self.published[-1].lists(worker_id)
        if (worker_id in self.became_member or listed) and worker_id not in self.byes:
            self.owed.add(worker_id)
        self.feed(on_gone(self.membership, worker_id))
        self.gone.add(worker_id)

    @rule(data=st.data())
    def die_and_settle(self, data: st.DataObject) -> None:
        self.die(data)
        self.settle()

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.feed(on_finished(self.membership, self.some(data)))

    @rule(data=st.data())
    def scale(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(self.membership.min_size, self.membership.max_size))
        self.feed(on_scale(self.membership, target))

    @rule(data=st.data(), passed_s=st.floats(0.0, 6.0))
    def tick(self, data: st.DataObject, passed_s: float) -> None:
        self.now += passed_s
        self.feed(on_waiting(self.membership, self.some(data), [self.some(data)], self.now))
        self.feed(on_tick(self.membership, self.now))

    @rule()
    def restart(self) -> None:
        again = from_json(to_json(self.membership), self.now)
        assert again == self.membership
        self.membership = again

    @rule()
    def settle(self) -> None:
        able = self.membership.in_state(State.WARM, State.FOLLOWING, State.MEMBER)
        warm = {worker.worker_id for worker in able}
        before: Membership = self.membership
        self.membership, instructions = settle(self.membership)
        self.byes |= {each.worker_id for each in instructions if isinstance(each, Bye)}
        generations = [each.generation for each in instructions if isinstance(each, Publish)]
        if not generations:
            assert not self.owed or not self.membership.in_state(State.MEMBER, State.LEAVING)
            return
        (generation,) = generations
        members, leavers = ids(generation.members), ids(generation.leavers)
        assert generation.number > max((each.number for each in self.published), default=0)
        assert not set(members) & set(leavers)
        assert not (set(members) | set(leavers)) & self.gone
        assert not (set(members) | set(leavers)) & self.byes
        assert set(members) <= warm
        assert len(members) <= self.membership.max_size
        assert generation.fault == bool(self.owed)
        homes = {member.host for member in generation.members}
        assert not generation.followers or len(members) >= before.min_size
        behind = [
            it
            for it in generation.followers
            if not (known := self.membership.worker(it.worker_id)) or not known.caught_up
        ]
        assert len({it.host for it in behind}) == len(behind)
        assert not {it.host for it in behind} & homes
        assert not set(ids(generation.followers)) & (set(members) | set(leavers) | self.gone | self.byes)
        assert generation.paused == (len(members) < before.min_size and not before.finishing)
        self.became_member += [worker_id for worker_id in members if worker_id not in self.became_member]
        assert members == sorted(members, key=self.became_member.index)
        self.published.append(generation)
        self.owed.clear()

    @invariant()
    def slots_of_the_living_are_unique(self) -> None:
        slots = [worker.member.slot for worker in self.membership.workers]
        assert len(slots) == len(set(slots))

    @invariant()
    def nobody_gone_is_still_listed(self) -> None:
        assert not {worker.worker_id for worker in self.membership.workers} & self.gone


AnySequence.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnySequence = AnySequence.TestCase


def test_workers_that_are_leaving_do_not_count_when_more_are_asked_for() -> None:
    membership = found(1, 8, 3)
    for worker_id in ("w0", "w1", "w2"):
        membership, _ = on_join(membership, worker_id, "here", 0.0, launched=True)
        membership, _ = on_ready(membership, worker_id)
    membership, _ = settle(membership)
    membership, shrinking = on_scale(membership, 1)
    assert [each for each in shrinking if isinstance(each, Excuse)] == [Excuse("w2"), Excuse("w1")]
    membership, growing = on_scale(membership, 3)
    (target,) = (each for each in growing if isinstance(each, SetTarget))
    assert (target.target, target.number) == (3, 2)  # beside those who are excused
