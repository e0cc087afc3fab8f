"""The words of an arena: small values in shared memory by which workers tell each other how far they are.

A word has one writer. It is 8 bytes and aligned, so a store is whole. A worker rings its bell, a futex, after each
change; who waits for it sleeps on that bell.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

from shoal.control.generation import MAX_SLOTS
from shoal.sync.memory import HostMemory, map_bytes

# A slot's words, by index of 8 bytes within its two cache lines. TOLD: the COMMIT of its host when it acknowledged, and
# INCUMBENT: whether it has had a state before; GAVE: the step whose gradients it gives; for workers of other hosts.
# CHECK: the commit that the lowest rank wants to be checked.
# WRITTEN_OF, WRITTEN: which buckets of a step's gradients lie in its lane, as bits; for workers of its own host.
# COPY: the commit of which a follower gets a copy, or a member keeps one for followers. PORT: where its collectives are
# reached.
BELL, ACK, READY, REDUCED, DONE, SEEN, STATEMENT, NAMES, TOLD, INCUMBENT, GAVE, WRITTEN_OF, WRITTEN, CHECK = range(14)
COPY, PORT = 14, 15
_LINE = 16

# A slot's values (64-bit floats), valid once READY (or REDUCED, for the norm) carries the tag.
WEIGHT, LOSS, NORM, PASS, METRICS = 0, 1, 2, 3, 4
MAX_METRICS = 28
_VALUES = 32
MAX_NAMES_BYTES = 4000

_COMMIT, _NAMES_BYTES, _GREETING, _BUCKETS = 0, 16, 24, 48
_NAMES_AT = 64
_SLOTS_AT = 4096
_VALUES_AT = _SLOTS_AT + MAX_SLOTS * _LINE * 8
_STATEMENTS_AT = _VALUES_AT + MAX_SLOTS * _VALUES * 8
_STATEMENT_BYTES = 4096
_RECORD_AT = _STATEMENTS_AT + MAX_SLOTS * _STATEMENT_BYTES
RECORD_BYTES = 128 * 1024
_GREETING_AT = _RECORD_AT + RECORD_BYTES
MAX_GREETING_BYTES = 64 * 1024
_MARKS_AT = _GREETING_AT + MAX_GREETING_BYTES
MAX_MARKS_BYTES = 2048
SIZE_BYTES = _MARKS_AT + MAX_SLOTS * MAX_MARKS_BYTES

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 98)
_ORDERED = platform.machine() == "x86_64"
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# CDLL gives up the GIL around the call, which a wait must; PyDLL keeps it, which is quicker for a wake.
_syscall_wait = ctypes.CDLL(None, use_errno=True).syscall
_syscall_wait.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_syscall_wake = ctypes.PyDLL(None).syscall
_syscall_wake.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

_private = ctypes.c_uint32(0)
_private_at = ctypes.addressof(_private)


def fence() -> None:
    """Order this thread's loads and stores. x86-64 does so by itself; elsewhere a futex call is a full barrier."""
    if not _ORDERED:
        _syscall_wake(_FUTEX, _private_at, _WAKE, 0)


def futex_works() -> bool:
    """Whether this kernel, and whatever filters its calls, answers a wake that wakes nobody."""
    return bool(_syscall_wake(_FUTEX, _private_at, _WAKE, 0) == 0)


def tag(generation: int, seq: int) -> int:
    return generation << 32 | seq


def generation_of(tag_: int) -> int:
    return tag_ >> 32


def seq_of(tag_: int) -> int:
    return tag_ & 0xFFFFFFFF


class Words:
    """Views of the words in one mapping of the memory named "words"."""

    def __init__(self, memory: HostMemory) -> None:
        fd = memory.open("words", SIZE_BYTES)
        self._map = map_bytes(fd, SIZE_BYTES, writable=True)
        os.close(fd)
        view = memoryview(self._map)
        self._u64 = view[:_VALUES_AT].cast("Q")
        self._u32 = view[:_VALUES_AT].cast("I")
        self._f64 = view[_VALUES_AT:_STATEMENTS_AT].cast("d")
        self.record = view[_RECORD_AT:_GREETING_AT]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def commit(self) -> int:
        return self._u64[_COMMIT]

    @commit.setter
    def commit(self, value: int) -> None:
        fence()
        self._u64[_COMMIT] = value

    @property
    def names(self) -> bytes:
        """The names of the metrics of the step in flight, as rank 0 has them. Read it between READY and DONE."""
        return bytes(self._map[_NAMES_AT : _NAMES_AT + self._u64[_NAMES_BYTES // 8]])

    @names.setter
    def names(self, text: bytes) -> None:
        self._map[_NAMES_AT : _NAMES_AT + len(text)] = text
        self._u64[_NAMES_BYTES // 8] = len(text)

    @property
    def greeting(self) -> tuple[int, bytes]:
        """The generation whose newcomers are greeted, and rank 0's hyperparameters as a text."""
        at = _GREETING // 8
        return self._u64[at], bytes(self._map[_GREETING_AT : _GREETING_AT + self._u64[at + 1]])

    def greet(self, generation: int, text: bytes) -> None:
        at = _GREETING // 8
        self._map[_GREETING_AT : _GREETING_AT + len(text)] = text
        self._u64[at + 1] = len(text)
        self._u64[at] = generation

    def buckets(self, step: int) -> int:
        """What whoever leads this host has chosen for the step of that tag; 0 where it has not."""
        at = _BUCKETS // 8
        return self._u64[at + 1] if self._u64[at] == step else 0

    def set_buckets(self, step: int, choice: int) -> None:
        """For a step that nobody begins before this worker's next done word."""
        at = _BUCKETS // 8
        self._u64[at + 1] = choice
        self._u64[at] = step

    def statement(self, slot: int) -> bytes:
        """What the slot's worker said it brings to the next commit, as far as it fits. Read it after READY."""
        at = _STATEMENTS_AT + slot * _STATEMENT_BYTES
        return bytes(self._map[at : at + _STATEMENT_BYTES]).partition(b"\0")[0]

    def set_statement(self, slot: int, text: bytes) -> None:
        at = _STATEMENTS_AT + slot * _STATEMENT_BYTES
        text = text[: _STATEMENT_BYTES - 1] + b"\0"
        self._map[at : at + len(text)] = text

    def get(self, slot: int, word: int) -> int:
        return self._u64[_SLOTS_AT // 8 + slot * _LINE + word]

    def put(self, slot: int, word: int, value: int) -> None:
        """Store a word of one's own slot; everything stored before is seen by whoever sees it."""
        fence()
        self._u64[_SLOTS_AT // 8 + slot * _LINE + word] = value

    def ring(self, slot: int) -> None:
        """Wake everyone who waits for this slot. Only the slot's worker rings, so counting needs no atomic add."""
        at = (_SLOTS_AT + slot * _LINE * 8) // 4
        self._u32[at] = (self._u32[at] + 1) & 0xFFFFFFFF
        _syscall_wake(_FUTEX, self._address + at * 4, _WAKE, _ALL)

    def bell(self, slot: int) -> int:
        return self._u32[(_SLOTS_AT + slot * _LINE * 8) // 4]

    def sleep(self, slot: int, bell: int, timeout_s: float) -> None:
        """Sleep until the slot's bell is no longer `bell`, until `stir`, or until the timeout."""
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        _syscall_wait(_FUTEX, self._address + _SLOTS_AT + slot * _LINE * 8, _WAIT, bell, ctypes.addressof(timeout))

    def stir(self, slot: int) -> None:
        """Wake who sleeps on this slot's bell without a change: they look again at what ends their wait."""
        _syscall_wake(_FUTEX, self._address + _SLOTS_AT + slot * _LINE * 8, _WAKE, _ALL)

    def value(self, slot: int, index: int) -> float:
        return self._f64[slot * _VALUES + index]

    def set_value(self, slot: int, index: int, value: float) -> None:
        self._f64[slot * _VALUES + index] = value

    def values(self, slot: int, start: int, count: int) -> Sequence[float]:
        at = slot * _VALUES + start
        return self._f64[at : at + count].tolist()

    # For workers of other hosts.

    def line(self, slot: int) -> bytes:
        """A slot's words and values, as its worker tells them to other hosts."""
        at, values = _SLOTS_AT + slot * _LINE * 8, _VALUES_AT + slot * _VALUES * 8
        return self._map[at : at + _LINE * 8] + self._map[values : values + _VALUES * 8]

    def mirror(self, slot: int, line: memoryview) -> None:
        """Write what a worker of another host has told, in an order in which it might have been written here."""
        self._map[_VALUES_AT + slot * _VALUES * 8 : _VALUES_AT + (slot + 1) * _VALUES * 8] = bytes(line[_LINE * 8 :])
        told = line[: _LINE * 8].cast("Q")
        told_first = (PORT, TOLD, INCUMBENT, COPY, STATEMENT, NAMES, SEEN, GAVE, CHECK)
        for word in (*told_first, READY, REDUCED, DONE, ACK):
            self.put(slot, word, told[word])
        self.ring(slot)

    def marks(self, slot: int, size_bytes: int) -> bytes:
        """Which tensors a worker of another host has gradients for, as bits."""
        at = _MARKS_AT + slot * MAX_MARKS_BYTES
        return self._map[at : at + size_bytes]

    def set_marks(self, slot: int, marks: bytes) -> None:
        at = _MARKS_AT + slot * MAX_MARKS_BYTES
        self._map[at : at + len(marks)] = marks


LINE_BYTES = (_LINE + _VALUES) * 8
