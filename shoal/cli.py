"""The command line. It never imports torch, so that it answers at once.

Exit codes: 0 the job finished or was stopped; 2 something the user can put right, told in one line; 1 the job failed;
128 + n after signal n.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shoal import __version__, errors
from shoal.control import client, prometheus, rundir
from shoal.control.environment import WorkerEnvironment
from shoal.control.membership import counted
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.launch.job import Ending, Job, Size, parse_size
from shoal.launch.local import LocalLauncher
from shoal.launch.relaunch import Relaunch, default_restarts
from shoal.launch.screen import Screen
from shoal.metrics import read_events

app = typer.Typer(
    help="Train one PyTorch model on many workers that come and go.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

JobArgument = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A run directory, or a name under ./shoal-runs; the newest if left out."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


class OnErrorChoice(str, Enum):
    stop = "stop"
    relaunch = "relaunch"


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """`2G`, `512M`, `1.5GiB`: powers of 1024. Fails with SettingsContradict."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise errors.SettingsContradict(f"--memory {text} is not an amount of memory; write --memory 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def check_script(script: Path) -> None:
    """Fails with ScriptFailed for what can be known before torch is loaded: that it is not there, or does not parse."""
    try:
        source = script.read_bytes()
    except FileNotFoundError:
        raise errors.ScriptFailed(f"{script} does not exist; name a Python script") from None
    except OSError as problem:
        raise errors.ScriptFailed(f"{script} cannot be read: {problem.strerror}; name a Python script") from problem
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(script), "exec")
    except (SyntaxError, ValueError) as problem:
        where = f", line {problem.lineno}" if isinstance(problem, SyntaxError) and problem.lineno else ""
        text = problem.msg if isinstance(problem, SyntaxError) else problem
        raise errors.ScriptFailed(f"{script}{where}: {type(problem).__name__}: {text}") from None


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="""**Examples**

`shoal run -n 4 train.py` — four workers

`shoal run -n 2:8 train.py --lr 0.1` — elastic: pauses below two, grows to eight; what follows the script is its own

`shoal run -n 4 --dir runs/a --memory 2G --threads 2 --no-pin train.py`

Ctrl-C lets the workers finish their step and leave; Ctrl-C again kills them.""",
)
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script: it calls shoal.run(main).")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    workers: Annotated[
        str | None,
        typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; one for each core if left out."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory; a new one under ./shoal-runs if left out.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="How long an awaited worker may be silent.")
    ] = DEFAULT_BUDGET_S,
    on_error: Annotated[
        OnErrorChoice, typer.Option(help="When the script raises in a worker: stop the job, or start another worker.")
    ] = OnErrorChoice.stop,
    restarts: Annotated[
        int | None,
        typer.Option(help="Failed workers within a minute before the job gives up; 10, or 3 for each worker."),
    ] = None,
    backoff: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="The pause before replacing a worker that died young; doubles each time."),
    ] = Relaunch.first_delay_s,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="A cap on shared memory, as 2G; what the machine has if left out."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="torch threads of a worker; its share of the cores if left out.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Give each worker cores of its own.")] = True,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve figures for Prometheus there, on loopback if no host is named."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors and the summary only.")] = False,
) -> int:
    """Train with a script on this machine, while workers come and go."""
    cores = len(os.sched_getaffinity(0))
    size = parse_size(workers if workers is not None else str(cores), cores)
    timeouts = Timeouts(budget_s)
    if restarts is not None and restarts < 0:
        raise errors.SettingsContradict(f"--restarts {restarts} is below 0; 0 means that no worker is replaced")
    if threads is not None and threads < 1:
        raise errors.SettingsContradict(f"--threads {threads} is below 1; leave it out to divide the cores")
    memory_bytes = parse_bytes(memory) if memory is not None else None
    budget = restarts if restarts is not None else default_restarts(size.target)
    if backoff < 0:
        raise errors.SettingsContradict(f"--backoff {backoff:g} is below 0; 0 replaces a dead worker at once")
    relaunch = Relaunch(budget, first_delay_s=backoff)
    if metrics_port is not None:
        prometheus.check_free(*prometheus.parse_address(metrics_port))
    check_script(script)
    script = script.absolute()
    settings = {
        "script": str(script),
        "args": args or [],
        "min": size.min,
        "max": size.max,
        "target": size.target,
        "budget_s": budget_s,
        "on_error": on_error.value,
        "restarts": budget,
        "backoff_s": backoff,
        "memory_bytes": memory_bytes,
        "threads": threads,
        "pin": pin,
        "metrics_port": metrics_port,
        "version": __version__,
    }
    run_dir = RunDir.create(directory, settings) if directory else rundir.create_default(script, settings)
    make_launcher = functools.partial(
        LocalLauncher,
        script,
        args or [],
        run_dir.logs,
        memory_limit_bytes=memory_bytes,
    )
    inherited = WorkerEnvironment.from_env(os.environ)
    environment = WorkerEnvironment(
        threads=threads or 0,
        pin=pin,
        plugin=inherited.plugin,
        faults=inherited.faults and os.path.abspath(inherited.faults),
    )
    return _run_job(run_dir, size, timeouts, relaunch, on_error, environment, Screen(quiet), make_launcher)


def _run_job(
    run_dir: RunDir,
    size: Size,
    timeouts: Timeouts,
    relaunch: Relaunch,
    on_error: OnErrorChoice,
    environment: WorkerEnvironment,
    screen: Screen,
    make_launcher: functools.partial[LocalLauncher],
) -> int:
    screen.tell(f"job {_name(run_dir)}: {counted(size.target, 'worker')}, run directory {run_dir.path}")
    began = time.monotonic()

    async def go() -> Ending:
        job = Job(run_dir, size, timeouts, relaunch, on_error.value, environment, screen)
        return await job.run(make_launcher)

    ending = asyncio.run(go())
    took_s = time.monotonic() - began
    if ending.error is not None:
        if ending.traceback is not None:
            screen.show(ending.traceback)
        raise ending.error
    for line in _summary(run_dir, ending, took_s):
        screen.say(line)
    return 0 if ending.signum is None else 128 + ending.signum


def _name(run_dir: RunDir) -> str:
    """How other commands can call the job from here."""
    under_runs = run_dir.path.parent == rundir.RUNS.absolute()
    return run_dir.path.name if under_runs else os.path.relpath(run_dir.path)


def _summary(run_dir: RunDir, ending: Ending, took_s: float) -> list[str]:
    events = read_events(run_dir.events)
    kinds = [event["event"] for event in events]
    if "generation" not in kinds:
        if ending.signum is None and "stopping" not in kinds:
            raise _never_joined(run_dir, called="finished" in kinds)
        return [f"stopped ({ending.reason}) before the job had begun"]
    how = "finished" if "finished" in kinds else f"stopped ({ending.reason})"
    report = _audit(run_dir)
    lost, refused = ({event["worker_id"] for event in events if event["event"] == kind} for kind in ("lost", "refused"))
    line = (
        f"{how}: {counted(report.steps, 'step')}, {counted(report.samples, 'sample')} in {took_s:.1f} s, "
        f"{counted(kinds.count('generation'), 'generation')}, {counted(len(lost - refused), 'worker')} lost"
    )
    return [line, str(report)]


def _never_joined(run_dir: RunDir, called: bool) -> errors.ScriptFailed:
    script = Path(run_dir.settings()["script"]).name
    if called:
        return errors.trained_nothing(script)
    return errors.ScriptFailed(f"{script} ended without calling shoal.run(main); call it at the end of the script")


def _audit(run_dir: RunDir) -> Any:
    # numpy costs a tenth of a second, which other commands need not pay
    from shoal.data.audit import audit

    committed = run_dir.committed()
    seq = committed.seq if committed is not None else _live_status(run_dir).get("seq")
    return audit(run_dir.audit, seq or None)


@app.command(epilog="**Example** `shoal status --json | jq .step`")
def status(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Show who is in, and how far the job is."""
    run_dir = rundir.find(job)
    state = _status(run_dir)
    if as_json:
        print(json.dumps(state))
        return 0
    loss = "" if state["loss"] is None else f", loss {state['loss']:.4f}"
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{_name(run_dir)}: {state['phase']}, generation {state['generation']}, step {state['step']:,}, "
        f"epoch {state['epoch']}, {state['samples']:,} samples, {state['rate']:,.0f} samples/s{loss}"
    )
    if state["workers"]:
        table = Table("worker", "rank", "state", "step", "pid", "host", box=None)
        for worker in state["workers"]:
            cells = [
                worker["worker_id"],
                worker["rank"],
                worker["state"],
                worker["step"],
                worker["pid"],
                worker["host"],
            ]
            if worker["suspect"]:
                cells[2] = f"{worker['state']}, suspect"
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        console.print(table)
    return 0


def _status(run_dir: RunDir) -> dict[str, Any]:
    """What the coordinator says, or what is left of a job that is over."""
    if live := _live_status(run_dir):
        return live
    events = read_events(run_dir.events)
    kinds = {event["event"] for event in events}
    committed = run_dir.committed()
    if committed is None:  # it was killed, and what its workers wrote down is all there is
        report = _audit(run_dir)
        committed = Committed(0, report.steps, 0, report.samples, None)
    settings = run_dir.settings()
    return {
        "dir": str(run_dir.path),
        "phase": "finished" if "finished" in kinds else "ended" if "ended" in kinds else "not running",
        "reason": "",
        "generation": max((event["number"] for event in events if event["event"] == "generation"), default=0),
        "workers": [],
        **asdict(committed),
        "rate": 0.0,
        "metrics": {},
        **{name: settings.get(name) for name in ("target", "min", "max")},
    }


def _live_status(run_dir: RunDir) -> dict[str, Any]:
    """What the coordinator says; empty if none answers."""
    address = run_dir.address()
    if address is not None:
        with contextlib.suppress(errors.JobNotFound):
            return client.status(address, run_dir.token())
    return {}


def _address(run_dir: RunDir) -> str:
    address = run_dir.address()
    if address is None:
        raise errors.JobNotFound(f"{_name(run_dir)} does not serve yet; try again in a moment")
    return address


@app.command(epilog="**Example** `shoal scale train-20260101-120000 6`")
def scale(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A run directory, or a name under ./shoal-runs.")],
    target: Annotated[str, typer.Argument(metavar="N", help="How many workers.")],
) -> int:
    """Change the number of workers of a running job."""
    if not target.isdecimal() or int(target) < 1:
        raise errors.SettingsContradict(
            f"cannot scale to {target}: it is not a number of workers; write shoal scale JOB 4"
        )
    run_dir = rundir.find(job)
    state = client.scale(_address(run_dir), run_dir.token(), int(target))
    print(f"{_name(run_dir)}: {counted(state['target'], 'worker')} wanted")
    return 0


@app.command(epilog="**Example** `shoal stop`")
def stop(job: JobArgument = None) -> int:
    """Let every worker finish its step and leave, and end the job."""
    run_dir = rundir.find(job)
    client.stop(_address(run_dir), run_dir.token(), "shoal stop")
    print(f"{_name(run_dir)}: stopping")
    return 0


@app.command(epilog="**Example** `shoal audit runs/a` — exits with 1 when a sample was lost or trained twice")
def audit(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Check, from what the workers really fed, that every sample was trained exactly once."""
    run_dir = rundir.find(job)
    report = _audit(run_dir)
    if as_json:
        print(json.dumps({**vars(report), "clean": report.clean}))
    else:
        print(report)
        for line in report.mismatches:
            print(line)
    return 0 if report.clean else 1


@app.command(epilog="**Example** `shoal report runs/a --out a.html` — one file that needs no network")
def report(
    job: JobArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the page goes; report.html in the run directory.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page about a job: step rate, where the time went, loss, and what every reconfiguration cost."""
    from shoal.report import page, read

    run_dir = rundir.find(job)
    found = read.read(run_dir, _live_status(run_dir))
    path = out or run_dir.path / "report.html"
    try:
        path.write_text(page.page(found), encoding="utf-8")
    except OSError as problem:
        raise errors.SettingsContradict(f"{path} cannot be written: {problem.strerror}; choose another --out") from None
    if as_json:
        print(json.dumps({"page": str(path), **page.figures(found)}))
    else:
        for line in (*page.summary(found), str(path)):
            print(line)
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


# typer brings its own copy of click in newer versions, and exports this one of its errors only
_BadCommandLine: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if type(error) is errors.ShoalError else f"{type(error).__name__}: {text}"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except errors.ShoalError as error:
        if error.__cause__ is not None and type(error) is errors.ShoalError:  # ours to put right, so show where
            traceback.print_exception(error.__cause__)
        print(f"shoal: {_one_line(error)}", file=sys.stderr)
        code = errors.exit_code(error)
    except _BadCommandLine as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            text = error.format_message().rstrip(".")
            print(f"shoal: SettingsContradict: {text}; see shoal --help", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)
