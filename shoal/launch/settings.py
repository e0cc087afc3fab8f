"""What a job was told, as its run directory keeps it."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shoal import __version__, errors
from shoal.checkpoints import DEFAULT_EVERY, DEFAULT_KEEP, Every
from shoal.control import prometheus
from shoal.control.environment import WorkerEnvironment
from shoal.control.generation import MAX_SLOTS
from shoal.control.membership.failures import OnError
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.launch.hosts import parse_hosts
from shoal.launch.relaunch import Relaunch, default_restarts
from shoal.launch.tail import LOG_LIMIT_BYTES
from shoal.wording import counted

# Whose run directories can be gone on with.
_OLDEST = "0.2.0"
# What the command line finds out by itself.
_MAX_THREADS = 1024
_MOST_ENV_BYTES = 32 * 1024  # it goes with others into one packet of a socket
_FOUND_OUT = {"script", "args", "cwd", "min", "max", "target", "follows_slots", "version"}


@dataclass(frozen=True)
class Size:
    """How many workers: the job pauses below `min` and starts with `target`."""

    min: int
    max: int
    target: int


def parse_size(text: str, cores: int, called: str = "-n") -> Size:
    """`4` is a target of 4 with everything from 1 up allowed; `2:8` stays between and aims at the number of cores."""
    try:
        low, high = (int(part) for part in text.split(":")) if ":" in text else (1, MAX_SLOTS)
        target = min(max(cores, low), high) if ":" in text else int(text)
    except ValueError:
        raise errors.SettingsContradict(
            f"{called} {text} is not a number of workers; write {called} 4, or {called} 2:8"
        ) from None
    if low > high:
        raise errors.SettingsContradict(
            f"{called} {text} asks for more at least than at most; write {called} {high}:{low}"
        )
    if low < 1 or target < 1:
        raise errors.SettingsContradict(f"{called} {text} has no worker; a job needs 1 at least")
    if max(target, high) > MAX_SLOTS:
        raise errors.SettingsContradict(f"{called} {text} is more than a job takes; {MAX_SLOTS} workers at most")
    return Size(low, high, target)


@dataclass(frozen=True)
class JobSettings:
    """Checked when it is made: SettingsContradict for what cannot be."""

    script: str
    args: tuple[str, ...] = ()
    cwd: str = ""  # where the job was started; its script may name files from there
    min: int = 1
    max: int = 1
    target: int = 1
    budget_s: float = DEFAULT_BUDGET_S
    on_error: OnError = "stop"
    on_drift: str = "stop"  # when hosts have other states: end what is wrong, or the job; or only tell
    restarts: int | None = None  # 10, or 3 for each worker
    backoff_s: float = Relaunch.first_delay_s
    memory_bytes: int | None = None
    threads: int | None = None
    pin: bool = True
    device: str = "auto"  # cpu, cuda, or whichever there is
    log_bytes: int = LOG_LIMIT_BYTES  # of a worker's log
    metrics_port: str | None = None  # for Prometheus
    checkpoint_every: str = DEFAULT_EVERY
    checkpoint_keep: int = DEFAULT_KEEP
    init_from: str = ""
    hosts: str = ""  # as -H takes them; none: workers are kept by the job itself
    discover: str = ""  # path of a script
    address: str = ""  # of this machine, for other hosts
    ssh: str = "ssh"
    remote_python: str = ""
    env: dict[str, str] = field(default_factory=dict)  # of workers on every host, over what they have there
    own_dirs: bool = False  # of hosts, also where they see the job's
    follows_slots: bool = False  # the number of workers is that of the slots, as hosts come and go
    tls: str = ""  # the folder of certificates; none: the job makes its own where it serves other hosts
    mutual: bool = False
    plain_text: bool = False  # also to other hosts
    version: str = __version__

    def __post_init__(self) -> None:
        if self.restarts is not None and self.restarts < 0:
            raise errors.SettingsContradict(
                f"--restarts {self.restarts} is below 0; 0 means that no worker is replaced"
            )
        if self.threads is not None and not 1 <= self.threads <= _MAX_THREADS:
            raise errors.SettingsContradict(
                f"--threads {self.threads} is not from 1 to {_MAX_THREADS}; leave it out to divide the cores"
            )
        if not 0 <= self.backoff_s < math.inf:
            raise errors.SettingsContradict(
                f"--backoff {self.backoff_s:g} is not a number of seconds from 0 up; 0 replaces a dead worker at once"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise errors.SettingsContradict(f"--device {self.device} is none that can be asked for; auto, cpu or cuda")
        if self.on_drift not in ("stop", "tell"):
            raise errors.SettingsContradict(f"--on-drift {self.on_drift} is nothing that can be done; stop or tell")
        for name, size_bytes in (("memory_bytes", self.memory_bytes), ("log_bytes", self.log_bytes)):
            if size_bytes is not None and size_bytes < 1:
                raise errors.SettingsContradict(f"{name} is {size_bytes}; write a number of bytes from 1 up")
        if self.checkpoint_keep < 1:
            raise errors.SettingsContradict(f"--keep {self.checkpoint_keep} is below 1; keep one checkpoint at least")
        if self.mutual and not self.tls:
            raise errors.SettingsContradict("--mutual needs certificates; name their folder with --tls DIR")
        if self.plain_text and self.tls:
            raise errors.SettingsContradict("--no-tls and --tls DIR contradict each other; leave one out")
        Every.parse(self.checkpoint_every)
        Timeouts(self.budget_s)
        if self.metrics_port is not None:
            prometheus.parse_address(self.metrics_port)
        if self.hosts and not self.discover:
            slots = sum(spec.slots for spec in parse_hosts(self.hosts))
            if self.target > slots:
                raise errors.SettingsContradict(
                    f"{counted(self.target, 'worker')} on {counted(slots, 'slot')} of {self.hosts}: lower -n, or name "
                    "more slots"
                )
        if self.address:
            _check_address(self.address)
        _check_env(self.env)

    @classmethod
    def names(cls) -> set[str]:
        """Of the settings that a user may give by name."""
        return {field.name for field in fields(cls)} - _FOUND_OUT

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> JobSettings:
        """From a run directory. RunDirUnusable if it is of another version, or of none."""
        refuse_newer(values)
        version = _version(values)
        if _ordered(version) < _ordered(_OLDEST):
            raise errors.RunDirUnusable(
                f"the job was run by shoal {version}, whose records this one ({__version__}) does not read; begin a "
                "new job from its weights with shoal run --init-from"
            )
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        if "script" not in known:
            raise errors.RunDirUnusable("the run directory does not say which script it is of; begin a new job")
        return cls(**{**known, "args": tuple(known.get("args", ())), "version": __version__})

    @property
    def size(self) -> Size:
        return Size(self.min, self.max, self.target)

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.budget_s)

    @property
    def relaunch(self) -> Relaunch:
        budget = self.restarts if self.restarts is not None else default_restarts(self.target)
        return Relaunch(budget, first_delay_s=self.backoff_s)

    @property
    def environment(self) -> WorkerEnvironment:
        """What workers are told on every host, whoever brought it."""
        return WorkerEnvironment(
            threads=self.threads or 0,
            pin=self.pin,
            device=self.device,
            checkpoint_every=self.checkpoint_every,
            checkpoint_keep=self.checkpoint_keep,
        )


def _check_address(address: str) -> None:
    try:
        ip = ipaddress.IPv4Address(address)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except (ValueError, OSError):
        raise errors.SettingsContradict(
            f"--address {address} is no IPv4 address of this machine; see ip addr"
        ) from None
    if ip.is_unspecified:
        raise errors.SettingsContradict(f"--address {address} is every network; name one address of this machine")


def _check_env(env: Mapping[str, str]) -> None:
    """What it says names no value, which may be secret."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not isinstance(value, str):
            raise errors.SettingsContradict(f"--env {name} is no variable; write --env NAME, or --env NAME=VALUE")
        if "\0" in value:
            raise errors.SettingsContradict(f"--env {name} has a zero byte, which ends a variable; leave it out")
        if name.startswith("SHOAL_"):
            raise errors.SettingsContradict(f"--env {name}: what begins with SHOAL_ is shoal's own; leave it out")
    size_bytes = sum(len(os.fsencode(name + value)) for name, value in env.items())
    if size_bytes > _MOST_ENV_BYTES:
        raise errors.SettingsContradict(
            f"--env has {size_bytes:,} bytes in all; {_MOST_ENV_BYTES:,} at most, put more into a file"
        )


def refuse_newer(values: Mapping[str, Any]) -> None:
    """RunDirUnusable if a run directory with these settings is of a newer version, whose records may differ."""
    version = _version(values)
    if _ordered(version) > _ordered(__version__):
        raise errors.RunDirUnusable(f"the job was run by shoal {version}, this is {__version__}; use the newer one")


def _version(values: Mapping[str, Any]) -> str:
    return str(values.get("version", __version__))


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
