"""The command that makes certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import normalized, within
from shoal.cli.shell import app
from shoal.control import certificates


@app.command(
    epilog="""**Examples**

`shoal certs certs`, then `shoal run --tls certs -n 4 train.py` — TLS on this machine

`shoal certs certs --host node1 --host 10.0.0.7` — for a coordinator that others reach by that name and that address

`shoal run --tls certs --mutual -n 4 train.py` — and nobody without a client's certificate is let in"""
)
def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", callback=normalized, help="Where they are, or will be.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME|IP", help="Where a coordinator is met, beside loopback; may be repeated."),
    ] = None,
    days: Annotated[
        int, typer.Option(callback=within(1, certificates.MAX_DAYS), help="How long new certificates are valid.")
    ] = certificates.DEFAULT_DAYS,
) -> int:
    """Make a small certificate authority, and certificates for a coordinator and its clients: what is missing of it."""
    made = certificates.make(directory, hosts or (), days)
    if not made:
        print(f"{directory}: nothing is missing; use it with shoal run --tls {directory}")
        return 0
    print(f"{directory}: made {', '.join(made)}")
    print(f"use it with shoal run --tls {directory} (--mutual: clients must show a certificate too)")
    print(f"keep {directory / 'ca.key'} to yourself: whoever has it can make certificates that your jobs believe")
    return 0
