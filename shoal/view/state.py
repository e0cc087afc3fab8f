"""The state of a job as one dictionary, whether it runs or is over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal import errors
from shoal.control import commands, rundir
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.progress import Passes, Progress, leased
from shoal.launch.screen import epoch_of
from shoal.metrics import read_events
from shoal.recipe import epochs_of
from shoal.wording import clock, counted, rate

OVER = frozenset({"finished", "ended", "failed", "not running"})  # phases of a job that does nothing any more


def name_of(run_dir: RunDir) -> str:
    """How other commands can call the job from here."""
    under_runs = run_dir.path.parent == rundir.RUNS.absolute()
    return run_dir.path.name if under_runs else os.path.relpath(run_dir.path)


def live(run_dir: RunDir, timeout_s: float = Timeouts().command_s) -> dict[str, Any]:
    """What the coordinator says; empty if none answers."""
    with contextlib.suppress(errors.JobNotFound):
        return commands.status(run_dir, timeout_s)
    return {}


def state_of(run_dir: RunDir) -> dict[str, Any]:
    """What the coordinator says, or what is left of a job that is over; `progress` is None before a first pass."""
    state = live(run_dir) or _left(run_dir)
    progress = Passes(run_dir.audit, epochs_of(run_dir.settings())).progress(state)
    return {**state, "progress": None if progress is None else asdict(progress)}


def _left(run_dir: RunDir) -> dict[str, Any]:
    events = read_events(run_dir.events)
    phase, reason = _silent(run_dir) if run_dir.runs() else how_it_ended(events)
    committed = run_dir.committed()
    if committed is None:  # it was killed, or its coordinator was: what its workers wrote down is all there is
        report = audited(run_dir)
        committed = Committed(0, report.trained_steps, report.epoch, report.trained_samples, None)
    settings = run_dir.settings()
    return {
        "dir": str(run_dir.path),
        "phase": phase,
        "reason": reason,
        "generation": max((event["number"] for event in events if event["event"] == "generation"), default=0),
        "workers": [],
        **asdict(committed),
        "rate": 0.0,
        **{name: settings.get(name) for name in ("target", "min", "max")},
    }


def _silent(run_dir: RunDir) -> tuple[str, str]:
    if run_dir.address() is None:
        return "starting", ""
    return "not answering", "the job runs, and its coordinator does not answer"


def of_this_life(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Those since the job was last resumed."""
    resumed = [index for index, event in enumerate(events) if event["event"] == "resumed"]
    return events[resumed[-1] :] if resumed else events


def how_it_ended(events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Phase and reason of a job that nobody runs any more."""
    told = {event["event"]: event for event in of_this_life(events)}
    if "over" in told:
        return told["over"]["phase"], told["over"]["text"]
    if "failed" in told and "stopping" in told:
        return "failed", f"{told['failed']['worker_id']} failed: {told['failed']['text']}"
    if "finished" in told:
        return "finished", ""
    if "ended" in told:
        return "ended", told.get("stopping", {}).get("text", "")
    return "not running", "it was killed, or has not begun"


def line_of(name: str, state: Mapping[str, Any]) -> str:
    """One line for people."""
    progress = Progress(**state["progress"]) if state["progress"] else None
    reason = state["reason"]
    if state["phase"] == "not running":
        reason += f"; go on with shoal resume {name}"
    phase = f"{state['phase']} ({reason})" if reason else state["phase"]
    parts = [phase, f"generation {state['generation']}", epoch_of(state, progress), f"step {state['step']:,}"]
    parts.append(counted(state["samples"], "sample"))
    if state["phase"] == "running":
        parts.append(f"{rate(state['rate'])} samples/s")
    if state["loss"] is not None:
        parts.append(f"loss {state['loss']:.4f}")
    if state.get("alike_at") is not None:
        parts.append(f"states alike at step {state['alike_at']:,}")
    if progress is not None and state["phase"] not in OVER:
        left_s = progress.left_s(state["rate"])
        parts.append(f"{progress.fraction:.0%} done" + (f", ETA {clock(left_s)}" if left_s is not None else ""))
    return f"{name}: {', '.join(parts)}"


def audited(run_dir: RunDir) -> Any:
    """The report of the audit, up to the newest commit that is known."""
    # numpy costs a tenth of a second, which other commands need not pay
    from shoal.data.audit import audit

    if leased(run_dir.audit) or not any(run_dir.audit.glob("*")):
        # There is no commit to know of: at the end of a job its launcher would wait for a coordinator that has gone.
        return audit(run_dir.audit, None)
    committed = run_dir.committed()
    seq = committed.seq if committed is not None else live(run_dir).get("seq")
    return audit(run_dir.audit, seq or None)
