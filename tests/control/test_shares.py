"""Where workers are to be, as hosts come, go, and are lost. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.control import membership as m
from shoal.control.hosts import Host, spread
from shoal.control.instructions import Bye, Drop, Excuse, Fence, Instruction, Log, SetTarget, Stop
from shoal.control.journal import from_json, to_json
from shoal.control.membership import Membership, State

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

    def __init__(self, target: int, **slots: int) -> None:
        expected = [Host(name, number) for name, number in slots.items()]
        self.membership = m.found(1, 64, target, hosts=expected)
        self.told: list[Instruction] = []
        for name in slots:
            self.hello(name, slots[name])

    def feed(self, outcome: tuple[Membership, list[Instruction]]) -> list[Instruction]:
        before = outcome[0]
        self.membership, published = m.settle(before)
        self.membership = from_json(to_json(self.membership), 0.0)  # all that counts is in the journal
        self.told = [*outcome[1], *published]
        return self.told

    def hello(self, name: str, slots: int, life: str = "1", live: tuple[str, ...] = (), grow: int = 0) -> None:
        host = Host(name, slots, f"{name}{life}", grown=grow)
        self.feed(m.on_roster(self.membership, host, live))
        for worker_id in live:
            self.feed(m.on_join(self.membership, worker_id, name, 0.0, launched=True))

    def start(self, name: str, *numbers: int) -> None:
        for number in numbers:
            self.feed(m.on_join(self.membership, f"{name}-w{number}", name, 0.0, launched=True))
            self.feed(m.on_ready(self.membership, f"{name}-w{number}"))

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
    job.feed(m.on_host_lost(job.membership, "b", "silent"))
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
    job.feed(m.on_host_lost(job.membership, "b", "silent"))
    job.hello("b", 1, life="1")
    assert job.told == [Drop("b")]
    job.feed(m.on_host_heard(job.membership, "b", 0.0))
    assert job.told == [Drop("b")], "it may not have noticed"
    job.feed(m.on_join(job.membership, "b-w0", "b", 0.0, generation=1, slot=1))
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
            membership, _ = m.on_host_heard(membership, name, now)
        for worker in membership.workers:
            membership, _ = m.on_beat(membership, worker.worker_id, now)
        membership, _ = m.on_tick(membership, now)
    assert [name for name in "ab" if membership.host(name) is None] == lost


def test_a_host_that_leaves_drains_and_its_share_goes_elsewhere() -> None:
    job = Job(3, a=2, b=4)
    job.start("a", 0, 1)
    job.start("b", 0)
    job.feed(m.on_slots(job.membership, "a", 0))
    assert job.shares() == {"a": 0, "b": 3}
    assert {told.worker_id for told in job.of(Excuse) if isinstance(told, Excuse)} == {"a-w0", "a-w1"}
    assert job.members() == ["b-w0"]


def test_fewer_workers_means_fewer_on_the_last_host() -> None:
    job = Job(4, a=2, b=2)
    job.start("b", 0, 1)
    job.start("a", 0, 1)
    job.feed(m.on_scale(job.membership, 3))
    assert job.shares() == {"a": 2, "b": 1}
    assert sorted(job.members()) == ["a-w0", "a-w1", "b-w0"]


def test_a_host_that_joins_by_hand_brings_workers_and_takes_them_with_it() -> None:
    job = Job(2, a=200)
    job.start("a", 0, 1)
    job.hello("spare", 3, grow=3)
    assert (job.membership.target, job.shares()) == (5, {"a": 2, "spare": 3})
    job.feed(m.on_slots(job.membership, "spare", 0))
    assert (job.membership.target, job.shares()) == (2, {"a": 2, "spare": 0})


def test_a_refused_newcomer_costs_the_share_of_its_own_host() -> None:
    job = Job(2, a=4, b=4)
    job.start("a", 0, 1)
    job.feed(m.on_scale(job.membership, 6))
    job.start("a", 2, 3)
    job.start("b", 0, 1)
    job.feed(m.on_refused(job.membership, "a-w3", "OutOfSharedMemory"))
    assert (job.membership.target, job.shares()) == (5, {"a": 3, "b": 2})


def test_a_job_whose_workers_end_everywhere_of_their_own_accord_is_over() -> None:
    job = Job(2, a=1, b=1)
    job.start("a", 0)
    job.feed(m.on_gone(job.membership, "a-w0", "exit status 0"))
    job.feed(m.on_idle(job.membership, "a"))
    assert not job.of(Stop)
    job.feed(m.on_idle(job.membership, "b"))
    assert job.of(Stop) == [Stop("every worker has gone")]
    assert not job.of(Bye)


def with_home(*members: str) -> Job:
    """Workers on the job's own host, which has no name before theirs, and on one that joined."""
    job = Job(2, far=2)
    job.feed(m.on_roster(job.membership, Host("here", 2, "here1", home=True), ()))
    for worker_id in members:
        host = "far" if worker_id.startswith("far") else "here"
        job.feed(m.on_join(job.membership, worker_id, host, 0.0, launched=True))
    for worker_id in members:
        job.feed(m.on_ready(job.membership, worker_id))
    return job


def test_whoever_takes_the_place_of_the_jobs_own_host_takes_its_workers_for_lost_and_the_others_go_on() -> None:
    job = with_home("w0", "far-w0")
    job.feed(m.on_roster(job.membership, Host("~", 0, "heir", home=True), ()))
    assert [log.worker_id for log in job.told if isinstance(log, Log) and log.kind == "lost"] == ["w0"]
    newest = job.membership.newest
    assert newest is not None
    assert newest.fault
    assert [member.worker_id for member in newest.members] == ["far-w0"]
    assert job.membership.stopping is None
    assert {host.name for host in job.membership.hosts} == {"far", "~"}


def test_if_all_who_had_the_state_were_on_the_lost_host_the_job_ends_instead_of_beginning_anew() -> None:
    job = with_home("w0", "w1")
    job.feed(m.on_join(job.membership, "far-w0", "far", 0.0, launched=True))
    job.feed(m.on_roster(job.membership, Host("~", 0, "heir", home=True), ()))
    stop = job.membership.stopping
    assert stop is not None
    assert (stop.failed, stop.kind) == (True, "StateLost")
