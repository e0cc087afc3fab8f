"""Connections between hosts: real sockets on loopback."""

from __future__ import annotations

import hmac
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.sync.wire import _HELLO, _MAGIC, Wire, listen

KEY = b"k" * 32
WAIT_S = 20.0


class Host:
    """A worker on a host of its own, which writes down what its wire tells."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self._told = threading.Condition()
        self.reached: list[int] = []
        self.lost: list[tuple[int, int]] = []
        self.problems: list[Exception] = []
        self.wire = Wire(slot, listen("127.0.0.1"), self)

    def connected(self, generation: int) -> None:
        with self._told:
            self.reached.append(generation)
            self._told.notify_all()

    def broken(self, generation: int, slot: int, why: str) -> None:
        with self._told:
            self.lost.append((generation, slot))
            self._told.notify_all()

    def failed(self, problem: Exception) -> None:
        with self._told:
            self.problems.append(problem)
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
    assert not any(host.problems for host in made)


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
    half, came = hosts[1].receives(1, 0, 4, 64 << 20)
    hosts[0].wire.post(1, 1, 4, memoryview(b"x" * (64 << 20)))
    while not any(half):
        pass
    enter(hosts[:2], 2)
    stays = bytes(half)
    into, done = hosts[1].receives(2, 0, 4, 3)
    hosts[0].wire.post(1, 1, 4, memoryview(b"old"))
    hosts[0].wire.post(2, 1, 4, memoryview(b"new"))
    assert done.wait(WAIT_S)
    assert into == b"new"
    assert came.is_set() or half == stays


def test_what_was_posted_may_be_written_over_once_the_next_generation_is_entered(hosts: list[Host]) -> None:
    for generation in range(1, 20, 2):
        enter(hosts[:2], generation)
        data = bytearray(16 << 20)
        into, whole = hosts[1].receives(generation, 0, 1, len(data))
        _, after = hosts[1].receives(generation, 0, 2, 1)
        hosts[0].wire.post(generation, 1, 1, memoryview(data))
        hosts[0].wire.post(generation, 1, 2, memoryview(b"!"))
        hosts[0].wire.enter(generation + 1, KEY, {})
        data[:] = b"x" * len(data)
        hosts[1].wire.enter(generation + 1, KEY, {})
        assert not any(into) or not whole.is_set()
        assert not after.is_set() or whole.is_set()


def test_hanging_up_is_seen_behind_a_frame_that_nobody_expects_and_beside_a_child_that_holds_the_socket(
    hosts: list[Host],
) -> None:
    enter(hosts, 1)
    hosts[2].wire.post(1, 0, 5, memoryview(b"unasked"))
    child = os.fork()
    if not child:
        time.sleep(WAIT_S)
        os._exit(0)
    try:
        hosts[2].wire.enter(2, KEY, {})
        for host in hosts[:2]:
            host.wait(lambda host=host: host.lost == [(1, 2)])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_wire_that_fails_says_so_and_lets_go(hosts: list[Host]) -> None:
    enter(hosts[:2], 1)
    hosts[0].wire.enter(2, KEY, {1: ("127.0.0.1", 70_000)})
    hosts[0].wait(lambda: len(hosts[0].problems) == 1)
    hosts[1].wait(lambda: hosts[1].lost == [(1, 0)])
    hosts[0].wire.enter(3, KEY, {})
    hosts[0].problems.clear()


def test_an_end_that_resets_is_called_again(hosts: list[Host]) -> None:
    """It has the key, answers, and hangs up before it has read the proof."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        hosts[0].wire.enter(1, KEY, {1: other.getsockname()[:2]})
        for _ in range(3):
            accepted, _ = other.accept()
            hello = accepted.recv(_HELLO.size, socket.MSG_WAITALL)
            nonce = bytes(16)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.sendall(nonce + hmac.digest(KEY, b"accepts" + hello + nonce, "sha256"))
            accepted.close()
    assert not hosts[0].reached


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
