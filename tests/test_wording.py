from __future__ import annotations

import pytest

from shoal.wording import amount, clock, counted, rate


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (counted(1, "step"), "1 step"),
        (counted(0, "step"), "0 steps"),
        (counted(1200, "step"), "1,200 steps"),
        (clock(0.4), "0:00"),
        (clock(-3), "0:00"),
        (clock(59.6), "1:00"),
        (clock(3725), "1:02:05"),
        (clock(2 * 86400 + 3 * 3600), "2 d 3 h"),
        (amount(512), "512 B"),
        (amount(1536), "1.5 KiB"),
        (amount(300 << 30), "300 GiB"),
        (amount(2 << 50), "2,048 TiB"),
        (rate(1573.4), "1,573"),
        (rate(12.34), "12.3"),
        (rate(0.054), "0.05"),
    ],
)
def test_numbers_are_said_with_their_units_and_no_more_digits_than_help(said, text):
    assert said == text
