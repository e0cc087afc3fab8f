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
from shoal.control.environment import WorkerEnvironment
from shoal.control.generation import MAX_SLOTS
from shoal.control.hosts import is_name
from shoal.control.rundir import RunDir, write_atomically
from shoal.control.timeouts import Timeouts
from shoal.launch import join as joining
from shoal.launch.fleet import Discovery
from shoal.launch.hosts import HostSpec, parse_hosts, read_hostfile
from shoal.launch.remote import Told
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings


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

`shoal join 192.0.2.7:40123 --token-file token --slots 4` — the address and the token are in the job's run directory

Ctrl-C lets the workers of this host finish their step and leave; the job goes on."""
)
def join(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="Of the job's coordinator: the file address of its run.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A copy of the file token of the job's run directory.")
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
    if address is None or token_file is None:
        raise errors.SettingsContradict("shoal join takes the address of a job and --token-file; see shoal join --help")
    name = host_name or socket.gethostname()
    if not is_name(name):
        raise errors.SettingsContradict(f"--host-name {name} is no name; take letters, digits, dots and dashes")
    return joining.by_hand(_described(address, token_file, name, slots or joining.cores()), Screen(quiet))


def _described(address: str, token_file: Path, host: str, slots: int) -> Told:
    """What the coordinator says of its job."""
    try:
        token = token_file.read_text().strip()
    except OSError as problem:
        raise errors.SettingsContradict(f"--token-file {token_file} cannot be read: {problem.strerror}") from None
    with tempfile.TemporaryDirectory(prefix="shoal-join-") as folder:
        asking = RunDir.create(Path(folder) / "asking", {})
        write_atomically(asking.token_file, token)
        asking.write_address(address)
        job = commands.describe(asking)
    settings = JobSettings.read({**job["settings"], "address": ""})  # which is not this machine's
    if not settings.hosts and not job["settings"].get("address"):
        raise errors.JobNotFound(f"the job at {address} is for one host; start it with --address or -H")
    environment = WorkerEnvironment(
        threads=settings.threads or 0,
        pin=settings.pin,
        checkpoint_every=settings.checkpoint_every,
        checkpoint_keep=settings.checkpoint_keep,
    )
    return Told(host, slots, address, token, job["dir"], job["settings"], environment.to_env(), grow=True)
