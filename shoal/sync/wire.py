"""The wire: this worker's connections to workers on other hosts, of one generation at a time.

One thread moves all bytes and owns all state; what others ask of it is queued. Frames go out in the order they were
posted and come into buffers that were named before (`expect`); a frame that nobody expects yet waits in the sender's
socket. Who does not know the generation's key is not spoken to, so nothing of an older generation, or of a stranger, is
ever read as a frame.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias

Address: TypeAlias = tuple[str, int]  # a number, not a name: looking that up would stop the wire

_log = logging.getLogger(__name__)

_HELLO = struct.Struct("<8sQII16s")  # magic, generation, from slot, to slot, nonce
_MAGIC = b"shoal-1\n"
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_FRAME = struct.Struct("<QQ")  # tag, bytes that follow
_RETRY_S = 0.01  # the other may learn of the generation a moment later
_GREETING_S = 2.0  # for a stranger to prove itself
_MAX_STRANGERS = 64
_PIECE_BYTES = 1 << 20  # moved by one call, so that one connection does not keep the others waiting
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Listens(Protocol):
    """What is told on the wire's thread. Whoever implements it must not block there."""

    def connected(self, generation: int) -> None:
        """Every other worker of the generation has been reached."""

    def broken(self, generation: int, slot: int, why: str) -> None:
        """The connection to that worker has ended; what was in flight on it is lost."""


class _Connection:
    def __init__(self, socket_: socket.socket) -> None:
        socket_.setblocking(False)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = socket_
        self.since_s = time.monotonic()
        self.slot: int | None = None  # of the worker at the other end, once it has proved itself
        self.called: int | None = None  # the slot whose address this end has connected to
        self.outgoing: deque[memoryview] = deque()
        self.into = memoryview(bytearray())  # what is being read; when it is full, `then` says what comes next
        self.filled = 0
        self.then: Callable[[], None] = lambda: None
        self.reading = True
        self.watched = 0

    def read(self, into: memoryview, then: Callable[[], None]) -> None:
        self.into, self.filled, self.then = into, 0, then


class Wire:
    def __init__(self, slot: int, host: str, listens: Listens) -> None:
        self._slot, self._listens = slot, listens
        self._listener = socket.create_server((host, 0), backlog=_MAX_STRANGERS)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._asked: deque[Callable[[], None]] = deque()
        self._bell_read, self._bell_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._selector.register(self._listener, _READ, self._accept)
        self._selector.register(self._bell_read, _READ, self._drain_bell)
        self._generation, self._key = 0, b""
        self._others: dict[int, Address] = {}
        self._calls: dict[int, float] = {}  # slots that this worker connects to, and when it tries next
        self._connections: dict[int, _Connection] = {}
        self._strangers: set[_Connection] = set()
        self._expected: dict[tuple[int, int], tuple[memoryview, Callable[[], None]]] = {}
        self._open = True
        self.sent_bytes = 0  # of frames, with their heads
        self._thread = threading.Thread(target=self._run, name="shoal-wire", daemon=True)
        self._thread.start()

    def enter(self, generation: int, key: bytes, others: Mapping[int, Address]) -> None:
        """Drop the connections of older generations, and what was posted or expected on them; connect to these slots.
        Of two workers the one with the lower slot connects."""
        self._ask(partial(self._enter, generation, key, dict(others)))

    def post(self, generation: int, slot: int, tag: int, data: memoryview) -> None:
        """Send a frame, after those posted before. `data` must not change until the other has it."""
        self._ask(partial(self._post, generation, slot, tag, data.cast("B")))

    def expect(self, generation: int, slot: int, tag: int, into: memoryview, then: Callable[[], None]) -> None:
        """The slot's frame with this tag fills `into`; `then` is called on the wire's thread."""
        self._ask(partial(self._expect, generation, slot, tag, into.cast("B"), then))

    def close(self) -> None:
        """End every connection; what is asked of the wire from here on is ignored."""
        self._ask(self._shut)
        self._thread.join()

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.append(request)
        with self._bell_lock:  # so that it does not write into whatever has the descriptor after `close`
            if self._bell_write < 0:
                return
            try:
                os.write(self._bell_write, b"\0")
            except BlockingIOError:
                pass  # it is ringing

    # From here on: the wire's thread only.

    def _run(self) -> None:
        while self._open:
            for key, events in self._selector.select(self._until_next_s()):
                if callable(key.data):
                    key.data()
                else:
                    self._serve(key.data, events)
            while self._asked:
                self._asked.popleft()()
            self._by_the_clock()
        self._release()

    def _until_next_s(self) -> float | None:
        times = [*self._calls.values(), *(one.since_s + _GREETING_S for one in self._strangers)]
        soonest_s = min(times, default=math.inf)
        return None if soonest_s == math.inf else max(0.0, soonest_s - time.monotonic())

    def _by_the_clock(self) -> None:
        now_s = time.monotonic()
        for stranger in [one for one in self._strangers if now_s - one.since_s > _GREETING_S]:
            self._end(stranger, "it did not prove itself in time")
        for slot in [slot for slot, at_s in self._calls.items() if at_s <= now_s]:
            self._call(slot)

    def _drain_bell(self) -> None:
        try:
            while os.read(self._bell_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _enter(self, generation: int, key: bytes, others: dict[int, Address]) -> None:
        if generation <= self._generation:
            return
        for connection in (*self._connections.values(), *self._strangers):
            self._drop(connection)
        self._connections, self._strangers, self._expected = {}, set(), {}
        self._generation, self._key, self._others = generation, key, others
        self._calls = {slot: 0.0 for slot in others if slot > self._slot}
        self._tell_if_connected()

    def _shut(self) -> None:
        self._open = False

    def _release(self) -> None:
        for connection in (*self._connections.values(), *self._strangers):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        with self._bell_lock:
            os.close(self._bell_read)
            os.close(self._bell_write)
            self._bell_write = -1

    def _post(self, generation: int, slot: int, tag: int, data: memoryview) -> None:
        connection = self._connections.get(slot)
        if generation != self._generation or connection is None:
            return  # whoever waits for the answer is told of the change, or was told that it is broken
        connection.outgoing += (memoryview(_FRAME.pack(tag, data.nbytes)), data)
        self._write(connection)

    def _expect(self, generation: int, slot: int, tag: int, into: memoryview, then: Callable[[], None]) -> None:
        if generation != self._generation:
            return
        self._expected[slot, tag] = into, then
        connection = self._connections.get(slot)
        if connection is not None and not connection.reading:
            self._frame_begins(connection)

    # Greetings: hello, then each proves to the other that it has the key.

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # it was gone before
        connection = _Connection(accepted)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._end(min(self._strangers, key=lambda one: one.since_s), "too many are at the door")
        self._strangers.add(connection)
        hello = memoryview(bytearray(_HELLO.size))
        connection.read(hello, partial(self._greeted, connection, hello))
        self._watch(connection)

    def _greeted(self, connection: _Connection, hello: memoryview) -> None:
        magic, generation, theirs, mine, _ = _HELLO.unpack(hello)
        known = magic == _MAGIC and generation == self._generation and mine == self._slot and theirs in self._others
        if not known or theirs >= self._slot:
            self._end(connection, "it is not of this generation")
            return
        nonce = os.urandom(_NONCE_BYTES)
        connection.outgoing.append(memoryview(nonce + self._proof(b"accepts", hello, nonce)))
        proof = memoryview(bytearray(_PROOF_BYTES))
        connection.read(proof, partial(self._proved, connection, theirs, proof, self._proof(b"connects", hello, nonce)))
        self._write(connection)

    def _call(self, slot: int) -> None:
        self._calls[slot] = math.inf  # until this one has ended
        family = socket.AF_INET6 if ":" in self._others[slot][0] else socket.AF_INET
        connection = _Connection(socket.socket(family, socket.SOCK_STREAM))
        connection.called = slot
        self._strangers.add(connection)
        connection.socket.connect_ex(self._others[slot])
        hello = _HELLO.pack(_MAGIC, self._generation, self._slot, slot, os.urandom(_NONCE_BYTES))
        connection.outgoing.append(memoryview(hello))
        answer = memoryview(bytearray(_NONCE_BYTES + _PROOF_BYTES))
        connection.read(answer, partial(self._answered, connection, slot, memoryview(hello), answer))
        self._watch(connection)

    def _answered(self, connection: _Connection, slot: int, hello: memoryview, answer: memoryview) -> None:
        nonce = bytes(answer[:_NONCE_BYTES])
        connection.outgoing.append(memoryview(self._proof(b"connects", hello, nonce)))
        self._write(connection)
        self._proved(connection, slot, answer[_NONCE_BYTES:], self._proof(b"accepts", hello, nonce))

    def _proof(self, role: bytes, hello: memoryview, nonce: bytes) -> bytes:
        return hmac.digest(self._key, role + bytes(hello) + nonce, "sha256")

    def _proved(self, connection: _Connection, slot: int, proof: memoryview, right: bytes) -> None:
        if not hmac.compare_digest(bytes(proof), right) or slot in self._connections:
            self._end(connection, "it does not have the generation's key")
            return
        self._strangers.discard(connection)
        connection.slot = slot
        self._connections[slot] = connection
        self._calls.pop(slot, None)
        self._frame_awaited(connection)
        self._tell_if_connected()

    def _tell_if_connected(self) -> None:
        if self._connections.keys() == self._others.keys():
            self._listens.connected(self._generation)

    # Frames.

    def _frame_awaited(self, connection: _Connection) -> None:
        head = memoryview(bytearray(_FRAME.size))
        connection.read(head, partial(self._frame_begins, connection))

    def _frame_begins(self, connection: _Connection) -> None:
        """Its head is read. Nothing more is, until somebody expects it."""
        assert connection.slot is not None
        tag, size_bytes = _FRAME.unpack(connection.into)
        expected = self._expected.pop((connection.slot, tag), None)
        connection.reading = expected is not None
        if expected is not None:
            into, then = expected
            if into.nbytes != size_bytes:
                self._end(connection, f"a frame {tag:#x} of {size_bytes:,} bytes came for {into.nbytes:,}")
                return
            connection.read(into, partial(self._frame_ends, connection, then))
        self._watch(connection)
        if connection.reading and not connection.into.nbytes:
            connection.then()

    def _frame_ends(self, connection: _Connection, then: Callable[[], None]) -> None:
        self._frame_awaited(connection)
        then()

    # Bytes.

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection.socket.fileno() < 0:
            return  # dropped by what was served before it
        if events & _WRITE:
            self._write(connection)
        if events & _READ and connection.socket.fileno() >= 0:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            space = connection.into[connection.filled : connection.filled + _PIECE_BYTES]
            count = connection.socket.recv_into(space)
        except BlockingIOError:
            return
        except OSError as problem:
            self._end(connection, problem.strerror or str(problem))
            return
        if not count:
            self._end(connection, "the other end has closed it")
            return
        connection.filled += count
        if connection.filled == connection.into.nbytes:
            connection.then()

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.outgoing:
                piece = connection.outgoing[0]
                count = connection.socket.send(piece[:_PIECE_BYTES]) if piece.nbytes else 0
                self.sent_bytes += count if connection.slot is not None else 0
                if count == piece.nbytes:
                    connection.outgoing.popleft()
                else:
                    connection.outgoing[0] = piece[count:]
        except BlockingIOError:
            pass
        except OSError as problem:
            self._end(connection, problem.strerror or str(problem))
            return
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Be called when it can be read or written, as far as either is wanted."""
        events = (_READ if connection.reading else 0) | (_WRITE if connection.outgoing else 0)
        if events == connection.watched or connection.socket.fileno() < 0:
            return
        if not connection.watched:
            self._selector.register(connection.socket, events, connection)
        elif not events:
            self._selector.unregister(connection.socket)
        else:
            self._selector.modify(connection.socket, events, connection)
        connection.watched = events

    def _drop(self, connection: _Connection) -> None:
        if connection.watched:
            self._selector.unregister(connection.socket)
            connection.watched = 0
        connection.socket.close()

    def _end(self, connection: _Connection, why: str) -> None:
        self._drop(connection)
        self._strangers.discard(connection)
        if connection.slot is not None and self._connections.get(connection.slot) is connection:
            del self._connections[connection.slot]
            self._listens.broken(self._generation, connection.slot, why)
        else:
            _log.debug("a connection was dropped: %s", why)
            if connection.called in self._calls:
                self._calls[connection.called] = time.monotonic() + _RETRY_S
