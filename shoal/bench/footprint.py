"""How much memory a group of processes takes together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """`proportional_bytes` counts a page shared by k processes as 1/k in each: summed over all, every page once."""

    variant: str
    n_workers: int
    proportional_bytes: int
    private_bytes: int


def footprint(variant: str, pids: Iterable[int]) -> Footprint:
    """Of living processes of this user. Raises FileNotFoundError when one of them is gone."""
    tables = [_rollup(pid) for pid in pids]
    return Footprint(
        variant=variant,
        n_workers=len(tables),
        proportional_bytes=sum(table["Pss"] for table in tables),
        private_bytes=sum(table["Private_Clean"] + table["Private_Dirty"] for table in tables),
    )


def _rollup(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        next(lines)  # the address range
        fields = (line.split() for line in lines)
        return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in fields}
