"""`shoal doctor`: whether a machine is fit to train, and what to change.

A check looks at one thing and judges it. What it judges by is an argument, so that every verdict can be tested on any
machine; `checks` asks this one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.text import Text

from shoal.wording import amount, counted

Verdict = Literal["ok", "warn", "bad"]
_STYLES: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}

GIB = 1 << 30
_PINGS, _PIPE_BYTES = 200, 64 << 20
_SYNCS = 5
_COLUMN = 19
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "9p", "ceph")
_STA_UNSYNC = 0x40


@dataclass(frozen=True)
class Check:
    """What was found. `todo` says what to change, and is empty when all is well."""

    name: str
    found: str
    verdict: Verdict = "ok"
    todo: str = ""


def report(directory: Path, console: Console, as_json: bool, more: Iterable[Check] = ()) -> int:
    """Check this machine for runs in `directory` and tell; 1 when something is bad."""
    done: list[Check] = []
    for check in itertools.chain(checks(directory), more):
        done.append(check)
        if not as_json:
            console.print(_row(check, console.width))
    bad = any(check.verdict == "bad" for check in done)
    if as_json:
        print(json.dumps({"fit": not bad, "checks": [asdict(check) for check in done]}))
    else:
        console.print(_sum(done))
    return int(bad)


def _row(check: Check, width: int) -> Text:
    """The verdict, the name, and what there is to say in a column of its own."""
    room = max(20, width - _COLUMN)
    told = [(line, "") for line in textwrap.wrap(check.found, room)]
    told += [(line, _STYLES[check.verdict]) for line in textwrap.wrap(f"→ {check.todo}", room) if check.todo]
    row = Text(check.verdict.ljust(6), style=_STYLES[check.verdict]) + Text(check.name.ljust(_COLUMN - 6))
    return row + Text("\n" + " " * _COLUMN).join(Text(line, style=style) for line, style in told)


def _sum(done: list[Check]) -> Text:
    bad, warn = (sum(check.verdict == verdict for check in done) for verdict in ("bad", "warn"))
    if bad:
        return Text(f"{counted(bad, 'thing')} to change before shoal can run here", style=_STYLES["bad"])
    if warn:
        return Text(f"fit to train; {counted(warn, 'thing')} could be better", style=_STYLES["warn"])
    return Text("fit to train", style=_STYLES["ok"])


def checks(directory: Path) -> Iterator[Check]:
    """Each as soon as it is done. `directory`, or what there is of the path to it, is where run directories will be."""
    yield python(platform.python_version(), _metadata("Requires-Python") or ">=3.10")
    yield from (
        packages(importlib.metadata.requires("shoal") or [], _version) if _metadata("Name") else [not_installed()]
    )
    yield kernel(platform.system(), platform.release(), platform.machine(), missing_calls())
    yield cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota(), os.getloadavg()[0])
    yield memory(psutil.virtual_memory().total, psutil.virtual_memory().available, memory_limit_bytes())
    yield shared_memory(Path("/dev/shm"))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield loopback()
    yield clock(time.get_clock_info("monotonic").resolution, synchronized())
    yield gpus(gpu_names())
    yield disk(directory)


# ---- versions --------------------------------------------------------------------------------------------------------


def _metadata(key: str) -> str | None:
    try:
        return importlib.metadata.metadata("shoal")[key]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def python(version: str, needed: str) -> Check:
    at_least = needed.lstrip(">= ")
    if _numbers(version) >= _numbers(at_least):
        return Check("Python", f"{version} at {sys.executable}")
    return Check("Python", version, "bad", f"use Python {at_least} or newer")


def not_installed() -> Check:
    return Check("packages", "shoal runs from its source and is not installed", "warn", "pip install --editable .")


def packages(requirements: list[str], version_of: Callable[[str], str | None]) -> Iterator[Check]:
    """One check for each requirement that is not of an extra, as pyproject.toml writes them."""
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", requirement)
        if match is None:
            continue
        name, at_least = match.groups()
        version = version_of(name)
        wanted = f"{name}>={at_least}" if at_least else name
        if version is None:
            yield Check(name, "not installed", "bad", f"pip install '{wanted}'")
        elif at_least and _numbers(version) < _numbers(at_least):
            yield Check(name, version, "bad", f"pip install '{wanted}'")
        else:
            yield Check(name, version)


# ---- the kernel ------------------------------------------------------------------------------------------------------


def missing_calls() -> list[str]:
    """What shoal asks of the kernel and does not get."""
    missing = []
    for name in ("memfd_create", "pidfd_open"):
        try:
            os.close(os.memfd_create("shoal-doctor") if name == "memfd_create" else os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            missing.append(name)
    from shoal.sync import words

    if not words.futex_works():
        missing.append("futex")
    return missing


def kernel(system: str, release: str, machine: str, missing: list[str]) -> Check:
    found = f"{system} {release} on {machine}"
    if system != "Linux":
        return Check("kernel", found, "bad", "run on Linux: shoal needs memfd, pidfd and futex")
    if missing:
        todo = f"use Linux 5.4 or newer, and in a container a seccomp profile that allows {', '.join(missing)}"
        return Check("kernel", f"{found}, without {', '.join(missing)}", "bad", todo)
    return Check("kernel", f"{found}; memfd, pidfd and futex work")


def open_files(soft: int, hard: int) -> Check:
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Check("open files", f"{soft:,} at most", "warn", f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}")
    return Check("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at most")


def synchronized() -> bool | None:
    """Whether the kernel's clock is kept by NTP or the like; None if it does not say."""
    timex = (ctypes.c_int * 64)()  # struct timex: modes, then longs; nothing is asked to change
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    status = ctypes.cast(ctypes.byref(timex, 5 * ctypes.sizeof(ctypes.c_long)), ctypes.POINTER(ctypes.c_int))[0]
    return None if state < 0 else not status & _STA_UNSYNC


def clock(resolution_s: float, in_sync: bool | None) -> Check:
    found = f"monotonic to {resolution_s * 1e9:.0f} ns"
    if resolution_s > 1e-4:
        return Check("clock", found, "warn", "use another clocksource: leases and step times are coarser than a step")
    if in_sync is None:
        return Check("clock", f"{found}; whether it is synchronized is not known")
    if not in_sync:
        todo = "start chronyd or systemd-timesyncd, if times of events shall compare with other machines'"
        return Check("clock", f"{found}; not synchronized", "warn", todo)
    return Check("clock", f"{found}; synchronized")


# ---- what there is to train with -------------------------------------------------------------------------------------


def _cgroup(name: str, version_1: str) -> list[str]:
    """A setting of this process's control group and of all that it lies in, as far as they are seen from here."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return []
    own = root / next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    places = [place / name for place in (own, *own.parents) if place.is_relative_to(root)]
    return [place.read_text().strip() for place in (*places, root / version_1) if place.is_file()]


def cpu_quota() -> float | None:
    """How many cores' time the control group allows; None if it sets no bound."""
    bounds = [text.split() for text in _cgroup("cpu.max", "cpu/cpu.cfs_quota_us")]
    return min((int(text[0]) / int([*text, "100000"][1]) for text in bounds if text[0].isdecimal()), default=None)


def memory_limit_bytes() -> int | None:
    bounds = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    return min((int(text) for text in bounds if text.isdecimal()), default=None)


def cores(there: int, allowed: int, quota: float | None, load: float) -> Check:
    found = f"{counted(allowed, 'core')} to use of {there}"
    if quota is not None and quota < allowed:
        todo = f"run -n {max(1, int(quota))} --no-pin, or raise the container's CPU limit (docker run --cpus {allowed})"
        return Check("cores", f"{found}, but time of {quota:g} only", "warn", todo)
    if load > allowed:
        todo = "end what else runs here, or use fewer workers: workers wait for the slowest of them"
        return Check("cores", f"{found}, and {load:.1f} processes want them", "warn", todo)
    return Check("cores", f"{found}, load {load:.1f}")


def memory(total_bytes: int, free_bytes: int, limit_bytes: int | None) -> Check:
    found = f"{amount(free_bytes)} free of {amount(total_bytes)}"
    if limit_bytes is not None and limit_bytes < total_bytes:
        found += f", {amount(limit_bytes)} allowed to this container"
    if min(free_bytes, limit_bytes or free_bytes) < 2 * GIB:
        todo = "end what else runs here, or raise the container's memory limit: torch alone takes 0.5 GiB"
        return Check("memory", found, "warn", todo)
    return Check("memory", found)


def shared_memory(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Check("/dev/shm", "not there", "warn", "mount -t tmpfs tmpfs /dev/shm: loader processes hand over there")
    found = f"{amount(usage.free)} free of {amount(usage.total)}"
    if usage.free < GIB:
        todo = "docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm: loader processes hand over there"
        return Check("/dev/shm", found, "warn", todo)
    return Check("/dev/shm", found)


def gpu_names() -> list[str]:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed.stdout, re.MULTILINE)


def gpus(names: list[str]) -> Check:
    if not names:
        return Check("GPUs", "none; shoal trains on the CPU")
    return Check("GPUs", f"{', '.join(sorted(set(names)))} × {len(names)}")


# ---- links and disks -------------------------------------------------------------------------------------------------


def loopback() -> Check:
    """Ports, and how quick a message and a stream are between two sockets of this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            echo = threading.Thread(target=_echo, args=(server,), daemon=True)
            echo.start()
            with socket.create_connection(server.getsockname(), timeout=5) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ping_s = statistics.median(_ping_s(link) for _ in range(_PINGS))
                bytes_per_s = _stream(link)
            echo.join(5)
    except OSError as problem:
        todo = "allow 127.0.0.1: ip link set lo up, and no firewall rule on lo"
        return Check("loopback", f"no port on 127.0.0.1: {problem.strerror or problem}", "bad", todo)
    return link_check(ping_s, bytes_per_s)


def link_check(ping_s: float, bytes_per_s: float) -> Check:
    found = f"ports free; {ping_s * 1e6:,.0f} µs there and back, {amount(bytes_per_s)}/s"
    if ping_s > 2e-3:
        todo = "end what else runs here: it is processes that wait for a core, not the link"
        return Check("loopback", found, "warn", todo)
    return Check("loopback", found)


def _echo(server: socket.socket) -> None:
    link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            link.sendall(link.recv(1))
        left = _PIPE_BYTES
        while left > 0 and (data := link.recv(1 << 20)):
            left -= len(data)
        link.sendall(b".")


def _ping_s(link: socket.socket) -> float:
    began = time.perf_counter()
    link.sendall(b".")
    link.recv(1)
    return time.perf_counter() - began


def _stream(link: socket.socket) -> float:
    chunk = bytes(1 << 20)
    began = time.perf_counter()
    for _ in range(_PIPE_BYTES // len(chunk)):
        link.sendall(chunk)
    link.recv(1)
    return _PIPE_BYTES / (time.perf_counter() - began)


def disk(directory: Path) -> Check:
    """Where the journal, the audit's records and the logs will be."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    try:
        fsync_s = _fsync_s(place)
    except OSError as problem:
        return Check("disk", f"{place}: {problem.strerror}", "bad", "choose another --dir, one you can write to")
    return disk_check(place, shutil.disk_usage(place).free, fsync_s, _file_system(place))


def disk_check(place: Path, free_bytes: int, fsync_s: float, kind: str) -> Check:
    found = f"{amount(free_bytes)} free at {place} ({kind}), fsync {fsync_s * 1e3:.1f} ms"
    if free_bytes < GIB:
        return Check("disk", found, "warn", "free some space, or choose another --dir")
    if kind in _NETWORK_FILE_SYSTEMS:
        return Check("disk", found, "warn", "choose a --dir on a disk of this machine: the journal needs its locks")
    if fsync_s > 0.1:
        return Check(
            "disk", found, "warn", "choose a --dir on a quicker disk: each new generation waits for its journal"
        )
    return Check("disk", found)


def _fsync_s(place: Path) -> float:
    with tempfile.TemporaryFile(dir=place) as file:
        took = []
        for _ in range(_SYNCS):
            os.write(file.fileno(), bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def _file_system(place: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    within = [mount for mount in mounts if place == Path(mount[1]) or Path(mount[1]) in place.parents]
    return max(within, key=lambda mount: len(mount[1]))[2] if within else "unknown"
