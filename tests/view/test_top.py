"""The screen of `shoal top`, state by state: always as large as the terminal, never larger."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from shoal.data.progress import Progress
from shoal.view.top import CATEGORIES, History, Point, Snapshot, screen_of, sparks, world

PROGRESS = Progress(0, epoch=2, epochs=30, epoch_done=438, epoch_samples=1438, done=3314, total=43_140)


def worker(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "worker_id": f"w{number}",
        "rank": number,
        "slot": number,
        "host": "box",
        "state": "member",
        "pid": 4000 + number,
        "step": 120,
        "suspect": False,
        **changes,
    }


def status(workers: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "dir": "/runs/a",
        "phase": "running",
        "reason": "",
        "generation": 7,
        "workers": [worker(number) for number in range(workers)],
        "seq": 121,
        "step": 120,
        "epoch": 2,
        "samples": 3314,
        "rate": 500.0,
        "loss": 0.25,
        "target": workers,
        "min": 1,
        "max": 8,
        **changes,
    }


def history(seconds: dict[str, dict[str, float]] | None = None) -> History:
    """Ten looks at a job of 10 steps and 100 samples a second."""
    found = History()
    for look in range(10):
        spent = {who: {name: look * s for name, s in told.items()} for who, told in (seconds or {}).items()}
        steps = {f"w{number}": 10 * look for number in range(3)}
        found.add(Point(float(look), 10 * look, 100 * look, steps, spent))
    return found


def snapshot(**changes: Any) -> Snapshot:
    events = [
        {"time": 1010.0 + number, "event": "generation", "number": number + 1, "members": ["w0"] * (number + 1)}
        | {"leavers": [], "fault": False, "paused": False, "cause": f"w{number} joined"}
        for number in range(3)
    ]
    base: dict[str, Any] = {
        "name": "digits-20260101-120000",
        "now_s": 1083.0,
        "created_s": 1000.0,
        "status": status(),
        "progress": PROGRESS,
        "sizes": [(event["time"], len(event["members"])) for event in events],
        "events": events,
        "history": history(),
    }
    return Snapshot(**{**base, **changes})


def shown(at: Snapshot, width: int = 80, height: int = 24, plain: bool = False) -> list[str]:
    """The lines as a terminal of that size shows them, none of them wrapped or missing."""
    console = Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=True)
    console.print(screen_of(at, width, height, plain), end="", soft_wrap=True)
    lines = console.export_text().split("\n")
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    return [line.rstrip() for line in lines]


STARTING = snapshot(
    status=status(0, phase="starting", generation=0, step=0, samples=0, loss=None, rate=0.0, target=3),
    progress=None,
    sizes=[],
    events=[],
    history=History(),
)
STATES = {
    "connecting": snapshot(status=None, progress=None, sizes=[], events=[], history=History()),
    "starting": STARTING,
    "running": snapshot(),
    "paused": snapshot(status=status(1, phase="paused", target=3, min=2)),
    "no answer": snapshot(silent_s=12.0),
    "stopping": snapshot(status=status(phase="stopping", reason="shoal stop")),
    "ended": snapshot(status=status(0, phase="ended", reason="every worker has gone", target=3)),
    "failed": snapshot(status=status(0, phase="stopping", reason="w1 failed: ValueError: " + "x" * 500)),
    "crowded": snapshot(status=status(200)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 10), (20, 3)])
@pytest.mark.parametrize("plain", [False, True])
def test_every_state_fills_a_terminal_of_any_size(state, width, height, plain):
    lines = shown(STATES[state], width, height, plain)
    assert lines[-1].startswith("q quits; the job go")
    if plain:
        assert all(line.isascii() for line in lines if " → " not in line)


def test_running_job_is_told_with_its_numbers_and_units():
    lines = shown(STATES["running"])
    assert " ".join(lines[0].split()) == "digits-20260101-120000 running generation 7 up 1:23"
    assert lines[2].startswith("progress   ━━━──")
    assert lines[2].endswith("   8%  ETA 6:38")
    assert lines[3].strip() == "epoch 3 of 30: 438 of 1,438 samples, in all 3,314 of 43,140"
    assert lines[4] == "speed      step 120   10.0 steps/s   100 samples/s   loss 0.2500"
    assert lines[6].endswith("  3 of 3")
    assert lines[9].split() == ["worker", "rank", "state", "step", "steps/s", "pid"]
    assert lines[10].split() == ["w0", "0", "member", "120", "10.0", "4000"]
    assert lines[14] == "events"
    assert lines[17].endswith("generation 2 → 3: w2 joined, 3 workers")


def test_job_that_does_not_run_promises_no_end():
    for state in ("paused", "stopping", "ended"):
        assert not any("ETA" in line for line in shown(STATES[state]))


def test_coordinator_that_is_away_is_told_and_the_last_answer_stays():
    lines = shown(STATES["no answer"])
    assert "no answer" in lines[0]
    assert lines[1] == "the coordinator has not answered for 0:12; asking again, what follows is old"
    assert any(line.startswith("w2 ") for line in lines)


def test_reason_of_an_end_is_told_in_one_line():
    assert shown(STATES["stopping"])[1] == "shoal stop"
    assert shown(STATES["failed"])[1].endswith("x…")
    lines = shown(snapshot(status=status(reason="w1 failed:\n\t\x1b[2Jred\x07")))
    assert lines[1] == "w1 failed: [2Jred"


def test_more_workers_than_fit_are_counted():
    lines = shown(STATES["crowded"])
    listed = sum(line.startswith("w") and "member" in line for line in lines)
    assert f"and {200 - listed} workers more" in lines
    assert "events" in lines
    assert sum(line.startswith("w") and "member" in line for line in shown(STATES["crowded"], 80, 300)) == 200


def test_worker_that_is_suspect_or_not_yet_in_stands_out():
    workers = [worker(0, suspect=True), worker(1, rank=None, state="warm", step=None)]
    lines = shown(snapshot(status={**status(), "workers": workers}))
    assert any(line.startswith("w0         0  member, suspect") for line in lines)
    assert any(line.startswith("w1            warm ") for line in lines)


def test_where_the_time_went_is_a_bar_for_the_job_and_for_each_worker():
    seconds = {"w0": {"compute": 0.75, "exchange": 0.25}, "w1": {"compute": 0.25, "wait": 0.75}}
    lines = shown(snapshot(history=history(seconds)))
    (at,) = (number for number, line in enumerate(lines) if line.startswith("time "))
    assert "".join(letter for letter, _ in itertools.groupby(lines[at].split()[1])) == "cxw"
    assert lines[at + 1].split("  ") == [*[""] * 5, " c compute 50%", "w wait 38%", "x exchange 12%"]
    bars = {line[:2]: line.split()[-1] for line in lines if line.startswith(("w0 ", "w1 ", "w2 "))}
    for whose, letters in {"w0": "cx", "w1": "cw"}.items():
        assert "".join(letter for letter, _ in itertools.groupby(bars[whose])) == letters
    assert bars["w0"].count("c") / len(bars["w0"]) == pytest.approx(0.75, abs=0.1)
    assert bars["w2"].isdecimal()  # it does not tell
    assert "where its time goes" not in "".join(shown(STATES["running"]))


def test_letters_of_categories_differ():
    assert len({letter for letter, _ in CATEGORIES.values()}) == len(CATEGORIES)


def test_short_loss_of_a_worker_is_seen_in_the_world_over_time():
    sizes = [(10.0, 4), (50.0, 2), (50.1, 4), (90.0, 8)]
    assert world(sizes, 0.0, 100.0, 10, plain=True) == " ====:===#"
    assert world(sizes, 60.0, 100.0, 4, plain=True) == "===#"


def test_sparks_rise_with_their_values():
    assert sparks([0.0, 1.0, 4.0, 8.0], 8.0) == " ▂▅█"
    assert sparks([0.0, 0.0], 0.0) == "  "


def test_rate_is_over_the_window_and_survives_a_silent_coordinator():
    found = History()
    for at_s, samples in [(0.0, 0), (10.0, 1000), (40.0, 1000), (41.0, 4100)]:
        found.add(Point(at_s, samples // 10, samples, {}, {}))
    assert found.samples_rate() == pytest.approx(100.0)
    assert found.step_rate() == pytest.approx(10.0)
    assert found.step_rate("w0") is None


def test_coordinator_that_begins_again_and_knows_less_is_not_a_step_back():
    found = history()
    found.add(Point(10.0, 0, 0, {}, {}))
    assert found.samples_rate() == pytest.approx(100.0)


def test_legend_of_all_categories_is_whole_at_80_columns():
    every = dict.fromkeys(CATEGORIES, 1.0)
    lines = shown(snapshot(history=history({"w0": every})))
    legend = " ".join(line.strip() for line in lines if "%" in line and "ETA" not in line)
    assert all(f"{letter} {name} 12%" in legend for name, (letter, _) in CATEGORIES.items()), legend
    assert "…" not in legend
