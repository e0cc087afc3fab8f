"""Where a worker's time goes, by a clock that the tests move."""

from __future__ import annotations

import pytest

from shoal.seconds import CATEGORIES, CHECKPOINT, COMPUTE, EXCHANGE, INPUT, RECONFIGURE, WAIT, Seconds


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(seconds: Seconds, clock: Clock, **categories: float) -> None:
    for name, length_s in categories.items():
        seconds.switch(CATEGORIES.index(name))
        clock.now_s += length_s


def told(seconds: Seconds) -> dict[str, float]:
    return {name: pytest.approx(value) for name, value in seconds.snapshot().items() if value}


def test_every_moment_belongs_to_one_category_and_the_sums_to_the_life(clock: Clock) -> None:
    seconds = Seconds(2.0, clock)
    clock.now_s += 1.0
    seconds.started()
    spend(seconds, clock, input=0.25, compute=4.0, exchange=1.0, wait=2.0, reconfigure=0.5)
    assert told(seconds) == {
        "startup": 3.0, "input": 0.25, "compute": 4.0, "exchange": 1.0, "wait": 2.0, "reconfigure": 0.5
    }  # fmt: skip
    assert sum(seconds.snapshot().values()) == pytest.approx(2.0 + clock.now_s - 100.0)


def test_all_before_the_first_batch_is_start_up_but_for_checkpoints(clock: Clock) -> None:
    seconds = Seconds(0.0, clock)
    spend(seconds, clock, startup=1.0, exchange=2.0, wait=3.0, checkpoint=4.0, input=5.0)
    assert seconds.starting
    seconds.started()
    assert not seconds.starting
    assert told(seconds) == {"startup": 11.0, "checkpoint": 4.0}


def test_an_attempt_that_is_given_up_becomes_redone_work_and_its_waiting_stays(clock: Clock) -> None:
    seconds = Seconds(0.0, clock)
    seconds.started()
    spend(seconds, clock, compute=10.0, exchange=1.0, wait=1.0)
    seconds.switch(INPUT)
    seconds.begin_attempt()
    spend(seconds, clock, compute=2.0, exchange=0.5, wait=4.0, reconfigure=3.0)
    assert seconds.give_up() == (pytest.approx(2.5), pytest.approx(4.0))
    assert told(seconds) == {"compute": 10.0, "exchange": 1.0, "wait": 5.0, "reconfigure": 3.0, "redone": 2.5}
    assert seconds.give_up() == (0.0, 0.0), "nothing is given up twice"
    assert seconds.category == RECONFIGURE


def test_during_goes_back_to_where_it_was_even_after_an_error(clock: Clock) -> None:
    seconds = Seconds(0.0, clock)
    seconds.switch(COMPUTE)

    def write() -> None:
        with seconds.during(CHECKPOINT):
            clock.now_s += 2.0
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    clock.now_s += 1.0
    assert seconds.category == COMPUTE
    assert told(seconds) == {"checkpoint": 2.0, "compute": 1.0}


def test_switch_says_what_was_before(clock: Clock) -> None:
    seconds = Seconds(0.0, clock)
    seconds.switch(EXCHANGE)
    assert seconds.switch(WAIT) == EXCHANGE
