"""What a comparison found, as values: to be printed, kept as JSON, and judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from shoal.bench.load import Load, Machine
from shoal.bench.statistics import Interval, Summary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Measured:
    """One variant's seconds a step: every round as it was, the summary over the kept ones."""

    variant: str
    step_s: tuple[float, ...]
    summary: Summary


@dataclass(frozen=True)
class Comparison:
    """A variant against another, paired by round: how many times its step takes, and how many seconds more."""

    variant: str
    other: str
    time_ratio: Interval
    extra_s: Interval
    doubts: tuple[str, ...]

    @property
    def efficiency(self) -> Interval:
        """The other's time over the variant's: 1.0 is as fast as the other."""
        return self.time_ratio.inverse()


@dataclass(frozen=True)
class Result:
    """`warmup_rounds` is how many of the first rounds the summaries and comparisons leave out."""

    title: str
    baseline: str
    n_workers: int
    cores_per_worker: int
    steps_per_turn: int
    warmup_rounds: int
    measured: tuple[Measured, ...]
    comparisons: tuple[Comparison, ...]
    loads: tuple[Load, ...]
    doubts: tuple[str, ...]
    machine: Machine

    def of(self, variant: str) -> Measured:
        return next(one for one in self.measured if one.variant == variant)

    def against(self, variant: str, other: str | None = None) -> Comparison:
        """The variant against the baseline, or against another it was claimed to be faster than."""
        pair = variant, other or self.baseline
        return next(one for one in self.comparisons if (one.variant, one.other) == pair)

    @property
    def claims(self) -> list[Comparison]:
        """Those between two variants of which none is the baseline."""
        return [one for one in self.comparisons if one.other != self.baseline]


def table(results: Sequence[Result]) -> Table:
    """One row a variant of each result. Efficiency is against the result's baseline, with its 95 % interval."""
    shown = Table(title=_title(results))
    for column in ("case", "variant", "ms a step", "middle half", "efficiency", "95 %", "µs beyond"):
        shown.add_column(column, justify="left" if column in ("case", "variant") else "right")
    for result in results:
        for one in result.measured:
            case = result.title if one is result.measured[0] else ""
            shown.add_row(case, one.variant, *_time_cells(one.summary), *_ratio_cells(result, one.variant))
        shown.add_section()
    return shown


def _title(results: Sequence[Result]) -> str:
    first = results[0]
    same = all((r.n_workers, r.cores_per_worker) == (first.n_workers, first.cores_per_worker) for r in results)
    groups = f"{first.n_workers} workers × {first.cores_per_worker} cores" if same else "several sizes of group"
    return f"{groups}, torch {first.machine.torch}, {first.machine.processor}"


def _time_cells(summary: Summary) -> tuple[str, str]:
    return (
        f"{summary.median * 1e3:.3f}",
        f"{summary.lower_quartile * 1e3:.3f}–{summary.upper_quartile * 1e3:.3f}",
    )


def _ratio_cells(result: Result, variant: str) -> tuple[str, str, str]:
    if variant == result.baseline:
        return ("1", "", "")
    found = result.against(variant)
    efficiency = found.efficiency
    mark = " ?" if found.doubts else ""
    return (
        f"{efficiency.value:.3f}{mark}",
        f"{efficiency.low:.3f}–{efficiency.high:.3f}",
        f"{found.extra_s.value * 1e6:+.0f} [{found.extra_s.low * 1e6:+.0f}, {found.extra_s.high * 1e6:+.0f}]",
    )


def doubt_lines(results: Sequence[Result]) -> list[str]:
    """Every warning, one a line, with the case it belongs to."""
    lines = []
    for result in results:
        lines += [f"{result.title}: {doubt}" for doubt in result.doubts]
        for found in result.comparisons:
            pair = found.variant if found.other == result.baseline else f"{found.variant} against {found.other}"
            lines += [f"{result.title}, {pair}: {doubt}" for doubt in found.doubts]
    return lines


def as_json(value: DataclassInstance) -> dict[str, Any]:
    return asdict(value)


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
