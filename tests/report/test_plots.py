from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from shoal.report.plots import Bar, Line, Marker, Part, chart, number, span, stacked_bars, ticks


@pytest.mark.parametrize(
    ("lo", "hi", "about", "found"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0, 4.2, 2, [0, 2, 4]),
        (0.21, 0.29, 4, [0.22, 0.24, 0.26, 0.28]),
        (3, 3, 5, [3]),
        (1e6, 3e6, 2, [1e6, 2e6, 3e6]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(lo: float, hi: float, about: int, found: list[float]) -> None:
    assert ticks(lo, hi, about) == pytest.approx(found)


def test_ticks_of_a_count_are_whole() -> None:
    assert ticks(0, 1.06, 4, whole=True) == [0, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (1e-4, "1e-4"), (0.00012, "1.2e-4"), (12.34, "12.3"), (123.4, "123"), (12500, "12,500")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_long_axis_is_in_a_long_unit() -> None:
    assert [span(seconds)[1] for seconds in (10, 100, 1000, 20000, 10**6)] == ["s", "s", "min", "h", "days"]


@pytest.mark.parametrize("width", [328, 960])
def test_everything_of_a_chart_lies_inside_it(width: int) -> None:
    lines = [Line("a<b", [(0.0, 1e-5), (5.0, 2.0), (10.0, 30.0)]), Line("n", [(0.0, 1.0), (4.0, 3.0)], steps=True)]
    drawn = ElementTree.fromstring(
        chart(lines, x_label="time (s)", y_label="loss", markers=[Marker(3.0, "w1 & w2 left")], width=width)
    )
    assert [title.text for title in drawn.iter("title")] == ["w1 & w2 left", "a<b", "n"]
    assert {"1e-5", "0.1", "10"} & {text.text for text in drawn.iter("text")}, "a range this wide is logarithmic"
    for text in drawn.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width


def test_a_chart_of_one_point_and_of_none() -> None:
    assert "<circle" in chart([Line("loss", [(3.0, 1.0)])], x_label="step", y_label="loss")
    assert chart([Line("loss", [])], x_label="step", y_label="loss") == ""
    assert chart([Line("loss", [(1.0, float("nan"))])], x_label="step", y_label="loss") == ""


def test_pieces_of_a_bar_add_up_to_its_length() -> None:
    parts = [Part("good", "blue"), Part("bad", "red"), Part("none", "gray")]
    bars = [Bar("w0", [6.0, 2.0, 0.0], "finished"), Bar("w1", [3.0, 1.0, 0.0])]
    drawn = ElementTree.fromstring(stacked_bars(bars, parts, x_label="s", unit="s"))
    widths = [float(piece.attrib["width"]) for piece in drawn.iter("rect")]
    assert len(widths) == 4
    assert widths[0] + widths[1] == pytest.approx(2 * (widths[2] + widths[3]), abs=0.1)
    assert "w0: good 6 s (75.0 %)" in [title.text for title in drawn.iter("title")]
