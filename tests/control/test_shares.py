"""Where workers are to be, as hosts come, go, and are lost. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.control.hosts import Host, spread
from shoal.control.instructions import Bye, Drop, Excuse, Fence, Instruction, Log, RefuseHost, SetTarget, Stop
from shoal.control.journal import from_json, to_json
from shoal.control.membership.failures import on_failed, on_refused
from shoal.control.membership.finishing import on_finished
from shoal.control.membership.hosts import (
    on_host_failed,
    on_host_heard,
    on_host_lost,
    on_idle,
    on_roster,
    on_slots,
    on_unlisted,
)
from shoal.control.membership.liveness import on_beat, on_tick
from shoal.control.membership.settling import settle
from shoal.control.membership.target import on_scale
from shoal.control.membership.values import Membership, State, found
from shoal.control.membership.workers import on_caught_up, on_gone, on_join, on_ready
from shoal.errors import SettingsContradict

hosts = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6).map(
    lambda drawn: [Host(str(place), slots, share=share) for place, (slots, share) in enumerate(drawn)]
)


@given(hosts=hosts, target=st.integers(1, 40))
def test_shares_fit_the_slots_and_nobody_moves_who_need_not(hosts: list[Host], target: int) -> None:
    after = spread(hosts, target)
    assert sum(host.share for host in after) == min(target, sum(host.slots for host in hosts))
    kept = [min(host.share, host.slots) for host in hosts]
    if sum(kept) <= target:
        assert all(new.share >= old for new, old in zip(after, kept, strict=True))
    else:
        assert all(new.share <= old for new, old in zip(after, kept, strict=True))
    assert spread(after, target) == after


def test_hosts_fill_in_their_order() -> None:
    assert [host.share for host in spread([Host("a", 4), Host("b", 4), Host("c", 4)], 6)] == [4, 2, 0]


class Job:
    """A membership and its hosts, as a coordinator would drive them."""

    def __init__(self, target: int, min_size: int = 1, max_size: int = 64, absent: str = "", **slots: int) -> None:
        expected = [Host(name, number) for name, number in slots.items()]
        self.membership = found(min_size, max_size, target, hosts=expected)
        self.told: list[Instruction] = []
        for name in slots:
            if name != absent:
                self.hello(name, slots[name])

    def feed(self, outcome: tuple[Membership, list[Instruction]]) -> list[Instruction]:
        before = outcome[0]
        self.membership, published = settle(before)
        self.membership = from_json(to_json(self.membership), 0.0)  # all that counts is in the journal
        self.told = [*outcome[1], *published]
        return self.told

    def hello(self, name: str, slots: int, life: str = "1", live: tuple[str, ...] = (), grow: int = 0) -> None:
        host = Host(name, slots, f"{name}{life}", grown=grow)
        self.feed(on_roster(self.membership, host, live))
        for worker_id in live:
            self.feed(on_join(self.membership, worker_id, name, 0.0, launched=True))

    def start(self, name: str, *numbers: int, follows: bool = False) -> None:
        for number in numbers:
            self.feed(on_join(self.membership, f"{name}-w{number}", name, 0.0, launched=True))
            self.feed(on_ready(self.membership, f"{name}-w{number}", follows))

    def shares(self) -> dict[str, int]:
        return {host.name: host.share for host in self.membership.hosts}

    def members(self) -> list[str]:
        return [worker.worker_id for worker in self.membership.in_state(State.MEMBER)]

    def of(self, *kinds: type) -> list[Instruction]:
        return [instruction for instruction in self.told if isinstance(instruction, kinds)]


def test_the_share_of_a_lost_host_goes_to_free_slots_and_stays_there_when_it_is_back() -> None:
    job = Job(4, a=2, b=2, c=4)
    assert job.shares() == {"a": 2, "b": 2, "c": 0}
    job.start("a", 0, 1)
    job.start("b", 0, 1)
    job.feed(on_host_lost(job.membership, "b", "silent"))
    assert job.shares() == {"a": 2, "c": 2}
    assert job.members() == ["a-w0", "a-w1"]
    assert job.membership.newest is not None
    assert job.membership.newest.fault
    job.hello("b", 2, life="2")
    assert job.shares() == {"a": 2, "c": 2, "b": 0}
    (told,) = job.of(SetTarget)
    assert isinstance(told, SetTarget)
    assert told.next_workers["b"] == 2, "no name is given twice"


def test_a_launcher_that_was_dropped_is_told_so_and_its_workers_are_fenced_however_they_come() -> None:
    job = Job(2, a=1, b=1)
    job.start("a", 0)
    job.start("b", 0)
    job.feed(on_host_lost(job.membership, "b", "silent"))
    job.hello("b", 1, life="1")
    assert job.told == [Drop("b")]
    job.feed(on_host_heard(job.membership, "b", 0.0))
    assert job.told == [Drop("b")], "it may not have noticed"
    job.feed(on_join(job.membership, "b-w0", "b", 0.0, generation=1, slot=1))
    assert job.told == [Fence("b-w0")]
    assert job.members() == ["a-w0"]
    job.hello("b", 1, life="2", live=())
    assert job.shares() == {"a": 1, "b": 1}


def test_a_launcher_that_begins_anew_brings_the_loss_of_what_was_there() -> None:
    job = Job(2, a=1, b=1)
    job.start("a", 0)
    job.start("b", 0)
    job.hello("b", 1, life="2")
    assert [log.text for log in job.of(Log) if isinstance(log, Log) and log.kind == "host_lost"] == [
        "b: its launcher began anew, 1 worker lost with it"
    ]
    assert job.members() == ["a-w0"]
    assert job.shares() == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("others", "heard", "lost"),
    [((0,), "a", ["b"]), ((), "a", []), ((0,), "", [])],
    ids=["others are well", "nobody else is a member", "the coordinator is cut off"],
)
def test_a_silent_host_is_lost_only_if_others_can_go_on_without_it(
    others: tuple[int, ...], heard: str, lost: list[str]
) -> None:
    job = Job(2, a=1, b=1)
    job.start("b", 0)
    job.start("a", *others)
    budget_s = job.membership.timeouts.budget_s
    membership = job.membership
    for tick in range(20):
        now = tick * budget_s / 10
        for name in heard:
            membership, _ = on_host_heard(membership, name, now)
        for worker in membership.workers:
            membership, _ = on_beat(membership, worker.worker_id, now)
        membership, _ = on_tick(membership, now)
    assert [name for name in "ab" if membership.host(name) is None] == lost


def test_a_host_that_leaves_drains_and_its_share_goes_elsewhere() -> None:
    job = Job(3, a=2, b=4)
    job.start("a", 0, 1)
    job.start("b", 0)
    job.feed(on_slots(job.membership, "a", 0))
    assert job.shares() == {"a": 0, "b": 3}
    assert {told.worker_id for told in job.of(Excuse) if isinstance(told, Excuse)} == {"a-w0", "a-w1"}
    assert job.members() == ["b-w0"]


def test_hosts_that_are_gone_from_the_list_hand_over_the_state_although_no_more_workers_may_be_there() -> None:
    job = Job(1, max_size=1, a=1)
    job.start("a", 0, follows=True)
    job.hello("c", 1)
    assert job.shares() == {"a": 1, "c": 0}
    job.feed(on_unlisted(job.membership, ["a"]))
    assert job.shares() == {"a": 1, "c": 1}
    job.start("c", 0, follows=True)
    assert [worker.worker_id for worker in job.membership.in_state(State.FOLLOWING)] == ["c-w0"]
    job.feed(on_caught_up(job.membership, "c-w0"))
    assert job.members() == ["a-w0", "c-w0"]
    job.feed(on_slots(job.membership, "a", 0))
    assert (job.members(), job.shares(), job.membership.target) == (["c-w0"], {"a": 0, "c": 1}, 1)


def test_a_host_that_is_listed_again_counts_again() -> None:
    job = Job(2, a=2, b=2)
    job.start("a", 0, 1)
    job.feed(on_unlisted(job.membership, ["a"]))
    assert job.shares() == {"a": 2, "b": 2}
    job.feed(on_unlisted(job.membership, []))
    assert job.shares() == {"a": 2, "b": 0}


def test_a_newcomer_that_is_refused_while_the_state_is_handed_over_is_not_started_again_and_again() -> None:
    job = Job(1, a=1, c=1)
    job.start("a", 0)
    job.feed(on_unlisted(job.membership, ["a"]))
    job.start("c", 0)
    job.feed(on_refused(job.membership, "c-w0", "OutOfSharedMemory"))
    assert (job.membership.target, job.shares()) == (1, {"a": 1, "c": 0})


def test_a_job_begins_without_a_founding_host_that_is_gone_from_the_list_and_gives_its_share_to_the_next() -> None:
    job = Job(2, absent="b", b=1, a=1)
    job.start("a", 0)
    assert not job.members()
    job.feed(on_unlisted(job.membership, ["b"]))
    assert (job.members(), job.shares()) == (["a-w0"], {"a": 1})
    job.hello("c", 1)
    assert job.shares() == {"a": 1, "c": 1}


def test_fewer_workers_means_fewer_on_the_last_host() -> None:
    job = Job(4, a=2, b=2)
    job.start("b", 0, 1)
    job.start("a", 0, 1)
    job.feed(on_scale(job.membership, 3))
    assert job.shares() == {"a": 2, "b": 1}
    assert sorted(job.members()) == ["a-w0", "a-w1", "b-w0"]


def test_a_job_whose_hosts_are_all_known_takes_no_more_workers_than_they_have_slots() -> None:
    job = Job(2, a=1, b=1)
    job.feed(on_host_lost(job.membership, "b", "silent"))
    job.feed(on_scale(job.membership, 1, named_slots=2))
    job.feed(on_scale(job.membership, 2, named_slots=2))  # it comes back
    with pytest.raises(SettingsContradict, match="cannot scale to 3: the hosts of the job have 2 slots"):
        on_scale(job.membership, 3, named_slots=2)
    job.feed(on_scale(job.membership, 3))
    assert job.membership.target == 3


def test_a_host_that_joins_by_hand_brings_workers_and_takes_them_with_it() -> None:
    job = Job(2, a=200)
    job.start("a", 0, 1)
    job.hello("spare", 3, grow=3)
    assert (job.membership.target, job.shares()) == (5, {"a": 2, "spare": 3})
    job.feed(on_slots(job.membership, "spare", 0))
    assert (job.membership.target, job.shares()) == (2, {"a": 2, "spare": 0})


def test_a_refused_newcomer_costs_the_share_of_its_own_host() -> None:
    job = Job(2, a=4, b=4)
    job.start("a", 0, 1)
    job.feed(on_scale(job.membership, 6))
    job.start("a", 2, 3)
    job.start("b", 0, 1)
    job.feed(on_refused(job.membership, "a-w3", "OutOfSharedMemory"))
    assert (job.membership.target, job.shares()) == (5, {"a": 3, "b": 2})


def test_a_job_whose_workers_end_everywhere_of_their_own_accord_is_over() -> None:
    job = Job(2, a=1, b=1)
    job.start("a", 0)
    job.feed(on_gone(job.membership, "a-w0", "exit status 0"))
    job.feed(on_idle(job.membership, "a"))
    assert not job.of(Stop)
    job.feed(on_idle(job.membership, "b"))
    assert job.of(Stop) == [Stop("every worker has gone")]
    assert not job.of(Bye)


def with_home(*members: str) -> Job:
    """Workers on the job's own host, which has no name before theirs, and on one that joined."""
    job = Job(2, far=2)
    job.feed(on_roster(job.membership, Host("here", 2, "here1", home=True), ()))
    for worker_id in members:
        host = "far" if worker_id.startswith("far") else "here"
        job.feed(on_join(job.membership, worker_id, host, 0.0, launched=True))
    for worker_id in members:
        job.feed(on_ready(job.membership, worker_id))
    return job


def test_whoever_takes_the_place_of_the_jobs_own_host_takes_its_workers_for_lost_and_the_others_go_on() -> None:
    job = with_home("w0", "far-w0")
    job.feed(on_roster(job.membership, Host("~", 0, "heir", home=True), ()))
    assert [log.worker_id for log in job.told if isinstance(log, Log) and log.kind == "lost"] == ["w0"]
    newest = job.membership.newest
    assert newest is not None
    assert newest.fault
    assert [member.worker_id for member in newest.members] == ["far-w0"]
    assert job.membership.stopping is None
    assert {host.name for host in job.membership.hosts} == {"far", "~"}


def test_if_all_who_had_the_state_were_on_the_lost_host_the_job_ends_instead_of_beginning_anew() -> None:
    job = with_home("w0", "w1")
    job.feed(on_join(job.membership, "far-w0", "far", 0.0, launched=True))
    job.feed(on_roster(job.membership, Host("~", 0, "heir", home=True), ()))
    stop = job.membership.stopping
    assert stop is not None
    assert (stop.failed, stop.kind) == (True, "StateLost")


def with_guest(state: State, slots: int = 1) -> Job:
    """A job that trains on one host, and one that somebody added by hand, whose first worker has come so far."""
    job = Job(2, a=2)
    job.start("a", 0, 1)
    job.feed(on_roster(job.membership, Host("spare", slots, "spare1", grown=slots, guest=True), ()))
    job.feed(on_join(job.membership, "spare-w0", "spare", 0.0, launched=True))
    if state is not State.JOINING:
        job.feed(on_ready(job.membership, "spare-w0", follows=state is State.FOLLOWING))
    worker = job.membership.worker("spare-w0")
    assert worker is not None
    assert worker.state is state
    return job


def fail(job: Job, worker_id: str, kind: str = "WorkersDiffer", fresh: bool = False) -> None:
    job.feed(on_failed(job.membership, worker_id, kind, "why", ends_job=True, fresh=fresh))


@pytest.mark.parametrize("kind", ["WorkersDiffer", "ScriptFailed", "OutOfSharedMemory"])
@pytest.mark.parametrize("state", [State.JOINING, State.FOLLOWING, State.MEMBER])
def test_a_newcomer_that_fails_on_a_guest_costs_the_job_that_guest_only(state: State, kind: str) -> None:
    job = with_guest(state)
    before = job.membership.newest
    fail(job, "spare-w0", kind, fresh=state is State.MEMBER)
    reason = f"spare is refused, and the job goes on without it: {kind}: why"
    assert job.of(RefuseHost) == [RefuseHost("spare", reason)]
    assert [log.text for log in job.of(Log) if isinstance(log, Log) and log.kind == "host_refused"] == [reason]
    assert job.membership.stopping is None
    assert (job.membership.target, job.shares(), job.members()) == (2, {"a": 2}, ["a-w0", "a-w1"])
    newest = job.membership.newest
    assert newest is not None
    assert (newest is not before and newest.fault) == (state is not State.JOINING), "others may wait for its words"
    fail(job, "spare-w0", kind)
    job.feed(on_gone(job.membership, "spare-w0", "exit status 2"))
    fail(job, "spare-w0", kind)
    job.feed(on_host_failed(job.membership, "spare", kind, "why"))
    assert job.membership.stopping is None, "what it says afterwards is known"
    job.feed(on_roster(job.membership, Host("spare", 1, "spare1", grown=1, guest=True), ()))
    assert job.told == [RefuseHost("spare", reason)], "it may not have heard"
    job.feed(on_roster(job.membership, Host("spare", 1, "spare2", grown=1, guest=True), ()))
    assert job.shares() == {"a": 2, "spare": 1}, "whoever put it right comes again"


@pytest.mark.parametrize("case", ["the job's own", "has trained", "a founder", "too few elsewhere", "finishing"])
def test_what_fails_elsewhere_or_later_ends_the_job_as_ever(case: str) -> None:
    job = with_guest(State.MEMBER)
    if case == "the job's own":
        job.feed(on_gone(job.membership, "a-w1"))
        job.start("a", 2)
    elif case == "too few elsewhere":
        for worker_id in ("a-w0", "a-w1"):
            job.feed(on_gone(job.membership, worker_id))
    elif case == "finishing":
        job.feed(on_finished(job.membership, "a-w0"))
    elif case == "a founder":
        job = Job(2, a=1)
        job.feed(on_roster(job.membership, Host("spare", 1, "spare1", guest=True), ()))
        job.start("a", 0)
        job.start("spare", 0)
    fail(job, "a-w2" if case == "the job's own" else "spare-w0", fresh=case != "has trained")
    assert job.membership.stopping is not None
    assert job.membership.stopping.failed
    assert not job.of(RefuseHost)


def test_a_guest_that_is_tried_again_and_again_does_not_fill_the_journal() -> None:
    job = Job(1, a=1)
    job.start("a", 0)
    sizes = []
    for life in range(300):
        job.feed(on_roster(job.membership, Host("spare", 1, f"spare{life}", grown=1, guest=True), ()))
        job.feed(on_join(job.membership, f"spare-w{life}", "spare", 0.0, launched=True))
        job.feed(on_failed(job.membership, f"spare-w{life}", "ScriptFailed", "x" * 10_000, ends_job=True))
        logged = [log.text for log in job.of(Log) if isinstance(log, Log) and log.kind == "host_refused"]
        assert [len(text) > 10_000 for text in logged] == [True]
        job.feed(on_gone(job.membership, f"spare-w{life}"))
        sizes.append(len(to_json(job.membership)))
    assert sizes[-1] < 1.1 * sizes[len(sizes) // 2] < 100_000
    job.feed(on_roster(job.membership, Host("spare", 1, "spare299", grown=1, guest=True), ()))
    (told,) = job.told
    assert isinstance(told, RefuseHost), "it may not have heard"


def test_a_guest_is_not_refused_while_nobody_else_has_the_state_for_certain() -> None:
    job = Job(2, min_size=2, a=2, b=2)
    job.start("a", 0, 1, follows=True)
    job.feed(on_roster(job.membership, Host("spare", 2, "spare1", grown=2, guest=True), ()))
    job.start("spare", 0, follows=True)
    job.feed(on_caught_up(job.membership, "spare-w0"))
    job.feed(on_host_lost(job.membership, "a", "silent"))
    job.start("b", 0, 1, follows=True)
    assert job.members() == ["spare-w0", "b-w0", "b-w1"], "they are too few, and take the state from the guest"
    job.feed(on_join(job.membership, "spare-w1", "spare", 0.0, launched=True))
    fail(job, "spare-w1", "ScriptFailed")
    assert not job.of(RefuseHost)
    assert job.membership.host("spare") is not None
    assert job.membership.stopping is not None
    assert job.membership.stopping.reason == "spare-w1 failed: ScriptFailed: why"


def test_a_guest_is_refused_if_a_host_that_came_later_has_followed_until_it_had_the_state() -> None:
    job = Job(1, a=1, b=1)
    job.start("a", 0, follows=True)
    job.feed(on_roster(job.membership, Host("spare", 2, "spare1", grown=2, guest=True), ()))
    for name in ("spare", "b"):
        job.start(name, 0, follows=True)
        job.feed(on_caught_up(job.membership, f"{name}-w0"))
    job.feed(on_host_lost(job.membership, "a", "silent"))
    job.feed(on_join(job.membership, "spare-w1", "spare", 0.0, launched=True))
    fail(job, "spare-w1", "ScriptFailed")
    assert job.of(RefuseHost)
    assert job.members() == ["b-w0"]


def test_a_guest_that_has_room_for_fewer_workers_than_it_has_slots_keeps_those() -> None:
    job = with_guest(State.MEMBER, slots=2)
    job.start("spare", 1)
    fail(job, "spare-w1", "OutOfSharedMemory")
    assert not job.of(RefuseHost)
    assert (job.membership.target, job.shares()) == (3, {"a": 2, "spare": 1})


@pytest.mark.parametrize("guest", [False, True])
def test_what_only_the_launcher_of_a_host_knows_costs_a_guest_alone(guest: bool) -> None:
    job = with_guest(State.JOINING)
    job.feed(on_gone(job.membership, "spare-w0", "exit status 3"))
    job.feed(on_host_failed(job.membership, "spare" if guest else "a", "ScriptFailed", "it ended with 3"))
    assert (job.membership.stopping is None) == guest
    assert bool(job.of(RefuseHost)) == guest
