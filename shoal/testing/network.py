"""Several hosts on one machine, for tests and benchmarks: a network namespace with an address of its own for each, and
a bridge between them. Links can be cut, limited, slow, or lose one direction. Needs root, `ip` and `tc`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

_PREFIX = "shoal-net"
_SUBNET = "10.77.0"


def missing() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool}, which is not installed (Debian: iproute2)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"network namespaces cannot be made here: {tried.stderr.strip()}"


class Network:
    """`with Network(2) as network:` has hosts 0 and 1. What a killed process has left is removed by the next."""

    def __init__(self, hosts: int) -> None:
        self.addresses = [f"{_SUBNET}.{host + 1}" for host in range(hosts)]
        self._hub = f"{_PREFIX}-{os.getpid()}-hub"
        self._names = [f"{_PREFIX}-{os.getpid()}-{host}" for host in range(hosts)]
        self._delaying: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        _remove_of_the_dead()
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for host, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            port = f"port{host}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._delaying is not None:
            self._end_delaying(self._delaying)
        for name in (*self._names, self._hub):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, to be run on that host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def cut(self, host: int) -> None:
        """Nothing reaches the host or comes from it, and nobody is told."""
        _run("ip", "-n", self._hub, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        _run("ip", "-n", self._hub, "link", "set", f"port{host}", "up")

    def lose(self, host: int, to: int) -> None:
        """What the host sends to that other one is lost; the other direction goes on."""
        _run("ip", "-n", self._names[host], "route", "replace", "blackhole", f"{self.addresses[to]}/32")

    def find(self, host: int, to: int) -> None:
        """No longer."""
        _run("ip", "-n", self._names[host], "route", "delete", "blackhole", f"{self.addresses[to]}/32")

    def limit(self, mbit: float) -> None:
        """What each host sends, in Mbit/s."""
        for name in self._names:
            _run(
                "tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf",
                "rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "50ms",
            )  # fmt: skip

    def delay(self, ms: float) -> None:
        """What each host sends arrives so much later, all of it and in order. 0: no longer."""
        before, self._delaying = self._delaying, None
        hosts = range(len(self._names))
        if before is not None:
            self._end_delaying(before)
        for host in hosts:
            # Between the host's port and the bridge there is a relay, by way of a link of its own.
            if ms and before is None:
                _run(
                    "ip", "-n", self._hub, "link", "add", f"relay{host}", "type", "veth", "peer", "name", f"late{host}"
                )
                _run("ip", "-n", self._hub, "link", "set", f"relay{host}", "up")
                _run("ip", "-n", self._hub, "link", "set", f"late{host}", "master", "bridge", "up")
                _run("ip", "-n", self._hub, "link", "set", f"port{host}", "nomaster")
            elif not ms and before is not None:
                _run("ip", "-n", self._hub, "link", "delete", f"relay{host}")
                _run("ip", "-n", self._hub, "link", "set", f"port{host}", "master", "bridge")
        if not ms:
            return
        pairs = [f"port{host}:relay{host}" for host in hosts]
        command = ["ip", "netns", "exec", self._hub, sys.executable, "-m", "shoal.testing.delay", f"{ms:g}", *pairs]
        self._delaying = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._delaying.stdout is not None
        if self._delaying.stdout.readline() != "ready\n":
            raise OSError(f"frames cannot be held back here: exit status {self._delaying.wait()}")

    def _end_delaying(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    def sent_bytes(self, host: int) -> int:
        """All that the host has sent so far, with the headers of its packets."""
        told = json.loads(_run("ip", "-n", self._names[host], "-statistics", "-json", "link", "show", "eth0"))
        return int(told[0]["stats64"]["tx"]["bytes"])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove_of_the_dead() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if (found := re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)) and not os.path.exists(f"/proc/{found[1]}"):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)
