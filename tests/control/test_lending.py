"""Workers, a coordinator and its journal, without processes: whatever is lost on the way, every sample is used once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.control import lending
from shoal.control.borrowed import Borrowed
from shoal.control.instructions import Fence, Granted, Instruction, Log, PassOver, Settled
from shoal.control.journal import from_json, to_json
from shoal.control.membership.settling import settle
from shoal.control.membership.values import Membership, Outcome, State, found
from shoal.control.membership.workers import on_gone, on_join, on_leave, on_parked, on_ready
from shoal.data import leased_audit
from shoal.data.audit import AuditReport, audit
from shoal.data.fed import AuditWriter, Fed, declare, digest
from shoal.data.leases import Lease, Lent, Said, Shard, extent_of
from shoal.data.ledger import Pass


@dataclass
class Worker:
    """As `train/leased.py` uses its leases."""

    worker_id: str
    writer: AuditWriter
    pass_: Pass
    borrowed: Borrowed = field(default_factory=Borrowed)
    leases: list[Lease] = field(default_factory=list)

    def step(self) -> bool:
        """Use one step's samples, and want more when there are none. Whether there were."""
        self.leases += self.borrowed.take()
        if not self.leases:
            self.borrowed.ask(3)
            return False
        lease = self.leases[0]
        said = self.borrowed.said()
        assert said is not None
        used = next(mine.used for mine in said.held if mine.number == lease.number)
        hi = min(used + self.pass_.step_samples(1), lease.shard.hi)
        self.record(lease, used, hi)
        if self.borrowed.use(lease.number, hi):
            self.leases.pop(0)
        return True

    def record(self, lease: Lease, lo: int, hi: int) -> None:
        shard, ids = lease.shard, self.pass_.order(lease.shard.epoch)[lo:hi]
        where = (1, lease.number, shard.pass_index, shard.epoch, shard.lo, shard.hi, lo, hi)
        self.writer.write(Fed(*where, digest([ids]), skipped=False))

    def complete(self) -> None:
        heard = max(1, self.borrowed.heard)
        self.writer.write(Fed(1, heard, self.pass_.index, self.pass_.epochs, 0, 0, 0, 0, digest([]), False))


class World:
    def __init__(self, directory: Path, pass_: Pass) -> None:
        self.directory, self.pass_ = directory, pass_
        self.membership: Membership = found(1, 64, 1)
        self.journal = to_json(self.membership)
        self.live: dict[str, Worker] = {}
        self.started = self.losses = 0
        self.granted: list[int] = []
        self.deaf = False  # what is told now does not arrive
        self.silent: set[str] = set()  # they have not come back in time for a coordinator without a journal
        declare(directory, pass_)

    def turn(self, event: Callable[[Membership], Outcome]) -> list[Instruction]:
        """As the coordinator does it: decide, journal, tell."""
        before = self.membership
        self.membership, told = event(before)
        for consequence in (settle, lending.lend):
            self.membership, more = consequence(self.membership)
            told = [*told, *more]
        if self.membership != before:
            self.journal = to_json(self.membership)
        again: list[str] = []
        for one in told:
            if isinstance(one, Granted) and one.lease.number not in self.granted:
                self.granted.append(one.lease.number)
            worker = self.live.get(getattr(one, "worker_id", ""))
            if self.deaf or worker is None:
                continue
            if isinstance(one, Granted) and not worker.borrowed.on_granted(one.lease):
                again.append(worker.worker_id)
            elif isinstance(one, Settled):
                worker.borrowed.on_settled(one.numbers)
            elif isinstance(one, PassOver):
                worker.borrowed.on_pass_over(one.pass_index, one.complete)
        for worker_id in again:
            self.say(worker_id)
        for one in told:
            if isinstance(one, Fence):
                assert one.worker_id in self.silent
                self.die(one.worker_id)
        return told

    def join(self) -> None:
        worker_id = f"w{self.started}"
        self.started += 1
        self.turn(lambda membership: on_join(membership, worker_id, "here", 0.0))
        self.turn(lambda membership: on_ready(membership, worker_id))
        worker = Worker(worker_id, AuditWriter(self.directory, worker_id), self.pass_)
        worker.borrowed.begin(extent_of(asdict(self.pass_)))
        self.live[worker_id] = worker

    def say(self, worker_id: str) -> None:
        said = self.live[worker_id].borrowed.said()
        assert said is not None
        self.turn(lambda membership: lending.on_said(membership, worker_id, said))

    def die(self, worker_id: str) -> None:
        self.live.pop(worker_id).writer.close()
        self.turn(lambda membership: on_gone(membership, worker_id, "killed"))

    def leave(self, worker_id: str) -> None:
        self.turn(lambda membership: on_leave(membership, worker_id))
        self.say(worker_id)
        if worker_id not in self.live:
            return  # fenced
        self.turn(lambda membership: on_parked(membership, worker_id, membership.number))
        self.live.pop(worker_id).writer.close()
        self.turn(lambda membership: on_gone(membership, worker_id, "exit status 0"))

    def restart(self, with_journal: bool, silent: str = "") -> None:
        """The coordinator is killed; whoever lives and is not silent says everything again."""
        if with_journal:
            self.membership = from_json(self.journal, 0.0)
        else:
            self.losses += 1
            there = [worker for worker in self.live.values() if worker.worker_id != silent]
            known = [said for worker in there if (said := worker.borrowed.said()) is not None]
            held = [lease for said in known for lease in said.held]
            heard = max((said.heard for said in known), default=0)
            begun = max((said.extent.pass_index for said in known if said.extent is not None), default=-1)
            lent = leased_audit.lent(self.directory, held, heard, begun, self.losses)
            self.silent |= {silent} & self.live.keys()
            strangers = (*lent.strangers, *({silent} & self.live.keys()))
            self.membership = replace(self.membership, lent=replace(lent, strangers=strangers))
        for worker_id in list(self.live):
            if worker_id != silent:
                self.say(worker_id)

    def finish(self) -> AuditReport:
        """Until somebody who came last is told that the pass is over, and everybody else too."""
        self.join()
        for _ in range(10_000):
            if all(worker.borrowed.over for worker in self.live.values()):
                break
            for worker_id, worker in list(self.live.items()):
                worker.step()
                self.say(worker_id)
        for worker in self.live.values():
            assert worker.borrowed.over, "a wait without an end"
            worker.complete()
            worker.writer.close()
        return audit(self.directory, None)


PASSES = st.builds(
    lambda samples, epochs, batch, accumulate, drop_last: Pass(
        0, samples, epochs, 5, True, drop_last and batch * accumulate <= samples, None, batch, accumulate, leased=True
    ),
    st.integers(6, 40),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 2),
    st.booleans(),
)
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 6 + ["say"] * 4 + ["unheard", "die", "leave", "join", "kept", "lost", "late"]),
        st.integers(0, 100),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(pass_=PASSES, deeds=DEEDS)
def test_whatever_is_lost_on_the_way_every_sample_is_used_once_and_no_number_twice(
    pass_: Pass, deeds: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), pass_)
        world.join()
        for deed, choice in deeds:
            if not world.live:
                world.join()
            worker_id = list(world.live)[choice % len(world.live)]
            if deed == "step":
                world.live[worker_id].step()
            elif deed == "join":
                world.join()
            elif deed in ("kept", "lost"):
                world.restart(with_journal=deed == "kept")
            elif deed == "late":
                # A second one that is silent, when another journal is lost before the first has come back, might be
                # fenced with what the first goes on with: nothing is used twice, and the audit cannot know it.
                others = world.silent & world.live.keys() - {worker_id}
                world.restart(with_journal=False, silent="" if others else worker_id)
            elif deed == "unheard":
                world.deaf = True
                world.say(worker_id)
                world.deaf = False
            else:
                getattr(world, deed)(worker_id)
            assert audit(Path(directory), None).clean, "in the middle of a pass"
        report = world.finish()
        assert report.clean, report.mismatches
        extent = extent_of(asdict(pass_))
        assert report.samples == extent.samples * extent.epochs
        assert world.membership.lent.used()[0] == report.samples
        assert world.membership.lent.used()[1] == report.steps


def running(*worker_ids: str) -> Membership:
    membership = found(1, 8, len(worker_ids))
    for worker_id in worker_ids:
        membership, _ = on_join(membership, worker_id, "here", 0.0, launched=True)
        membership, _ = on_ready(membership, worker_id)
    return settle(membership)[0]


PASS = Pass(0, 40, 1, 5, True, False, None, 4, 1, leased=True)
EXTENT = extent_of(asdict(PASS))


def ask(membership: Membership, worker_id: str, said: Said) -> Outcome:
    membership, told = lending.on_said(membership, worker_id, said)
    membership, more = lending.lend(membership)
    return membership, [*told, *more]


def only(told: list[Instruction], kind: type[Any]) -> list[Any]:
    return [one for one in told if isinstance(one, kind)]


def test_what_was_granted_and_not_heard_is_told_again_and_nothing_more_is_granted() -> None:
    membership, told = ask(running("w0", "w1"), "w0", Said(EXTENT, wants=2))
    again, told_again = ask(membership, "w0", Said(EXTENT, wants=2))
    assert only(told, Granted) == only(told_again, Granted)
    assert again == membership


def test_uses_alone_need_no_entry_in_the_journal_and_the_end_of_a_lease_does() -> None:
    membership, told = ask(running("w0"), "w0", Said(EXTENT, wants=2))
    (lease,) = [one.lease for one in only(told, Granted)]
    used = replace(lease, used=lease.shard.lo + 4)
    partly, _ = ask(membership, "w0", Said(EXTENT, (used,), heard=1))
    assert partly == membership
    assert partly.lent.used() == (4, 1)
    assert from_json(to_json(partly), 0.0).lent.leases[0].used == used.used
    ended, told = ask(membership, "w0", Said(EXTENT, (used,), (1,), heard=1))
    assert ended != membership
    assert only(told, Settled) == [Settled("w0", (1,))]


def test_the_rest_of_a_lost_worker_goes_to_who_waits_and_the_pass_is_over_only_then() -> None:
    membership, _ = ask(running("w0", "w1"), "w0", Said(EXTENT, wants=100))
    for number in range(2, 30):  # w1 uses all that is left
        membership, told = ask(membership, "w1", Said(EXTENT, wants=100, heard=number - 1))
        if not only(told, Granted):
            break
        (lease,) = [one.lease for one in only(told, Granted)]
        membership, _ = ask(membership, "w1", Said(EXTENT, (replace(lease, used=lease.shard.hi),), (number,), number))
    assert not only(told, PassOver), "w0 has the rest"
    membership, _ = on_gone(membership, "w0", "killed")
    membership, told = lending.lend(settle(membership)[0])
    assert [one.text for one in only(told, Log)] == ["8 samples of 1 lease"]
    for shard in (Shard(0, 0, 0, 4), Shard(0, 0, 4, 8)):
        (lease,) = [one.lease for one in only(told, Granted)]
        assert (lease.worker_id, lease.shard) == ("w1", shard)
        ended = Said(EXTENT, (replace(lease, used=shard.hi),), (lease.number,), lease.number, wants=1)
        membership, told = ask(membership, "w1", ended)
    assert only(told, PassOver) == [PassOver("w1", 0)]


def test_who_comes_back_with_a_lease_that_was_given_away_is_fenced_first() -> None:
    held = Lease(7, "w0", Shard(0, 0, 0, 8), 4)
    membership, told = ask(running("w0", "w1"), "w0", Said(EXTENT, (held,), heard=7, wants=2))
    assert only(told, Fence) == [Fence("w0")]
    assert not only(told, Granted)
    _, told = ask(membership, "w0", Said(EXTENT, (), heard=7, wants=2))
    assert not told, "until it is gone, nothing it says counts"


@pytest.mark.parametrize("ended", [(), (7,)])
def test_who_was_silent_while_the_journal_was_lost_and_has_leases_is_fenced(ended: tuple[int, ...]) -> None:
    """It may have used up what others were given meanwhile."""
    held = (Lease(7, "w0", Shard(0, 0, 0, 8), 8),)
    membership = replace(running("w0", "w1"), lent=Lent(number=7, strangers=("w0", "w1")))
    _, told = ask(membership, "w0", Said(EXTENT, held, ended, heard=7, wants=2))
    assert only(told, Fence) == [Fence("w0")]
    membership, told = ask(membership, "w1", Said(EXTENT, (), heard=5, wants=2))
    assert [one.lease.number for one in only(told, Granted)] == [8]
    _, told = ask(membership, "w1", Said(EXTENT, membership.lent.leases, heard=8))
    assert not told


def test_a_newcomer_leaves_a_pass_that_others_have_left_early_and_who_is_in_it_may_go_on() -> None:
    membership, told = ask(running("w0", "w1", "w2"), "w0", Said(EXTENT, wants=1))
    (lease,) = [one.lease for one in only(told, Granted)]
    left = Said(replace(EXTENT, pass_index=1), (lease,), (1,), heard=1, wants=1)
    membership, told = ask(membership, "w0", left)
    assert [one.lease.shard.pass_index for one in only(told, Granted)] == [1]
    _, told = ask(membership, "w1", Said(EXTENT, wants=1))
    assert told == [PassOver("w1", 0, complete=False)]
    _, told = ask(membership, "w2", Said(EXTENT, wants=1, heard=1))
    assert [one.lease.shard for one in only(told, Granted)] == [lease.shard]


def test_a_grant_of_a_pass_that_was_left_goes_back_and_the_next_one_is_still_wanted() -> None:
    membership, told = ask(running("w0"), "w0", Said(EXTENT, wants=1))
    (late,) = only(told, Granted)
    borrowed = Borrowed()
    borrowed.begin(EXTENT)
    borrowed.ask(1)
    borrowed.leave()
    borrowed.begin(replace(EXTENT, pass_index=1))
    borrowed.ask(1)
    assert not borrowed.on_granted(late.lease)
    said = borrowed.said()
    assert said is not None
    membership, told = ask(membership, "w0", said)
    assert [one.lease.shard.pass_index for one in only(told, Granted)] == [1]
    assert membership.lent.passes[0].returned == (late.lease.shard,)


def test_a_leaver_gets_nothing_more_and_keeps_what_it_has_until_it_is_parked() -> None:
    membership, _ = ask(running("w0", "w1"), "w0", Said(EXTENT, wants=2))
    membership, _ = settle(on_leave(membership, "w0")[0])
    membership, told = ask(membership, "w0", Said(EXTENT, membership.lent.leases, heard=1, wants=2))
    assert not told
    assert len(membership.lent.leases) == 1
    membership, _ = on_parked(membership, "w0", membership.number)
    worker = membership.worker("w0")
    assert worker is not None
    assert worker.state is State.PARTED
    membership, _ = lending.lend(membership)
    assert not membership.lent.leases
    assert membership.lent.passes[0].returned
