"""A coordinator that lost its journal, and knows what workers and launcher tell it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.control.generation import Generation, Member
from shoal.control.hosts import Host
from shoal.control.instructions import Bye, Excuse, Fence, Heeded, Log, Publish, SetTarget, Stop
from shoal.control.journal import from_json, to_json
from shoal.control.membership.failures import on_failed
from shoal.control.membership.finishing import on_stop
from shoal.control.membership.hosts import on_roster
from shoal.control.membership.settling import settle
from shoal.control.membership.target import on_scale, on_wish
from shoal.control.membership.values import Membership, Outcome, State, found
from shoal.control.membership.workers import on_gone, on_join, on_leave, on_parked, on_ready
from shoal.control.rebuild import Report, Roster, rebuild
from shoal.control.timeouts import Timeouts

FOUNDING = found(1, 4, 2, Timeouts(10.0))


@dataclass
class Process:
    """A worker as the client in it sees the job."""

    worker_id: str
    slot: int
    newest: Generation | None = None
    last_fault: int = 0
    dismissed: bool = False
    ready: bool = False
    leaves: bool = False
    parked: int = 0

    def report(self) -> Report:
        return Report(self.worker_id, "here", self.slot, self.newest, self.last_fault, self.dismissed)


@dataclass
class World:
    """A job whose coordinator may lose its journal: what it decided, who lives, and what each of them has heard."""

    membership: Membership = FOUNDING
    live: dict[str, Process] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)  # as the event log has them
    target: SetTarget | None = None
    deaf: set[str] = field(default_factory=set)  # what is told to them now does not arrive

    def feed(self, outcome: Outcome) -> None:
        self.membership, instructions = outcome
        self.membership, more = settle(self.membership)
        for told in (*instructions, *more):
            if isinstance(told, Publish):
                for member in (*told.generation.members, *told.generation.leavers):
                    self.hear(member.worker_id, told.generation)
            elif isinstance(told, Bye) and told.worker_id in self.live and told.worker_id not in self.deaf:
                self.live[told.worker_id].dismissed = True
            elif isinstance(told, SetTarget):
                self.target = told

    def hear(self, worker_id: str, generation: Generation) -> None:
        process = self.live.get(worker_id)
        if process is not None and worker_id not in self.deaf:
            process.newest = generation
            process.last_fault = generation.number if generation.fault else process.last_fault

    def start(self) -> None:
        active = self.membership.in_state(State.JOINING, State.WARM, State.MEMBER)
        if len([worker for worker in active if worker.worker_id in self.live]) >= self.membership.target:
            return  # the launcher starts no more than it was told to
        worker_id = f"w{len(self.slots)}"
        self.membership, _ = on_join(self.membership, worker_id, "here", 0.0, launched=True)
        worker = self.membership.worker(worker_id)
        assert worker is not None
        self.live[worker_id] = Process(worker_id, worker.member.slot)
        self.slots[worker_id] = worker.member.slot

    def act(self, action: str, number: int) -> None:
        if action == "start":
            self.start()
        elif action == "scale":
            self.feed(on_scale(self.membership, 1 + number % 4))
        elif self.live:
            process = self.live[sorted(self.live)[number % len(self.live)]]
            getattr(self, action)(process)

    def ready(self, process: Process) -> None:
        process.ready = True
        self.feed(on_ready(self.membership, process.worker_id))

    def leave(self, process: Process) -> None:
        process.leaves = True
        self.feed(on_leave(self.membership, process.worker_id))

    def park(self, process: Process) -> None:
        if process.newest is not None and process.newest.leaves(process.worker_id):
            process.parked = process.newest.number
            self.feed(on_parked(self.membership, process.worker_id, process.parked))

    def die(self, process: Process) -> None:
        del self.live[process.worker_id]
        self.feed(on_gone(self.membership, process.worker_id))

    def die_unheard(self, process: Process) -> None:
        del self.live[process.worker_id]

    def turn_deaf(self, process: Process) -> None:
        self.deaf.add(process.worker_id)

    def rebuild(self, events: bool) -> Membership:
        reports = [process.report() for process in self.live.values()]
        gone = tuple(worker_id for worker_id in self.slots if worker_id not in self.live)
        roster = Roster(Host("here"), tuple(self.live), gone, self.target)
        number, slots = (self.membership.number, self.slots) if events else (0, {})
        return rebuild(FOUNDING, reports, [roster], slots, number, 0.0)[0]

    def come_back(self, membership: Membership) -> Membership:
        """As after any restart: the launcher and every worker say again what they have to say."""
        membership, _ = on_roster(membership, Host("here"), tuple(self.live))
        for worker_id in self.live:
            membership, _ = on_join(membership, worker_id, "here", 0.0, launched=True)
        for process in self.live.values():
            known = 0 if process.newest is None else process.newest.number
            membership, told = on_join(membership, process.worker_id, "here", 0.0, known, process.slot)
            assert not any(isinstance(each, Fence) for each in told)
            if process.ready:
                membership, _ = on_ready(membership, process.worker_id)
            if process.leaves:
                membership, _ = on_leave(membership, process.worker_id)
            membership, _ = on_parked(membership, process.worker_id, process.parked)
        return settle(membership)[0]


ACTIONS = ["start", "start", "ready", "ready", "leave", "park", "park", "die", "scale", "die_unheard"]


def history(actions: list[str]) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 20)), max_size=40)


def played(actions: list[tuple[str, int]]) -> World:
    world = World()
    for action, number in actions:
        world.act(action, number)
    return world


def summary(membership: Membership) -> object:
    states = {worker.worker_id: (worker.state, worker.member.slot) for worker in membership.workers}
    return membership.newest, membership.number, membership.target, states


@given(history(ACTIONS))
@settings(max_examples=300, deadline=None)
def test_whatever_happened_the_workers_know_the_membership_that_the_journal_held(
    actions: list[tuple[str, int]],
) -> None:
    world = played(actions)
    newest = world.membership.newest
    assume(newest is None or any(process.newest == newest for process in world.live.values()))
    # A leaver that was let go and has ended looks like one that died: that costs one more generation.
    assume(newest is None or all(world.membership.worker(it.worker_id) for it in newest.leavers))
    rebuilt = world.rebuild(events=False)
    if newest is not None:
        assert (rebuilt.newest, rebuilt.number) == (newest, world.membership.number)
    assert summary(world.come_back(rebuilt)) == summary(world.come_back(world.membership))


@given(history([*ACTIONS, "turn_deaf"]))
@settings(max_examples=300, deadline=None)
def test_even_if_some_were_not_told_no_number_and_no_slot_is_used_twice(actions: list[tuple[str, int]]) -> None:
    world = played(actions)
    after = world.come_back(world.rebuild(events=True))
    assert after.number >= world.membership.number
    if after.newest is not None and after.newest not in [process.newest for process in world.live.values()]:
        assert after.newest.number > world.membership.number
    slots = [worker.member.slot for worker in after.workers]
    assert len(slots) == len(set(slots))
    assert {worker.worker_id: worker.member.slot for worker in after.workers} == {
        worker_id: process.slot for worker_id, process in world.live.items()
    }


def trio() -> tuple[Generation, list[Report]]:
    members = tuple(Member(f"w{slot}", slot, "here") for slot in range(3))
    newest = Generation(7, members[:2], members[2:])
    return newest, [Report(member.worker_id, "here", member.slot, newest, 5) for member in members]


def test_a_leaver_a_member_a_newcomer_and_one_that_was_let_go_come_back_as_that() -> None:
    newest, reports = trio()
    old = replace(newest, number=4, leavers=(Member("w8", 8, "here"),))
    reports += [Report("w8", "here", 8, old), Report("w9", "here", 9)]
    membership, _ = rebuild(FOUNDING, reports, [], {}, 0, 0.0)
    states = {worker.worker_id: worker.state for worker in membership.workers}
    assert states == {
        "w0": State.MEMBER,
        "w1": State.MEMBER,
        "w2": State.LEAVING,
        "w8": State.PARTED,
        "w9": State.JOINING,
    }
    assert (membership.newest, membership.number, membership.last_fault) == (newest, 7, 5)


def test_a_number_that_only_the_event_log_knows_is_not_used_again() -> None:
    _, reports = trio()
    membership, _ = rebuild(FOUNDING, reports, [], {}, 9, 0.0)
    membership, _ = on_gone(membership, "w1", "signal 9")
    membership, (publish,) = settle(membership)
    assert isinstance(publish, Publish)
    assert (publish.generation.number, publish.generation.fault) == (10, True)


def test_what_only_the_launcher_has_heard_is_done_the_newest_leave_or_all() -> None:
    _, reports = trio()
    everybody = ("w0", "w1", "w2")
    roster = Roster(Host("here"), everybody, target=SetTarget(1, False, 6, {"here": 1}))
    membership, _ = rebuild(FOUNDING, reports, [roster], {}, 0, 0.0)
    assert [worker.worker_id for worker in membership.in_state(State.MEMBER)] == ["w0"]
    assert (membership.target, membership.targets) == (1, 6)
    stopping = Stop("asked to")
    membership, _ = rebuild(FOUNDING, reports, [replace(roster, stopping=stopping)], {}, 0, 0.0)
    assert not membership.in_state(State.MEMBER)
    assert (membership.stopping, membership.finishing) == (stopping, True)


def test_founders_keep_their_order_whoever_comes_back_first() -> None:
    _, reports = trio()
    founders = [replace(report, newest=None) for report in reversed(reports)]
    membership, _ = rebuild(FOUNDING, founders, [], {"w0": 0, "w1": 1, "w2": 2}, 0, 0.0)
    assert [worker.worker_id for worker in membership.workers] == ["w0", "w1", "w2"]


def test_a_silent_worker_keeps_the_slot_that_the_event_log_knows() -> None:
    _, reports = trio()
    roster = Roster(Host("here"), ("w0", "w1", "w2", "w4"), target=SetTarget(3, False, 0, {"here": 3}))
    membership, _ = rebuild(FOUNDING, reports, [roster], {"w4": 5}, 0, 0.0)
    worker = membership.worker("w4")
    assert worker is not None
    assert (worker.state, worker.member.slot) == (State.JOINING, 5)
    _, told = on_join(membership, "w4", "here", 0.0, slot=5)
    assert not told


@pytest.mark.parametrize("worker_id", ["w1", "w9"])
def test_a_worker_that_comes_back_with_a_slot_that_is_anothers_is_fenced(worker_id: str) -> None:
    _, reports = trio()
    membership, _ = rebuild(FOUNDING, reports, [], {}, 0, 0.0)
    _, told = on_join(membership, worker_id, "here", 0.0, slot=2)
    assert Fence(worker_id) in told


# What is said again after a restart is not decided again.


def running() -> Membership:
    membership = FOUNDING
    for worker_id in ("w0", "w1"):
        membership, _ = on_join(membership, worker_id, "here", 0.0, launched=True)
        membership, _ = on_ready(membership, worker_id)
    return settle(membership)[0]


def test_a_wish_counts_once_and_is_acknowledged_each_time() -> None:
    membership, _ = on_wish(running(), "w0", 1, 1, relative=True)
    assert membership.target == 3
    membership = from_json(to_json(membership), 0.0)
    again, told = on_wish(membership, "w0", 1, 1, relative=True)
    assert (again, told) == (membership, [Heeded("w0", 1)])
    assert on_wish(membership, "w1", 1, 1, relative=True)[0].target == 4


@pytest.mark.parametrize("ends_job", [True, False])
def test_a_failure_counts_once(ends_job: bool) -> None:
    membership, told = on_failed(running(), "w0", "ValueError", "bad", "Traceback", ends_job=ends_job)
    assert next(each.kind for each in told if isinstance(each, Log)) == "failed"
    membership = from_json(to_json(membership), 0.0)
    assert (membership.stopping == Stop("w0 failed: ValueError: bad", True, "ValueError")) == ends_job
    assert on_failed(membership, "w0", "ValueError", "bad", "Traceback", ends_job=ends_job) == (membership, [])


def test_a_launcher_that_is_back_hears_target_stop_fences_and_excuses() -> None:
    membership, _ = on_stop(running(), Stop("asked to"))
    membership, told = on_roster(from_json(to_json(membership), 0.0), Host("here"), ["w0", "w1"])
    assert told == [Excuse("w0"), Excuse("w1"), SetTarget(2, finishing=True), Stop("asked to")]
    assert on_stop(membership, Stop("again")) == (membership, [])
