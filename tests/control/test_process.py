"""The coordinator as a process of its own, and the client in a process that forks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from shoal.control import commands
from shoal.control.client import Client, Progress
from shoal.control.membership.values import found
from shoal.control.rundir import RunDir
from shoal.control.serve import EmbeddedCoordinator
from shoal.control.timeouts import Timeouts

WAIT_S = 20.0


def start(run_dir: RunDir) -> subprocess.Popen[str]:
    """A coordinator that serves by the time this returns."""
    command = [sys.executable, "-m", "shoal.control.coordinator", "--dir", str(run_dir.path), "--target", "1"]
    process = subprocess.Popen([*command, "--parent", str(os.getpid())], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "coordinator serves" in process.stderr.readline()
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    assert process.stderr is not None
    process.stderr.close()
    return process.wait(WAIT_S)


def join(run_dir: RunDir, worker_id: str) -> Client:
    client = Client(run_dir, worker_id, "here", Timeouts(1.0), Progress, lambda generation: None)
    client.connect()
    return client


def test_a_coordinator_killed_without_warning_comes_back_where_it_was(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    process = start(run_dir)
    first = join(run_dir, "w0")
    first.ready()
    assert first.wait_newer(0, WAIT_S) is not None
    assert end(process, signal.SIGKILL) == -signal.SIGKILL
    process = start(run_dir)
    second = join(run_dir, "w1")
    second.ready()
    generation = first.wait_newer(1, WAIT_S)
    assert generation is not None
    assert [member.worker_id for member in generation.members] == ["w0", "w1"]
    assert generation.number == 2
    for client in (first, second):
        client.close()
    assert end(process, signal.SIGTERM) == 0


def test_a_second_coordinator_on_a_served_directory_says_so_in_one_line(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    process = start(run_dir)
    command = [sys.executable, "-m", "shoal.control.coordinator", "--dir", str(run_dir.path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert second.returncode == 1
    assert "another coordinator serves" in second.stderr
    assert "Traceback" not in second.stderr
    assert commands.status(run_dir)["phase"] == "starting"
    end(process, signal.SIGTERM)


def test_the_coordinator_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    parent_code = f"""
import os, subprocess, sys
command = [sys.executable, "-m", "shoal.control.coordinator", "--dir", {str(run_dir.path)!r}]
child = subprocess.Popen([*command, "--parent", str(os.getpid())], stderr=subprocess.PIPE, text=True)
child.stderr.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    assert select.select([pidfd], [], [], WAIT_S)[0], "the coordinator outlived its parent"
    os.close(pidfd)
    parent.wait(WAIT_S)
    parent.stdin.close()
    parent.stdout.close()


def test_a_forked_child_lets_go_of_the_coordinators_sockets_and_the_parent_keeps_them(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    server = EmbeddedCoordinator(run_dir, found(1, 1, 1))
    server.start()
    client = join(run_dir, "w0")
    assert sockets_to(run_dir) >= 3, "the listener and both ends of the stream"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a loader worker is forked from a process with threads
        child = os.fork()
    if child == 0:
        client.close_in_child()
        os._exit(sockets_to(run_dir))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.ready()
    assert client.wait_newer(0, WAIT_S) is not None
    client.close()
    server.stop()


def sockets_to(run_dir: RunDir) -> int:
    """How many descriptors of this process are sockets at the coordinator's port."""
    port = int((run_dir.address() or "").rpartition(":")[2])
    at_port = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if port in (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16)):
                at_port.add(f"socket:[{fields[9]}]")
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_socket()]
    return sum(os.readlink(link) in at_port for link in links)
