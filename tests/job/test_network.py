"""Jobs on several hosts that are network namespaces: links are cut and heal, lose a direction, and nothing shows in the
result."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.control.rundir import RunDir
from shoal.data.audit import audit
from shoal.metrics import read_events
from shoal.testing.network import Network, missing
from tests.job import training
from tests.job.test_faults import MANY, SCRIPT
from tests.job.training import Case, Gate

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a network")
WAIT_S = 60.0


class FarJob:
    """A job of two workers on host 0, which others join with two each. Nothing of it is reached but its files: the test
    is on none of its hosts."""

    def __init__(self, network: Network, folder: Path, budget_s: float = 2.0, epochs: int = 12) -> None:
        self.network, self.folder = network, folder
        self.gate = Gate(folder / "gate")
        self.case = Case(str(folder / "out"), epochs=epochs, gate=str(self.gate.path))
        (folder / "out").mkdir()
        self.run_dir = RunDir(folder / "run")
        command = [
            sys.executable, "-m", "shoal", "run", "-n", "2", "--budget", str(budget_s), "--dir", str(self.run_dir.path),
            "--address", network.addresses[0], *MANY, str(SCRIPT), *self.case.args(),
        ]  # fmt: skip
        self.home = self._start(0, command, "home.log")
        self.far: dict[int, subprocess.Popen[bytes]] = {}
        self.until(lambda: self.run_dir.address() is not None)

    def _start(self, host: int, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with open(self.folder / log, "ab") as output:
            return subprocess.Popen(self.network.on(host, command), stdout=output, stderr=output)

    def join(self, host: int) -> None:
        command = [
            sys.executable, "-m", "shoal", "join", str(self.run_dir.invitation_file), "--slots", "2",
            "--host-name", f"far{host}",
        ]  # fmt: skip
        self.far[host] = self._start(host, command, f"far{host}.log")

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline_s:
                said = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
                raise TimeoutError(f"{said}\n" + "\n".join(str(event) for event in self.events()[-30:]))
            time.sleep(0.02)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = read_events(self.run_dir.events) if self.run_dir.events.exists() else []
        return [event for event in found if kind is None or event["event"] == kind]

    def size(self) -> int:
        """How many members the newest generation has."""
        generations = self.events("generation")
        return len(generations[-1]["members"]) if generations else 0

    def check(self) -> None:
        """Let it come to its end: that is the one of an undisturbed run, on every worker."""
        self.gate.open(10**6)
        assert self.home.wait(WAIT_S) == 0, (self.folder / "home.log").read_text()
        state, losses = training.reference(self.case)
        committed = self.run_dir.committed()
        assert committed is not None
        assert committed.step == len(losses)
        assert audit(self.run_dir.audit, committed.seq).clean
        assert len({event["digest"] for event in self.events("finished")}) == 1
        for one in training.results(self.case).values():
            for name, value in state.items():
                assert (one["state"][name] - value).abs().max() < 1e-10

    def close(self) -> None:
        for process in (self.home, *self.far.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FarJob]:
    with Network(3) as network:
        made = FarJob(network, tmp_path)
        try:
            made.join(1)
            made.gate.open(10)
            made.until(lambda: made.size() == 4)
            yield made
        finally:
            made.close()


@pytest.mark.slow
def test_a_link_that_is_cut_for_longer_than_the_budget_drops_its_host_which_comes_back_when_it_heals(
    job: FarJob,
) -> None:
    job.gate.open(30)
    job.network.cut(1)
    job.until(lambda: job.size() == 2)
    assert len(job.events("host_lost")) == 1
    job.gate.open(60)
    job.network.heal(1)
    job.until(lambda: job.size() == 4)
    job.check()


@pytest.mark.slow
def test_a_link_that_is_cut_for_a_second_is_a_pause_and_nothing_else(tmp_path: Path) -> None:
    with Network(2) as network:
        job = FarJob(network, tmp_path, budget_s=5.0)
        try:
            job.join(1)
            job.gate.open(10)
            job.until(lambda: job.size() == 4)
            generations = len(job.events("generation"))
            job.gate.open(60)
            network.cut(1)
            time.sleep(1.0)  # what this is about
            network.heal(1)
            job.check()
            assert not job.events("lost")
            later = job.events("generation")[generations:]
            assert all("finished" in generation["cause"] for generation in later)
        finally:
            job.close()


ECHO = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
server = socket.create_server((address, 7))
print("ready", flush=True)
end, _ = server.accept()
with end:
    left = size
    while left:
        left -= len(end.recv(min(left, 1 << 16)))
    end.sendall(b"!")
"""
SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
end = socket.create_connection((address, 7))
began = time.monotonic()
end.sendall(bytes(size))
assert end.recv(1) == b"!"
print(time.monotonic() - began)
"""


def exchanged_s(network: Network, size_bytes: int) -> float:
    """How long so many bytes take from host 0 to host 1, with an answer."""
    arguments = [network.addresses[1], str(size_bytes)]
    echo = [sys.executable, "-c", ECHO, *arguments]
    with subprocess.Popen(network.on(1, echo), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        send = network.on(0, [sys.executable, "-c", SEND, *arguments])
        return float(subprocess.run(send, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout)


def test_packets_are_delayed_both_ways_and_all_arrive() -> None:
    with Network(2) as network:
        network.delay(50)
        assert exchanged_s(network, 1) >= 0.1
        assert exchanged_s(network, 16 << 20) >= 0.1
        network.delay(200)
        assert exchanged_s(network, 1) >= 0.4
        network.delay(0)
        exchanged_s(network, 1)


@pytest.mark.slow
def test_packets_that_are_late_cost_time_and_nothing_else(tmp_path: Path) -> None:
    with Network(2) as network:
        network.delay(50)
        job = FarJob(network, tmp_path, epochs=5)
        try:
            job.join(1)
            job.gate.open(10)
            job.until(lambda: job.size() == 4)
            generations = len(job.events("generation"))
            job.check()
            assert not job.events("lost")
            assert not job.events("host_lost")
            assert all("finished" in generation["cause"] for generation in job.events("generation")[generations:])
        finally:
            job.close()


@pytest.mark.slow
@pytest.mark.parametrize(("host", "to"), [(1, 0), (0, 1)])
def test_a_link_that_loses_one_direction_is_a_link_that_is_cut(job: FarJob, host: int, to: int) -> None:
    job.gate.open(30)
    job.network.lose(host, to)
    job.until(lambda: job.size() == 2)
    job.gate.open(60)
    job.network.find(host, to)
    job.until(lambda: job.size() == 4)
    job.check()


@pytest.mark.slow
def test_three_hosts_of_which_one_is_lost_for_good(job: FarJob) -> None:
    job.join(2)
    job.until(lambda: job.size() == 6)
    job.gate.open(30)
    job.network.cut(2)
    job.until(lambda: job.size() == 4)
    job.check()
    job.network.heal(2)
    assert job.far[2].wait(WAIT_S) is not None  # it ends by itself: there is no job any more


@pytest.mark.slow
def test_two_far_hosts_that_do_not_reach_each_other_are_not_both_kept(job: FarJob) -> None:
    job.join(2)
    job.until(lambda: job.size() == 6)
    job.gate.open(30)
    for one, other in ((1, 2), (2, 1)):
        job.network.lose(one, other)
    job.until(lambda: job.size() == 4)
    job.check()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "workers"])
def test_a_far_host_that_is_stopped_is_dropped(job: FarJob, who: str) -> None:
    job.gate.open(30)
    started = {event["worker_id"] for event in job.events("joined") if "far1" in event["worker_id"]}
    assert len(started) == 2
    stopped = [job.far[1].pid] if who == "launcher" else children(job.far[1].pid)
    for pid in stopped:
        subprocess.run(["kill", "-STOP", str(pid)], check=False)
    job.gate.open(60)
    job.until(lambda: job.size() == 2 or bool(job.events("lost")))
    for pid in stopped:
        subprocess.run(["kill", "-CONT", str(pid)], check=False)
    job.check()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
