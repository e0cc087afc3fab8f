"""Two workers train, one is killed, two join: what that cost, beside a run that nobody disturbed.

make demo
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.testing import FaultPlan, JobResult, LocalJob

SCRIPT = Path(__file__).parent / "digits.py"


@dataclass(frozen=True)
class Outcome:
    result: JobResult
    accuracy: float
    steps: list[tuple[float, int]]  # when each was committed, by how many workers


def main() -> int:
    console = Console()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        with console.status("training with two workers, undisturbed …"):
            calm = run(Path(folder), "calm", disturb=False)
        with console.status("the same again: one worker is killed, two join …"):
            disturbed = run(Path(folder), "disturbed", disturb=True)
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
    return 0 if same and disturbed.result.audit.clean else 1


def run(folder: Path, name: str, *, disturb: bool) -> Outcome:
    out = folder / f"{name}-out"
    out.mkdir()
    # `kill -9` in the middle of a step; the launcher replaces the dead worker, and one more is asked for.
    plan = FaultPlan().kill("w1", step=60, during="reduce").join(at_step=150) if disturb else None
    job = LocalJob(SCRIPT, [str(out)], workers=2, directory=folder / name, plan=plan, options=["--quiet"])
    result = job.run()
    finished = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    longest: dict[str, Any] = max(finished, key=lambda one: len(one["steps"]), default={"accuracy": 0.0, "steps": []})
    return Outcome(result, longest["accuracy"], [(at, size) for at, size in longest["steps"]])


def table(outcome: Outcome) -> Table:
    shown = Table(title="what happened, and what it cost the others")
    for column in ("second", "event", "workers", "ms lost"):
        shown.add_column(column, justify="left" if column == "event" else "right")
    first_s = outcome.steps[0][0]
    for event in outcome.result.of("generation")[1:]:
        if not event["members"] or event["time"] > outcome.steps[-1][0]:
            continue
        lost_ms = stall_s(outcome.steps, event["time"]) * 1e3
        shown.add_row(
            f"{event['time'] - first_s:.2f}", event["cause"], str(len(event["members"])), f"{max(0.0, lost_ms):.0f}"
        )
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
