"""Operations that workers ask for by name, each in its own order: which are ready, and what is done at once.

The lowest rank keeps the table. It knows no socket and no clock: requests come in, decisions go out, and everybody does
what was decided in the order of the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FUSED_BYTES = 8 << 20  # of small tensors that are summed in one transfer
_RAGGED = ("allgather", "alltoall")


@dataclass(frozen=True)
class Request:
    """What one worker asks for. `factor`: of the result. `splits`: rows of an alltoall for each rank."""

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    size_bytes: int = 0
    reduce: str = ""
    factor: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()

    @classmethod
    def parse(cls, told: dict[str, Any]) -> Request:
        return cls(**{**told, "shape": tuple(told["shape"]), "splits": tuple(told["splits"])})

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be the same on all workers."""
        shape = ("rows", *self.shape[1:]) if self.kind in _RAGGED else self.shape
        return self.kind, self.dtype, shape, self.reduce, self.factor, self.root

    def __str__(self) -> str:
        text = " ".join(filter(None, (self.kind, self.reduce)))
        text += f" of {self.dtype} {self.shape}" if self.dtype else ""
        text += f" times {self.factor:g}" if self.factor != 1.0 else ""
        return text + (f" from rank {self.root}" if self.kind == "broadcast" else "")


@dataclass(frozen=True)
class Decision:
    """These are done now, in one transfer. `rows`: of each rank, for each other or for all. `problem`: why not."""

    names: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...] = ()
    problem: str = ""

    @classmethod
    def parse(cls, told: dict[str, Any]) -> Decision:
        return cls(tuple(told["names"]), tuple(map(tuple, told["rows"])), told["problem"])


class Table:
    """`ids`: of the workers, by rank. A worker asks for a name again only when it has heard what was decided of it."""

    def __init__(self, ids: Sequence[str], fused_bytes: int = FUSED_BYTES) -> None:
        self._ids, self._fused_bytes = ids, fused_bytes
        self._asked: dict[str, dict[int, Request]] = {}  # by name and rank
        self._complete: list[str] = []

    def submit(self, rank: int, request: Request) -> None:
        asked = self._asked.setdefault(request.name, {})
        asked[rank] = request
        if len(asked) == len(self._ids):
            self._complete.append(request.name)

    def missing(self, name: str) -> list[str]:
        """Who has not asked for it. Nobody, of a name that was decided meanwhile."""
        asked = self._asked.get(name)
        return [] if asked is None else [it for rank, it in enumerate(self._ids) if rank not in asked]

    def decide(self) -> list[Decision]:
        """Of all names that everybody has asked for by now."""
        complete, self._complete = self._complete, []
        decisions: list[Decision] = []
        fused: dict[tuple[object, ...], tuple[list[str], int]] = {}
        for name in complete:
            asked = self._asked.pop(name)
            first = asked[0]
            problem = self._problem(name, asked)
            if not problem and first.kind == "allreduce" and first.size_bytes < self._fused_bytes:
                key = first.dtype, first.reduce, first.factor
                names, size_bytes = fused.pop(key, ([], 0))
                if size_bytes + first.size_bytes > self._fused_bytes:
                    decisions.append(Decision(tuple(names)))
                    names, size_bytes = [], 0
                fused[key] = [*names, name], size_bytes + first.size_bytes
                continue
            rows: tuple[tuple[int, ...], ...] = ()
            if not problem and first.kind in _RAGGED:
                ranks = range(len(self._ids))
                rows = tuple(asked[rank].splits or (math.prod(asked[rank].shape[:1]),) for rank in ranks)
            decisions.append(Decision((name,), rows, problem))
        return decisions + [Decision(tuple(names)) for names, _ in fused.values()]

    def _problem(self, name: str, asked: dict[int, Request]) -> str:
        first = asked[0]
        other = next((rank for rank in range(len(self._ids)) if asked[rank].alike != first.alike), None)
        if other is not None:
            return (
                f"{name!r} is another operation on {self._ids[other]} ({asked[other]}) than on {self._ids[0]} "
                f"({first}): a name must mean the same everywhere"
            )
        return ""
