"""The one way anything is timed against anything else here.

All variants are started and stay; each round gives every variant one turn, in an order that changes from round to
round. While one has its turn the others are blocked on a read. So a slow minute of the machine meets all variants
alike, and the ratio within a round does not see it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        """Run so many steps and return the seconds a step took."""

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
    difference_claimed: Collection[str] = (),
) -> Result:
    """Time all variants beside each other until `rounds` rounds are past the warm-up.

    `steps_per_turn` is the same for all; by default as many as the baseline does in `turn_s`. Variants named in
    `difference_claimed` get a doubt when their interval holds 1.0. After `max_warmup_rounds` (by default `rounds`) more
    rounds than asked for the last ones are taken as they are, and the result says so.
    Raises SettingsContradict for settings that cannot give a result, and whatever a variant raises; every variant is
    stopped either way.
    """
    _check(variants, baseline, rounds, difference_claimed)
    spare = rounds if max_warmup_rounds is None else max_warmup_rounds
    with ExitStack() as started:
        for variant in variants.values():
            started.callback(variant.stop)
            variant.start(n_workers, cores_per_worker)
        steps = steps_per_turn or _steps_in(variants[baseline], turn_s)
        taken, loads, dropped, settled = _take_rounds(variants, steps, rounds, spare)
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
            Measured(name, tuple(series), statistics.summarize(series[dropped:])) for name, series in taken.items()
        ),
        comparisons=tuple(
            _comparison(name, series[dropped:], taken[baseline][dropped:], name in difference_claimed)
            for name, series in taken.items()
            if name != baseline
        ),
        loads=tuple(loads),
        doubts=tuple(doubts),
        machine=this_machine(),
    )


def _check(variants: Mapping[str, Variant], baseline: str, rounds: int, difference_claimed: Collection[str]) -> None:
    unknown = [name for name in (baseline, *difference_claimed) if name not in variants]
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
    """Every round's seconds a step by variant, each round's load, how many rounds were warm-up, whether it ended."""
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


def _comparison(name: str, mine: Sequence[float], baseline: Sequence[float], difference_claimed: bool) -> Comparison:
    ratio = statistics.paired_ratio(mine, baseline)
    return Comparison(
        variant=name,
        time_ratio=ratio,
        extra_s=statistics.paired_difference(mine, baseline),
        doubts=tuple(statistics.ratio_doubts(ratio, difference_claimed=difference_claimed)),
    )
