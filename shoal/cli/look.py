"""Commands that look at a job, or at the machine, and change nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal import errors
from shoal.cli.options import FollowOption, JobArgument, JsonOption, normalized, within
from shoal.cli.shell import app
from shoal.control import rundir, tls
from shoal.control.rundir import RunDir
from shoal.launch.screen import prefixed
from shoal.launch.settings import refuse_newer
from shoal.view import events as event_view
from shoal.view import logs as log_view
from shoal.view.state import audited, line_of, live, name_of, state_of


def _readable(job: str | None) -> RunDir:
    """The job, for a command that reads its records. RunDirUnusable if a newer version wrote them."""
    run_dir = rundir.find(job)
    refuse_newer(run_dir.settings())
    return run_dir


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`| head` ends the command, with the exit code of a signal."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more at its end
        raise typer.Exit(128 + signal.SIGPIPE) from None


@app.command(
    epilog="""**Examples**

`shoal status` — the newest job under ./shoal-runs

`shoal status runs/a --json | jq .progress.done`

`shoal top` shows the same once a second"""
)
def status(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Show who is in, how far the job is, and how it ended if it has."""
    run_dir = _readable(job)
    state = state_of(run_dir)
    if as_json:
        print(json.dumps(state))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(line_of(name_of(run_dir), state))
    if state["workers"]:
        table = Table("worker", "rank", "state", "step", "pid", "host", box=None)
        for worker in state["workers"]:
            cells = [worker[name] for name in ("worker_id", "rank", "state", "step", "pid", "host")]
            if worker["suspect"]:
                cells[2] = f"{worker['state']}, suspect"
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        console.print(table)
    return 0


@app.command(
    epilog="""**Examples**

`shoal events` — the newest job, one line an event

`shoal events runs/a --follow` — until the job has ended

`shoal events --json | jq 'select(.event == "generation") | .members'`"""
)
def events(
    job: JobArgument = None,
    follow: FollowOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> int:
    """Show what happened: who joined, left or died, and why."""
    with _reader_may_leave():
        for event in event_view.events(rundir.find(job), follow):
            line = json.dumps(event) if as_json else f"{event_view.time_of(event)}  {event_view.event_line(event)}"
            print(line, flush=follow)
    return 0


def _workers(context: typer.Context, incomplete: str) -> list[str]:
    try:
        found = log_view.names(rundir.find(context.params.get("job")))
    except errors.ShoalError:
        return []
    return [name for name in found if name.startswith(incomplete)]


@app.command(
    epilog="""**Examples**

`shoal logs` — all that the workers of the newest job printed, worker by worker

`shoal logs -f` — the last lines, and then each as it comes, until the job has ended

`shoal logs runs/a --worker w3 -n 50`

`shoal logs --worker coordinator` — shoal's own: coordinator, forkserver"""
)
def logs(
    job: JobArgument = None,
    follow: FollowOption = False,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker", "-w", metavar="W", help="Of this worker only; may be repeated.", autocompletion=_workers
        ),
    ] = None,
    last_lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", callback=within(0), help="No more than so many of each that are there already."),
    ] = None,
) -> int:
    """Show what the workers print."""
    read = log_view.follow if follow else log_view.logs
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with _reader_may_leave():
        for worker_id, line in read(rundir.find(job), worker or (), last_lines):
            if console.is_terminal:
                console.print(prefixed(worker_id, line))
            else:
                print(f"{worker_id} | {line}", flush=follow)
    return 0


@app.command(
    epilog="""**Examples**

`shoal top` — the newest job under ./shoal-runs

`shoal top runs/a --interval 5`

`shoal top | tee top.txt` — not on a terminal it is a line a second

q or Ctrl-C quits; the job goes on."""
)
def top(
    job: JobArgument = None,
    interval_s: Annotated[
        float,
        typer.Option("--interval", "-d", metavar="SECONDS", callback=within(0.1, 86400), help="Between two looks."),
    ] = 1.0,
) -> int:
    """Watch a job as it trains: workers, speed, progress, events."""
    from shoal.view.top import watch

    with _reader_may_leave():
        return watch(_readable(job), Console(highlight=False, markup=False), interval_s)


@app.command(
    epilog="""**Examples**

`shoal report` — of the newest job, to report.html in its run directory

`shoal report runs/a --out a.html` — one file that needs no network"""
)
def report(
    job: JobArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=normalized, help="Where the page goes; report.html in the run directory."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page about a job: step rate, where the time went, loss, and what every reconfiguration cost."""
    from shoal.report import page, read

    run_dir = _readable(job)
    found = read.read(run_dir, live(run_dir))
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


@app.command(
    epilog="""**Examples**

`shoal audit runs/a` — exits with 1 when a sample was lost or trained twice

`shoal audit --json | jq .clean`"""
)
def audit(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Check, from what the workers really fed, that every sample was trained exactly once."""
    run_dir = _readable(job)
    report = audited(run_dir)
    if as_json:
        print(json.dumps({**vars(report), "clean": report.clean}))
    else:
        print(report)
        for line in report.mismatches:
            print(line)
    return 0 if report.clean else 1


@app.command(
    epilog="""**Examples**

`shoal doctor` — each line that is not ok says what to change

`shoal doctor --json | jq '.checks[] | select(.verdict != "ok")'`

`shoal doctor --tls certs --host 10.0.0.7` — certificates too: expired, for another address, keys that others can read

Exits with 1 when something is bad, that is, when shoal cannot run."""
)
def doctor(
    directory: Annotated[
        Path, typer.Option("--dir", callback=normalized, help="Where run directories will be.")
    ] = rundir.RUNS,
    certificates: Annotated[
        Path | None, typer.Option("--tls", callback=normalized, metavar="DIR", help="Check these certificates too.")
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME|IP", help="Where a coordinator with them is met; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check whether this machine is fit to train, and say what to change."""
    from shoal.view import doctor as doctor_view
    from shoal.view import trust

    more = trust.checks(certificates, hosts or [tls.LOOPBACK]) if certificates is not None else ()
    return doctor_view.report(directory, Console(highlight=False, markup=False), as_json, more)


@app.command(
    epilog="""**Examples**

`shoal web` — the newest job; open the address that it prints

`shoal web runs/a --port 8080`"""
)
def web(
    job: JobArgument = None,
    port: Annotated[int, typer.Option(callback=within(0, 65535), help="On loopback; 0 for any that is free.")] = 0,
) -> int:
    """Show a job live in a browser, with buttons to scale it, take a checkpoint and stop it."""
    run_dir = _readable(job)
    try:
        import uvicorn

        from shoal.web.app import application, new_key
    except ImportError as problem:
        raise errors.SettingsContradict(
            f"shoal web needs {problem.name}, which is not installed; pip install 'shoal[web]'"
        ) from None
    key = new_key()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()  # before the address is told: who opens it at once waits, and is not refused
        except OSError as problem:
            raise errors.SettingsContradict(
                f"--port {port} cannot be used: {problem.strerror}; choose another, or 0 for any that is free"
            ) from None
        print(f"http://127.0.0.1:{server.getsockname()[1]}/?key={key}", flush=True)
        config = uvicorn.Config(application(run_dir, key), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[server])
    return 0
