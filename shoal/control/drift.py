"""Whether the copies of the state that a job has are alike, by checksums that their holders tell.

The workers of a host share one copy, on devices each has its own. A check is of one commit: it is judged once every
copy has told of it, and forgotten where one does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_CHECKS = 4  # that may be under way


@dataclass(frozen=True)
class Told:
    """What the holder of one copy tells."""

    generation: int
    seq: int
    step: int
    copies: tuple[tuple[str, ...], ...]  # the workers of each; the first of them tells
    sums: Mapping[str, int] = field(compare=False)  # by tensor


@dataclass(frozen=True)
class Alike:
    step: int


@dataclass(frozen=True)
class Drift:
    """Copies differ. `others`: those that are not as most are; without a majority, all of them."""

    step: int
    seq: int
    tensor: str  # the first that differs
    copies: tuple[tuple[str, ...], ...]
    others: tuple[tuple[str, ...], ...]
    majority: bool
    alike_at: int  # the newest step of which it is known that they were


class Checks:
    """Not in the journal: what was told is told again to a coordinator that follows another."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], dict[str, Told]] = {}
        self.alike_at = 0  # the newest step at which all copies were

    def on_told(self, worker_id: str, told: Told) -> Alike | Drift | None:
        """None: not everybody has told yet."""
        key = (told.generation, told.seq)
        by_worker = self._told.setdefault(key, {})
        by_worker[worker_id] = told
        for old in sorted(self._told)[:-_CHECKS]:
            del self._told[old]
        if not {copy[0] for copy in told.copies} <= by_worker.keys():
            return None
        del self._told[key]
        sums = {copy: by_worker[copy[0]].sums for copy in told.copies}
        verdict = judge(told, sums, self.alike_at)
        if isinstance(verdict, Alike):
            self.alike_at = max(self.alike_at, told.step)
        return verdict


def judge(told: Told, sums: Mapping[tuple[str, ...], Mapping[str, int]], alike_at: int) -> Alike | Drift:
    whole = {copy: tuple(its.items()) for copy, its in sums.items()}
    [(most, count), *others] = Counter(whole.values()).most_common()
    if not others:
        return Alike(told.step)
    majority = 2 * count > len(whole)
    odd = tuple(copy for copy, its in whole.items() if its != most or not majority)
    differ = (name for name, value in most if any(its.get(name) != value for its in sums.values()))
    tensor = next(differ, "the names of tensors")
    return Drift(told.step, told.seq, tensor, told.copies, odd, majority, alike_at)
