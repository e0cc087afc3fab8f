"""Which hosts a job has: how people write them down, and which of them is this machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import errors
from shoal.control.generation import MAX_SLOTS
from shoal.control.hosts import is_name

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*")
_LINE = re.compile(r"(\S+?)(?:(?::|\s+slots\s*=\s*|\s+)(\S+))?")


@dataclass(frozen=True)
class HostSpec:
    """A host as the job knows it, and as ssh does; `where` is empty for this machine."""

    name: str
    slots: int
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def written(self) -> str:
        """As -H takes it."""
        return f"{self.where or f'localhost/{self.name}'}:{self.slots}"


def parse_hosts(text: str) -> tuple[HostSpec, ...]:
    """`a:4,b:4`, as -H takes it. Raises SettingsContradict."""
    specs = tuple(_parse(part.strip(), f"-H {text}") for part in text.split(","))
    return _distinct(specs, f"-H {text}")


def read_hostfile(path: Path) -> tuple[HostSpec, ...]:
    """Lines of `host slots=4`, `host:4` or `host 4`; `#` begins a comment. Raises SettingsContradict."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise errors.SettingsContradict(f"--hostfile {path} cannot be read: {why}; name a file of hosts") from None
    specs = parse_lines(lines, f"--hostfile {path}")
    if not specs:
        raise errors.SettingsContradict(f"--hostfile {path} names no host; write a line like server1:4")
    return specs


def parse_lines(lines: Iterable[str], called: str) -> tuple[HostSpec, ...]:
    """The hosts of a hostfile, or of what a discovery script prints. Raises SettingsContradict."""
    specs = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            specs.append(_parse(text, f"{called}, line {number}"))
    return _distinct(specs, called)


def _parse(text: str, where: str) -> HostSpec:
    if "[" in text or "::" in text or text.count(":") > 2:
        raise errors.SettingsContradict(
            f"{where}: {text!r}: IPv6 addresses are not supported yet; write IPv4 or a name"
        )
    found = _LINE.fullmatch(text)
    address, _, label = (found[1] if found else "").partition("/")
    slots = (found[2] if found else None) or "1"
    if not _ADDRESS.fullmatch(address) or (label and not is_name(label)) or not slots.isdecimal():
        raise errors.SettingsContradict(f"{where}: {text!r} is not a host and its slots; write server1:4")
    if not 1 <= int(slots) <= MAX_SLOTS:
        raise errors.SettingsContradict(f"{where}: {address} has {slots} slots; write a number from 1 to {MAX_SLOTS}")
    local = is_this_machine(address)
    if label and not local:
        raise errors.SettingsContradict(f"{where}: {text!r}: only hosts on this machine have names of their own")
    name = label or address.rpartition("@")[2]
    return HostSpec(name, int(slots), "" if local else address)


def _distinct(specs: Sequence[HostSpec], where: str) -> tuple[HostSpec, ...]:
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise errors.SettingsContradict(f"{where}: {twice} is named twice; add up its slots")
    slots = sum(spec.slots for spec in specs)
    if slots > MAX_SLOTS:
        raise errors.SettingsContradict(f"{where}: {slots} slots in all; a job has {MAX_SLOTS} at most")
    return tuple(specs)


def is_this_machine(host: str) -> bool:
    """By its name alone: localhost, 127.…, and what this machine calls itself."""
    own = socket.gethostname()
    return host in ("localhost", own, own.partition(".")[0]) or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def own_address(towards: str) -> str:
    """The IPv4 address by which this machine reaches that host. Raises HostUnusable for one that nobody knows."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise errors.HostUnusable(
            f"{towards} cannot be reached: {problem.strerror or problem}; check its name, or, if only ssh knows the "
            "way, give --address IP, by which it reaches this machine"
        ) from None
