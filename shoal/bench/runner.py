"""The one way anything is timed against anything else here.

All variants are started and stay; each round gives every variant one turn, in an order that changes from round to
round. While one has its turn the others are blocked on a read. So a slow minute of the machine meets all variants
alike, and the ratio within a round does not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from shoal.bench import statistics
from shoal.bench.load import Load, LoadProbe, load_doubts, this_machine
from shoal.bench.results import Comparison, Measured, Result
from shoal.errors import SettingsContradict

_MAX_STEPS_PER_TURN = 20_000


class Variant(Protocol):
    """Something that can be timed beside others. Between its turns it must be idle: blocked, not spinning."""

    def start(self, n_workers: int, cores_per_worker: int) -> None:
        """Ready when this returns: processes up, model built."""

    def measure(self, steps: int) -> float:
        """Run so many steps; the seconds one took, by the slowest worker over all of them."""

    def stop(self) -> None:
        """Leave nothing behind; also after a failure, also when never started."""


def turn_order(names: Sequence[str], round_number: int) -> list[str]:
    """Every name once. A round runs backwards after the one before it, and each pair of rounds begins one name later:
    nobody always follows the same neighbor, or always goes first."""
    shift = round_number // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_number % 2 else order


def compare(
    title: str,
    variants: Mapping[str, Variant],
    *,
    baseline: str,
    n_workers: int,
    cores_per_worker: int,
    rounds: int = 9,
    max_warmup_rounds: int | None = None,
    steps_per_turn: int | None = None,
    turn_s: float = 0.5,
    faster: Sequence[tuple[str, str]] = (),
) -> Result:
    """Time all variants beside each other until `rounds` rounds are past the warm-up.

    `steps_per_turn` is the same for all; by default as many as the baseline does in `turn_s`. A pair in `faster` is a
    claim, that the first is faster than the second: the two are compared with each other too, and an interval that
    holds 1.0 is a doubt. After `max_warmup_rounds` (by default `rounds`) more rounds than asked for the last ones are
    taken as they are, and the result says so.
    Raises SettingsContradict for settings that cannot give a result, and whatever a variant raises; every variant is
    stopped either way.
    """
    _check(variants, baseline, rounds, faster)
    spare = rounds if max_warmup_rounds is None else max_warmup_rounds
    with ExitStack() as started:
        for variant in variants.values():
            started.callback(variant.stop)
            variant.start(n_workers, cores_per_worker)
        steps = steps_per_turn or _steps_in(variants[baseline], turn_s)
        taken, loads, dropped, settled = _take_rounds(variants, steps, rounds, spare)
    kept = {name: series[dropped:] for name, series in taken.items()}
    doubts = load_doubts(loads)
    if not settled:
        doubts.insert(0, f"never steady: still trending after {len(loads)} rounds, the last {rounds} are taken")
    return Result(
        title=title,
        baseline=baseline,
        n_workers=n_workers,
        cores_per_worker=cores_per_worker,
        steps_per_turn=steps,
        warmup_rounds=dropped,
        measured=tuple(
            Measured(name, tuple(series), statistics.summarize(kept[name])) for name, series in taken.items()
        ),
        comparisons=(
            *(_comparison(kept, name, baseline, claimed=False) for name in kept if name != baseline),
            *(_comparison(kept, name, other, claimed=True) for name, other in faster),
        ),
        loads=tuple(loads),
        doubts=tuple(doubts),
        machine=this_machine(),
    )


def _check(variants: Mapping[str, Variant], baseline: str, rounds: int, faster: Sequence[tuple[str, str]]) -> None:
    unknown = [name for name in (baseline, *(name for pair in faster for name in pair)) if name not in variants]
    if unknown:
        raise SettingsContradict(f"no variant is named {', '.join(unknown)}; there are {', '.join(variants)}")
    if rounds < statistics.MIN_ROUNDS:
        raise SettingsContradict(
            f"{rounds} rounds cannot give a {statistics.CONFIDENCE:.0%} interval; ask for at least"
            f" {statistics.MIN_ROUNDS}"
        )


def _steps_in(variant: Variant, turn_s: float) -> int:
    """How many steps fill a turn. The first steps of a process are slow, so the guess is refined until it holds."""
    steps = 1
    while True:
        fitting = max(1, min(_MAX_STEPS_PER_TURN, round(turn_s / variant.measure(steps))))
        if fitting <= 2 * steps:
            return fitting
        steps = fitting


def _take_rounds(
    variants: Mapping[str, Variant], steps: int, rounds: int, spare: int
) -> tuple[dict[str, list[float]], list[Load], int, bool]:
    """Every round's turn by variant, each round's load, how many rounds were warm-up, whether it ended."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    loads: list[Load] = []
    probe = LoadProbe()
    while True:
        probe.begin()
        for name in turn_order(list(variants), len(loads)):
            taken[name].append(variants[name].measure(steps))
        loads.append(probe.end())
        # A round is dropped for all as long as it is warm-up for one: pairs stay pairs.
        dropped = max(statistics.warmup_rounds(series) for series in taken.values())
        if len(loads) - dropped >= rounds:
            return taken, loads, dropped, True
        if len(loads) >= rounds + spare:
            return taken, loads, len(loads) - rounds, False


def _comparison(kept: Mapping[str, Sequence[float]], name: str, other: str, *, claimed: bool) -> Comparison:
    ratio = statistics.paired_ratio(kept[name], kept[other])
    return Comparison(
        variant=name,
        other=other,
        time_ratio=ratio,
        extra_s=statistics.paired_difference(kept[name], kept[other]),
        doubts=tuple(statistics.ratio_doubts(ratio, difference_claimed=claimed)),
    )
