"""Hosts on the command line: which a job has, and this one as one of them."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal.cli.options import QuietOption, within
from shoal.cli.shell import app
from shoal.control import commands
from shoal.control.generation import MAX_SLOTS
from shoal.control.hosts import is_name
from shoal.control.invitation import Invitation
from shoal.control.timeouts import Timeouts
from shoal.launch import join as joining
from shoal.launch.fleet import Discovery
from shoal.launch.hosts import HostSpec, parse_hosts, read_hostfile
from shoal.launch.remote import Told
from shoal.launch.screen import Screen
from shoal.launch.session import OWN
from shoal.launch.settings import JobSettings
from shoal.process import cores


def named_hosts(
    hosts: str | None, hostfile: Path | None, discover: Path | None, timeouts: Timeouts
) -> tuple[HostSpec, ...]:
    """The hosts that a job begins with; none if it is not told any. Raises SettingsContradict."""
    if sum(given is not None for given in (hosts, hostfile, discover)) > 1:
        raise errors.SettingsContradict("-H, --hostfile and --discover all name the hosts; give one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is not None:
        return read_hostfile(hostfile)
    if discover is None:
        return ()
    found = asyncio.run(Discovery(discover.absolute(), timeouts).hosts())
    if not found:
        raise errors.SettingsContradict(f"--discover {discover} names no host; a job begins with one at least")
    return found


@app.command(
    epilog="""**Examples**

`scp home:runs/a/invitation .`, then `shoal join invitation --slots 4` — the file has the token: keep it to yourself

Ctrl-C lets the workers of this host finish their step and leave; the job goes on."""
)
def join(
    invitation: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A copy of the file invitation of the job's run directory.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(callback=within(1, MAX_SLOTS), help="Workers here; one for each core if left out.")
    ] = None,
    host_name: Annotated[str | None, typer.Option(metavar="NAME", help="What the job calls this host.")] = None,
    told: Annotated[bool, typer.Option("--told", hidden=True)] = False,
    quiet: QuietOption = False,
) -> int:
    """Add this machine to a job that runs elsewhere and was started with --address or -H."""
    if told:
        return joining.as_told()
    if invitation is None:
        raise errors.SettingsContradict("shoal join takes a copy of the job's invitation; see shoal join --help")
    name = host_name or socket.gethostname()
    if not is_name(name):
        raise errors.SettingsContradict(f"--host-name {name} is no name; take letters, digits, dots and dashes")
    return joining.by_hand(described(Invitation.read(invitation), name, slots or cores()), Screen(quiet))


def described(invitation: Invitation, host: str, slots: int) -> Told:
    """What the coordinator says of its job."""
    with tempfile.TemporaryDirectory(prefix=OWN) as folder:
        try:
            job = commands.describe(invitation.accept(Path(folder) / "asking", {}))
        except errors.JobNotFound:
            raise errors.JobNotFound(
                f"nobody answers at {invitation.address}; is the job over? else copy its invitation again"
            ) from None
    settings = JobSettings.read({**job["settings"], "address": ""})  # which is not this machine's
    return Told(
        host=host,
        slots=slots,
        address=invitation.address,
        token=invitation.token,
        certificates=invitation.certificates,
        dir=job["dir"],
        settings=job["settings"],
        environment=settings.environment.to_env(),
        grow=True,
    )
