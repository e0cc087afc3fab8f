"""A job on several hosts: on this machine under several names, and over real ssh to a server of the test's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import errors
from shoal.cli import main
from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.data.audit import audit
from shoal.launch import session
from shoal.launch.fleet import Fleet
from shoal.launch.hosts import HostSpec, parse_hosts, parse_lines
from shoal.launch.relaunch import CoolDown
from shoal.launch.remote import Reach, RemoteHost, Told
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings
from shoal.launch.tasks import Tasks
from shoal.metrics import read_events, write_end
from shoal.testing.faults import lose_journal

DEADLINE_S = 90.0
ROOT = str(Path(shoal.__file__).parents[1])
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs ssh and sshd (Debian: openssh-server)"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

# It goes on until the file `enough` is there, so that nothing depends on how fast it is.
LEASED = """
    import os, pathlib, time, torch, shoal

    def main(worker):
        model = torch.nn.Linear(2, 1)
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), sync=shoal.Independent(lockstep=False))
        print("on", worker.host, "at", os.environ["SHOAL_ADDRESS"])
        print(worker.id, "has", os.environ.get("DATA"), "and", os.environ["SHOAL_DEVICE"])
        data = torch.utils.data.TensorDataset(torch.randn(640, 2), torch.randn(640, 1))
        while True:
            for x, y in worker.batches(data, batch_size=8, epochs=1):
                worker.step(((model(x) - y) ** 2).mean())
                time.sleep(0.002)
            if pathlib.Path("enough").exists():
                break

    shoal.run(main)
"""
LOCKSTEP = LEASED.replace(", sync=shoal.Independent(lockstep=False)", "")


def until(holds: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def processes_in(directory: Path) -> list[psutil.Process]:
    """Those that were started there, wherever their parents are now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Run:
    """A `shoal run` under way in `directory`."""

    def __init__(self, directory: Path, *options: str, script: str = LEASED) -> None:
        self.directory, self.dir = directory, directory / "run"
        (directory / "script.py").write_text(textwrap.dedent(script))
        self.output = directory / "output"
        with open(self.output, "w") as output:
            self.process = self.start("run", "--threads", "1", "--dir", "run", *options, "script.py", output=output)

    def start(self, *words: str, output: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shoal", *words]
        env = {**os.environ, "PYTHONPATH": ROOT}
        return subprocess.Popen(command, cwd=self.directory, env=env, stdout=output, stderr=subprocess.STDOUT)

    def printed(self) -> str:
        return self.output.read_text()

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in read_events(self.dir / "events.jsonl") if event["event"] == kind]

    def members(self) -> list[str]:
        generations = self.events("generation")
        return list(generations[-1]["members"]) if generations else []

    def until(self, holds: Callable[[], bool]) -> None:
        until(lambda: holds() or self.process.poll() is not None, self.printed)
        assert holds(), self.printed()

    def has_on(self, **hosts: int) -> None:
        """Wait for so many members on each of these hosts, and none elsewhere."""

        def there() -> bool:
            names = [member.rpartition("-")[0] for member in self.members()]
            return {name: names.count(name) for name in names} == {name: n for name, n in hosts.items() if n}

        self.until(there)

    def launcher(self, host: str) -> psutil.Process:
        """The process that keeps the workers of that host: the fork server's parent, whose child has the host's log."""
        for process in processes_in(self.directory):
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{host}-w0.log"):
                return process.parent().parent()
        raise AssertionError(f"{host} has no worker")

    def finish(self) -> None:
        (self.directory / "enough").touch()
        self.ended(0)
        committed = RunDir(self.dir).committed()
        report = audit(self.dir / "audit", None if committed is None else committed.seq)
        assert report.clean, str(report)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.ended(130)
        assert (report := audit(self.dir / "audit", None)).clean, str(report)

    def ended(self, code: int) -> None:
        assert self.process.wait(DEADLINE_S) == code, self.printed()
        until(lambda: not processes_in(self.directory), lambda: str(processes_in(self.directory)))


@contextmanager
def running(directory: Path, *options: str, script: str = LEASED) -> Iterator[Run]:
    run = Run(directory, *options, script=script)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        until(lambda: not processes_in(directory), lambda: str(processes_in(directory)))


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The options by which server1 and server2 are reached, at a server of this machine."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.2\nListenAddress 127.0.0.3\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
    )
    hosts = "".join(f"Host server{n}\n HostName 127.0.0.{n + 1}\n" for n in (1, 2))
    for name in ("user", "stranger"):
        (folder / f"as-{name}").write_text(
            f"{hosts}Host *\n Port {port}\n IdentityFile {folder}/{name}\n IdentitiesOnly yes\n"
            f" StrictHostKeyChecking no\n UserKnownHostsFile {folder}/known\n LogLevel ERROR\n"
        )
    assert SSHD is not None
    if os.geteuid() == 0:  # where the system's own service never ran, Debian's sshd misses it
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert "listening" in server.stderr.readline()
        yield ["--ssh", f"ssh -F {folder}/as-user"]
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_ctrl_c_lets_the_workers_of_every_host_finish_their_step_and_leave(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1") as run:
        run.has_on(a=1, b=1)
        with pytest.raises(errors.SettingsContradict, match="cannot scale to 5: the hosts of the job have 2 slots"):
            commands.scale(RunDir(run.dir), 5)
        run.process.send_signal(signal.SIGINT)
        run.ended(128 + signal.SIGINT)
    assert {event["worker_id"] for event in run.events("left")} == {"a-w0", "b-w0"}
    assert not run.events("lost")
    assert "audit: 0 lost, 0 repeated" in run.printed()


@pytest.mark.slow
def test_a_host_whose_launcher_is_killed_loses_its_workers_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:2,localhost/b:1", "--budget", "2") as run:
        run.has_on(a=2, b=1)
        launcher = run.launcher("b")
        launcher.kill()
        run.until(lambda: len(run.events("host_lost")) == 1)
        run.has_on(a=2, b=1)
        assert "b-w1" in run.members(), "no name is used twice"
        run.finish()
    assert "a-w0 | on a at 127.0.0.1" in run.printed()
    assert [event["worker_id"] for event in run.events("lost")] == ["b-w0"]


@needs_sshd
def test_a_job_over_ssh_has_the_variables_it_names_and_ends_with_nothing_left_on_either_host(
    tmp_path: Path, ssh: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"secret={uuid4()}"
    monkeypatch.setenv("DATA", secret)
    with running(tmp_path, "-H", "server1:1,server2:1", "--env", "DATA", *ssh) as run:
        run.has_on(server1=1, server2=1)
        assert clients_of(run)
        assert not [process for process in psutil.process_iter(["cmdline"]) if secret in str(process.info["cmdline"])]
        run.finish()
    assert "server2-w0 | on server2 at 127.0.0.1" in run.printed()
    assert f"server2-w0 | server2-w0 has {secret}" in run.printed()
    assert "its launcher ended" not in run.printed()
    assert run.printed().rstrip().split("\n")[-1].startswith("audit: 0 lost, 0 repeated")


@pytest.mark.slow
def test_a_job_that_goes_on_has_the_same_variables_and_says_that_it_begins_anew(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--env", "DATA=given") as run:
        run.until(lambda: run.members() == ["w0"])
        run.process.kill()
        until(lambda: not processes_in(tmp_path))
        (tmp_path / "enough").touch()
        with open(tmp_path / "resumed", "w") as output:
            assert run.start("resume", "run", output=output).wait(DEADLINE_S) == 0
    lines = (tmp_path / "resumed").read_text().split("\n")
    assert "no checkpoint: the job begins anew" in lines
    assert "w1 | w1 has given and auto" in lines


def test_a_host_with_a_directory_of_its_own_keeps_no_variable_of_the_job_on_its_disk(tmp_path: Path) -> None:
    secret = f"secret={uuid4()}"
    (tmp_path / "script.py").touch()
    settings = asdict(JobSettings(str(tmp_path / "script.py"), env={"DATA": secret}))
    with session.host(Told("a", 1, "127.0.0.1:1", "token", {}, str(tmp_path / "run"), settings)) as here:
        assert not here.shared
        assert here.settings.env == {"DATA": secret}
        written = [path.read_text() for path in here.run_dir.path.rglob("*") if path.is_file()]
    assert written
    assert not any(secret in text for text in written)


@pytest.mark.slow
def test_what_is_written_on_a_host_with_a_directory_of_its_own_comes_home(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1", "--own-dirs") as run:
        run.has_on(a=1, b=1)
        job = RunDir(run.dir)
        run.until(lambda: all((job.audit / f"{name}-w0.bin").exists() for name in "ab"))
        os.kill(job.coordinator()[0], signal.SIGKILL)
        run.until(lambda: len(run.events("restarted")) == 1)
        run.finish()
    assert "on b at 127.0.0.1" in (job.logs / "b-w0.log").read_text()
    assert (job.metrics / "a-w0.jsonl").stat().st_size > 0
    assert not list(Path(tempfile.gettempdir()).glob("shoal-join-*"))


@pytest.mark.slow
def test_a_job_whose_coordinator_and_journal_are_lost_goes_on_with_the_workers_of_every_host(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1", "-n", "1") as run:
        run.has_on(a=1)
        commands.scale(RunDir(run.dir), 2)
        run.has_on(a=1, b=1)
        pid = RunDir(run.dir).coordinator()[0]
        os.kill(pid, signal.SIGSTOP)
        lose_journal(RunDir(run.dir), "deleted")
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: len(run.events("rebuilt")) == 1)
        status = commands.status(RunDir(run.dir))
        assert status["target"] == 2
        assert sorted(worker["worker_id"] for worker in status["workers"]) == ["a-w0", "b-w0"]
        commands.scale(RunDir(run.dir), 1)
        run.has_on(a=1)
        run.finish()
    assert not run.events("lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("import nowhere", "ScriptFailed: a: script.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("import os; os._exit(3)", "ScriptFailed: a: a-w0 ended with exit status 3; its log says why"),
        ("pass", "ScriptFailed: script.py ended without calling shoal.run(main); call it at the end of the script"),
    ],
)
def test_a_script_that_fails_on_a_host_ends_the_job_as_it_would_here(tmp_path: Path, line: str, wanted: str) -> None:
    with running(tmp_path, "-H", "localhost/a:1", script=line) as run:
        run.ended(2)
    assert run.printed().rstrip().split("\n")[-1] == f"shoal: {wanted}"


def clients_of(run: Run) -> list[psutil.Process]:
    return [child for child in psutil.Process(run.process.pid).children() if child.name() == "ssh"]


@needs_sshd
@pytest.mark.slow
@pytest.mark.parametrize("fate", ["client killed", "client stopped", "session killed", "home killed"])
def test_a_cut_connection_leaves_nothing_running_on_the_host(tmp_path: Path, ssh: list[str], fate: str) -> None:
    with running(tmp_path, "-H", "server1:1", "--budget", "1", *ssh) as run:
        run.has_on(server1=1)
        launcher = run.launcher("server1")
        workers = launcher.children(recursive=True)
        (client,) = clients_of(run)
        if fate == "client killed":
            client.kill()
        elif fate == "client stopped":
            client.suspend()
        elif fate == "session killed":
            launcher.parent().kill()  # sshd's
        else:
            run.process.kill()
        until(lambda: not any(alive(process) for process in (launcher, *workers)))
        if fate != "home killed":
            run.until(lambda: "server1-w1" in run.members())
            run.finish()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_host_joins_by_hand_and_leaves_with_ctrl_c_while_the_job_goes_on(tmp_path: Path) -> None:
    options = ("--address", "127.0.0.1", "--budget", "2", "--env", "DATA=given", "--device", "cpu")
    with running(tmp_path, "-n", "1", *options) as run:
        run.until(lambda: run.members() == ["w0"])
        words = ("join", str(run.dir / "invitation"), "--slots", "2", "--host-name", "spare")
        with open(tmp_path / "joined", "w") as output:
            joined = run.start(*words, output=output)
        try:
            run.until(lambda: set(run.members()) == {"w0", "spare-w0", "spare-w1"})
            joined.send_signal(signal.SIGINT)
            assert joined.wait(DEADLINE_S) == 0, (tmp_path / "joined").read_text()
        finally:
            joined.kill()
            joined.wait()
        assert "spare-w0 | spare-w0 has given and cpu" in (tmp_path / "joined").read_text()
        run.until(lambda: run.members() == ["w0"])
        assert commands.status(RunDir(run.dir))["target"] == 1
        assert not run.events("lost")
        run.finish()


@pytest.mark.slow
def test_hosts_that_a_script_discovers_are_used_followed_and_let_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, script = discovered(tmp_path, "localhost/a:1\n")
    with running(tmp_path, "--discover", str(script), "--budget", "1", script=LOCKSTEP) as run:
        run.has_on(a=1)
        write(listed, "localhost/a:1\nlocalhost/b:2\n")
        run.has_on(a=1, b=2)
        write(listed, "localhost/b:1\n")
        run.has_on(b=1)
        with pytest.raises(SystemExit, match="0"):
            main(["scale", str(run.dir), "3"])
        assert "3 workers wanted; its hosts have 1 slot, more come with other hosts" in capsys.readouterr().out
        write(listed, "nonsense:x\n")
        run.until(lambda: "'nonsense:x' is not a host and its slots" in run.printed())
        write(listed, "")
        run.until(lambda: "b is gone from the list of hosts; it stays until another has the state" in run.printed())
        write(listed, "localhost/c:1\nlocalhost/d:1\n")
        run.has_on(c=1, d=1)
        assert not run.events("lost")
        run.interrupt()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "before", "after"),
    [
        ("2", {"a": 2}, {"c": 2}),
        ("2", {"a": 1, "b": 1}, {"c": 1, "d": 1}),
        ("2:2", {"a": 1, "b": 1}, {"c": 1, "d": 1}),
        ("1:1", {"a": 1}, {"c": 1}),
    ],
)
def test_all_discovered_hosts_change_at_once_and_as_many_workers_train_on(
    tmp_path: Path, workers: str, before: dict[str, int], after: dict[str, int]
) -> None:
    def lines(slots: dict[str, int]) -> str:
        return "".join(f"localhost/{name}:{number}\n" for name, number in slots.items())

    listed, script = discovered(tmp_path, lines(before))
    with running(tmp_path, "--discover", str(script), "-n", workers, "--budget", "1", script=LOCKSTEP) as run:
        run.has_on(**before)
        write(listed, lines(after))
        run.has_on(**after)
        assert commands.status(RunDir(run.dir))["target"] == sum(after.values())
        assert not run.events("lost")
        run.interrupt()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "lines"),
    [("1:2", "localhost/a:1\nfar:1\n"), ("2", "far:1\nlocalhost/a:1\n")],
    ids=["the slots count", "so many are wanted"],
)
def test_a_job_begins_without_a_host_that_is_gone_from_the_list_before_it_has_come(
    tmp_path: Path, workers: str, lines: str
) -> None:
    listed, discover = discovered(tmp_path, lines)
    os.mkfifo(tmp_path / "silence")
    script(
        tmp_path / "ssh", f'case "$*" in *-G*) exit;; esac\ntouch {tmp_path}/tried; cat {tmp_path}/silence; exit 255'
    )
    options = ("--address", "127.0.0.1", "--ssh", str(tmp_path / "ssh"), "--budget", "1")
    with running(tmp_path, "--discover", str(discover), "-n", workers, *options, script=LOCKSTEP) as run:
        run.until((tmp_path / "tried").exists)
        write(listed, "localhost/a:1\n")
        run.until(lambda: "far is gone from the list of hosts\n" in run.printed())
        (tmp_path / "silence").write_text("")
        run.has_on(a=1)
        write(listed, "localhost/a:1\nlocalhost/b:1\n")
        run.has_on(a=1, b=1)
        run.interrupt()
    assert "far: " not in run.printed()


@pytest.mark.slow
def test_a_host_whose_slots_change_while_it_is_coming_has_the_newer(tmp_path: Path) -> None:
    script(
        tmp_path / "discover",
        f"if [ -e {tmp_path}/asked ]; then echo localhost/a:2; else touch {tmp_path}/asked; echo localhost/a:1; fi",
    )
    with running(tmp_path, "--discover", str(tmp_path / "discover"), "--budget", "1") as run:
        run.has_on(a=2)
        run.interrupt()


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_the_script_names_then(tmp_path: Path) -> None:
    listed, script = discovered(tmp_path, "localhost/a:1\n")
    with running(tmp_path, "--discover", str(script), "--budget", "1", script=LOCKSTEP) as run:
        run.has_on(a=1)
        run.interrupt()
        write(listed, "localhost/b:1\n")
        with open(run.output, "a") as output:
            run.process = run.start("resume", str(run.dir), output=output)
        run.has_on(b=1)
        run.interrupt()


def discovered(folder: Path, hosts: str) -> tuple[Path, Path]:
    """A file with these hosts, and a script that prints it."""
    listed, script = folder / "listed", folder / "discover"
    listed.write_text(hosts)
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    return listed, script


def write(path: Path, text: str) -> None:
    """At once: whoever reads sees the one or the other."""
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.replace(path)


@pytest.mark.slow
def test_a_host_that_is_stopped_is_lost_and_begins_anew_when_it_wakes_up(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1", "--budget", "1") as run:
        run.has_on(a=1, b=1)
        launcher = run.launcher("b")
        old = launcher.children(recursive=True)
        for process in (launcher, *old):
            process.suspend()
        run.until(lambda: len(run.events("host_lost")) == 1)
        run.until(lambda: run.members() == ["a-w0"])
        for process in (*old, launcher):
            process.resume()
        run.until(lambda: "b-w1" in run.members())
        assert not any(alive(process) for process in old), "what was dropped is ended before it begins anew"
        run.finish()


@needs_sshd
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["-H", "server9:1"], "HostUnusable: server9"),
        (["-H", "server1:1", "--ssh", "ssh -F {folder}/as-stranger"], "HostUnusable: server1: "),
        (["-H", "server1:1", "--remote-python", "/nowhere/python"], "HostUnusable: server1: "),
        (["-H", "server1:1", "--remote-python", "{folder}/without"], "HostUnusable: server1: "),
        (["-H", "server1:1", "--remote-python", "{folder}/older"], "HostUnusable: server1 has shoal 0.0.1, the job "),
        (["-H", "server1:1", "--remote-python", "{folder}/torch"], "HostUnusable: server1 has torch 0.0.1, the job "),
        pytest.param(["-H", "server1:2", "--device", "cuda"], "DeviceMissing: server1-w", marks=needs_no_gpu),
    ],
    ids=["unknown", "key refused", "no python", "no shoal", "another shoal", "another torch", "no GPU"],
)
def test_a_host_that_cannot_be_used_is_one_line_and_exit_code_2(
    tmp_path: Path, ssh: list[str], options: list[str], wanted: str
) -> None:
    folder = Path(ssh[1].split()[-1]).parent
    script(folder / "without", 'exec %s -I -S "$@"')
    other = 'from shoal.control import protocol; protocol.versions = lambda: {"torch": "0.0.1"}'
    script(folder / "torch", f"shift 2; exec %s -c '{other}; {MAIN}' \"$@\"")
    script(folder / "older", f'shift 2; exec %s -c \'import shoal; shoal.__version__ = "0.0.1"; {MAIN}\' "$@"')
    given = [word.replace("{folder}", str(folder)) for word in options]
    with running(tmp_path, *ssh, *given) as run:
        run.ended(2)
    assert [line for line in run.printed().split("\n") if line.startswith("shoal: ")] == [run.printed().split("\n")[-2]]
    assert run.printed().split("\n")[-2].startswith(f"shoal: {wanted}"), run.printed()


MAIN = "import sys, shoal.cli; shoal.cli.main(sys.argv[1:])"


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line.replace('%s', sys.executable)}\n")
    path.chmod(0o755)


MISTAKES = {
    "-H a:": "is not a host and its slots",
    "-H a:0": "a has 0 slots; write a number from 1 to 256",
    "-H a:two": "is not a host and its slots",
    "-H a:1,,b:1": "'' is not a host and its slots",
    "-H a:1,b:2,a:1": "a is named twice",
    "-H far/a:1": "only hosts on this machine have names of their own",
    "-H -oProxyCommand=x:1": "is not a host and its slots",
    "-H [::1]:1": "'[::1]:1': IPv6 addresses are not supported yet",
    "-H fe80::1": "'fe80::1': IPv6 addresses are not supported yet",
    "-H nowhere.invalid:1 --ssh true": "nowhere.invalid cannot be reached: ",
    "-H server1:1 --ssh nosuchssh": "--ssh nosuchssh cannot be run: No such file or directory",
    "--env UNSET": "--env UNSET: it is not set here; set it, or write --env UNSET=VALUE",
    "--env A-B=hush": "--env A-B is no variable",
    "--env SHOAL_DIR=here": "what begins with SHOAL_ is shoal's own",
    "-H a:200,b:200": "400 slots in all; a job has 256 at most",
    "-H localhost/a:1 -n 2": "2 workers on 1 slot of localhost/a:1",
    "-H a:1 --hostfile hosts": "give one of them",
    "--hostfile nowhere": "cannot be read: No such file or directory",
    "--hostfile hosts": "--hostfile hosts, line 3: 'b slots=x' is not a host and its slots",
    "--discover ./nowhere": "cannot be run: No such file or directory",
    "--address 0.0.0.0": "is every network",
    "--address 203.0.113.9": "is no IPv4 address of this machine",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_in_the_hosts_is_one_line_and_exit_code_2(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# ours\na slots=2\nb slots=x\n")
    Path("script.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(["run", *options.split(), "script.py"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert MISTAKES[options] in err
    assert not Path("shoal-runs").exists()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kill -9 $$", "server1: {ssh} was ended by signal 9 (Killed)"),
        (
            "echo \"ModuleNotFoundError: No module named 'typer'\" >&2; exit 1",
            "server1: ModuleNotFoundError: No module named 'typer'; /usr/bin/python3 must be there and have shoal with "
            "what it needs, see --remote-python",
        ),
    ],
    ids=["killed", "without dependencies"],
)
def test_how_the_way_to_a_host_failed_is_said(tmp_path: Path, line: str, wanted: str) -> None:
    script(tmp_path / "ssh", line)
    reach = Reach((str(tmp_path / "ssh"),), "/usr/bin/python3")
    told = Told("server1", 1, "127.0.0.1:1", "token", {}, str(tmp_path), {})
    remote = RemoteHost(HostSpec("server1", 1, "server1"), told, reach, Timeouts(), Screen(quiet=True))
    end = asyncio.run(remote.run(lambda: told.address))
    assert (end.up, str(end.error)) == (False, wanted.format(ssh=tmp_path / "ssh"))


class Heard(Screen):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_host_that_ends_with_the_job_is_not_said_to_be_tried_again(tmp_path: Path) -> None:
    script(tmp_path / "ssh", f"echo '{{\"up\": 1}}'; touch {tmp_path}/began")
    told = Told("", 0, "127.0.0.1:1", "token", {}, str(tmp_path), {})
    fleet = Fleet(
        (HostSpec("server1", 1, "server1"),), told, Reach((str(tmp_path / "ssh"),)), RunDir(tmp_path), Timeouts()
    )
    screen, problems = Heard(), list[errors.ShoalError]()

    async def go() -> None:
        tasks = Tasks(problems.append)
        fleet.start(tasks, screen, problems.append)
        while fleet._remotes or not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        await fleet.stop(0.0, busy=lambda: False)  # as home does once it has heard of the end, too
        await tasks.cancel()

    asyncio.run(asyncio.wait_for(go(), DEADLINE_S))
    assert (screen.lines, problems) == ([], [])


def takes_the_place(run_dir: RunDir, capsys: pytest.CaptureFixture[str], address: str = "127.0.0.1") -> str:
    """What `shoal coordinator` says to what it cannot do."""
    with pytest.raises(SystemExit) as ended:
        main(["coordinator", str(run_dir.path), "--address", address])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_nobody_takes_the_place_of_a_job_that_runs_or_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir.create(tmp_path / "run", {"script": "train.py"})
    with run_dir.held():
        assert "a job is running in" in takes_the_place(run_dir, capsys)
    assert "is no IPv4 address of this machine" in takes_the_place(run_dir, capsys, "203.0.113.9")
    write_end(run_dir.events, "finished", "")
    assert "does not run anywhere; go on with shoal resume" in takes_the_place(run_dir, capsys)


@pytest.mark.slow
def test_a_job_of_which_nobody_is_left_does_not_begin_anew_elsewhere(tmp_path: Path) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1", "--budget", "1") as run:
        run.has_on(a=1, b=1)
        run.process.kill()
        until(lambda: not processes_in(tmp_path))
        with open(tmp_path / "heir", "w") as output:
            heir = run.start("coordinator", "run", "--address", "127.0.0.2", output=output)
        assert heir.wait(DEADLINE_S) == 2
    assert "StateLost: no worker of the job came to 127.0.0.2:" in (tmp_path / "heir").read_text()


def test_lines_of_a_hostfile_are_read_in_every_form() -> None:
    lines = ["# ours", "", "a slots=2", "b:3  # fast", "c 4", "me@d:1", "e", "localhost/f:2"]
    specs = parse_lines(lines, "here")
    assert [(spec.name, spec.slots, spec.where) for spec in specs] == [
        ("a", 2, "a"),
        ("b", 3, "b"),
        ("c", 4, "c"),
        ("d", 1, "me@d"),
        ("e", 1, "e"),
        ("f", 2, ""),
    ]
    assert parse_hosts(",".join(spec.written for spec in specs)) == specs


@given(
    lives=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 1000.0)), max_size=50),
)
def test_a_host_rests_longer_each_time_and_never_for_ever(lives: list[tuple[str, float]]) -> None:
    policy = CoolDown()
    before: dict[str, float] = {}
    for host, lived_s in lives:
        policy, rest_s = policy.on_end(host, lived_s)
        assert policy.first_s <= rest_s <= policy.longest_s
        if lived_s >= policy.healthy_s:
            assert rest_s == policy.first_s
        else:
            assert rest_s == min(2 * before.get(host, policy.first_s / 2), policy.longest_s)
        before[host] = rest_s
