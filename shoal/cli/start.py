"""Commands that start a job, or go on with one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shoal import checkpoints, errors
from shoal.cli.hosts import named_hosts
from shoal.cli.job import check_script, checked_address, resumed, run_job
from shoal.cli.options import (
    DirOption,
    InitOption,
    JobArgument,
    MutualOption,
    PlainTextOption,
    QuietOption,
    TlsOption,
    WorkersOption,
    normalized,
    parse_bytes,
    parse_env,
)
from shoal.cli.shell import app
from shoal.control import prometheus, rundir
from shoal.control.rundir import RunDir
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.launch.fleet import home_address
from shoal.launch.local import LocalLauncher
from shoal.launch.relaunch import Relaunch
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings, parse_size
from shoal.launch.tail import LOG_LIMIT_BYTES
from shoal.metrics import read_events
from shoal.process import cores
from shoal.view.state import how_it_ended


class OnErrorChoice(str, Enum):
    stop = "stop"
    relaunch = "relaunch"


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="""**Examples**

`shoal run -n 4 train.py` — four workers

`shoal run -n 2:8 train.py --lr 0.1` — elastic: pauses below two, grows to eight; what follows the script is its own

`shoal run -H server1:4,server2:4 --env DATA --env LOG=debug train.py` — on two hosts, over ssh

`shoal run -n 4 --dir runs/a --memory 2G --threads 2 --no-pin train.py`

Ctrl-C lets the workers finish their step and leave; Ctrl-C again kills them.""",
)
def run(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", callback=normalized, help="The training script: it calls shoal.run(main)."),
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    workers: WorkersOption = None,
    directory: DirOption = None,
    budget_s: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="How long an awaited worker may be silent.")
    ] = DEFAULT_BUDGET_S,
    on_error: Annotated[
        OnErrorChoice, typer.Option(help="When the script raises in a worker: stop the job, or start another worker.")
    ] = OnErrorChoice.stop,
    on_drift: Annotated[
        str,
        typer.Option(
            metavar="stop|tell", help="When hosts turn out to have different models: end what is wrong, or only say so."
        ),
    ] = "stop",
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
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="What worker.device is; auto is a GPU where there is one.")
    ] = "auto",
    checkpoint_every: Annotated[
        str,
        typer.Option(
            metavar="STEPS|TIME|off", help="Take a checkpoint so often: 500 steps, 30s, 10m, 2h; also at the end."
        ),
    ] = checkpoints.DEFAULT_EVERY,
    keep: Annotated[int, typer.Option(help="How many checkpoints stay.")] = checkpoints.DEFAULT_KEEP,
    init_from: InitOption = None,
    log_size: Annotated[
        str, typer.Option(metavar="BYTES", help="A worker's log keeps between this much and twice as much of its end.")
    ] = f"{LOG_LIMIT_BYTES >> 20}M",
    metrics_port: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve figures for Prometheus there, on loopback if no host is named."
        ),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,…", help="Keep the workers on these hosts.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The hosts, a line of HOST:SLOTS for each.")
    ] = None,
    discover: Annotated[
        Path | None,
        typer.Option(metavar="SCRIPT", help="Run it now and then: it prints the hosts there are, as a hostfile."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="IP", help="The address of this machine that other hosts reach.")
    ] = None,
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="The ssh client, with options it needs.")] = "ssh",
    remote_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python on the other hosts; the same path as here if left out.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable for the workers of every host, with its value here or another; may be repeated.",
        ),
    ] = None,
    own_dirs: Annotated[
        bool, typer.Option("--own-dirs", help="Hosts write to a folder of their own, and what they write comes here.")
    ] = False,
    certificates: TlsOption = None,
    mutual: MutualOption = False,
    plain_text: PlainTextOption = False,
    quiet: QuietOption = False,
) -> int:
    """Train with a script, on this machine or on several, while workers come and go."""
    specs = named_hosts(hosts, hostfile, discover, Timeouts(budget_s))
    places = sum(spec.slots for spec in specs) if specs else cores()
    size = parse_size(workers if workers is not None else str(places), places)
    if metrics_port is not None:
        prometheus.check_free(*prometheus.parse_address(metrics_port))
    settings = JobSettings(
        script=str(script.absolute()),
        cwd=os.getcwd(),
        args=tuple(args or ()),
        min=size.min,
        max=size.max,
        target=size.target,
        budget_s=Timeouts(budget_s).budget_s,
        on_error=on_error.value,
        on_drift=on_drift,
        restarts=restarts,
        backoff_s=backoff,
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        threads=threads,
        pin=pin,
        device=device,
        log_bytes=parse_bytes(log_size, "--log-size"),
        metrics_port=metrics_port,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=keep,
        init_from=str(init_from.absolute()) if init_from is not None else "",
        hosts=",".join(spec.written for spec in specs),
        discover=str(discover.absolute()) if discover is not None else "",
        address=address or "",
        ssh=ssh,
        remote_python=remote_python or "",
        env=parse_env(env or (), os.environ),
        own_dirs=own_dirs,
        follows_slots=workers is None or ":" in workers,
        tls=str(certificates.absolute()) if certificates is not None else "",
        mutual=mutual,
        plain_text=plain_text,
    )
    check_script(script)
    address = checked_address(settings)
    if init_from is not None:
        checkpoints.weights(init_from)
    kept = asdict(settings)
    run_dir = RunDir.create(directory, kept) if directory else rundir.create_default(script, kept)
    with run_dir.held():
        return run_job(run_dir, settings, address, Screen(quiet))


@app.command(
    epilog="""**Examples**

`shoal resume` — go on with the newest job under ./shoal-runs

`shoal resume runs/a -n 8` — with eight workers, whatever it had before"""
)
def resume(
    job: JobArgument = None,
    workers: Annotated[
        str | None,
        typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; as before if left out."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Go on with a job that has ended or was killed, from its newest checkpoint that is whole."""
    run_dir = rundir.find(job)
    settings = JobSettings.read(run_dir.settings())
    if workers is not None:
        size = parse_size(workers, cores())
        settings = replace(settings, min=size.min, max=size.max, target=size.target)
    if settings.discover:
        specs = named_hosts(None, None, Path(settings.discover), settings.timeouts)
        settings = replace(settings, hosts=",".join(spec.written for spec in specs))
    check_script(Path(settings.script))
    address = home_address(settings)
    with run_dir.held():
        return go_on(run_dir, settings, address, Screen(quiet))


def go_on(
    run_dir: RunDir,
    settings: JobSettings,
    address: str,
    screen: Screen,
    launcher: Callable[..., LocalLauncher] = LocalLauncher,
) -> int:
    """Run the job of a directory that is held from its newest checkpoint; otherwise as `run_job`."""
    newest, damaged = checkpoints.newest_whole(run_dir.checkpoints)
    for line in damaged:
        screen.say(f"{line}; it is left out")
    if newest is None and how_it_ended(read_events(run_dir.events))[0] == "finished":
        raise errors.RunDirUnusable(
            f"{run_dir.path} has finished and left no checkpoint to go on from; run it anew with shoal run"
        )
    if settings.cwd and Path.cwd() != Path(settings.cwd):
        try:
            os.chdir(settings.cwd)
            screen.tell(f"in {settings.cwd}, where the job was started")
        except OSError as problem:
            screen.say(f"{settings.cwd}, where the job was started: {problem.strerror}; it goes on in {Path.cwd()}")
    if newest is None:
        screen.say("no checkpoint: the job begins anew")
    else:
        screen.tell(f"going on from {newest.path.name}: step {newest.step:,}, epoch {newest.manifest['epoch'] + 1}")
    return run_job(run_dir, settings, address, screen, resumed(run_dir, newest), newest, launcher)


@app.command(
    epilog="""**Examples**

`shoal coordinator /shared/runs/a --address 192.0.2.8` — on a machine that sees the run directory, when the one where
the job was started is lost and hosts that joined it by hand still run"""
)
def coordinator(
    address: Annotated[
        str, typer.Option(metavar="IP", help="Of this machine, by which the hosts of the job reach it.")
    ],
    job: JobArgument = None,
    quiet: QuietOption = False,
) -> int:
    """Take the place of a job's own host that is lost: workers on other hosts find the coordinator here, and train
    on."""
    run_dir = rundir.find(job)
    with run_dir.held():
        settings = JobSettings.read({**run_dir.settings(), "address": address})
        if how_it_ended(read_events(run_dir.events))[0] != "not running":
            raise errors.JobNotFound(f"{run_dir.path} does not run anywhere; go on with shoal resume")
        return run_job(run_dir, settings, address, Screen(quiet), inherits=True)
