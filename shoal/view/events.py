"""`shoal events`: what happened, as lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.control.rundir import RunDir
from shoal.launch.screen import transition_line
from shoal.launch.tail import Tail

POLL_S = 0.2


def event_line(event: Mapping[str, Any]) -> str:
    """One line, without its time, for an event of any kind."""
    if (told := transition_line(event)) is not None:
        return told
    text = str(event.get("text", ""))
    if event["event"] == "over":
        return f"job {event['phase']}" + (f": {text}" if text else "")
    if event["event"] == "finished" and "step" in event:
        text = f"step {event['step']:,}"
    if event["event"] == "ended":
        text = "every worker has gone"
    who = event.get("worker_id")
    what = f"{who} {event['event']}" if who else str(event["event"])
    return f"{what}: {text}" if text else what


def time_of(event: Mapping[str, Any]) -> str:
    """Local time, to the millisecond."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"])) + f".{int(event['time'] % 1 * 1000):03}"


def events(run_dir: RunDir, follow: bool) -> Iterator[dict[str, Any]]:
    """The events of the job so far; with `follow`, also those to come until the job has ended."""
    tail = Tail(run_dir.events)
    try:
        while True:
            over = not follow or not run_dir.runs()
            for line in tail.lines(last=over):
                yield json.loads(line)
            if over:
                return
            time.sleep(POLL_S)
    finally:
        tail.close()
