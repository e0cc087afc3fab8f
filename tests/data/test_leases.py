from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from shoal.data import leases
from shoal.data.leases import Extent, Lease, Lent, Shard, Wish

EXTENTS = st.builds(Extent, st.just(0), st.integers(1, 50), st.integers(1, 4), st.integers(1, 7))


def places(shard: Shard, lo: int | None = None, hi: int | None = None) -> list[tuple[int, int]]:
    return [(shard.epoch, at) for at in range(shard.lo if lo is None else lo, shard.hi if hi is None else hi)]


@given(
    extent=EXTENTS,
    deeds=st.lists(st.tuples(st.sampled_from("gguuued"), st.integers(0, 30), st.integers(1, 9)), max_size=80),
)
def test_whatever_the_order_of_grants_uses_and_deaths_each_sample_of_each_epoch_is_used_once(
    extent: Extent, deeds: list[tuple[str, int, int]]
) -> None:
    lent = leases.begin(Lent(), extent)
    used: Counter[tuple[int, int]] = Counter()
    numbers: list[int] = []

    def grant(worker_id: str, steps: int, among: int) -> None:
        nonlocal lent
        lent, lease = leases.grant(lent, 0, worker_id, steps, among)
        if lease is not None:
            numbers.append(lease.number)
            assert lease.shard.hi > lease.shard.lo
            assert lease.shard.lo % extent.step_samples == 0
            assert lease.shard.hi % extent.step_samples == 0 or lease.shard.hi == extent.samples

    def use(lease: Lease, steps: int) -> None:
        nonlocal lent
        to = min(lease.used + steps * extent.step_samples, lease.shard.hi)
        used.update(places(lease.shard, lease.used, to))
        lent = leases.note(lent, lease.number, to)
        if to == lease.shard.hi:
            lent = leases.end(lent, lease.number)

    for deed, which, steps in deeds:
        if deed == "g":
            grant(f"w{which % 5}", steps, which % 4 + 1)
        elif deed == "d":
            lent = leases.take_back(lent, f"w{which % 5}")
        elif lent.leases:
            lease = lent.leases[which % len(lent.leases)]
            lent = leases.end(lent, lease.number) if deed == "e" else lent
            if deed == "u":
                use(lease, steps)
        assert asdict(leases.from_dict(asdict(lent))) == {**asdict(lent), "wishes": ()}
        assert lent.used()[0] == used.total()
        assert not leases.complete(lent, 0) or used.total() == extent.samples * extent.epochs
    while not leases.complete(lent, 0):
        grant("last", 3, 1)
        for lease in lent.leases:
            use(lease, 1)
    assert used == Counter((epoch, at) for epoch in range(extent.epochs) for at in range(extent.samples))
    assert numbers == list(range(1, len(numbers) + 1))


def test_what_was_returned_is_lent_before_what_comes_next_and_older_epochs_first() -> None:
    lent = leases.begin(Lent(), Extent(0, 8, 3, 2))
    for worker_id in ("w0", "w0", "w1", "w1", "w2", "w2"):
        lent, _ = leases.grant(lent, 0, worker_id, 2, 1)
    lent = leases.take_back(leases.take_back(lent, "w2"), "w0")
    shards = []
    for _ in range(3):
        lent, lease = leases.grant(lent, 0, "w3", 2, 1)
        assert lease is not None
        shards.append((lease.shard.epoch, lease.shard.lo))
    assert shards[:2] == [(0, 0), (0, 4)]


def test_the_last_shards_of_a_pass_are_small_so_that_nobody_keeps_the_others_waiting() -> None:
    lent = leases.begin(Lent(), Extent(0, 1000, 1, 1))
    sizes = []
    while (granted := leases.grant(lent, 0, "w0", 100, 4))[1] is not None:
        lent, lease = granted
        assert lease is not None
        sizes.append(lease.shard.hi - lease.shard.lo)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 100
    assert sizes[-4:] == [1, 1, 1, 1]


def test_nothing_to_give_now_and_a_complete_pass_are_told_apart() -> None:
    lent = leases.begin(Lent(), Extent(0, 4, 1, 4))
    lent, lease = leases.grant(lent, 0, "w0", 1, 1)
    assert lease is not None
    assert leases.grant(lent, 0, "w1", 1, 1) == (lent, None)
    assert not leases.complete(lent, 0)
    lent = leases.end(leases.note(lent, 1, 4), 1)
    assert leases.complete(lent, 0)


def test_an_older_pass_stays_complete_and_takes_no_room() -> None:
    lent = Lent()
    for index in range(50):
        lent = leases.begin(lent, Extent(index, 4, 1, 4))
        lent, lease = leases.grant(lent, index, "w0", 1, 1)
        assert lease is not None
        lent = leases.end(leases.note(lent, lease.number, 4), lease.number)
    assert len(lent.passes) == 1
    assert all(leases.complete(lent, index) for index in range(50))
    assert lent.used() == (200, 50)


def test_a_worker_has_one_wish() -> None:
    lent = leases.wish(leases.wish(Lent(), Wish("w0", 0, 3)), Wish("w0", 1, 4))
    assert lent.wishes == (Wish("w0", 1, 4),)


def test_without_a_journal_what_is_neither_used_nor_held_is_lent_again() -> None:
    extent = Extent(0, 10, 3, 2)
    used = [Shard(0, 0, 0, 4), Shard(0, 0, 6, 10), Shard(0, 1, 0, 2), Shard(0, 1, 2, 4)]
    held = [Lease(9, "w1", Shard(0, 1, 2, 6), 2)]  # of which another had used a part, and died
    lent = leases.rebuild([extent], used, held, 12, losses=2)
    assert lent.number == 2 * leases.NUMBERS, "higher than any that is on lease to somebody who says nothing"
    assert lent.passes[0].returned == (Shard(0, 0, 4, 6),)
    assert (lent.passes[0].epoch, lent.passes[0].position) == (1, 6)
    assert lent.used() == (10, 5)


def test_passes_that_were_left_early_are_not_kept_for_ever() -> None:
    lent = Lent()
    for index in range(100):
        lent = leases.begin(lent, Extent(index, 100, 1, 10))
        lent, lease = leases.grant(lent, index, "w0", 1, 1)
        assert lease is not None
        lent = leases.end(lent, lease.number)
    assert len(lent.passes) < 8
    assert leases.left_early(lent, 3)
    assert not leases.complete(lent, 3)
    assert leases.begin(lent, Extent(3, 100, 1, 10)) == lent, "who comes late does not begin it again"
