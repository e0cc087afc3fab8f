"""Connections between hosts: real sockets on loopback."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.sync.wire import _HELLO, _MAGIC, Wire

KEY = b"k" * 32
WAIT_S = 20.0


class Host:
    """A worker on a host of its own, which writes down what its wire tells."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self._told = threading.Condition()
        self.reached: list[int] = []
        self.lost: list[tuple[int, int]] = []
        self.wire = Wire(slot, "127.0.0.1", self)

    def connected(self, generation: int) -> None:
        with self._told:
            self.reached.append(generation)
            self._told.notify_all()

    def broken(self, generation: int, slot: int, why: str) -> None:
        with self._told:
            self.lost.append((generation, slot))
            self._told.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._told:
            assert self._told.wait_for(until, WAIT_S)

    def receives(self, generation: int, slot: int, tag: int, size_bytes: int) -> tuple[bytearray, threading.Event]:
        into, done = bytearray(size_bytes), threading.Event()
        self.wire.expect(generation, slot, tag, memoryview(into), done.set)
        return into, done


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made = [Host(slot) for slot in range(3)]
    yield made
    for host in made:
        host.wire.close()


def enter(hosts: list[Host], generation: int, key: bytes = KEY) -> None:
    addresses = {host.slot: host.wire.address for host in hosts}
    for host in hosts:
        others = {slot: address for slot, address in addresses.items() if slot != host.slot}
        host.wire.enter(generation, key, others)
    for host in hosts:
        host.wait(lambda host=host: generation in host.reached)


def test_frames_larger_than_any_buffer_cross_in_all_directions_at_once(hosts: list[Host]) -> None:
    enter(hosts, 1)
    size = 8 << 20
    sent = {host.slot: os.urandom(size) for host in hosts}
    arriving = [
        (of.slot, *to.receives(1, of.slot, 7, size)) for to in hosts for of in hosts if to is not of
    ]  # fmt: skip
    for of in hosts:
        for to in hosts:
            if to is not of:
                of.wire.post(1, to.slot, 7, memoryview(sent[of.slot]))
    for slot, into, done in arriving:
        assert done.wait(WAIT_S)
        assert into == sent[slot]
    assert {host.wire.sent_bytes for host in hosts} == {2 * (size + 16)}


def test_a_frame_waits_until_somebody_expects_it_and_keeps_its_place(hosts: list[Host]) -> None:
    enter(hosts[:2], 1)
    for tag in (1, 2, 3):
        hosts[0].wire.post(1, 1, tag, memoryview(bytes([tag]) * tag))
    later = hosts[1].receives(1, 0, 2, 2), hosts[1].receives(1, 0, 3, 3)
    assert not later[0][1].wait(0.05)
    first = hosts[1].receives(1, 0, 1, 1)
    for tag, (into, done) in enumerate((first, *later), start=1):
        assert done.wait(WAIT_S)
        assert into == bytes([tag]) * tag


def test_an_empty_frame_arrives(hosts: list[Host]) -> None:
    enter(hosts[:2], 1)
    _, empty = hosts[1].receives(1, 0, 5, 0)
    into, full = hosts[1].receives(1, 0, 6, 1)
    hosts[0].wire.post(1, 1, 5, memoryview(b""))
    hosts[0].wire.post(1, 1, 6, memoryview(b"x"))
    assert empty.wait(WAIT_S)
    assert full.wait(WAIT_S)
    assert into == b"x"


def test_the_next_generation_reads_nothing_of_the_one_before(hosts: list[Host]) -> None:
    enter(hosts[:2], 1)
    hosts[0].wire.post(1, 1, 4, memoryview(b"old" * 1_000_000))  # is under way, half of it read at most
    enter(hosts[:2], 2)
    into, done = hosts[1].receives(2, 0, 4, 3)
    hosts[0].wire.post(1, 1, 4, memoryview(b"old"))
    hosts[0].wire.post(2, 1, 4, memoryview(b"new"))
    assert done.wait(WAIT_S)
    assert into == b"new"


def test_whoever_is_late_is_called_until_it_comes(hosts: list[Host]) -> None:
    hosts[0].wire.enter(3, KEY, {1: hosts[1].wire.address})
    time.sleep(0.1)
    hosts[1].wire.enter(3, KEY, {0: hosts[0].wire.address})
    for host in hosts[:2]:
        host.wait(lambda host=host: host.reached == [3])


@pytest.mark.parametrize("strangers_slot", [0, 2])
def test_without_the_key_nobody_is_reached(hosts: list[Host], strangers_slot: int) -> None:
    hosts[strangers_slot].wire.enter(1, b"another key", {1: hosts[1].wire.address})
    hosts[1].wire.enter(1, KEY, {strangers_slot: hosts[strangers_slot].wire.address})
    time.sleep(0.3)
    assert not hosts[strangers_slot].reached
    assert not hosts[1].reached


def test_a_worker_whose_wire_ends_is_named_and_the_rest_go_on(hosts: list[Host]) -> None:
    enter(hosts, 1)
    hosts[2].wire.close()
    for host in hosts[:2]:
        host.wait(lambda host=host: host.lost == [(1, 2)])
    enter(hosts[:2], 2)


def test_a_frame_of_another_size_ends_the_connection_and_touches_nothing(hosts: list[Host]) -> None:
    enter(hosts[:2], 1)
    into, done = hosts[1].receives(1, 0, 9, 4)
    hosts[0].wire.post(1, 1, 9, memoryview(b"12345"))
    hosts[1].wait(lambda: hosts[1].lost == [(1, 0)])
    assert into == bytes(4)
    assert not done.is_set()


def test_silent_strangers_do_not_keep_workers_out(hosts: list[Host]) -> None:
    hosts[1].wire.enter(1, KEY, {0: hosts[0].wire.address})
    silent = [socket.create_connection(hosts[1].wire.address) for _ in range(200)]
    enter(hosts[:2], 1)
    for one in silent:
        one.close()


@given(garbage=st.one_of(
    st.binary(max_size=200),
    st.builds(
        _HELLO.pack, st.just(_MAGIC), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3),
        st.binary(min_size=16, max_size=16),
    ).flatmap(lambda hello: st.binary(max_size=100).map(lambda rest: hello + rest)),
))  # fmt: skip
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_dropped_without_harm(hosts: list[Host], garbage: bytes) -> None:
    if not hosts[1].reached:
        enter(hosts[:2], 1)
    with socket.create_connection(hosts[1].wire.address) as stranger:
        stranger.sendall(garbage)
    into, done = hosts[1].receives(1, 0, 1, 2)
    hosts[0].wire.post(1, 1, 1, memoryview(b"ok"))
    assert done.wait(WAIT_S)
    assert into == b"ok"
    assert not hosts[1].lost
