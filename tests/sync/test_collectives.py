"""Operations by name, against NumPy, between workers that are threads with real sockets."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import errors
from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.sync.collectives import Collectives, Handle
from shoal.sync.group import Group
from shoal.sync.hosts import Relay
from shoal.sync.notice import Notice
from shoal.sync.words import ACK, PORT, Words
from tests.sync.harness import SharedMemory

WAIT_S = 30.0
NUMPY: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod,
}  # fmt: skip


class Peer:
    """A worker without a process, and without a model."""

    def __init__(self, slot: int, memory: SharedMemory, host: str = "") -> None:
        """`host`: its name, if there are several."""
        self.slot, self.id, self.memory = slot, f"w{slot}", memory
        self.words = Words(memory)
        self.notice = Notice(self.words)
        self.broken: list[int] = []
        self.relay = Relay(self.words, self.notice, "127.0.0.1", lambda *_: None) if host else None
        self.host = host or "here"
        self.collectives = Collectives(self.notice, self.id, on_broken=lambda number, *_: self.broken.append(number))
        self.words.put(slot, PORT, self.collectives.port)

    @property
    def member(self) -> Member:
        return Member(self.id, self.slot, self.host, self.relay.address if self.relay else "")

    def enter(self, generation: Generation) -> None:
        group = Group(self.words, self.notice, generation, self.id, spin=False, relay=self.relay)
        group.enter(incumbent=False)
        self.collectives.enter(group)

    def close(self) -> None:
        self.collectives.close()
        if self.relay is not None:
            self.relay.close()


class Peers:
    def __init__(self) -> None:
        self.made: list[Peer] = []

    def begin(self, count: int, hosts: Sequence[str] = ()) -> list[Peer]:
        """So many new ones, in generation 1."""
        memories: dict[str, SharedMemory] = {}
        homes = list(hosts) or [""] * count
        peers = [Peer(slot, memories.setdefault(host, SharedMemory()), host) for slot, host in enumerate(homes)]
        self.made += peers
        self.enter(1, peers)
        return peers

    @staticmethod
    def enter(number: int, peers: Sequence[Peer]) -> None:
        generation = Generation(number, tuple(peer.member for peer in peers), key=b"k" * 32)
        together(peers, lambda peer: peer.enter(generation))


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    for peer in made.made:
        peer.close()


def together(peers: Sequence[Peer], do: Callable[[Peer], Any]) -> list[Any]:
    results: list[Any] = [None] * len(peers)
    problems: list[BaseException] = []

    def body(index: int) -> None:
        try:
            results[index] = do(peers[index])
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if problems:
        raise problems[0]
    assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
    return results


def tell(peers: Sequence[Peer], generation: Generation) -> None:
    for peer in peers:
        peer.notice.tell(generation)


def values(peer: Peer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Small whole numbers, which every dtype has."""
    generator = torch.Generator().manual_seed(31 * peer.slot + len(shape))
    return torch.randint(0, 3, tuple(shape), generator=generator).to(dtype)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions_of_every_dtype_are_those_of_numpy_and_the_same_bits_everywhere(peers: Peers, size: int) -> None:
    ours = peers.begin(size)
    cases = [(op, dtype, shape) for op in NUMPY for dtype in DTYPES for shape in [(), (5,), (3, 0), (7, 3)]]

    def ask(peer: Peer) -> list[torch.Tensor]:
        handles = [
            peer.collectives.allreduce(values(peer, dtype, shape), f"{op} {dtype} {shape}", op=op)
            for op, dtype, shape in cases
        ]
        return [handle.wait(WAIT_S) for handle in handles]

    results = together(ours, ask)
    for index, (op, dtype, shape) in enumerate(cases):
        inputs = np.stack([values(peer, dtype, shape).double().numpy() for peer in ours])
        wanted = torch.from_numpy(np.asarray(NUMPY[op](inputs, axis=0))).to(dtype)  # towards zero, as ours
        for result in results:
            assert result[index].dtype == dtype
            assert result[index].shape == wanted.shape
            torch.testing.assert_close(result[index], wanted)
            assert torch.equal(result[index], results[0][index])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_go_where_they_belong(peers: Peers, size: int) -> None:
    ours = peers.begin(size)
    rows = {peer.slot: values(peer, torch.float32, (3 * peer.slot, 2)) + 10 * peer.slot for peer in ours}
    splits = {peer.slot: [(peer.slot + to) % 3 for to in range(size)] for peer in ours}
    mail = {slot: torch.arange(sum(one) * 2).view(-1, 2) + 100 * slot for slot, one in splits.items()}
    whole = {peer.slot: values(peer, torch.int64, (5, 2)) for peer in ours}

    def ask(peer: Peer) -> tuple[Any, ...]:
        use = peer.collectives
        gathered, numbers = use.allgather(rows[peer.slot], "rows"), use.allgather(torch.tensor(peer.slot), "numbers")
        posted = use.alltoall(mail[peer.slot], splits[peer.slot], "mail")
        even = use.alltoall(torch.arange(2 * size) + 100 * peer.slot, name="even")
        scattered = use.reducescatter(whole[peer.slot], "scattered", op="sum")
        use.barrier("all").wait(WAIT_S)
        return tuple(it.wait(WAIT_S) for it in (gathered, numbers, posted, even, scattered))

    results = together(ours, ask)
    all_rows = np.concatenate([it.numpy() for it in rows.values()])
    total = np.sum([it.numpy() for it in whole.values()], axis=0)
    for me, (gathered, numbers, (posted, counts), (even, _), scattered) in enumerate(results):
        np.testing.assert_array_equal(gathered.numpy(), all_rows)
        assert numbers.tolist() == list(range(size))
        mine = [np.split(mail[of].numpy(), np.cumsum(splits[of])[:-1])[me] for of in range(size)]
        np.testing.assert_array_equal(posted.numpy(), np.concatenate(mine))
        assert counts == [len(it) for it in mine]
        assert even.tolist() == [100 * of + 2 * me + at for of in range(size) for at in range(2)]
        np.testing.assert_array_equal(scattered.numpy(), np.array_split(total, size)[me])


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b"), ("a", "b", "c")], ids=str)
def test_workers_of_several_hosts_reach_each_other(peers: Peers, hosts: tuple[str, ...]) -> None:
    ours = peers.begin(len(hosts), hosts)
    results = together(ours, lambda peer: peer.collectives.allgather(torch.tensor([peer.slot]), "x").wait(WAIT_S))
    assert all(it.tolist() == list(range(len(hosts))) for it in results)


@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_gives_the_roots_tensor_and_fills_the_given_one(peers: Peers, root: int) -> None:
    ours = peers.begin(3)
    mine = [torch.full((4,), float(peer.slot)) for peer in ours]

    def ask(peer: Peer) -> None:
        target = mine[peer.slot]
        assert peer.collectives.broadcast(target, root, "x", out=target).wait(WAIT_S) is target

    together(ours, ask)
    assert all(it.tolist() == [float(root)] * 4 for it in mine)


def test_factors_before_and_after_and_tensors_that_are_not_contiguous(peers: Peers) -> None:
    ours = peers.begin(2)
    base = torch.arange(12.0).view(3, 4)

    def ask(peer: Peer) -> tuple[torch.Tensor, torch.Tensor]:
        use = peer.collectives
        floats = use.allreduce(base.t() * (peer.slot + 1), "f", op="sum", prescale=0.5, postscale=4.0)
        ints = use.allreduce(torch.tensor([3, -3]), "i", op="sum", prescale=0.5, postscale=1.5)
        return floats.wait(WAIT_S), ints.wait(WAIT_S)

    for floats, ints in together(ours, ask):
        torch.testing.assert_close(floats, base.t() * 6)
        assert ints.tolist() == [3, -3]  # 1 + 1, times 1.5


def test_large_tensors_and_many_small_ones_go_at_once(peers: Peers) -> None:
    ours = peers.begin(3)

    def ask(peer: Peer) -> list[torch.Tensor]:
        use = peer.collectives
        large = [use.allreduce(torch.full((1 << 20,), float(peer.slot)), f"large {it}", op="sum") for it in range(3)]
        with use.together():
            small = [use.allreduce(torch.full((it,), peer.slot), f"small {it}", op="sum") for it in range(300)]
        return [it.wait(WAIT_S) for it in (*large, *small)]

    for result in together(ours, ask):
        assert [it.numel() for it in result] == [1 << 20] * 3 + list(range(300))
        assert all(bool((it == 3).all()) for it in result)


@given(seed=st.integers(0, 10**6), size=st.integers(2, 4), count=st.integers(1, 30))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_workers_that_ask_and_wait_in_different_orders_never_block_each_other(
    peers: Peers, seed: int, size: int, count: int
) -> None:
    ours = peers.begin(size)
    kinds = random.Random(seed).choices(["sum", "gather", "broadcast", "barrier"], k=count)

    def ask(peer: Peer) -> dict[int, Any]:
        rng, use = random.Random(seed + peer.slot), peer.collectives
        order = list(range(count))
        rng.shuffle(order)
        handles: dict[int, Handle[Any]] = {}
        for index in order:
            name, mine = f"op {index}", torch.tensor([index, peer.slot])
            handles[index] = {
                "sum": lambda: use.allreduce(mine, name, op="sum"),  # noqa: B023, called at once
                "gather": lambda: use.allgather(mine, name),  # noqa: B023
                "broadcast": lambda: use.broadcast(mine, index % size, name),  # noqa: B023
                "barrier": lambda: use.barrier(name),  # noqa: B023
            }[kinds[index]]()
        rng.shuffle(order)
        return {index: handles[index].wait(WAIT_S) for index in order}

    for result in together(ours, ask):
        for index, kind in enumerate(kinds):
            if kind == "sum":
                assert result[index].tolist() == [index * size, sum(range(size))]
            elif kind == "gather":
                assert result[index].tolist() == [it for slot in range(size) for it in (index, slot)]
            elif kind == "broadcast":
                assert result[index].tolist() == [index, index % size]


def test_a_name_that_means_different_things_fails_in_one_line_on_every_worker(peers: Peers) -> None:
    ours = peers.begin(3)

    def ask(peer: Peer) -> str:
        wrong = peer.collectives.allreduce(torch.zeros(3 if peer.slot == 1 else 2), "x")
        with pytest.raises(errors.WorkersDiffer) as caught:
            wrong.wait(WAIT_S)
        assert peer.collectives.allreduce(torch.ones(2), "x", op="sum").wait(WAIT_S).tolist() == [3.0, 3.0]
        return str(caught.value)

    (line,) = set(together(ours, ask))
    assert all(it in line for it in ["'x'", "w0", "w1", "float32 (2,)", "float32 (3,)"])
    assert "\n" not in line


def test_a_name_that_is_under_way_is_refused_and_the_first_use_of_it_goes_on(peers: Peers) -> None:
    first, second = peers.begin(2)
    handle = first.collectives.allreduce(torch.ones(1), "x", op="sum")
    with pytest.raises(errors.SettingsContradict, match=r"'x'.*under way"):
        first.collectives.allreduce(torch.ones(1), "x")
    together([first, second], lambda peer: peer.collectives.barrier("others go on").wait(WAIT_S))
    assert not handle.poll()
    second.collectives.allreduce(torch.ones(1), "x", op="sum").wait(WAIT_S)
    assert handle.wait(WAIT_S).tolist() == [2.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda use: use.allreduce(torch.ones(2), op="median"),
        lambda use: use.allreduce(torch.ones(2, dtype=torch.complex64)),
        lambda use: use.broadcast(torch.ones(2), 2),
        lambda use: use.alltoall(torch.ones(3)),
        lambda use: use.alltoall(torch.ones(3), [4, -1]),
        lambda use: use.reducescatter(torch.ones(())),
    ],
)
def test_what_cannot_be_is_refused_at_once(peers: Peers, wrong: Callable[[Collectives], Any]) -> None:
    with pytest.raises(errors.SettingsContradict):
        wrong(peers.begin(2)[0].collectives)


@pytest.mark.parametrize(("late", "connected"), [(0, True), (2, True), (0, False), (1, False)])
def test_a_wait_that_stalls_says_who_has_not_asked(peers: Peers, late: int, connected: bool) -> None:
    ours = peers.begin(3)
    if connected:
        together(ours, lambda peer: peer.collectives.barrier().wait(WAIT_S))
    early = [peer for peer in ours if peer.slot != late]

    def ask(peer: Peer) -> Handle[torch.Tensor]:
        handle = peer.collectives.allreduce(torch.ones(1), "x", op="sum")
        while not handle.missing:
            with pytest.raises(errors.Stalled) as stalled:
                handle.wait(0.3)
        assert str(stalled.value) == f"allreduce 'x' is not done after 0.3 s: w{late} did not ask for it"
        return handle

    handles = together(early, ask)
    handles.append(ours[late].collectives.allreduce(torch.ones(1), "x", op="sum"))  # it comes after all
    assert [handle.wait(WAIT_S).item() for handle in handles] == [3.0] * 3


def test_when_a_worker_dies_what_is_under_way_ends_on_the_others_and_the_next_generation_begins_clean(
    peers: Peers,
) -> None:
    ours = peers.begin(3)
    together(ours, lambda peer: peer.collectives.barrier().wait(WAIT_S))
    waiting = [[peer.collectives.allreduce(torch.ones(1 << 18), f"{name}") for name in ("x", "y")] for peer in ours[:2]]
    ours[2].collectives.allreduce(torch.ones(1 << 18), "x")  # may be on its way when it dies
    ours[2].close()
    peers.made.remove(ours[2])
    left = ours[:2]
    generation = Generation(2, tuple(peer.member for peer in left), fault=True, key=b"l" * 32)
    tell(left, generation)
    for handles in waiting:
        with pytest.raises(Changed, match="generation 1 is over"):
            handles[1].wait(WAIT_S)
    assert all(peer.broken in ([], [1]) for peer in left)
    for peer in left:  # until it has entered the next one
        with pytest.raises(Changed):
            peer.collectives.barrier().wait(WAIT_S)
    together(left, lambda peer: peer.enter(generation))
    results = together(left, lambda peer: peer.collectives.allreduce(torch.ones(2), "x", op="sum").wait(WAIT_S))
    assert all(it.tolist() == [2.0, 2.0] for it in results)


def test_who_enters_the_next_generation_takes_nothing_of_the_last_along(peers: Peers) -> None:
    ours = peers.begin(2)
    together(ours, lambda peer: peer.collectives.barrier().wait(WAIT_S))
    old = ours[0].collectives.allreduce(torch.full((2,), 7.0), "x", op="sum")  # the other has not asked for it
    peers.enter(2, ours)
    with pytest.raises(Changed):
        old.wait(WAIT_S)
    results = together(ours, lambda peer: peer.collectives.allreduce(torch.ones(2), "x", op="sum").wait(WAIT_S))
    assert all(it.tolist() == [2.0, 2.0] for it in results)
    # Those without a name are counted from the beginning of a generation.
    newcomer = Peer(2, ours[0].memory)
    peers.made.append(newcomer)
    peers.enter(3, [*ours, newcomer])
    sums = together([*ours, newcomer], lambda peer: peer.collectives.allreduce(torch.ones(1), op="sum").wait(WAIT_S))
    assert [it.item() for it in sums] == [3.0] * 3


def test_a_planned_change_ends_what_waits_for_one_that_has_moved_on(peers: Peers) -> None:
    """The one that waits has not moved on itself, and nobody has died."""
    ours = peers.begin(2)
    together(ours, lambda peer: peer.collectives.barrier().wait(WAIT_S))
    handle = ours[0].collectives.barrier("x")
    generation = Generation(2, (ours[1].member,), (ours[0].member,), key=b"l" * 32)
    tell(ours, generation)
    assert not handle.poll()
    moved = threading.Thread(target=ours[1].enter, args=(generation,), daemon=True)
    ours[0].words.put(0, ACK, 2)  # it acknowledges, as a leaver does from another thread
    moved.start()
    with pytest.raises(Changed):
        handle.wait(WAIT_S)
    moved.join(WAIT_S)


def test_one_that_skips_a_generation_is_not_waited_for_there(peers: Peers) -> None:
    ours = peers.begin(2)
    together(ours, lambda peer: peer.collectives.barrier().wait(WAIT_S))
    members = tuple(peer.member for peer in ours)
    second, third = Generation(2, members, fault=True, key=b"l" * 32), Generation(3, members, key=b"m" * 32)
    ours[1].words.put(1, ACK, 2)  # it acknowledges, and knows of the third before it has entered
    tell(ours, second)
    ours[0].enter(second)
    handle = ours[0].collectives.barrier("x")
    ours[0].notice.tell(third)
    ours[1].words.put(1, ACK, 3)
    with pytest.raises(Changed):
        handle.wait(WAIT_S)
    assert ours[0].collectives.over


def test_where_the_wire_itself_fails_nothing_waits_in_this_generation_or_the_next(peers: Peers) -> None:
    ours = peers.begin(2)
    handle = ours[0].collectives.barrier("x")
    assert ours[0].collectives._wire is not None
    ours[0].collectives._wire.ask(lambda: [][0])
    with pytest.raises(errors.CommunicatorLost, match="the connections of w0 failed: IndexError"):
        handle.wait(WAIT_S)
    assert not ours[0].collectives.over, "there is no other generation to wait for"
    peers.enter(2, ours)
    with pytest.raises(errors.CommunicatorLost):
        ours[0].collectives.barrier().wait(WAIT_S)


def test_bytes_are_shared_by_rank(peers: Peers) -> None:
    ours = peers.begin(3)
    given = [b"first", b"", bytes(range(256)) * 1000]
    assert together(ours, lambda peer: peer.collectives.share(given[peer.slot]).wait(WAIT_S)) == [given] * 3


def test_before_there_is_a_group_it_says_where_to_use_them(peers: Peers) -> None:
    peer = Peer(0, SharedMemory())
    peers.made.append(peer)
    with pytest.raises(errors.SettingsContradict, match="w0 has no group yet"):
        peer.collectives.allreduce(torch.ones(1))


def test_nothing_is_left_when_it_is_closed() -> None:
    def held() -> tuple[int, int]:
        """Sockets, pipes and the like, and threads; not the memory, which is collected later."""
        kinds = [os.readlink(it.path) for it in os.scandir("/proc/self/fd") if os.path.lexists(it.path)]
        return sum(not kind.startswith("/") for kind in kinds), threading.active_count()

    for turn in range(3):
        made = Peers()
        ours = made.begin(3)
        together(ours, lambda peer: peer.collectives.allreduce(torch.ones(1 << 16), "x").wait(WAIT_S))
        under_way = ours[0].collectives.barrier("never")
        for peer in ours:
            peer.close()
        with pytest.raises(Changed):
            under_way.wait(WAIT_S)
        del ours, made
        if turn == 0:
            before = held()
    after = held()
    assert after == before
