"""The wire: this worker's connections to other workers, of one generation at a time.

One thread moves all bytes and owns all state; what others ask of it is queued. Frames go out in the order they were
posted and come into buffers that were named before (`expect`); a frame that nobody expects yet waits in the sender's
socket. A connection begins with both ends proving that they have the generation's key, so nothing of an older
generation is read as a frame, nor what anybody says who is not on the path. Frames are not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

Address: TypeAlias = tuple[str, int]  # a number, not a name: looking that up would stop the wire

_log = logging.getLogger(__name__)

_HELLO = struct.Struct("<8sQII16s")  # magic, generation, from slot, to slot, nonce
_MAGIC = b"shoal-1\n"
_WELCOME = b"\n"
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_FRAME = struct.Struct("<QQ")  # tag, bytes that follow
_RETRY_S = 0.01  # the other may learn of the generation a moment later
_GREETING_S = 2.0  # for a stranger to prove itself
_MAX_STRANGERS = 64
_PAUSE_S = 0.1  # without taking new connections, when there are no descriptors left
_PIECE_BYTES, _PIECES = 1 << 20, 4  # moved at a time, so that one connection does not keep the others waiting
_READ, _WRITE, _HUNG_UP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listens(Protocol):
    """What is told on the wire's thread. Whoever implements it must not block there."""

    def connected(self, generation: int) -> None:
        """Every other worker of the generation has been reached."""

    def broken(self, generation: int, slot: int, why: str) -> None:
        """The connection to that worker has ended; what was in flight on it is lost."""

    def failed(self, problem: Exception) -> None:
        """The wire itself cannot go on."""


class _Expected(NamedTuple):
    into: memoryview | None  # None: made when it comes
    most_bytes: int
    then: Callable[[memoryview], None]


class _Connection:
    def __init__(self, socket_: socket.socket, patience_s: float, called: int | None = None) -> None:
        socket_.setblocking(False)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A line that is cut says nothing: what is not acknowledged for so long ends the connection, also when nothing
        # is sent.
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(patience_s / 2)))
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        self.socket = socket_
        self.since_s = time.monotonic()
        self.called = called  # the slot whose address this end has connected to
        self.slot: int | None = None  # of the worker at the other end, once it has proved itself
        self.outgoing: deque[memoryview] = deque()
        self.into = memoryview(bytearray())  # what is being read; when it is full, `then` says what comes next
        self.filled = 0
        self.then: Callable[[], None] = lambda: None
        self.reading = True
        self.watched: int | None = None

    @property
    def open(self) -> bool:
        return self.socket.fileno() >= 0

    def read(self, into: memoryview, then: Callable[[], None]) -> None:
        self.into, self.filled, self.then = into, 0, then


def listen(host: str) -> socket.socket:
    """At that address of this machine, and a port that is free."""
    listener = socket.create_server((host, 0), family=_family(host), backlog=_MAX_STRANGERS)
    listener.setblocking(False)
    return listener


class Wire:
    def __init__(self, slot: int, listener: socket.socket, listens: Listens, patience_s: float = 5.0) -> None:
        """`slot` is this worker's; it may be set later, before the first generation is entered. `listener`, made by
        `listen`, is the wire's from here on. A connection on which nothing comes through for `patience_s` has ended."""
        self._patience_s = patience_s
        self.slot, self._listens = slot, listens
        self._listener = listener
        self.address: Address = self._listener.getsockname()[:2]
        self._asked: deque[Callable[[], None]] = deque()
        self._bell_read, self._bell_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._bell_lock = threading.RLock()  # a signal's handler may ask while this thread does
        self._rung = False  # and what is asked from here on, not looked at yet
        self._epoll = select.epoll()
        self._epoll.register(self._listener, _READ)
        self._epoll.register(self._bell_read, _READ)
        self._by_descriptor: dict[int, _Connection] = {}
        self._listens_again_s = math.inf
        self._generation, self._key = 0, b""
        self._others: dict[int, Address] = {}
        self._calls: dict[int, float] = {}  # slots that this worker connects to, and when it tries next
        self._connections: dict[int, _Connection] = {}
        self._strangers: set[_Connection] = set()
        self._expected: dict[tuple[int, int], _Expected] = {}
        self._open = True
        self.sent_bytes = 0  # of frames, with their heads
        self._thread = threading.Thread(target=self._run, name="shoal-wire", daemon=True)
        self._thread.start()

    def enter(self, generation: int, key: bytes, others: Mapping[int, Address]) -> None:
        """Drop the connections of older generations, and what was posted or expected on them; connect to these slots.
        Of two workers the one with the lower slot connects. When this returns, buffers of before are not touched any
        more."""
        entered = threading.Event()

        def enter() -> None:
            self._enter(generation, key, dict(others))
            entered.set()

        self.ask(enter)
        while not entered.wait(0.1) and self._thread.is_alive():
            pass  # if the thread has ended, it has told why

    def unreached(self) -> list[int]:
        """Slots that there is no connection to, as far as is known at the moment."""
        return sorted(set(self._others) - set(self._connections))

    def post(self, generation: int, slot: int, tag: int, data: memoryview) -> None:
        """Send a frame, after those posted before. Only once `connected`; what is posted to a connection that is not
        there, or not any more, goes nowhere. `data` must not change until the other has it."""
        self.ask(partial(self._post, generation, slot, tag, data.cast("B")))

    def expect(self, generation: int, slot: int, tag: int, into: memoryview, then: Callable[[], None]) -> None:
        """The slot's frame with this tag fills `into`; `then` is called on the wire's thread."""
        whole = into.cast("B")
        self.ask(partial(self._expect, generation, slot, tag, _Expected(whole, whole.nbytes, lambda _: then())))

    def expect_up_to(
        self, generation: int, slot: int, tag: int, most_bytes: int, then: Callable[[memoryview], None]
    ) -> None:
        """As `expect`, of a frame whose size is not known: `then` gets it."""
        self.ask(partial(self._expect, generation, slot, tag, _Expected(None, most_bytes, then)))

    def forget(self, generation: int, first: int, last: int) -> None:
        """Frames with tags from `first` to `last`, of which none has been sent, are not expected any more."""
        self.ask(partial(self._forget, generation, first, last))

    def close(self) -> None:
        """End every connection; what is asked of the wire from here on is ignored."""
        self.ask(self._shut)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_in_child(self) -> None:
        """After a fork, in the child, which has no thread of it: let go of what the parent may close."""
        for one in (*self._by_descriptor.values(),):
            one.socket.close()
        self._listener.close()
        self._epoll.close()
        self._bell_write = -1

    def ask(self, request: Callable[[], None]) -> None:
        """Have something done on the wire's thread, after what was asked before."""
        self._asked.append(request)
        if self._rung or threading.get_ident() == self._thread.ident:
            return  # it looks at what is asked before it sleeps
        with self._bell_lock:  # so that it does not write into whatever has the descriptor after `close`
            if self._bell_write < 0:
                return
            self._rung = True
            try:
                os.write(self._bell_write, b"\0")
            except BlockingIOError:
                pass  # it is ringing

    # From here on: the wire's thread only.

    def _run(self) -> None:
        try:
            while self._open:
                for descriptor, events in self._epoll.poll(self._until_next_s()):
                    if descriptor == self._listener.fileno():
                        self._accept()
                    elif descriptor == self._bell_read:
                        self._drain_bell()
                    elif (connection := self._by_descriptor.get(descriptor)) is not None:
                        self._serve(connection, events)
                self._by_the_clock()
                while self._asked:
                    self._asked.popleft()()
        except Exception as problem:  # also of those who listen: nobody must wait for a wire that is no more
            self._release()
            self._listens.failed(problem)
            return
        self._release()

    @property
    def _settled(self) -> bool:
        """Whether nothing is to be done by the clock."""
        return not self._strangers and not self._calls and self._listens_again_s == math.inf

    def _until_next_s(self) -> float | None:
        if self._settled:
            return None
        ends = (one.since_s + _GREETING_S for one in self._strangers)
        soonest_s = min((*self._calls.values(), *ends, self._listens_again_s))
        return None if soonest_s == math.inf else max(0.0, soonest_s - time.monotonic())

    def _by_the_clock(self) -> None:
        if self._settled:
            return
        now_s = time.monotonic()
        for stranger in [one for one in self._strangers if now_s - one.since_s > _GREETING_S]:
            self._end(stranger, "it did not prove itself in time")
        for slot in [slot for slot, at_s in self._calls.items() if at_s <= now_s]:
            self._call(slot)
        if self._listens_again_s <= now_s:
            self._listens_again_s = math.inf
            self._epoll.modify(self._listener, _READ)

    def _drain_bell(self) -> None:
        try:
            while os.read(self._bell_read, 4096):
                pass
        except BlockingIOError:
            pass
        # Not before: who asks in between would ring, that would be read here, and nobody would ring any more. What was
        # asked until now is done after this.
        self._rung = False

    def _enter(self, generation: int, key: bytes, others: dict[int, Address]) -> None:
        if generation <= self._generation:
            return
        for connection in (*self._connections.values(), *self._strangers):
            self._drop(connection)
        self._connections, self._strangers, self._expected = {}, set(), {}
        self._generation, self._key, self._others = generation, key, others
        self._calls = {slot: 0.0 for slot in others if slot > self.slot}
        self._tell_if_connected()

    def _shut(self) -> None:
        self._open = False

    def _release(self) -> None:
        for connection in (*self._connections.values(), *self._strangers):
            self._drop(connection)
        self._epoll.close()
        self._listener.close()
        with self._bell_lock:
            os.close(self._bell_read)
            os.close(self._bell_write)
            self._bell_write = -1

    def _post(self, generation: int, slot: int, tag: int, data: memoryview) -> None:
        connection = self._connections.get(slot)
        if generation != self._generation or connection is None:
            return
        connection.outgoing += (memoryview(_FRAME.pack(tag, data.nbytes)), data)
        self._write(connection)

    def _expect(self, generation: int, slot: int, tag: int, expected: _Expected) -> None:
        if generation != self._generation:
            return
        self._expected[slot, tag] = expected
        connection = self._connections.get(slot)
        if connection is not None and not connection.reading:
            self._frame_begins(connection)

    def _forget(self, generation: int, first: int, last: int) -> None:
        if generation == self._generation:
            kept = {key: it for key, it in self._expected.items() if not first <= key[1] <= last}
            self._expected = kept

    # Greetings: hello; the acceptor proves that it has the key, then the caller; welcome.

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as problem:  # if it is not for want of descriptors, who called was gone before
            if problem.errno in _NO_DESCRIPTORS:
                self._epoll.modify(self._listener, 0)
                self._listens_again_s = time.monotonic() + _PAUSE_S
            return
        callers = [one for one in self._strangers if one.called is None]
        if len(callers) >= _MAX_STRANGERS:
            self._end(min(callers, key=lambda one: one.since_s), "too many are at the door")
        connection = _Connection(accepted, self._patience_s)
        self._strangers.add(connection)
        hello = memoryview(bytearray(_HELLO.size))
        connection.read(hello, partial(self._greeted, connection, hello))
        self._watch(connection)

    def _greeted(self, connection: _Connection, hello: memoryview) -> None:
        magic, generation, theirs, mine, _ = _HELLO.unpack(hello)
        known = magic == _MAGIC and generation == self._generation and mine == self.slot and theirs in self._others
        if not known or theirs >= self.slot:
            self._end(connection, "it is not of this generation")
            return
        nonce = os.urandom(_NONCE_BYTES)
        connection.outgoing.append(memoryview(nonce + self._proof(b"accepts", hello, nonce)))
        proof = memoryview(bytearray(_PROOF_BYTES))
        right = self._proof(b"connects", hello, nonce)
        connection.read(proof, partial(self._caller_proved, connection, theirs, proof, right))
        self._write(connection)

    def _caller_proved(self, connection: _Connection, slot: int, proof: memoryview, right: bytes) -> None:
        if not hmac.compare_digest(bytes(proof), right):
            self._end(connection, "it does not have the generation's key")
        elif slot in self._connections:
            self._end(connection, "that worker is connected already")
        else:
            connection.outgoing.append(memoryview(_WELCOME))
            self._write(connection)
            if connection.open:
                self._is_connected(connection, slot)

    def _call(self, slot: int) -> None:
        self._calls[slot] = math.inf  # until this one has ended
        host, port = self._others[slot]
        connection = _Connection(socket.socket(_family(host), socket.SOCK_STREAM), self._patience_s, called=slot)
        self._strangers.add(connection)
        connection.socket.connect_ex((host, port))
        hello = _HELLO.pack(_MAGIC, self._generation, self.slot, slot, os.urandom(_NONCE_BYTES))
        connection.outgoing.append(memoryview(hello))
        answer = memoryview(bytearray(_NONCE_BYTES + _PROOF_BYTES))
        connection.read(answer, partial(self._answered, connection, slot, memoryview(hello), answer))
        self._watch(connection)

    def _answered(self, connection: _Connection, slot: int, hello: memoryview, answer: memoryview) -> None:
        nonce = bytes(answer[:_NONCE_BYTES])
        if not hmac.compare_digest(bytes(answer[_NONCE_BYTES:]), self._proof(b"accepts", hello, nonce)):
            self._end(connection, "it does not have the generation's key")
            return
        connection.outgoing.append(memoryview(self._proof(b"connects", hello, nonce)))
        connection.read(memoryview(bytearray(len(_WELCOME))), partial(self._is_connected, connection, slot))
        self._write(connection)

    def _proof(self, role: bytes, hello: memoryview, nonce: bytes) -> bytes:
        return hmac.digest(self._key, role + bytes(hello) + nonce, "sha256")

    def _is_connected(self, connection: _Connection, slot: int) -> None:
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
        connection.read(memoryview(bytearray(_FRAME.size)), partial(self._frame_begins, connection))

    def _frame_begins(self, connection: _Connection) -> None:
        """Its head is read. Nothing more is, until somebody expects it."""
        assert connection.slot is not None
        tag, size_bytes = _FRAME.unpack(connection.into)
        expected = self._expected.pop((connection.slot, tag), None)
        connection.reading = expected is not None
        if expected is not None:
            into, most_bytes, then = expected
            if size_bytes > most_bytes or (into is not None and into.nbytes != size_bytes):
                self._end(connection, f"a frame {tag:#x} of {size_bytes:,} bytes came for {most_bytes:,}")
                return
            if into is None:
                into = memoryview(bytearray(size_bytes))
            connection.read(into, partial(self._frame_ends, connection, partial(then, into)))
        self._watch(connection)
        if connection.reading and not connection.into.nbytes:
            connection.then()

    def _frame_ends(self, connection: _Connection, then: Callable[[], None]) -> None:
        self._frame_awaited(connection)
        then()

    # Bytes.

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & _WRITE:
            self._write(connection)
        if connection.open and connection.reading and events & ~_WRITE:
            self._read(connection)
        elif connection.open and events & ~(_READ | _WRITE):
            self._end(connection, "the other end has closed it")  # what it said last, nobody has asked for

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
            for _ in range(_PIECES):
                if not connection.outgoing:
                    break
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
        """Be called when it can be read or written, as far as either is wanted, and when the other end has hung up."""
        events = _HUNG_UP | (_READ if connection.reading else 0) | (_WRITE if connection.outgoing else 0)
        if events == connection.watched or not connection.open:
            return
        if connection.watched is None:
            self._epoll.register(connection.socket, events)
            self._by_descriptor[connection.socket.fileno()] = connection
        else:
            self._epoll.modify(connection.socket, events)
        connection.watched = events

    def _drop(self, connection: _Connection) -> None:
        if connection.watched is not None:
            self._epoll.unregister(connection.socket)
            del self._by_descriptor[connection.socket.fileno()]
            connection.watched = None
        try:
            connection.socket.shutdown(socket.SHUT_RDWR)  # also if a child process holds it
        except OSError:
            pass  # it was not connected yet, or is not any more
        connection.socket.close()

    def _end(self, connection: _Connection, why: str) -> None:
        if not connection.open:
            return
        self._drop(connection)
        self._strangers.discard(connection)
        if connection.slot is not None and self._connections.get(connection.slot) is connection:
            del self._connections[connection.slot]
            self._listens.broken(self._generation, connection.slot, why)
        else:
            _log.debug("a connection was dropped: %s", why)
            if connection.called in self._calls:
                self._calls[connection.called] = time.monotonic() + _RETRY_S


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
