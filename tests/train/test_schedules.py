from __future__ import annotations

import pytest

from shoal.train.schedules import LinearScaling, Schedule, Situation, SqrtScaling


def at(size: int, before: int = 0, since: int = 1000) -> Situation:
    return Situation(step=1000, epoch=0, size=size, size_before=before, steps_since_change=since)


@pytest.mark.parametrize(
    ("schedule", "factor"), [(LinearScaling(), 4.0), (SqrtScaling(), 2.0), (LinearScaling(base_size=2), 2.0)]
)
def test_the_factor_follows_the_number_of_workers(schedule: Schedule, factor: float) -> None:
    assert schedule.factor(at(4)) == pytest.approx(factor)
    assert schedule.factor(at(1)) == pytest.approx(factor / 4 if isinstance(schedule, LinearScaling) else 1.0)


def test_after_a_change_the_factor_moves_in_a_straight_line() -> None:
    schedule = LinearScaling(warmup_steps=3)
    assert [schedule.factor(at(6, before=2, since=since)) for since in range(5)] == pytest.approx([3, 4, 5, 6, 6])
    assert [schedule.factor(at(2, before=6, since=since)) for since in range(5)] == pytest.approx([5, 4, 3, 2, 2])


def test_at_the_start_it_warms_up_from_the_optimizers_own_rate() -> None:
    schedule = SqrtScaling(warmup_steps=1)
    assert [schedule.factor(at(4, since=since)) for since in range(2)] == pytest.approx([1.5, 2.0])
