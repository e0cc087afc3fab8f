"""Logs of workers, which write to the file itself: how they are read while they grow, and kept from growing too large.

A log is `w0.log` and what came before it, `w0.log.1`. Nobody stands between a worker and its file: when it is too
large, the launcher takes off its head.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import BinaryIO

LOG_LIMIT_BYTES = 64 << 20

_READ_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_FALLOC_FL_COLLAPSE_RANGE = 0x08


def older_part(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class Tail:
    """The lines that come to a file, each once and whole, up to where it is cut. With `last_lines`, no more than so
    many of those that are there already.

    A head that is taken off meanwhile is read in the older part; of several taken off between two looks, only the last
    is there to be read.
    """

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        self._path = path
        self._last_lines = last_lines
        self._file: BinaryIO | None = None
        self._position = 0
        self._older: tuple[int, int] | None = None
        self._shrunk = False
        self._rest = b""
        self._end_bytes: int | None = None

    def cut(self, end_bytes: int | None) -> None:
        """Leave out what lies behind, by the file as it is now."""
        if self._file is not None:
            self._rest += self._head_taken_off()
        self._end_bytes = end_bytes

    def lines(self, last: bool = False) -> list[str]:
        """What is new. With `last`, all of it, and also a line that has no end."""
        if self._file is None and not self._open():
            return []
        *whole, self._rest = (self._rest + self._head_taken_off() + self._read(last)).split(b"\n")
        if last and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> bool:
        try:
            self._file = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        self._older = _identity(older_part(self._path))
        if self._last_lines is not None:
            self._position = _start_of_last_lines(self._file.fileno(), self._last_lines)
        return True

    def _read(self, last: bool) -> bytes:
        assert self._file is not None
        fd = self._file.fileno()
        size_bytes = os.fstat(fd).st_size
        if size_bytes < self._position:
            # A head is being taken off, and the older part is about to appear. If not, somebody emptied the file.
            if not self._shrunk and not last:
                self._shrunk = True
                return b""
            self._position = 0
        self._shrunk = False
        end = size_bytes if self._end_bytes is None else min(size_bytes, self._end_bytes)
        wanted = max(0, end - self._position)
        data = os.pread(fd, wanted if last else min(wanted, _READ_BYTES), self._position)
        self._position += len(data)
        return data

    def _head_taken_off(self) -> bytes:
        """What of it was not read yet, if that happened since the last look."""
        older = older_part(self._path)
        identity = _identity(older)
        if identity is None or identity == self._older:
            return b""
        self._older, self._shrunk = identity, False
        try:
            head = older.read_bytes() if self._position < older.stat().st_size else b""
            removed = older.stat().st_size
        except FileNotFoundError:
            return b""
        missed = head[self._position : self._end_bytes]
        self._position = max(0, self._position - removed)
        if self._end_bytes is not None:
            self._end_bytes = max(0, self._end_bytes - removed)
        return missed


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _start_of_last_lines(fd: int, count: int) -> int:
    at = os.fstat(fd).st_size
    if not count or not at:
        return at
    ends = -1 if os.pread(fd, 1, at - 1) == b"\n" else 0  # the end of the last line begins none
    while at > 0:
        begin = max(0, at - _BLOCK_BYTES)
        block = os.pread(fd, at - begin, begin)
        for index in range(len(block) - 1, -1, -1):
            if block[index] == 0x0A:
                ends += 1
                if ends == count:
                    return begin + index + 1
        at = begin
    return 0


def bound(path: Path, limit_bytes: int) -> bool:
    """Whether the file was larger, and its content became the older part. It may be appended to (O_APPEND) meanwhile.

    Nothing written is lost where the file system can take a range out of a file (ext4, xfs). Elsewhere the file is
    emptied, and what is written between the end of the copy and that moment is lost. A disk too full for a copy keeps
    no older part.
    """
    with open(path, "rb+", buffering=0) as file:
        fd = file.fileno()
        size_bytes = os.fstat(fd).st_size
        if size_bytes <= limit_bytes:
            return False
        block_bytes = os.fstatvfs(fd).f_bsize
        head_bytes = (size_bytes - 1) // block_bytes * block_bytes  # whole blocks, and not the whole file
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with open(draft, "wb", buffering=0) as copy:
            try:
                _copy(fd, copy.fileno(), head_bytes)
                os.fdatasync(fd)  # or the writer would wait for it while the range is taken out
                if not _collapse(fd, head_bytes):
                    _copy(fd, copy.fileno())
                    os.ftruncate(fd, 0)
            except OSError:
                copy.truncate(0)
                os.ftruncate(fd, 0)
        draft.replace(older_part(path))
        return True


def _copy(source: int, copy: int, up_to: int | None = None) -> None:
    """Go on copying where the copy ends, up to there or to the end of the source."""
    at = os.fstat(copy).st_size
    while sent := os.sendfile(copy, source, at, _READ_BYTES if up_to is None else min(_READ_BYTES, up_to - at)):
        at += sent


def _collapse(fd: int, head_bytes: int) -> bool:
    """Take the head out of the file, whole or not at all; False where the file system cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(head_bytes) and fallocate(fd, _FALLOC_FL_COLLAPSE_RANGE, 0, head_bytes) == 0
