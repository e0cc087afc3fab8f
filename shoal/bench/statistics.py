"""What a list of timings says, and what it does not say. Pure functions over numbers.

Ratios and differences are paired: value i of the variant and value i of the baseline were taken in the same round, so
what the machine did to both in that round cancels. Their centre is the Hodges–Lehmann estimate and their interval the
exact one of Wilcoxon's signed ranks: about as narrow as Student's when the noise is normal, and unmoved by the one
round in which something else woke up on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from shoal.errors import SettingsContradict

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # with fewer, no interval of signed ranks reaches 95 %
WORTHLESS_HALF_WIDTH = 0.10

_MIN_STEADY = 4
_NORMAL_MAD = 1.4826  # median absolute deviation × this = standard deviation, for normal noise
_OUTLIER_SPREADS = 4.0
_TREND_SPREADS = 2.0
_SPREAD_FLOOR = 0.01  # what moves by less than 1 % is steady, however quiet the machine


@dataclass(frozen=True)
class Summary:
    """A median with its spread: quartiles and extremes."""

    median: float
    lower_quartile: float
    upper_quartile: float
    min: float
    max: float
    count: int


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds that hold the true value in 95 of 100 runs."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """As a part of the value: 0.1 is ±10 %. Meant for ratios."""
        return (self.high - self.low) / 2 / abs(self.value)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def inverse(self) -> Interval:
        """Of a ratio of times, the ratio of rates."""
        return Interval(1 / self.value, 1 / self.high, 1 / self.low)


def summarize(values: Sequence[float]) -> Summary:
    lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Summary(median(values), lower, upper, min(values), max(values), len(values))


def warmup_rounds(values: Sequence[float]) -> int:
    """How many leading rounds belong to the warm-up: the fewest after which the start is no different from the rest.

    Returns len(values) when no steady part of at least four rounds is left.
    """
    for dropped in range(len(values) - _MIN_STEADY + 1):
        if _is_steady(values[dropped:]):
            return dropped
    return len(values)


def _is_steady(values: Sequence[float]) -> bool:
    """The first value does not stand out from the later half, and the earlier half's median does not either."""
    earlier, later = values[: len(values) // 2], values[len(values) // 2 :]
    centre = median(later)
    spread = max(_NORMAL_MAD * median(abs(value - centre) for value in later), _SPREAD_FLOOR * abs(centre))
    stands_out = abs(values[0] - centre) > _OUTLIER_SPREADS * spread
    trends = abs(median(earlier) - centre) > _TREND_SPREADS * spread
    return not (stands_out or trends)


def paired_ratio(variant: Sequence[float], baseline: Sequence[float]) -> Interval:
    """variant / baseline, round by round, with its 95 % interval. Needs MIN_ROUNDS rounds."""
    logs = [math.log(mine / theirs) for mine, theirs in zip(variant, baseline, strict=True)]
    centre = signed_rank_interval(logs)
    return Interval(math.exp(centre.value), math.exp(centre.low), math.exp(centre.high))


def paired_difference(variant: Sequence[float], baseline: Sequence[float]) -> Interval:
    """variant - baseline, round by round, with its 95 % interval. Needs MIN_ROUNDS rounds."""
    return signed_rank_interval([mine - theirs for mine, theirs in zip(variant, baseline, strict=True)])


def signed_rank_interval(values: Sequence[float]) -> Interval:
    """Where the centre of a symmetric distribution lies: the median of all pairwise means, and the exact 95 % bounds.

    Raises SettingsContradict below MIN_ROUNDS values.
    """
    if len(values) < MIN_ROUNDS:
        raise SettingsContradict(
            f"{len(values)} rounds cannot give a {CONFIDENCE:.0%} interval; measure at least {MIN_ROUNDS}"
        )
    means = sorted((a + b) / 2 for index, a in enumerate(values) for b in values[index:])
    cut = _critical_rank_sum(len(values))
    return Interval(median(means), means[cut], means[-1 - cut])


def _critical_rank_sum(count: int) -> int:
    """The largest c with P(sum of the positive ranks ≤ c) ≤ 2.5 %; that many pairwise means are cut off at each end.

    Under symmetry each of the ranks 1..count is positive or not with even odds; `ways[s]` counts the patterns of signs
    whose positive ranks add up to s.
    """
    ways = [1] + [0] * (count * (count + 1) // 2)
    for rank in range(1, count + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    budget = (1 - CONFIDENCE) / 2 * 2**count
    critical, patterns = -1, 0
    while patterns + ways[critical + 1] <= budget:
        critical += 1
        patterns += ways[critical]
    return critical


def ratio_doubts(ratio: Interval, *, difference_claimed: bool) -> list[str]:
    """Why this ratio should not be quoted; empty when it may be."""
    doubts = []
    if ratio.half_width > WORTHLESS_HALF_WIDTH:
        doubts.append(
            f"worthless: ratio {ratio.value:.3f} is known only to ±{ratio.half_width:.0%}"
            f" [{ratio.low:.3f}, {ratio.high:.3f}]; measure more rounds or on a quieter machine"
        )
    if difference_claimed and ratio.contains(1.0):
        doubts.append(
            f"no difference shown: ratio {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] may as well be 1.0"
        )
    return doubts
