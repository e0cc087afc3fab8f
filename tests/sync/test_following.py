"""A host gets the state while others train, and has the same bits as they from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from shoal.control.generation import Generation
from shoal.errors import Changed
from shoal.sync import following, hosts
from shoal.sync import words as w
from shoal.sync.allreduce import AllReduce
from shoal.sync.following import Source, Told
from shoal.sync.group import Following
from shoal.train.attempt import Policy
from tests.sync.harness import Host, ThreadWorker
from tests.sync.test_allreduce import BATCHES, INPUTS, OPTIMIZERS, TARGETS
from tests.sync.test_between_hosts import Made, workers_on

LAYOUTS = [(1,), (2,), (1, 1), (2, 1)]


def made(name: str = "AdamW") -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 61), nn.BatchNorm1d(61), nn.Tanh(), nn.Linear(61, 9), nn.Linear(9, 3)]
        model = nn.Sequential(*layers).double()
        for parameter in model[3].parameters():
            parameter.requires_grad_(False)
        return model, OPTIMIZERS[name]([one for one in model.parameters() if one.requires_grad])

    return make


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(INPUTS[ids]), TARGETS[ids])


class Withheld:
    """Pieces of the state are asked for, and given when a test lets them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []  # slot of whom, and which piece
        self.goes = 0  # so many pieces at once
        self.released = threading.Event()
        self._held: list[Callable[[], None]] = []
        self._lock = threading.Lock()  # they are asked for on the wire's thread
        give = Source._give

        def withhold(source: Source, group: Any, follower: int, index: int) -> None:
            self.asked.append((group.slot, index))
            with self._lock:
                if self.goes <= 0:
                    self._held.append(lambda: group.far.wire.ask(lambda: give(source, group, follower, index)))
                    return
                self.goes -= 1
            give(source, group, follower, index)

        monkeypatch.setattr(Source, "_give", withhold)

    def release(self) -> None:
        self.released.set()
        with self._lock:
            self.goes = 10**6
            held, self._held = self._held, []
        for give in held:
            give()


class Scene:
    """Members that train, and one worker that follows in a thread of its own."""

    def __init__(self, members: Sequence[ThreadWorker], follower: ThreadWorker) -> None:
        self.members, self.follower = list(members), follower
        self.caught_up = threading.Event()
        self.problem: BaseException | None = None
        self.number = 0
        self._thread: threading.Thread | None = None

    def begin(self, *, follows: bool, joins: bool = False, fault: bool = False) -> None:
        """The next generation of everybody."""
        self.number += 1
        workers = [*self.members, self.follower] if joins else self.members
        followers = (self.follower.member,) if follows else ()
        listed = tuple(worker.member for worker in workers)
        generation = Generation(self.number, listed, fault=fault, key=b"k" * 32, followers=followers)
        everybody = [*self.members, *([self.follower] if follows or joins else [])]
        for worker in everybody:
            worker.notice.tell(generation)
        if self._thread is not None:
            self._thread.join(20)
            assert not self._thread.is_alive()
            self._thread = None
        if self.problem is not None:
            raise self.problem
        if follows:
            self._thread = threading.Thread(target=self._follow, args=(generation,), daemon=True)
            self._thread.start()
        if joins:
            self.members.append(self.follower)
        Host.together(self.members, lambda one: one.enter_generation(generation))

    def _follow(self, generation: Generation) -> None:
        one = self.follower
        try:
            with suppress(Changed):
                group = Following(one.words, one.notice, generation, f"w{one.slot}", relay=one.relay)
                group.enter(incumbent=one.incumbent)
                one.sync.follow(group, self._has_caught_up)
        except BaseException as problem:
            self.problem = problem

    def _has_caught_up(self) -> None:
        self.follower.incumbent = True
        self.caught_up.set()

    def train(self, batches: Sequence[Sequence[int]], loss: Any = loss) -> None:
        for ids in batches:
            Host.together(self.members, lambda one, ids=ids: one.step(ids, loss))
            assert len({one.sync.digest(one.group.seq) for one in self.members}) == 1

    def train_into(self, batches: Sequence[Sequence[int]]) -> None:
        """The last step of these is the generation's last."""
        self.train(batches[:-1])
        for worker in (*self.members, self.follower):
            worker.notice.newest = self.number + 1
        self.train(batches[-1:])

    def join(self) -> None:
        """The follower becomes a member, and has the same bits as the others from then on."""
        self.train_into(BATCHES[:2])
        self.begin(follows=False, joins=True)
        self.train(BATCHES[:2])

    def edit(self, by: int) -> None:
        def edit(one: ThreadWorker) -> None:
            one.sync.open_edit()
            if one.slot == by:
                with torch.no_grad():
                    one.model[0].weight.mul_(0.5)  # type: ignore[index,union-attr,operator]
            one.stepper.edit(one.group, one.record)
            one.record = one.records.read(one.group.seq)

        Host.together(self.members, edit)


def scene(tmp_path: Path, layout: Sequence[int], make: Callable[[], Made], **how: Any) -> Scene:
    *members, follower = workers_on(tmp_path, (*layout, 1), make, **how)
    return Scene(members, follower)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["SGD momentum, decay", "AdamW", "Adafactor"])
def test_a_host_follows_while_others_train_and_has_the_same_bits(
    name: str, layout: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = Withheld(monkeypatch)
    it = scene(tmp_path, layout, made(name), policy=Policy(clip_norm=0.3))
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.begin(follows=True)
    it.train(BATCHES[2:5])  # of which nothing can be made again yet
    assert not it.caught_up.is_set()
    withheld.release()
    it.train(BATCHES[5:])
    assert it.caught_up.wait(20)
    it.train_into(BATCHES[:2])
    it.begin(follows=False, joins=True)
    assert it.follower.sync.digest(it.follower.group.seq) == it.members[0].sync.digest(it.members[0].group.seq)
    it.train(BATCHES[:3])


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_what_is_sent_in_half_the_bytes_is_followed_too(wire: Any, tmp_path: Path) -> None:
    def make() -> Made:
        model = nn.Linear(6, 3)
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def plain(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids].float()), TARGETS[ids].float())

    it = scene(tmp_path, (1, 1), make, sync=lambda: AllReduce(wire=wire))
    it.begin(follows=False)
    it.train(BATCHES[:1], plain)
    it.begin(follows=True)
    it.train(BATCHES, plain)
    assert it.caught_up.wait(20)
    it.train(BATCHES, plain)
    for worker in (*it.members, it.follower):
        worker.notice.newest = it.number + 1
    it.train(BATCHES[:1], plain)
    it.begin(follows=False, joins=True)
    it.train(BATCHES[:2], plain)


def test_whoever_keeps_the_copy_dies_and_another_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PIECE_BYTES", 512)
    withheld = Withheld(monkeypatch)
    it = scene(tmp_path, (1, 1), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    withheld.goes = 5
    it.begin(follows=True)
    it.train(BATCHES[2:4])
    first = list(withheld.asked)
    assert len({piece for _, piece in first}) == 7
    (source,) = {slot for slot, _ in first}
    withheld.asked.clear()
    it.members = [one for one in it.members if one.slot != source]
    withheld.goes = 10**6
    it.begin(follows=True, fault=True)
    it.train(BATCHES[4:])
    assert it.caught_up.wait(20)
    assert {slot for slot, _ in withheld.asked} == {it.members[0].slot}
    again = {piece for _, piece in withheld.asked}
    assert min(again) == 5  # what was there is not asked for again
    it.join()


def test_when_nobody_keeps_the_copy_any_more_it_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    withheld = Withheld(monkeypatch)
    it = scene(tmp_path, (1, 1, 1), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.begin(follows=True)
    it.train(BATCHES[2:4])
    holders = {one.slot for one in it.members if one.words.get(one.slot, w.COPY)}
    assert len(holders) == 2
    it.members = [one for one in it.members if one.slot not in holders]
    withheld.release()
    it.begin(follows=True, fault=True)
    it.train(BATCHES[4:])
    assert it.caught_up.wait(20)
    it.join()


@pytest.mark.parametrize("early", [True, False])
def test_an_edit_by_a_member_reaches_a_follower_before_and_after_it_has_the_state(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = Withheld(monkeypatch)
    it = scene(tmp_path, (1, 1), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    if not early:
        withheld.release()
    it.begin(follows=True)
    it.train(BATCHES[2:6])
    assert it.caught_up.wait(0 if early else 20) != early

    it.edit(by=1)
    it.train(BATCHES[6:])
    assert it.caught_up.wait(20)
    it.join()


def test_an_edit_while_pieces_come_is_not_overwritten_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_PIECE_BYTES", 64)
    withheld, taken = Withheld(monkeypatch), threading.Event()
    take = hosts.Far.take_checked

    def take_and_then_pieces(far: hosts.Far, slot: int, step: int, kind: int, into: Any) -> None:
        take(far, slot, step, kind, into)
        if kind == hosts.STATE:
            withheld.release()
            taken.set()

    monkeypatch.setattr(hosts.Far, "take_checked", take_and_then_pieces)
    it = scene(tmp_path, (1,), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.begin(follows=True)
    it.train(BATCHES[2:4])
    it.edit(by=0)
    assert taken.wait(20)
    it.train(BATCHES)
    assert it.caught_up.wait(20)
    it.join()


def test_sums_that_wait_for_the_copy_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members wait for the follower rather than fill its memory."""
    monkeypatch.setattr(following, "_MOST_BYTES", 1)
    withheld = Withheld(monkeypatch)
    it = scene(tmp_path, (1,), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.begin(follows=True)
    it.train(BATCHES[2:3])
    threading.Timer(0.3, withheld.release).start()
    it.train(BATCHES[3:4])
    assert withheld.released.is_set()
    assert it.caught_up.wait(20)
    it.join()


def test_a_piece_that_comes_damaged_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give, damaged = Source._give, list[int]()

    def spoil(source: Source, group: Any, follower: int, index: int) -> None:
        if damaged:
            give(source, group, follower, index)
            return
        damaged.append(index)
        for part, view in enumerate((b"\0" * len(source._copy[index]), b"\1\2\3\4")):
            tag = hosts.frame_tag(0, hosts.PIECE, 2 * index + part)
            group.far.wire.post(group.far.number, follower, tag, memoryview(view))

    monkeypatch.setattr(Source, "_give", spoil)
    it = scene(tmp_path, (1,), made())
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.begin(follows=True)
    it.train(BATCHES)
    assert it.caught_up.wait(20)
    it.join()
    assert damaged


def test_what_is_told_of_a_commit_comes_back_as_it_was() -> None:
    told = Told(7 << 32 | 5, 2, "some", 3, 0.25, 0.5, 2, b"\xa0")
    assert Told.unpack(told.pack()) == told


def test_what_a_followers_host_holds_from_an_earlier_life_does_not_count(tmp_path: Path) -> None:
    """All that had the state have died, and the memory of the follower's host has come further than the member's."""
    it = scene(tmp_path, (1,), made())
    it.members.append(it.follower)
    it.begin(follows=False)
    it.train(BATCHES[:2])
    it.members = it.members[:1]
    it.begin(follows=False, fault=True)
    it.train(BATCHES[2:3])
    for one in (*it.members, it.follower):
        one.incumbent = False
    it.follower.words.commit = it.members[0].words.commit + 5
    it.begin(follows=True)
    it.train(BATCHES)
    assert it.caught_up.wait(20)
    it.join()


def test_a_follower_counts_a_commit_only_when_the_other_followers_have_it_too(tmp_path: Path) -> None:
    """Without one of them the members do not commit."""
    workers = workers_on(tmp_path, (1, 1, 1), made())
    member, one, other = workers
    generation = Generation(1, (member.member,), key=b"k" * 32, followers=(one.member, other.member))

    def enter(worker: ThreadWorker) -> Following:
        standing = Following(worker.words, worker.notice, generation, f"w{worker.slot}", relay=worker.relay)
        standing.enter(incumbent=False)
        return standing

    standings = dict(zip(workers, Host.together(workers, enter), strict=True))
    step, counted = w.tag(1, 1), threading.Event()

    def follow() -> None:
        standings[one].follow(step)
        counted.set()

    def done(worker: ThreadWorker) -> None:
        worker.words.put(worker.slot, w.DONE, step)
        standings[worker].far.tell()  # type: ignore[union-attr]

    threading.Thread(target=follow, daemon=True).start()
    done(member)
    assert not counted.wait(0.3)
    done(other)
    assert counted.wait(20)
