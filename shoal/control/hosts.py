"""The hosts of a job, and how many workers each of them is to have. Pure, like `membership`, which uses it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.control.generation import MAX_SLOTS


def is_name(text: str) -> bool:
    """Whether a host can be called that: files of its workers are."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None


@dataclass(frozen=True)
class Host:
    """A host that a launcher keeps workers on, or soon will. In a job they stand in the order in which they fill."""

    name: str
    slots: int = MAX_SLOTS
    life: str = ""  # of its launcher: the next one has another; none before the first has come
    home: bool = False  # its launcher is the job's own, which is lost only when another takes its place
    share: int = 0  # of the target
    grown: int = 0  # how much of the target came with it, and goes with it
    guest: bool = False  # somebody added it by hand to a job that does without it
    going: bool = False  # it is gone from the list: what it still has is beside the target
    idle: bool = False  # all of its workers have ended and none is to come
    heard_at: float = field(default=0.0, compare=False)


def slots_of(hosts: Sequence[Host]) -> int:
    """How many workers there is room for."""
    return min(sum(host.slots for host in hosts), MAX_SLOTS)


def spread(hosts: Sequence[Host], target: int) -> tuple[Host, ...]:
    """The hosts with their shares of the target: nobody moves who need not, what is missing goes to the first that have
    free slots, what is too much is taken from the last. One that is going keeps what it has, beside the target."""
    shares = [min(host.share, host.slots) for host in hosts]
    staying = [place for place, host in enumerate(hosts) if not host.going]
    there = sum(shares[place] for place in staying)
    surplus, missing = max(0, there - target), max(0, target - there)
    for place in reversed(staying):
        taken = min(shares[place], surplus)
        shares[place], surplus = shares[place] - taken, surplus - taken
    for place in staying:
        given = min(hosts[place].slots - shares[place], missing)
        shares[place], missing = shares[place] + given, missing - given
    return tuple(replace(host, share=share) for host, share in zip(hosts, shares, strict=True))
