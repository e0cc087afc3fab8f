"""The workers of a job as a picture: a box for each host, a circle for each worker, and whom each exchanges with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_RADIUS = 22
_GAP = 74
_TOP = 44
_COLORS = {
    "member": "green",
    "leaving": "amber",
    "warm": "teal",
    "following": "teal",
    "joining": "silver",
    "parted": "gray",
}
_HOST_WIDE = 640


def picture(workers: Sequence[Mapping[str, Any]]) -> str:
    """An SVG; hosts below each other, each with its workers in the order of their ranks. A line joins members that
    exchange: all with all."""
    if not workers:
        return '<p class="soft">no workers</p>'
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for worker in sorted(workers, key=lambda one: (one["host"], one["rank"] is None, one["rank"] or 0)):
        hosts.setdefault(worker["host"], []).append(worker)
    parts, y, places = [], 0, {}
    for host, here in hosts.items():
        a_row = max(1, (_HOST_WIDE - 20) // _GAP)
        rows = math.ceil(len(here) / a_row)
        height = _TOP + rows * _GAP
        parts.append(
            f'<rect x="1" y="{y + 1}" width="{_HOST_WIDE - 2}" height="{height - 8}" rx="8" fill="var(--panel)"/>'
            f'<text x="14" y="{y + 22}">{escape(host)}</text>'
        )
        for index, worker in enumerate(here):
            x = 46 + index % a_row * _GAP
            places[worker["worker_id"]] = (x, y + _TOP + 18 + index // a_row * _GAP, worker)
        y += height
    members = [(x, at) for x, at, worker in places.values() if worker["rank"] is not None]
    for index, (x, at) in enumerate(members):
        for other_x, other_at in members[index + 1 :]:
            bend = min(30.0, abs(other_x - x) / 6)
            parts.append(
                f'<path d="M{x} {at} Q{(x + other_x) / 2} {(at + other_at) / 2 - bend} {other_x} {other_at}" '
                f'fill="none" stroke="var(--grid)" stroke-width="2"/>'
            )
    parts += [_circle(x, at, worker) for x, at, worker in places.values()]
    return (
        f'<svg class="plot" id="workers" viewBox="0 0 {_HOST_WIDE} {y}" width="{_HOST_WIDE}" height="{y}" role="img" '
        f'aria-label="{len(workers)} workers">{"".join(parts)}</svg>'
    )


def _circle(x: int, y: int, worker: Mapping[str, Any]) -> str:
    color = "red" if worker["suspect"] else _COLORS.get(worker["state"], "gray")
    rank = "–" if worker["rank"] is None else worker["rank"]
    state = f"{worker['state']}, suspect" if worker["suspect"] else worker["state"]
    title = f"{worker['worker_id']}: {state}, rank {rank}, step {worker['step']}, pid {worker['pid']}"
    return (
        f'<g class="worker {escape(worker["state"])}"><title>{escape(title)}</title>'
        f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="var(--paper)" stroke="var(--{color})" stroke-width="4"/>'
        f'<text x="{x}" y="{y + 5}" text-anchor="middle" class="strong">{rank}</text>'
        f'<text x="{x}" y="{y + 38}" text-anchor="middle">{escape(worker["worker_id"])}</text></g>'
    )
