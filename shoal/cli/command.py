"""Commands to a job that runs."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from shoal import errors
from shoal.cli.options import JobArgument, JsonOption, jobs, named
from shoal.cli.shell import app
from shoal.control import commands, rundir
from shoal.control.generation import MAX_SLOTS
from shoal.control.rundir import RunDir
from shoal.metrics import read_events
from shoal.view.state import how_it_ended, live, name_of
from shoal.wording import counted

_POLL_S = 0.1


@app.command(
    epilog="""**Examples**

`shoal scale train-20260101-120000 6` — six workers, whether that is more or fewer

`shoal scale runs/a 1`"""
)
def scale(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", callback=named, help="A run directory, or a name under ./shoal-runs.", autocompletion=jobs
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="N", help="How many workers.")],
) -> int:
    """Change the number of workers of a running job."""
    if not target.isdecimal() or not 1 <= int(target) <= MAX_SLOTS:
        raise errors.SettingsContradict(
            f"cannot scale to {target}: write a number of workers from 1 to {MAX_SLOTS}, as shoal scale JOB 4"
        )
    run_dir = rundir.find(job)
    if not run_dir.runs():
        raise errors.JobNotFound(f"{_ended(run_dir)}; go on with shoal resume {name_of(run_dir)} -n {target}")
    state = commands.scale(run_dir, int(target))
    wanted = f"{name_of(run_dir)}: {counted(state['target'], 'worker')} wanted"
    short = 0 < state["slots"] < state["target"]
    print(
        f"{wanted}; its hosts have {counted(state['slots'], 'slot')}, more come with other hosts" if short else wanted
    )
    return 0


@app.command(
    epilog="""**Examples**

`shoal stop` — the newest job; one that has ended already is no error

`shoal stop runs/a && shoal events runs/a --follow` — until it has really ended"""
)
def stop(job: JobArgument = None) -> int:
    """Let every worker finish its step and leave, and end the job."""
    run_dir = rundir.find(job)
    if not run_dir.runs():
        print(_ended(run_dir))
        return 0
    commands.stop(run_dir, "shoal stop")
    print(f"{name_of(run_dir)}: stopping")
    return 0


@app.command(
    epilog="""**Examples**

`shoal checkpoint` — of the newest job under ./shoal-runs

`shoal checkpoint runs/a --json | jq .path`"""
)
def checkpoint(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Take a checkpoint of the next step, and wait until it is on the disk."""
    run_dir = rundir.find(job)
    before = len(read_events(run_dir.events))
    asked = commands.checkpoint(run_dir)["generation"]
    while True:
        for event in read_events(run_dir.events)[before:]:
            if event["event"] == "checkpointed":
                print(json.dumps(event) if as_json else f"{event['path']}: {event['text']}")
                return 0
            if event["event"] == "checkpoint_failed":
                raise errors.ShoalError(event["text"])
        state = live(run_dir)
        if not state:
            raise errors.JobNotFound(f"{name_of(run_dir)} ended before it had taken a checkpoint; see shoal status")
        if state["generation"] != asked:  # the lowest rank may have gone with the request
            asked = commands.checkpoint(run_dir)["generation"]
        time.sleep(_POLL_S)


def _ended(run_dir: RunDir) -> str:
    """What there is to say to somebody who takes an ended job for a running one."""
    phase, reason = how_it_ended(read_events(run_dir.events))
    how = f"{phase}: {reason}" if phase == "failed" else reason or phase
    return f"{name_of(run_dir)} has ended ({how})"
