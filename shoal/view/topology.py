"""A topology as people look at it: its facts, and a picture for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from shoal.sync import consensus
from shoal.sync.mixing import Mixing
from shoal.sync.topology import Hosts, Topology
from shoal.wording import counted

MOST_STEPS = 64  # of a schedule that are looked at, where its period is longer or it has none
_MOST_ROUND = 24  # workers that are drawn as a circle; of more, the matrix is
_MOST_LISTED = 8
_COLUMNS, _ROWS = 38, 18  # of the picture
_EDGE, _ARROW, _RANK = "blue", "bold cyan", "bold"
_ARROWS = "→↘↓↙←↖↑↗"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def facts_of(topology: Topology, workers: int, hosts: Hosts | None = None, step: int = 0) -> dict[str, Any]:
    """All that is told of it, as a program would read it. The neighbors are those of `step`, the rest is of a whole
    period, or as much of it as `steps` says. `sends`: how often a worker sends the model in a step, on average."""
    schedule = topology.on(workers, hosts)
    steps = min(schedule.period or MOST_STEPS, MOST_STEPS)
    mixings = [schedule.mixing(at) for at in range(steps)]
    whole = steps == schedule.period
    kinds: set[str] = {mixing.stochastic for mixing in mixings}
    sent = [degree for mixing in mixings for degree in mixing.out_degrees]
    received = [degree for mixing in mixings for degree in mixing.in_degrees]
    shown = schedule.mixing(step)
    return {
        "topology": str(topology),
        "workers": workers,
        "hosts": None if hosts is None else list(hosts),
        "period": schedule.period,
        "steps": steps,
        "out_degree": [min(sent), max(sent)],
        "in_degree": [min(received), max(received)],
        "sends": sum(sent) / len(sent),
        "undirected": all(mixing.undirected for mixing in mixings),
        "regular": all(mixing.regular for mixing in mixings),
        "stochastic": _weakest(kinds),
        "diameter": consensus.steps_to_hear(mixings),
        "spectral_gap": consensus.spectral_gap(mixings) if whole else None,
        "rate": consensus.rate(mixings) if whole else None,
        "steps_to_a_thousandth": consensus.steps_to_agree(mixings),
        "step": step,
        "neighbors": [_part(shown, rank) for rank in range(workers)],
    }


def _part(mixing: Mixing, rank: int) -> dict[str, Any]:
    part = mixing.neighborhood(rank)
    named = {"sources": part.sources, "destinations": part.destinations}
    return {"self_weight": part.self_weight} | {
        name: {str(other): weights[other] for other in sorted(weights)} for name, weights in named.items()
    }


def _weakest(kinds: set[str]) -> str:
    if kinds <= {"doubly"}:
        return "doubly"
    return next((kind for kind in ("column", "row") if kinds <= {"doubly", kind}), "neither")


def lines_of(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What there is to say, with the name of each; short enough to stand beside the picture."""
    period, steps = facts["period"], facts["steps"]
    if period is None:
        yield "period", f"none; {steps} steps seen"
    elif period > 1:
        yield "period", counted(period, "step") + (f"; {steps} seen" if steps < period else "")
    yield "sends to", _ranged(*facts["out_degree"]) + " a step"
    yield "hears from", _ranged(*facts["in_degree"]) + " a step"
    yield "traffic", f"{facts['sends']:.3g} × the model a step"
    yield "edges", f"{'undirected' if facts['undirected'] else 'directed'}, {'' if facts['regular'] else 'not '}regular"
    yield "weights", "not stochastic" if facts["stochastic"] == "neither" else f"{facts['stochastic']} stochastic"
    yield "average", "is kept" if facts["stochastic"] in ("doubly", "row") else "moves"
    yield "diameter", "not connected" if facts["diameter"] is None else counted(facts["diameter"], "step")
    if facts["spectral_gap"] is not None:
        yield "gap", f"{number(facts['spectral_gap'])}{' over a period' if steps > 1 else ''}"
        yield "disagreement", f"× {number(facts['rate'])} a step"
    agree = facts["steps_to_a_thousandth"]
    yield "to 1/1000", "never" if agree is None else f"in {counted(agree, 'step')}"


def number(value: float) -> str:
    """Of a number from 0 to 1: three digits, and more where they are all 0 or all 9."""
    near = min(value, 1 - value)
    return f"{value:.3f}" if near >= 0.01 or near < 1e-12 else f"{value:.{1 - math.floor(math.log10(near))}f}"


def _ranged(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def sent_in(facts: Mapping[str, Any]) -> Iterator[str]:
    """To whom each rank sends in the step that is shown: as distances, where these are everybody's, or a line each."""
    workers = facts["workers"]
    sent = [sorted(int(other) for other in part["destinations"]) for part in facts["neighbors"]]
    distances = {tuple(sorted((other - rank) % workers for other in to)) for rank, to in enumerate(sent)}
    if len(distances) == 1:
        (ahead,) = distances
        both = all(workers - distance in ahead for distance in ahead)
        kept = [distance for distance in ahead if not both or 2 * distance <= workers]
        said = [f"{'±' if both and 2 * distance < workers else '+'}{distance}" for distance in kept]
        yield f"each rank sends to {_some(said)}" if said else "nobody sends"
        return
    for rank, to in enumerate(sent[:_MOST_LISTED]):
        yield f"{rank} → {_some(list(map(str, to)))}" if to else f"{rank} sends nothing"
    if workers > _MOST_LISTED:
        yield f"and {workers - _MOST_LISTED} more (--json has all)"


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_LISTED]) + (f", … ({len(words)})" if len(words) > _MOST_LISTED else "")


# The picture


class Canvas:
    """Dots, eight of them a character, and characters that lie on top of them."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._dots: dict[tuple[int, int], int] = {}
        self._over: dict[tuple[int, int], tuple[str, str]] = {}

    def dot(self, x: float, y: float) -> None:
        column, row = int(x) // 2, int(y) // 4
        if 0 <= column < self._columns and 0 <= row < self._rows:
            bit = _DOTS[int(y) % 4][int(x) % 2]
            self._dots[row, column] = self._dots.get((row, column), 0) | bit

    def line(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        (x, y), (to_x, to_y) = begin, end
        pieces = max(1, round(max(abs(to_x - x), abs(to_y - y))))
        for piece in range(pieces + 1):
            self.dot(x + (to_x - x) * piece / pieces, y + (to_y - y) * piece / pieces)

    def write(self, x: float, y: float, text: str, style: str) -> None:
        """Its middle there."""
        first = round(x / 2 - len(text) / 2)
        for index, letter in enumerate(text):
            self._over[int(y) // 4, first + index] = letter, style

    def text(self) -> Text:
        lines = []
        for row in range(self._rows):
            line = Text()
            for column in range(self._columns):
                bits = self._dots.get((row, column), 0)
                letter, style = self._over.get((row, column), (chr(_BRAILLE | bits) if bits else " ", _EDGE))
                line.append(letter, style)
            lines.append(line)
        return Text("\n").join(lines)


def picture(mixing: Mixing) -> Text:
    """The ranks in a circle, clockwise from the top, with a line for each edge and an arrow where it goes one way. Of
    many workers, the matrix: a dot in row i and column j where i sends to j."""
    return _circle(mixing) if mixing.workers <= _MOST_ROUND else _matrix(mixing)


def _circle(mixing: Mixing) -> Text:
    workers = mixing.workers
    canvas = Canvas(_COLUMNS, _ROWS)
    middle_x, middle_y = _COLUMNS - 1.0, 2 * _ROWS - 2.0
    radius = 2.0 * _ROWS - 9 if workers > 1 else 0.0

    def place(rank: int, at: float) -> tuple[float, float]:
        angle = 2 * math.pi * rank / workers
        return middle_x + at * math.sin(angle), middle_y - at * math.cos(angle)

    one_way = [(i, j) for i, j in _edges(mixing) if i not in mixing.rows[j]]
    for i, j in _edges(mixing):
        canvas.line(place(i, radius), place(j, radius))
    if len(one_way) <= 2 * _MOST_ROUND:
        for i, j in one_way:
            (x, y), (to_x, to_y) = place(i, radius), place(j, radius)
            angle = math.atan2(to_y - y, to_x - x)
            canvas.write(
                x + 0.7 * (to_x - x), y + 0.7 * (to_y - y), _ARROWS[round(angle / math.pi * 4) % 8], _ARROW
            )  # nearer to its end, as two of opposite ways share their middle
    for rank in range(workers):
        x, y = place(rank, radius + 5 if workers > 1 else 0)
        canvas.write(x, y, str(rank), _RANK)
    return canvas.text()


def _matrix(mixing: Mixing) -> Text:
    workers = mixing.workers
    dots = min(workers, 2 * (_COLUMNS - 2), 4 * _ROWS)
    canvas = Canvas(-(-dots // 2), -(-dots // 4))
    for i, j in _edges(mixing):
        canvas.dot(j * dots // workers, i * dots // workers)
    return canvas.text()


def _edges(mixing: Mixing) -> Iterable[tuple[int, int]]:
    return ((i, j) for i, row in enumerate(mixing.rows) for j in row if i != j)
