"""Arguments and options that several commands have."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import errors
from shoal.control import rundir

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def normalized(path: Path | None) -> Path | None:
    """As people would write it, `a/c` for `a/b/../c`; unless that is another place, by a symbolic link."""
    plain = Path(os.path.normpath(path)) if path is not None else None
    return plain if path is None or os.path.realpath(path) == os.path.realpath(str(plain)) else path


def named(job: str | None) -> str | None:
    """A run directory or a name, normalized."""
    return None if job is None else str(normalized(Path(job)))


def within(least: float, most: float = math.inf) -> Callable[..., Any]:
    """A callback for an option with a number. Fails with SettingsContradict."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            allowed = f"{least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
            raise errors.SettingsContradict(f"{param.opts[0]} {value:g} cannot be; write {allowed}")
        return value

    return check


def jobs(incomplete: str) -> list[str]:
    """For completion in a shell."""
    return [path.parent.name for path in sorted(rundir.RUNS.glob(f"{incomplete}*/job.json"))]


JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        callback=named,
        help="A run directory, or a name under ./shoal-runs; the newest if left out.",
        autocompletion=jobs,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]
WorkersOption = Annotated[
    str | None,
    typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; one for each core if left out."),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", callback=normalized, help="The run directory; a new one under ./shoal-runs if left out."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Errors and the summary only.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")]
InitOption = Annotated[
    Path | None,
    typer.Option(
        "--init-from",
        callback=normalized,
        metavar="PATH",
        help="Begin with the weights of a checkpoint, a run, or a safetensors file.",
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        callback=normalized,
        metavar="DIR",
        help="Speak TLS by certificates that shoal certs has made there; for other hosts a job makes its own.",
    ),
]
PlainTextOption = Annotated[
    bool, typer.Option("--no-tls", help="Speak plain text with other hosts too, on a network that you trust.")
]
MutualOption = Annotated[bool, typer.Option("--mutual", help="Let only those in who show a client's certificate.")]

# Of commands that use a model file.
ModelFile = Annotated[
    Path, typer.Argument(metavar="MODEL_FILE", callback=normalized, help="A Python file with functions and no loop.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", callback=normalized, metavar="job.toml", help="Settings in tables [job] and [train]."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting of the job or the training; may be repeated."),
]
BatchOption = Annotated[int | None, typer.Option(help="Samples of one worker in a step.")]
LoadersOption = Annotated[int | None, typer.Option(help="Loader processes of each worker.")]
WeightsOption = Annotated[
    Path,
    typer.Option(
        "--from", callback=normalized, metavar="PATH", help="The weights: a run, a checkpoint, or a safetensors file."
    ),
]


def parse_bytes(text: str, option: str = "--memory") -> int:
    """`2G`, `512M`, `1.5GiB`: powers of 1024. Fails with SettingsContradict."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise errors.SettingsContradict(f"{option} {text} is not a number of bytes; write {option} 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_env(given: Iterable[str], here: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` with the value it has here. Fails with SettingsContradict."""
    found = {}
    for text in given:
        name, is_given, value = text.partition("=")
        if not is_given and name not in here:
            raise errors.SettingsContradict(f"--env {name}: it is not set here; set it, or write --env {name}=VALUE")
        found[name] = value if is_given else here[name]
    return found
