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
    idle: bool = False  # all of its workers have ended and none is to come
    heard_at: float = field(default=0.0, compare=False)


def spread(hosts: Sequence[Host], target: int) -> tuple[Host, ...]:
    """The hosts with their shares of the target: nobody moves who need not, what is missing goes to the first that have
    free slots, what is too much is taken from the last."""
    shares = [min(host.share, host.slots) for host in hosts]
    surplus = max(0, sum(shares) - target)
    missing = max(0, target - sum(shares))
    for place in reversed(range(len(hosts))):
        taken = min(shares[place], surplus)
        shares[place], surplus = shares[place] - taken, surplus - taken
    for place, host in enumerate(hosts):
        given = min(host.slots - shares[place], missing)
        shares[place], missing = shares[place] + given, missing - given
    return tuple(replace(host, share=share) for host, share in zip(hosts, shares, strict=True))
