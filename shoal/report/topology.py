"""A topology as an SVG of its own: the ranks in a circle, an arrow for what goes one way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from shoal.report.plots import COLORS, STYLE
from shoal.sync.mixing import Mixing
from shoal.sync.topology import Hosts

_TOP = 56
_MARGIN = 44
_LINE = 17
_SIDE = 3


def svg(mixing: Mixing, title: str, lines: Sequence[str], hosts: Hosts | None = None) -> str:
    """`lines` stand below the picture, three side by side. Workers of a host have a color of their own."""
    workers = mixing.workers
    lines = ["   ·   ".join(lines[first : first + _SIDE]) for first in range(0, len(lines), _SIDE)]
    dot = max(4.0, min(17.0, 620 / max(1, workers)))
    radius = max(150.0, min(330.0, workers * 9.0))
    size = 2 * (radius + _MARGIN)
    width, height = max(size, 560.0), _TOP + size + 16 + _LINE * len(lines)
    middle_x, middle_y = width / 2, _TOP + size / 2

    def place(rank: float, at: float = radius) -> tuple[float, float]:
        angle = 2 * math.pi * rank / workers
        return middle_x + at * math.sin(angle) * (workers > 1), middle_y - at * math.cos(angle) * (workers > 1)

    edges = [(i, j) for i, row in enumerate(mixing.rows) for j in row if i != j]
    faint = max(0.12, min(0.85, 60 / max(1, len(edges))))
    parts = [
        f'<text class="strong" x="{middle_x:.0f}" y="28" text-anchor="middle" font-size="16">{escape(title)}</text>'
    ]
    for i, j in edges:
        back = i in mixing.rows[j]
        if back and i > j:
            continue
        parts.append(_edge(place(i), place(j), (middle_x, middle_y), dot, faint, _tip(mixing, i, j, back), back))
    colors = {host: COLORS[index % len(COLORS)] for index, host in enumerate(dict.fromkeys(hosts or (0,)))}
    for rank in range(workers):
        x, y = place(rank)
        color = colors[(hosts or (0,) * workers)[rank]]
        part = mixing.neighborhood(rank)
        said = f"rank {rank}: takes {part.self_weight:.3g} of itself; hears from {_ranks(part.sources)}; sends to "
        parts.append(
            f"<g><title>{escape(said + _ranks(part.destinations))}</title>"
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}" fill="var(--paper)" stroke="var(--{color})" '
            f'stroke-width="{2.5 if dot > 8 else 1.5}"/>'
        )
        if dot > 8:
            parts.append(f'<text class="strong" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{rank}</text>')
        parts.append("</g>")
    for index, line in enumerate(lines):
        y = _TOP + size + 10 + _LINE * index
        parts.append(f'<text x="{middle_x:.0f}" y="{y:.0f}" text-anchor="middle">{escape(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.6L8 4L0 7.4z" fill="var(--blue)"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _edge(
    begin: tuple[float, float],
    end: tuple[float, float],
    middle: tuple[float, float],
    dot: float,
    faint: float,
    tip: str,
    back: bool,
) -> str:
    """Bent a little to the middle, so that the two of a pair of neighbors and those through the middle are told apart;
    it ends where the circles of its ranks do."""
    (x, y), (to_x, to_y) = begin, end
    bend = 0.16
    at_x, at_y = ((a + b) / 2 + bend * (m - (a + b) / 2) for a, b, m in zip(begin, end, middle, strict=True))
    x, y = _towards(x, y, at_x, at_y, dot + 2)
    to_x, to_y = _towards(to_x, to_y, at_x, at_y, dot + 3)
    arrow = "" if back else ' marker-end="url(#tip)"'
    return (
        f'<path d="M{x:.1f} {y:.1f}Q{at_x:.1f} {at_y:.1f} {to_x:.1f} {to_y:.1f}" fill="none" stroke="var(--blue)" '
        f'stroke-width="1.6" opacity="{faint:.2f}"{arrow}><title>{escape(tip)}</title></path>'
    )


def _towards(x: float, y: float, to_x: float, to_y: float, far: float) -> tuple[float, float]:
    length = math.hypot(to_x - x, to_y - y) or 1.0
    return x + (to_x - x) * far / length, y + (to_y - y) * far / length


def _tip(mixing: Mixing, i: int, j: int, back: bool) -> str:
    said = f"{j} takes {mixing.rows[i][j]:.3g} of {i}"
    return f"{said}, {i} takes {mixing.rows[j][i]:.3g} of {j}" if back else said


def _ranks(weights: Mapping[int, float]) -> str:
    return ", ".join(map(str, sorted(weights))) or "nobody"
