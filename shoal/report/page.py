"""A run as one page: HTML with everything in it, to be read offline and on a narrow screen too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from shoal.report import plots
from shoal.report.plots import Bar, Line, Marker, Part
from shoal.report.read import Change, Run
from shoal.seconds import GOOD, MEANING
from shoal.wording import counted

_WIDTHS = {"wide": 960, "middle": 640, "narrow": 328}  # pixels
_BINS = {"wide": 240, "middle": 160, "narrow": 80}
_WORKERS_SHOWN = 64
_EVENTS_SHOWN = 1000

# Plain words for the categories of `shoal.seconds`, and their colors.
_PARTS = {
    "compute": Part("computing", "blue"),
    "exchange": Part("exchanging and stepping", "teal"),
    "input": Part("waiting for data", "gray"),
    "wait": Part("waiting for the slowest", "amber"),
    "reconfigure": Part("reconfiguring", "violet"),
    "redone": Part("redone work", "red"),
    "startup": Part("starting up", "silver"),
    "checkpoint": Part("checkpoints", "brown"),
}
_MARKED = {"lost": "red", "joined": "green", "left": "gray", "other": "violet"}
_ROWS = {kind: row for row, kind in enumerate(_MARKED)}
_MARK_WORDS = {"lost": "killed or lost", "joined": "joined", "left": "left", "other": "other changes"}
STYLE = (
    plots.STYLE
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1008px; margin: 0 auto; padding: 20px 24px 48px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 8px; }
h3 { font-size: 14px; margin: 18px 0 4px; font-weight: 600; }
p { margin: 6px 0; }
.soft { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 10px; font-size: 13px; font-weight: 600;
  color: var(--paper); vertical-align: 3px; margin-left: 8px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 18px 0 8px; }
.card { background: var(--panel); border-radius: 8px; padding: 10px 12px; }
.card b { display: block; font-size: 21px; line-height: 1.25; font-weight: 650; }
.card span { color: var(--soft); font-size: 12.5px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); }
.legend i, td i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.box { overflow-x: auto; max-height: 560px; overflow-y: auto; border: 1px solid var(--grid); border-radius: 8px; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 600; position: sticky; top: 0; background: var(--panel); }
th, td { padding: 5px 12px; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.t { min-width: 150px; }
td.w { white-space: nowrap; }
@media (max-width: 688px) { td.w { white-space: normal; } }
summary { cursor: pointer; font-weight: 600; margin: 36px 0 8px; font-size: 17px; }
.middle, .narrow, td small { display: none; }
.narrow svg { width: 100%; max-width: 460px; }
.middle svg { width: 100%; max-width: 780px; }
@media (max-width: 1008px) { .wide { display: none; } .middle { display: block; } }
@media (max-width: 688px) { .middle { display: none; } .narrow { display: block; }
  main { padding: 16px 16px 40px; } h1 { font-size: 20px; }
  td.m, th.m { display: none; } td small { display: block; color: var(--soft); white-space: normal; }
  .cards { grid-template-columns: 1fr 1fr; } .card b { font-size: 18px; } th, td { padding: 5px 9px; } }
"""
)


def page(run: Run) -> str:
    """The whole page."""
    title = f"{run.name} · shoal"
    going = '<p class="soft">This is the job as it was when the page was made.</p>' if run.phase == "running" else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body(run)}{going}</main></body></html>\n"
    )


def body(run: Run) -> str:
    """What is between the page's head and foot; it needs `STYLE`."""
    parts = (_header, _cards, _over_time, _goodput, _losses, _reconfigurations, _events)
    return "".join(part(run) for part in parts)


def summary(run: Run) -> list[str]:
    """A few lines for a terminal."""
    if run.goodput is None:
        return [f"{run.name}: {run.phase}, no worker has measured anything yet"]
    seconds = run.seconds
    total_s = sum(seconds.values())
    shares = [
        f"{_PARTS[name].name} {value / total_s:.1%}"
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
        if value / total_s >= 0.0005
    ]
    return [
        f"{run.name}: {run.phase}, {counted(run.steps, 'step')}, goodput {run.goodput:.1%} of "
        f"{_seconds(total_s)} of {counted(len(run.workers), 'worker')}",
        ", ".join(shares),
    ]


def figures(run: Run) -> dict[str, Any]:
    """The same for a program; everything in it can be written as JSON."""
    return {
        "name": run.name,
        "phase": run.phase,
        "reason": run.reason,
        "steps": run.steps,
        "samples_per_s": run.samples_per_s,
        "goodput": run.goodput,
        "seconds": run.seconds,
        "workers": [asdict(worker) for worker in run.workers],
        "reconfigurations": [asdict(change) for change in run.changes],
        "audit_clean": None if run.audit is None else run.audit.clean,
    }


def _header(run: Run) -> str:
    color = {"running": "blue", "finished": "green", "failed": "red", "not running": "red"}.get(run.phase, "gray")
    settings = run.settings
    script = " ".join([Path(str(settings.get("script", ""))).name, *map(str, settings.get("args", ()))])
    told = {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_s)),
        "took" if run.phase != "running" else "so far": _seconds(max(0.0, run.ended_s - run.began_s)),
        "workers wanted": _wanted(settings),
        "heartbeat budget": f"{settings['budget_s']:g} s" if "budget_s" in settings else None,
        "restarts allowed": settings.get("restarts"),
        "on error": settings.get("on_error"),
        "threads": settings.get("threads"),
        "shoal": settings.get("version"),
    }
    said = " · ".join(f"{name} {value}" for name, value in told.items() if value is not None)
    reason = f'<p class="soft">{escape(run.reason)}</p>' if run.reason else ""
    return (
        f'<h1>{escape(run.name)}<span class="badge" style="background: var(--{color})">{run.phase}</span>'
        f'</h1>{reason}<p class="soft">{escape(script)}</p><p class="soft">{escape(said)}.</p>'
    )


def _wanted(settings: dict[str, object]) -> str | None:
    if "target" not in settings:
        return None
    return f"{settings['target']} ({settings.get('min')} to {settings.get('max')})"


def _cards(run: Run) -> str:
    sizes = [size for _, size in run.sizes if size]
    members = f"{min(sizes)}–{max(sizes)}" if sizes and min(sizes) < max(sizes) else str(max(sizes, default=0))
    audit = run.audit
    if audit is None:
        checked = ("–", "audit: nothing to check")
    elif audit.clean:
        checked = ("clean", f"audit: {counted(audit.samples, 'sample')}, each trained once")
    else:
        checked = ("NOT CLEAN", f"audit: {audit.lost} lost, {audit.repeated} repeated")
    last_loss = next((line.loss for line in reversed(run.lines) if line.loss is not None), None)
    cost_s = sum(cost.total_s for change in run.changes for cost in change.costs.values())
    cards = [
        ("–" if run.goodput is None else f"{run.goodput:.1%}", "goodput: computing and exchanging"),
        (f"{run.steps:,}", "steps"),
        ("–" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}", "samples/s, all workers"),
        ("–" if last_loss is None else plots.number(last_loss), "last loss"),
        (members, f"workers at once, {len(run.workers)} in all"),
        (f"{run.count('lost')} / {run.count('joined')}", "lost / joined"),
        (_seconds(cost_s), f"worker time lost by {counted(len(run.changes), 'reconfiguration')}"),
        checked,
    ]
    shown = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in cards)
    return f'<div class="cards">{shown}</div>'


def _in_widths(make: Callable[[str, int], str]) -> str:
    """One plot in each of the widths that a page has."""
    return "".join(f'<div class="{name}">{make(name, width)}</div>' for name, width in _WIDTHS.items())


def _over_time(run: Run) -> str:
    if not run.sizes:
        return "<h2>Step rate and workers</h2><p>No generation has begun.</p>"
    ended_s = max(run.ended_s, run.sizes[-1][0])
    unit_s, unit = plots.span(ended_s - run.began_s)

    def at(time_s: float) -> float:
        return (time_s - run.began_s) / unit_s

    x_range = (0.0, at(ended_s))
    markers = [_marker(change, at(change.time_s), f"{at(change.time_s):.2f} {unit}") for change in run.changes]
    used = [kind for kind in _MARKED if any(kind == _kind(change) for change in run.changes)]
    sizes = [(at(time_s), float(size)) for time_s, size in run.sizes]
    sizes.append((x_range[1], sizes[-1][1]))

    def draw(name: str, width: int) -> str:
        rate = [(at(time_s), value) for time_s, value in run.rate(_BINS[name])]
        upper = plots.chart(
            [Line("steps a second", rate, "blue", fill=True)],
            x_label=f"time since the job began ({unit})", y_label="steps/s", markers=markers, x_range=x_range,
            y_from_zero=True, width=width, height=230,
        )  # fmt: skip
        lower = plots.chart(
            [Line("workers", sizes, "teal", steps=True, fill=True)],
            x_label=f"time since the job began ({unit})", y_label="workers", markers=markers, x_range=x_range,
            y_from_zero=True, y_whole=True, width=width, height=160,
        )  # fmt: skip
        return (upper or "<p>No step was committed.</p>") + lower

    words = plots.legend([(_MARK_WORDS[kind], _MARKED[kind]) for kind in used])
    return f"<h2>Step rate and workers over time</h2>{words}{_in_widths(draw)}"


def _marker(change: Change, x: float, when: str) -> Marker:
    kind = _kind(change)
    return Marker(x, f"{change.cause}: {_sizes(change)}, {when}", _MARKED[kind], _ROWS[kind])


def _kind(change: Change) -> str:
    if change.fault:
        return "lost"
    if change.after > change.before:
        return "joined"
    return "left" if change.after < change.before else "other"


def _sizes(change: Change) -> str:
    return f"{change.before} → {change.after}" + (", paused" if change.paused else "")


def _goodput(run: Run) -> str:
    if run.goodput is None:
        return "<h2>Where the time went</h2><p>No worker has measured anything yet.</p>"
    seconds = run.seconds
    total_s = sum(seconds.values())
    names = list(_PARTS)
    parts = list(_PARTS.values())
    job = Bar("", [seconds[name] for name in names])
    workers = [
        Bar(worker.worker_id, [worker.seconds[name] for name in names], worker.ended or "running")
        for worker in run.workers[:_WORKERS_SHOWN]
    ]
    longest_s = max((worker.total_s for worker in run.workers[:_WORKERS_SHOWN]), default=0.0)
    unit_s, unit = plots.span(longest_s)
    scaled = [Bar(bar.name, [part / unit_s for part in bar.parts], bar.note) for bar in workers]

    def whole(_: str, width: int) -> str:
        return plots.stacked_bars([job], parts, x_label="", unit="s", shares=True, width=width, bar_height=34)

    def each(_: str, width: int) -> str:
        return plots.stacked_bars(scaled, parts, x_label=f"life of the process ({unit})", unit=unit, width=width)

    rows = "".join(
        f'<tr><td class="w"><i style="background: var(--{_PARTS[name].color})"></i>{escape(_PARTS[name].name)}'
        f"{' ✓' if name in GOOD else ''}<small>{escape(MEANING[name])}</small></td>"
        f'<td class="n">{seconds[name] / total_s:.1%}</td><td class="n">{_seconds(seconds[name])}</td>'
        f'<td class="t m soft">{escape(MEANING[name])}</td></tr>'
        for name in names
        if seconds[name] or name in GOOD
    )
    more = len(run.workers) - len(workers)
    left_out = f'<p class="soft">and {counted(more, "worker")} more</p>' if more > 0 else ""
    return (
        f"<h2>Where the time went: goodput {run.goodput:.1%}</h2>"
        f'<p class="soft">Every second of every worker, {_seconds(total_s)} together; ✓ counts as goodput.</p>'
        f"{_in_widths(whole)}"
        f'<div class="box" style="margin-top: 10px"><table><tr><th>what</th><th class="n">share</th>'
        f'<th class="n">time</th><th class="m">meaning</th></tr>{rows}</table></div>'
        f"<h3>Each worker</h3>{_in_widths(each)}{left_out}"
    )


def _losses(run: Run) -> str:
    if not run.lines:
        return "<h2>Loss and metrics</h2><p>No step was committed.</p>"
    series: list[tuple[str, list[tuple[float, float]], str]] = []
    losses = [(float(line.step), line.loss) for line in run.lines if line.loss is not None]
    series.append(("loss", losses, "blue"))
    for index, name in enumerate(run.metric_names):
        points = [(float(line.step), line.metrics[name]) for line in run.lines if name in line.metrics]
        series.append((name, points, plots.COLORS[(index + 1) % len(plots.COLORS)]))
    norms = [(float(line.step), line.gradient_norm) for line in run.lines if line.gradient_norm is not None]
    if norms:
        series.append(("norm of the gradient", norms, "brown"))
    rates = [(float(line.step), line.learning_rate) for line in run.lines if line.learning_rate is not None]
    if len({rate for _, rate in rates}) > 1:
        series.append(("learning rate", rates, "green"))
    markers = [
        _marker(change, float(change.step), f"step {change.step:,}")
        for change in run.changes
        if change.step is not None
    ]

    def draw(_: str, width: int) -> str:
        charts = [
            plots.chart([Line(what, _thinned(points, width), color)],
                        x_label="step", y_label=what, markers=markers, width=width, height=210)
            for what, points, color in series
        ]  # fmt: skip
        return "".join(charts)

    several = any(line.steps > 1 for line in run.lines) or len(run.lines) > min(_WIDTHS.values())
    means = '<p class="soft">A point is a mean over neighboring steps.</p>' if several else ""
    return f"<h2>Loss and metrics</h2>{means}{_in_widths(draw)}"


def _thinned(points: Sequence[tuple[float, float]], at_most: int) -> list[tuple[float, float]]:
    """Means of neighbors, so that a long run still draws fast."""
    size = -(-len(points) // at_most)
    if size <= 1:
        return list(points)
    groups = (points[at : at + size] for at in range(0, len(points), size))
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def _reconfigurations(run: Run) -> str:
    if not run.changes:
        return "<h2>Reconfigurations</h2><p>The group never changed.</p>"
    rows = "".join(_row(run, change) for change in run.changes)
    return (
        "<h2>Reconfigurations</h2>"
        '<p class="soft">What each worker that went on lost: waiting for the one that died, parking and agreeing, and '
        "work that came again. Where nobody went on, nothing was lost.</p>"
        '<div class="box"><table id="reconfigurations">'
        '<tr><th class="n">at</th><th>cause</th><th class="n">workers</th><th class="n">step</th>'
        '<th class="n">median ms</th><th class="n">worst ms</th><th class="n">redone steps</th>'
        f"<th>ms each</th></tr>{rows}</table></div>"
    )


def _row(run: Run, change: Change) -> str:
    lost_ms = {worker_id: cost.total_s * 1e3 for worker_id, cost in change.costs.items()}
    detail = {
        worker_id: f"between generations {cost.took_s * 1e3:.1f} ms, waited {cost.waited_s * 1e3:.1f} ms, "
        f"redone {cost.redone_s * 1e3:.1f} ms"
        for worker_id, cost in change.costs.items()
    }
    each = " · ".join(
        f'<span title="{escape(detail[worker_id])}">{escape(worker_id)}&nbsp;{ms:.1f}</span>'
        for worker_id, ms in lost_ms.items()
    )
    median = f"{statistics.median(lost_ms.values()):.1f}" if lost_ms else "–"
    worst = f"{max(lost_ms.values()):.1f}" if lost_ms else "–"
    step = "–" if change.step is None else f"{change.step:,}"
    color = _MARKED[_kind(change)]
    return (
        f'<tr><td class="n">{_seconds(change.time_s - run.began_s)}</td>'
        f'<td class="t"><i style="background: var(--{color})"></i>{escape(change.cause)}</td>'
        f'<td class="n">{_sizes(change)}</td><td class="n">{step}</td><td class="n">{median}</td>'
        f'<td class="n">{worst}</td><td class="n">{change.redone_steps}</td><td class="t">{each or "–"}</td></tr>'
    )


def _events(run: Run) -> str:
    shown = run.events[-_EVENTS_SHOWN:]
    rows = "".join(
        f'<tr><td class="n">{_seconds(event["time"] - run.began_s)}</td><td>{escape(event["event"])}</td>'
        f"<td>{escape(str(event.get('worker_id', '')))}</td>"
        f'<td class="t">{escape(str(event.get("cause") or event.get("text") or ""))}</td></tr>'
        for event in shown
    )
    cut = f", the last {len(shown):,} of {len(run.events):,}" if len(shown) < len(run.events) else ""
    return (
        f"<details><summary>Events ({len(run.events):,}{cut})</summary>"
        '<div class="box"><table><tr><th class="n">at</th><th>event</th><th>worker</th><th>what</th></tr>'
        f"{rows}</table></div></details>"
    )


def _seconds(value_s: float) -> str:
    """A length of time for a person: 12 ms, 3.45 s, 12 min 5 s, 3 h 20 min."""
    if abs(value_s) < 1:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < 120:
        return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.1f} s"
    if value_s < 7200:
        return f"{value_s // 60:.0f} min {value_s % 60:.0f} s"
    return f"{value_s // 3600:,.0f} h {value_s % 3600 // 60:.0f} min"
