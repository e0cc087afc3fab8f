"""Plots as SVG text: lines and steps over an axis with marked moments, and stacked bars.

An SVG here has its size in pixels and is not scaled, so that its text stays readable; where a page must fit a narrow
screen, make the plot in two widths. Colors are variables: a page that shows plots includes `STYLE`, which has them for
light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f7f9; --ink: #1b2330; --soft: #5d6878; --grid: #dfe3e9;
  --blue: #2468c8; --teal: #12908e; --gray: #98a2b1; --amber: #d99a1c; --violet: #8656c9; --red: #cf3f3f;
  --silver: #c9d0da; --brown: #94683c; --green: #2c9150; --pink: #c74d8f; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161d; --panel: #1b212b; --ink: #e6eaf0; --soft: #9aa6b6;
  --grid: #2d3644; --blue: #68a2f5; --teal: #3fc0b8; --gray: #7d8897; --amber: #e3b04c; --violet: #b08cec;
  --red: #f07070; --silver: #4d596a; --brown: #c2976a; --green: #5cc481; --pink: #ea83b8; } }
svg.plot { display: block; max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg.plot text { fill: var(--soft); }
svg.plot text.strong { fill: var(--ink); font-weight: 600; }
svg.plot .grid { stroke: var(--grid); stroke-width: 1; }
"""
COLORS = ("blue", "amber", "teal", "violet", "pink", "green", "brown", "red")

_CHAR = 6.7  # the width of a character of the labels, in pixels; a little more than most need


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    color: str = "blue"
    steps: bool = False  # holds its value until the next point
    fill: bool = False


@dataclass(frozen=True)
class Marker:
    """A moment on the x axis: a thin line through the plot with a dot, and a text to hover over. Dots of moments that
    may be close together are told apart by their row, from the top."""

    x: float
    text: str
    color: str = "gray"
    row: int = 0


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One kind of piece of a stacked bar."""

    name: str
    color: str


def chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    markers: Sequence[Marker] = (),
    x_range: tuple[float, float] | None = None,
    y_from_zero: bool = False,
    y_whole: bool = False,
    log: bool | None = None,
    width: int = 960,
    height: int = 240,
) -> str:
    """Lines over a common x axis. `log`: the y axis; None for a logarithm where values are positive and span more than
    a hundredfold. `y_whole`: ticks at whole numbers only."""
    values = [y for line in lines for _, y in line.points if math.isfinite(y)]
    xs = [x for line in lines for x, _ in line.points]
    if not values:
        return ""
    x_lo, x_hi = x_range or (min(xs), max(xs))
    x_hi = x_hi if x_hi > x_lo else x_lo + 1.0
    y = _scale(values, y_from_zero, y_whole, log, height)
    labels = _labels(y.ticks, y.log)
    left = max(34.0, 14 + _CHAR * max(map(len, labels)))
    right, top, bottom = width - 14.0, 26.0, height - 36.0

    def px(value: float) -> float:
        return left + (value - x_lo) / (x_hi - x_lo) * (right - left)

    def py(value: float) -> float:
        return bottom - y.place(value) * (bottom - top)

    out = [f'<text x="4" y="14">{escape(y_label)}</text>']
    for tick, label in zip(y.ticks, labels, strict=True):
        at = py(tick)
        out.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{left - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    out += _x_axis(x_lo, x_hi, px, left, right, bottom, x_label)
    for marker in markers:
        if x_lo <= marker.x <= x_hi:
            at = px(marker.x)
            out.append(
                f'<g><title>{escape(marker.text)}</title><path d="M{at:.1f} {top:.1f}V{bottom:.1f}" '
                f'stroke="var(--{marker.color})" stroke-width="1.5" stroke-dasharray="3 3"/>'
                f'<circle cx="{at:.1f}" cy="{top + 10 * marker.row:.1f}" r="4" fill="var(--{marker.color})"/>'
                f'<path d="M{at:.1f} {top:.1f}V{bottom:.1f}" stroke="transparent" stroke-width="9"/></g>'
            )
    for line in lines:
        points = [(px(x), py(value)) for x, value in line.points if math.isfinite(value)]
        out.append(_path(line, points, bottom))
    return _svg(width, height, out, f"{y_label} over {x_label}")


def stacked_bars(
    bars: Sequence[Bar],
    parts: Sequence[Part],
    *,
    x_label: str,
    unit: str,
    shares: bool = False,
    width: int = 960,
    bar_height: int = 20,
) -> str:
    """One bar a row, each piece with a text to hover over. `shares`: every bar fills the width, and pieces that are
    wide enough carry their percentage."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    named = any(bar.name for bar in bars)
    left = 12 + 1.1 * _CHAR * max(len(bar.name) for bar in bars) if named else 1.0
    room = max(16, int(0.3 * width / _CHAR))  # characters of a note
    notes = min(room, max(len(bar.note) for bar in bars))
    right = width - (10 + _CHAR * notes if notes else 14.0)
    row, top = bar_height + 7, 2.0
    bottom = top + row * len(bars)
    out: list[str] = []

    def px(value: float) -> float:
        return left + value * (right - left)

    if not shares:
        out += _x_axis(0.0, longest, lambda value: px(value / longest), left, right, bottom, x_label)
    for index, bar in enumerate(bars):
        y, total = top + row * index, sum(bar.parts) or 1.0
        if bar.name:
            out.append(f'<text class="strong" x="2" y="{y + bar_height / 2 + 4:.1f}">{escape(bar.name)}</text>')
        at = 0.0
        for part, value in zip(parts, bar.parts, strict=True):
            share = value / (total if shares else longest)
            if share <= 0:
                continue
            x, wide = px(at), share * (right - left)
            at += share
            percent = f"{100 * value / total:.1f} %"
            said = f"{bar.name + ': ' if bar.name else ''}{part.name} {number(value)} {unit} ({percent})"
            out.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(wide, 0.4):.2f}" height="{bar_height}" '
                f'fill="var(--{part.color})"><title>{escape(said)}</title></rect>'
            )
            if shares and wide > _CHAR * len(percent) + 8:
                middle = x + wide / 2
                ink = "ink" if part.color == "silver" else "paper"  # the one color that is near to the paper
                out.append(
                    f'<text x="{middle:.1f}" y="{y + bar_height / 2 + 4:.1f}" text-anchor="middle" '
                    f'style="fill: var(--{ink}); font-weight: 600; pointer-events: none">{percent}</text>'
                )
        if bar.note:
            end = px(1.0) if shares else px(total / longest)
            note = bar.note if len(bar.note) <= room else f"{bar.note[: room - 1]}…"
            out.append(
                f'<text x="{end + 6:.1f}" y="{y + bar_height / 2 + 4:.1f}">{escape(note)}'
                f"<title>{escape(bar.note)}</title></text>"
            )
    return _svg(width, int(bottom + (2 if shares else 36)), out, x_label or "shares")


def legend(items: Sequence[tuple[str, str]]) -> str:
    """Names with their colors, as HTML."""
    spans = "".join(f'<span><i style="background: var(--{color})"></i>{escape(name)}</span>' for name, color in items)
    return f'<p class="legend">{spans}</p>'


def ticks(lo: float, hi: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers within [lo, hi], roughly so many."""
    if hi <= lo:
        return [lo]
    raw = (hi - lo) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / raw)))
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(lo / step - 1e-9)
    return [index * step for index in range(first, math.floor(hi / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short, and without zeros that say nothing: 1,250 · 0.05 · 1e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


def span(seconds: float) -> tuple[float, str]:
    """The unit for an axis of this many seconds: its size and its name."""
    for size_s, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 3 * size_s:
            return size_s, name
    return 1.0, "s"


@dataclass(frozen=True)
class _Scale:
    lo: float
    hi: float
    log: bool
    ticks: list[float]

    def place(self, value: float) -> float:
        """Between 0 at the bottom and 1 at the top."""
        if self.log:
            lo, hi = math.log10(self.lo), math.log10(self.hi)
            return (math.log10(max(value, self.lo)) - lo) / (hi - lo)
        return (value - self.lo) / (self.hi - self.lo)


def _scale(values: Sequence[float], from_zero: bool, whole: bool, log: bool | None, height: int) -> _Scale:
    lo, hi = min(values), max(values)
    if log is None:
        log = lo > 0 and hi / lo > 100 and not from_zero
    if log and lo > 0:
        low, high = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
        high = max(high, low + 1)
        every = max(1, math.ceil((high - low) / max(2, (height - 60) // 26)))
        return _Scale(10.0**low, 10.0**high, True, [10.0**power for power in range(low, high + 1, every)])
    if from_zero:
        lo = min(0.0, lo)
    if hi <= lo:
        margin = abs(lo) * 0.1 or 1.0
        lo, hi = (lo if from_zero else lo - margin), hi + margin
    about = max(2, (height - 60) // 40)
    margin = 0.06 * (hi - lo)
    hi, lo = hi + margin, lo if from_zero else lo - margin
    return _Scale(lo, hi, False, ticks(lo, hi, about, whole))


def _x_axis(
    lo: float, hi: float, px: Callable[[float], float], left: float, right: float, bottom: float, label: str
) -> list[str]:
    out = [f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>']
    free = 0.0
    places = ticks(lo, hi, max(2, int((right - left) / 80)))
    for tick, text in zip(places, _labels(places), strict=True):
        at = px(tick)
        half = _CHAR * len(text) / 2
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}"/>')
        if at - half >= free and at + half <= right + 14:
            out.append(f'<text x="{at:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{text}</text>')
            free = at + half + 6
    out.append(f'<text x="{right:.1f}" y="{bottom + 32:.1f}" text-anchor="end">{escape(label)}</text>')
    return out


def _labels(places: Sequence[float], log: bool = False) -> list[str]:
    """As fine as the distance of two ticks needs."""
    step = places[1] - places[0] if len(places) > 1 and not log else 0.0
    if step < 1e-3:
        return [number(place) for place in places]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{place:,.{digits}f}" for place in places]


def _path(line: Line, points: Sequence[tuple[float, float]], bottom: float) -> str:
    if not points:
        return ""
    if len(points) == 1 and not line.steps:
        x, y = points[0]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--{line.color})"/>'
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    path += [f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}" for x, y in rest]
    drawn = "".join(path)
    title = f"<title>{escape(line.name)}</title>"
    color = f"var(--{line.color})"
    area = ""
    if line.fill:
        closed = f"{drawn}V{bottom:.1f}H{points[0][0]:.1f}Z"
        area = f'<path d="{closed}" fill="{color}" fill-opacity="0.15" stroke="none"/>'
    return (
        f'<g>{title}{area}<path d="{drawn}" fill="none" stroke="{color}" stroke-width="1.8" '
        f'stroke-linejoin="round"/></g>'
    )


def _svg(width: int, height: int, body: Sequence[str], label: str) -> str:
    return (
        f'<svg class="plot" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(body)}</svg>'
    )
