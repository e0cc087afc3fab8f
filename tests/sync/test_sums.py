"""Sums over hosts: real sockets on loopback, a thread for each worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.sync.hosts import Far, Places, Relay
from shoal.sync.notice import Notice
from shoal.sync.sums import Sums, Table
from shoal.sync.words import Words
from tests.sync.harness import SharedMemory

CHUNK = 5_000
LAYOUTS = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2, 3), (4,)), ((0,), (1,), (2,)), ((0, 1), (2,), (3, 4, 5))]


def table_of(hosts: tuple[tuple[int, ...], ...], parts: int) -> Table:
    return Table(hosts, parts, tuple(range(parts)))


class Workers:
    """All workers of some hosts, connected for the sums of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        memory = SharedMemory()
        slots = [slot for slots in table.hosts for slot in slots]
        self.notices = {slot: Notice(Words(memory)) for slot in slots}
        self.relays = {slot: Relay(Words(memory), self.notices[slot], "127.0.0.1", lambda *_: None) for slot in slots}
        members = [Member(f"w{it}", it, f"host{table.host_of(it)}", self.relays[it].address) for it in slots]
        generation = Generation(1, tuple(members), key=b"k" * 32)
        places = Places(generation)
        for slot, relay in self.relays.items():
            relay.enter(slot, generation)
        self.far = {
            it.slot: Far(self.relays[it.slot], Words(memory), self.notices[it.slot], places, it) for it in members
        }
        for far in self.far.values():
            far.connect()
        self.sums = {slot: Sums(far, table, slot) for slot, far in self.far.items()}

    def step(self, number: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole sum as each host has it; `parts` by host."""
        totals = [part.clone() for part in parts]

        def work(slot: int) -> None:
            host, sums = self.table.host_of(slot), self.sums[slot]
            mine = self.table.chunks_of(slot)
            sums.begin(number, {chunk: totals[host][chunk] for chunk in mine})
            for chunk in mine:
                sums.give([chunk])
            assert sorted(sums.take()) == mine

        threads = [threading.Thread(target=work, args=(slot,)) for slot in self.sums]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return totals

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param)
    yield made
    made.close()


TABLES = [table_of(hosts, parts) for hosts in LAYOUTS for parts in (12, 7)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_every_chunk_is_the_work_of_one_worker_of_each_host(table: Table) -> None:
    for host, slots in enumerate(table.hosts):
        done = [chunk for slot in slots for chunk in table.chunks_of(slot)]
        assert done == list(range(table.parts))
        for slot in slots:
            assert all(table.slot(chunk, host) == slot for chunk in table.chunks_of(slot))


@pytest.mark.parametrize("workers", TABLES, ids=str, indirect=True)
def test_all_hosts_have_the_same_bits_of_every_sum_for_the_fewest_bytes(workers: Workers) -> None:
    table, steps = workers.table, 3
    n_hosts = len(table.hosts)
    for number in range(1, steps + 1):
        parts = [torch.randn(table.parts, CHUNK) * 10.0**host for host in range(n_hosts)]
        wanted = torch.stack(parts).double().sum(dim=0)
        totals = workers.step(number, parts)
        for total in totals:
            assert torch.equal(total, totals[0])
            assert torch.allclose(total.double(), wanted, rtol=1e-5, atol=1e-4)
    gradient_bytes = table.parts * CHUNK * 4
    sent = [sum(workers.relays[slot].wire.sent_bytes for slot in slots) for slots in table.hosts]
    heads = 16 * 2 * table.parts * (n_hosts - 1)
    assert sum(sent) <= steps * (2 * (n_hosts - 1) * gradient_bytes + n_hosts * heads)
    if table.parts % n_hosts == 0:
        assert all(one <= steps * (2 * (n_hosts - 1) / n_hosts * gradient_bytes + heads) for one in sent)


@pytest.mark.parametrize("workers", [table_of(((0,), (1,)), 4)], ids=str, indirect=True)
def test_a_wait_for_a_host_that_gives_nothing_ends_with_the_generation(workers: Workers) -> None:
    sums = workers.sums[0]
    ended: list[bool] = []

    def work() -> None:
        sums.begin(1, {chunk: torch.zeros(CHUNK) for chunk in range(4)})
        with pytest.raises(Changed):
            list(sums.take())
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    workers.notices[0].tell(Generation(2, (), fault=True))
    thread.join(20)
    assert ended == [True]
