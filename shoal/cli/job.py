"""A job from here on: its settings become processes, and its end becomes a summary."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

from shoal import errors
from shoal.checkpoints import Checkpoint
from shoal.cli.shell import one_line
from shoal.control import tls
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import Committed, RunDir
from shoal.launch.fleet import Fleet, fleet_of, home_address
from shoal.launch.heir import Inherited
from shoal.launch.host import Ending
from shoal.launch.job import BEGINNING, Job, Origin
from shoal.launch.local import LocalLauncher, launcher_of
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings
from shoal.metrics import EventLog, read_events, write_end
from shoal.view.state import audited, name_of, of_this_life
from shoal.wording import counted


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


def checked_address(settings: JobSettings) -> str:
    """As `home_address`, of a job for which the certificates, if it is given some, are good. Fails with HostUnusable,
    CertificateUnusable, CertificateRefused."""
    address = home_address(settings)
    if settings.tls:
        tls.check(Path(settings.tls), settings.mutual, [address or tls.LOOPBACK])
    return address


def run_job(
    run_dir: RunDir,
    settings: JobSettings,
    address: str,
    screen: Screen,
    origin: Origin = BEGINNING,
    checkpoint: Checkpoint | None = None,
    launcher: Callable[..., LocalLauncher] = LocalLauncher,
    *,
    inherits: bool = False,
) -> int:
    """`address`: of this machine for the job's other hosts; empty if there are none. `inherits`: the job runs on other
    hosts, and its own was lost."""
    met_at = address or tls.LOOPBACK
    if settings.tls:
        tls.provide(run_dir, Path(settings.tls), settings.mutual, met_at)
    elif tls.needed(asdict(settings), met_at):
        tls.make_for_job(run_dir, met_at)
    inherited = WorkerEnvironment.from_env(os.environ)
    environment = replace(
        settings.environment,
        plugin=inherited.plugin,
        faults=inherited.faults and os.path.abspath(inherited.faults),
        resume=str(checkpoint.path) if checkpoint is not None else "",
        init_from=settings.init_from,
        address=address,
    )
    fleet: Fleet | Inherited | None
    fleet = Inherited(run_dir, settings.timeouts) if inherits else fleet_of(settings, run_dir, environment)
    screen.tell(f"job {name_of(run_dir)}: {counted(settings.target, 'worker')}, run directory {run_dir.path}")
    if address and not tls.is_loopback(address):
        screen.tell(f"to join from another machine: copy {run_dir.invitation_file} there, and shoal join invitation")
    began = time.monotonic()

    async def go() -> Ending:
        relaunch, timeouts = settings.relaunch, settings.timeouts
        job = Job(
            run_dir,
            settings.size,
            timeouts,
            relaunch,
            settings.on_error,
            environment,
            screen,
            origin,
            settings.log_bytes,
            fleet,
        )
        return await job.run(launcher_of(settings, run_dir.logs, launcher))

    ending = asyncio.run(go())
    took_s = time.monotonic() - began
    try:
        if ending.error is not None:
            raise ending.error
        lines = _summary(run_dir, ending, took_s)
    except errors.ShoalError as error:
        write_end(run_dir.events, "failed", one_line(error))
        if ending.traceback is not None:
            screen.show(ending.traceback)
        raise
    finished = any(event["event"] == "finished" for event in of_this_life(read_events(run_dir.events)))
    write_end(run_dir.events, *(("finished", "") if finished else ("ended", f"stopped: {ending.reason}")))
    for line in lines:
        screen.say(line)
    return 0 if ending.signum is None else 128 + ending.signum


def _summary(run_dir: RunDir, ending: Ending, took_s: float) -> list[str]:
    events = read_events(run_dir.events)
    kinds = [event["event"] for event in events]
    if "generation" not in kinds:
        if ending.signum is None and "stopping" not in kinds:
            raise _never_joined(run_dir, called="finished" in kinds)
        return [f"stopped ({ending.reason}) before the job had begun"]
    finished = any(event["event"] == "finished" for event in of_this_life(events))
    how = "finished" if finished else f"stopped ({ending.reason})"
    report = audited(run_dir)
    lost, refused = ({event["worker_id"] for event in events if event["event"] == kind} for kind in ("lost", "refused"))
    parts = [f"{how}: trained {_steps(report.trained_steps, report.trained_samples)} in {took_s:.1f} s"]
    if report.evaluated_steps:
        parts.append(f"evaluated or predicted {_steps(report.evaluated_steps, report.evaluated_samples)}")
    parts.append(f"{counted(kinds.count('generation'), 'generation')}, {counted(len(lost - refused), 'worker')} lost")
    return ["; ".join(parts), str(report)]


def _steps(steps: int, samples: int) -> str:
    return f"{counted(steps, 'step')}, {counted(samples, 'sample')}"


def _never_joined(run_dir: RunDir, called: bool) -> errors.ScriptFailed:
    script = Path(run_dir.settings()["script"]).name
    if called:
        return errors.trained_nothing(script)
    return errors.ScriptFailed(f"{script} ended without calling shoal.run(main); call it at the end of the script")


def resumed(run_dir: RunDir, newest: Checkpoint | None) -> Origin:
    """Make the run directory that of a job that goes on from this checkpoint."""
    from shoal.data.fed import roll_back  # numpy costs a tenth of a second

    generation = run_dir.last_generation()
    at = None if newest is None else {**newest.manifest["record"], "seq": newest.seq}
    committed = None if at is None else Committed(**{field.name: at[field.name] for field in fields(Committed)})
    roll_back(run_dir.audit, generation, 0 if newest is None else newest.seq)
    run_dir.forget_ending()
    events = EventLog(run_dir.events)
    events.write(time.time(), "resumed", generation=generation, step=0 if newest is None else newest.step)
    events.close()
    return Origin(committed, generation, run_dir.next_worker())
