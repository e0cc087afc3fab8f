"""Two workers train, one is killed, two join, the coordinator is killed: what that cost, beside a run that nobody
disturbed. The second run is shown live, as `shoal top` does, and ends with a report.

make demo
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.control.rundir import RunDir, default_path
from shoal.report.page import page
from shoal.report.read import read
from shoal.testing import FaultPlan, JobResult, LocalJob
from shoal.view.top import watch

SCRIPT = Path(__file__).parent / "digits.py"


@dataclass(frozen=True)
class Outcome:
    result: JobResult
    accuracy: float
    steps: list[tuple[float, int]]  # when each was committed, by how many workers
    report: Path | None  # a page about the run


def main() -> int:
    console = Console()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        with console.status("training with two workers, undisturbed …"):
            calm = run(Path(folder), "calm")
        console.print("the same again: one worker is killed, two join, and the coordinator is killed …")
        disturbed = run(Path(folder), "disturbed", console)
    for outcome in (calm, disturbed):
        if outcome.result.exit_code != 0:
            console.print(outcome.result.output, highlight=False)
            return 1
    console.print(table(disturbed))
    console.print(
        f"accuracy on held-out digits: [bold]{disturbed.accuracy:.3f}[/] disturbed, "
        f"[bold]{calm.accuracy:.3f}[/] undisturbed ({len(disturbed.steps)} and {len(calm.steps)} steps)",
        highlight=False,
    )
    same = len(set(disturbed.result.digests.values())) == 1
    print(f"final state: {'the same bits' if same else 'DIFFERENT'} on {len(disturbed.result.digests)} workers")
    print(disturbed.result.audit)
    console.print(f"[dim]{time.monotonic() - began_s:.0f} s in all[/]", highlight=False)
    print(f"where the time went: {disturbed.report}")
    return 0 if same and disturbed.result.audit.clean else 1


def run(folder: Path, name: str, console: Console | None = None) -> Outcome:
    """One run, watched and disturbed if there is a console to show it on."""
    out = folder / f"{name}-out"
    out.mkdir()
    # `kill -9` in the middle of a step; the launcher replaces the dead worker, and one more is asked for.
    plan = FaultPlan().kill("w1", step=60, during="reduce").join(at_step=150) if console is not None else None
    directory = folder / name if console is None else default_path("demo")
    job = LocalJob(SCRIPT, [str(out)], workers=2, directory=directory, plan=plan, options=["--quiet"])
    job.start()
    report = None
    if console is not None:
        threading.Thread(target=kill_coordinator, args=(job,), daemon=True).start()
        run_dir = RunDir(directory.absolute())
        job.wait_until(run_dir.runs)
        watch(run_dir, console)
    result = job.wait()
    if console is not None:
        report = run_dir.path / "report.html"
        report.write_text(page(read(run_dir, {})))
    finished = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    longest: dict[str, Any] = max(finished, key=lambda one: len(one["steps"]), default={"accuracy": 0.0, "steps": []})
    return Outcome(result, longest["accuracy"], [(at, size) for at, size in longest["steps"]], report)


def kill_coordinator(job: LocalJob) -> None:
    """In the middle of the training, which goes on without it until there is another."""
    job.wait_until(lambda: job.status().get("step", 0) > 220)
    job.kill_coordinator()


def table(outcome: Outcome) -> Table:
    shown = Table(title="what happened, and what it cost the others")
    for column in ("second", "event", "workers", "ms lost"):
        shown.add_column(column, justify="left" if column == "event" else "right")
    first_s = outcome.steps[0][0]
    founding, *events = [event for event in outcome.result.events if event["event"] in ("generation", "restarted")]
    workers = len(founding["members"])
    for event in events:
        if event["time"] > outcome.steps[-1][0] or not event.get("members", True):
            continue
        workers = len(event["members"]) if "members" in event else workers
        cause = event.get("cause") or f"coordinator restarted {event['text']}"
        lost_ms = stall_s(outcome.steps, event["time"]) * 1e3
        shown.add_row(f"{event['time'] - first_s:.2f}", cause, str(workers), f"{max(0.0, lost_ms):.0f}")
    return shown


def stall_s(steps: list[tuple[float, int]], at_s: float) -> float:
    """How much longer than a usual step the gap between two commits around this moment was."""
    times = [time_s for time_s, _ in steps]
    gaps = list(itertools.pairwise(times))
    usual_s = statistics.median(after - before for before, after in gaps)
    around = [after - before for before, after in gaps if after >= at_s][:3]
    return max(around, default=0.0) - usual_s


if __name__ == "__main__":
    sys.exit(main())
