"""Sums over hosts: real sockets on loopback, a thread for each worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shoal.errors import Changed
from shoal.sync.sums import Sums, Table
from shoal.sync.wire import Wire

KEY = b"k" * 32
CHUNK = 5_000
LAYOUTS = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2, 3), (4,)), ((0,), (1,), (2,)), ((0, 1), (2,), (3, 4, 5))]


class Member:
    def __init__(self, slot: int) -> None:
        self.reached = threading.Event()
        self.wire = Wire(slot, "127.0.0.1", self)

    def connected(self, generation: int) -> None:
        self.reached.set()

    def broken(self, generation: int, slot: int, why: str) -> None: ...

    def failed(self, problem: Exception) -> None:
        raise problem


class Workers:
    """All workers of some hosts, connected for the sums of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.members = {slot: Member(slot) for slots in table.hosts for slot in slots}
        for slot, member in self.members.items():
            others = {other: self.members[other].wire.address for other in table.others(slot)}
            member.wire.enter(1, KEY, others)
        for member in self.members.values():
            assert member.reached.wait(20)
        self.sums = {slot: Sums(member.wire, 1, table, slot) for slot, member in self.members.items()}

    def step(self, number: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole sum as each host has it; `parts` by host."""
        totals = [torch.full_like(part, torch.nan) for part in parts]

        def work(slot: int) -> None:
            host, sums = self.table.host_of(slot), self.sums[slot]
            mine = self.table.chunks_of(slot)
            sums.begin(number, {chunk: totals[host][chunk] for chunk in mine})
            for chunk in mine:
                sums.give(chunk, parts[host][chunk])
            assert sorted(sums.take()) == list(mine)

        threads = [threading.Thread(target=work, args=(slot,)) for slot in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return totals

    def close(self) -> None:
        for member in self.members.values():
            member.wire.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param)
    yield made
    made.close()


TABLES = [Table(hosts, chunks) for hosts in LAYOUTS for chunks in (12, 7)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_every_chunk_is_the_work_of_one_worker_of_each_host(table: Table) -> None:
    for host, slots in enumerate(table.hosts):
        done = [chunk for slot in slots for chunk in table.chunks_of(slot)]
        assert done == list(range(table.chunks))
        for slot in slots:
            assert all(table.slot(chunk, host) == slot for chunk in table.chunks_of(slot))
            assert all(slot in table.others(other) for other in table.others(slot))


@pytest.mark.parametrize("workers", TABLES, ids=str, indirect=True)
def test_all_hosts_have_the_same_bits_of_every_sum_for_the_fewest_bytes(workers: Workers) -> None:
    table, steps = workers.table, 3
    n_hosts = len(table.hosts)
    for number in range(1, steps + 1):
        parts = [torch.randn(table.chunks, CHUNK) * 10.0**host for host in range(n_hosts)]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        for total in workers.step(number, parts):
            assert torch.equal(total, expected)
    gradient_bytes = table.chunks * CHUNK * 4
    sent = [sum(workers.members[slot].wire.sent_bytes for slot in slots) for slots in table.hosts]
    heads = 16 * 2 * table.chunks * (n_hosts - 1)
    assert sum(sent) <= steps * (2 * (n_hosts - 1) * gradient_bytes + n_hosts * heads)
    if table.chunks % n_hosts == 0:
        assert all(one <= steps * (2 * (n_hosts - 1) / n_hosts * gradient_bytes + heads) for one in sent)


@pytest.mark.parametrize("workers", [Table(((0,), (1,)), 4)], ids=str, indirect=True)
def test_a_wait_for_a_host_that_gives_nothing_can_be_ended(workers: Workers) -> None:
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
    sums.release()
    thread.join(20)
    assert ended == [True]
