"""Shared memory of a host, held by file descriptors only: nothing is named, so nothing is left after `kill -9`."""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import socket
from typing import Any, Protocol

import psutil

from shoal import errors

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Tell malloc to keep freed memory: torch frees and takes the same megabytes every step, and without this each
    of them is a page fault (20,000 a step for a model of 21 M parameters)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; musl has no such knob
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def _available_bytes() -> int:
    """What the machine, or the control group this process is in, can still give."""
    available = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(used.read()))
    except (OSError, ValueError):  # no such control group here
        pass
    return available


def create(name: str, size_bytes: int, limit_bytes: int | None = None) -> int:
    """A descriptor of `size_bytes` of zeroed shared memory, all of it really there. Fails with OutOfSharedMemory
    now rather than with a bus error in the middle of a step."""
    free = _available_bytes()
    if limit_bytes is not None:
        free = min(free, limit_bytes)
    message = (
        f"the arena's {name} needs {_gib(size_bytes)} of shared memory, {_gib(free)} is free: "
        f"use a smaller model or fewer workers, or raise --memory"
    )
    if size_bytes > free:
        raise errors.OutOfSharedMemory(message)
    try:
        fd = os.memfd_create(f"shoal-{name}", os.MFD_CLOEXEC)
    except OSError as problem:
        raise errors.OutOfSharedMemory(
            f"the arena's {name} cannot be made: {problem.strerror}; see ulimit -n"
        ) from problem
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as problem:
        os.close(fd)
        raise errors.OutOfSharedMemory(f"{message} ({problem.strerror})") from problem
    return fd


class HostMemory(Protocol):
    """Where a worker gets the host's shared memory from: the same name gives all workers the same bytes."""

    def open(self, name: str, size_bytes: int) -> int: ...


class OwnMemory:
    """The memory of a worker that is alone: it makes what it opens."""

    def open(self, name: str, size_bytes: int) -> int:
        return create(name, size_bytes)


class Channel:
    """A worker's socket to its launcher: packets of JSON, descriptors beside them.

    {"memory": name, "bytes": size}          → the descriptor, or {"error", "message"}
    {"error", "message", "traceback", "log_bytes"}   the worker's last words; no answer
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, packet: dict[str, Any]) -> None:
        self._sock.send(json.dumps(packet).encode())

    def open(self, name: str, size_bytes: int) -> int:
        self.send({"memory": name, "bytes": size_bytes})
        data, ancillary, _, _ = self._sock.recvmsg(65536, socket.CMSG_SPACE(4))
        if not data:
            raise errors.ShoalError("the launcher closed this worker's channel: the job is ending")
        reply = json.loads(data)
        if "error" in reply:
            raise errors.named(reply["error"], reply["message"])
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[:4])
        return fds[0]


def map_bytes(fd: int, size_bytes: int, *, writable: bool) -> mmap.mmap:
    return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
