"""A job on several hosts: on this machine under several names, and over real ssh to a server of the test's own."""

from __future__ import annotations

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
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.cli import main
from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.data.audit import audit
from shoal.launch.hosts import parse_hosts, parse_lines
from shoal.launch.relaunch import CoolDown
from shoal.metrics import read_events
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
        print("on", os.environ["SHOAL_HOST"], "at", os.environ["SHOAL_ADDRESS"])
        data = torch.utils.data.TensorDataset(torch.randn(640, 2), torch.randn(640, 1))
        while True:
            for x, y in worker.batches(data, batch_size=8, epochs=1):
                worker.step(((model(x) - y) ** 2).mean())
                time.sleep(0.002)
            if pathlib.Path("enough").exists():
                break

    shoal.run(main)
"""


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
def test_a_job_over_ssh_ends_with_nothing_left_on_either_host(tmp_path: Path, ssh: list[str]) -> None:
    with running(tmp_path, "-H", "server1:1,server2:1", *ssh) as run:
        run.has_on(server1=1, server2=1)
        run.finish()
    assert "server2-w0 | on server2 at 127.0.0.1" in run.printed()
    assert run.printed().rstrip().split("\n")[-1].startswith("audit: 0 lost, 0 repeated")


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
    with running(tmp_path, "-n", "1", "--address", "127.0.0.1", "--budget", "2") as run:
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
        run.until(lambda: run.members() == ["w0"])
        assert commands.status(RunDir(run.dir))["target"] == 1
        assert not run.events("lost")
        run.finish()


@pytest.mark.slow
def test_hosts_that_a_script_discovers_are_used_followed_and_let_go(tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_text("localhost/a:1\n")
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    with running(tmp_path, "--discover", str(script), "--budget", "1") as run:
        run.has_on(a=1)
        write(listed, "localhost/a:1\nlocalhost/b:2\n")
        run.has_on(a=1, b=2)
        write(listed, "localhost/b:1\n")
        run.has_on(b=1)
        write(listed, "nonsense:x\n")
        run.until(lambda: "'nonsense:x' is not a host and its slots" in run.printed())
        assert not run.events("lost")
        run.finish()


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
