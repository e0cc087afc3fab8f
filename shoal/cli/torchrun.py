"""The launcher of a job whose workers torchrun has started. The first of them starts it, not people."""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import typer

from shoal import errors
from shoal.cli.hosts import described
from shoal.cli.job import run_job
from shoal.cli.shell import app
from shoal.cli.start import go_on
from shoal.control import rundir
from shoal.control.environment import WorkerEnvironment
from shoal.control.generation import MAX_SLOTS
from shoal.control.invitation import Invitation
from shoal.control.rundir import RunDir
from shoal.control.torchrun import Torchrun
from shoal.launch import join
from shoal.launch.hall import HallLauncher
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings

_LOOK_S = 0.05


class _Screen(Screen):
    def show(self, traceback: str) -> None:
        """The worker itself has, where torchrun puts what it writes."""


@app.command(hidden=True, context_settings={"allow_interspersed_args": False})
def torchrun(
    script: Annotated[str, typer.Argument()],
    args: Annotated[list[str] | None, typer.Argument()] = None,
    agent: Annotated[int, typer.Option()] = 0,
) -> int:
    """Keep the processes that torchrun has started on this host."""
    round_, environment = Torchrun.from_env(os.environ), WorkerEnvironment.from_env(os.environ)
    if round_ is None:
        raise errors.SettingsContradict("this is not for people: torchrun's processes start it; see the README")
    launcher = functools.partial(HallLauncher, address=round_.hall, host=agent)
    screen = _Screen(quiet=False)
    if environment.invitation:
        invitation = Invitation.read(Path(environment.invitation))
        return join.by_hand(described(invitation, f"{socket.gethostname()}-{agent}", round_.size), screen, launcher)
    path = Path(environment.dir) if environment.dir else _path_of(script, agent)
    if round_.restart and (path / "job.json").exists():
        run_dir = RunDir.open(path)
        settings = JobSettings.read(run_dir.settings())
        _until_free(run_dir, settings.timeouts.join_s)
        with run_dir.held():
            return go_on(run_dir, settings, "", screen, launcher)
    settings = JobSettings(
        script=os.path.abspath(script),
        args=tuple(args or ()),
        cwd=os.getcwd(),
        min=1,
        max=MAX_SLOTS,
        target=round_.size,
        threads=environment.threads or None,
        pin=environment.pin,
        device=environment.device,
        checkpoint_every=environment.checkpoint_every,
        checkpoint_keep=environment.checkpoint_keep,
        init_from=environment.init_from,
    )
    run_dir = RunDir.create(path, asdict(settings))
    with run_dir.held():
        return run_job(run_dir, settings, "", screen, launcher=launcher)


def _path_of(script: str, agent: int) -> Path:
    """The same for all that one torchrun starts."""
    path = rundir.default_path(script, psutil.Process(agent).create_time())
    return path.with_name(f"{path.name}-{agent}")


def _until_free(run_dir: RunDir, within_s: float) -> None:
    """The launcher of the round before has its workers to end."""
    latest_s = time.monotonic() + within_s
    while run_dir.runs() and time.monotonic() < latest_s:
        time.sleep(_LOOK_S)
