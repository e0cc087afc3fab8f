from __future__ import annotations

import math
import random

import pytest

from shoal.bench.statistics import (
    Interval,
    paired_difference,
    paired_ratio,
    ratio_doubts,
    signed_rank_interval,
    summarize,
    warmup_rounds,
)
from shoal.errors import SettingsContradict


def noisy(level: float, noise: float, count: int, source: random.Random) -> list[float]:
    return [level * math.exp(source.gauss(0, noise)) for _ in range(count)]


def test_planted_ratio_lies_within_its_interval_about_95_times_in_100() -> None:
    source = random.Random(1)
    hits = 0
    for _ in range(400):
        baseline = noisy(0.010, 0.05, 9, source)
        # What the machine does to a round, it does to both: the pairing must take it out.
        variant = [1.3 * value * math.exp(source.gauss(0, 0.02)) for value in baseline]
        hits += paired_ratio(variant, baseline).contains(1.3)
    assert 0.93 <= hits / 400 <= 0.99


def test_paired_ratio_is_narrow_although_the_machine_drifts_by_half() -> None:
    source = random.Random(2)
    drift = [1 + 0.5 * index / 11 for index in range(12)]
    baseline = [value * math.exp(source.gauss(0, 0.005)) for value in drift]
    variant = [1.2 * value * math.exp(source.gauss(0, 0.005)) for value in drift]
    ratio = paired_ratio(variant, baseline)
    assert ratio.contains(1.2)
    assert ratio.half_width < 0.01


def test_one_disturbed_round_of_nine_does_not_move_the_ratio_out_of_reach() -> None:
    baseline = [1.0] * 9
    variant = [1.10, 1.11, 1.09, 1.10, 4.0, 1.10, 1.12, 1.08, 1.10]
    ratio = paired_ratio(variant, baseline)
    assert ratio.value == pytest.approx(1.10, abs=0.02)
    assert ratio.low > 1.07


@pytest.mark.parametrize(
    # Exact two-sided 5 % critical values of Wilcoxon's signed ranks, from the printed tables: the interval runs from
    # the (critical value + 1)-th smallest to the same largest of the pairwise means.
    ("count", "critical"),
    [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)],
)
def test_interval_bounds_are_those_of_the_printed_signed_rank_tables(count: int, critical: int) -> None:
    values = [float(2**index) for index in range(count)]
    means = sorted((a + b) / 2 for index, a in enumerate(values) for b in values[index:])
    interval = signed_rank_interval(values)
    assert (interval.low, interval.high) == (means[critical], means[-1 - critical])


def test_five_rounds_are_refused_because_no_95_percent_interval_exists() -> None:
    with pytest.raises(SettingsContradict, match="at least 6"):
        paired_difference([1.0] * 5, [1.0] * 5)


def test_rounds_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0] * 7, [1.0] * 8)


def test_paired_difference_finds_what_was_added() -> None:
    source = random.Random(3)
    baseline = noisy(300e-6, 0.05, 11, source)
    variant = [value + 40e-6 + source.gauss(0, 1e-6) for value in baseline]
    assert paired_difference(variant, baseline).value == pytest.approx(40e-6, abs=2e-6)


def test_inverse_of_an_interval_swaps_its_ends() -> None:
    assert Interval(2.0, 1.0, 4.0).inverse() == Interval(0.5, 0.25, 1.0)


@pytest.mark.parametrize("slow", [[3.0], [3.0, 2.0], [2.0, 1.6, 1.3, 1.15]])
def test_a_planted_slow_start_is_dropped_and_nothing_else(slow: list[float]) -> None:
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99]
    assert warmup_rounds(slow + steady) == len(slow)


def test_a_fast_start_is_a_warmup_too() -> None:
    assert warmup_rounds([0.7, 0.8, 1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0]) == 2


def test_steady_noise_is_rarely_taken_for_a_warmup() -> None:
    source = random.Random(4)
    dropped = [warmup_rounds(noisy(1.0, 0.03, 12, source)) for _ in range(300)]
    assert sum(count > 0 for count in dropped) / 300 < 0.25
    assert sum(dropped) / 300 < 1.0


def test_a_series_that_never_settles_is_all_warmup() -> None:
    assert warmup_rounds([2.0**-index for index in range(10)]) == 10


def test_a_wide_interval_is_called_worthless_and_says_how_wide() -> None:
    (doubt,) = ratio_doubts(Interval(1.4, 1.1, 1.7), difference_claimed=True)
    assert "worthless" in doubt
    assert "±21%" in doubt


def test_an_interval_around_one_is_a_doubt_only_where_a_difference_is_claimed() -> None:
    ratio = Interval(1.01, 0.98, 1.03)
    assert ratio_doubts(ratio, difference_claimed=False) == []
    (doubt,) = ratio_doubts(ratio, difference_claimed=True)
    assert "no difference shown" in doubt


def test_summary_gives_median_quartiles_and_extremes() -> None:
    summary = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (summary.median, summary.lower_quartile, summary.upper_quartile) == (3.0, 2.0, 4.0)
    assert (summary.min, summary.max, summary.count) == (1.0, 5.0, 5)
    assert summarize([7.0]).upper_quartile == 7.0
