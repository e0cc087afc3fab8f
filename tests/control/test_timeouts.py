from __future__ import annotations

import pytest

from shoal.control.timeouts import Timeouts
from shoal.errors import SettingsContradict


def test_every_timeout_follows_from_the_budget() -> None:
    short, long = Timeouts(1.0), Timeouts(10.0)
    assert short.beat_s == 0.2
    assert (long.beat_s, long.probe_s, long.join_s, long.drain_s) == (2.0, 1.0, 60.0, 40.0)
    assert long.backoff_first_s < long.backoff_max_s < long.budget_s


def test_an_override_stands_beside_the_derived_ones() -> None:
    timeouts = Timeouts(10.0, beat_s=0.5)
    assert (timeouts.beat_s, timeouts.probe_s) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("budget_s", "override", "named"),
    [
        (0.4, {}, "--budget"),
        (-1.0, {}, "--budget"),
        (float("nan"), {}, "--budget"),
        (float("inf"), {}, "--budget"),
        (5.0, {"beat_s": 2.5}, "beat_s"),
        (5.0, {"beat_s": -1.0}, "beat_s"),
        (5.0, {"probe_s": 2.5}, "probe_s"),
        (5.0, {"join_s": 1.0}, "join_s"),
        (5.0, {"join_s": 0.0}, "join_s"),
    ],
)
def test_timeouts_that_cannot_all_hold_are_refused_by_name(
    budget_s: float, override: dict[str, float], named: str
) -> None:
    with pytest.raises(SettingsContradict, match=named) as refused:
        Timeouts(budget_s, **override)
    assert "\n" not in str(refused.value)
