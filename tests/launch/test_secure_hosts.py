"""TLS that a job on several hosts has without being asked, the invitation to it, and who is not believed."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from shoal.cli import main
from shoal.control import certificates, commands, tls
from shoal.control.invitation import Invitation
from shoal.control.rundir import RunDir
from shoal.errors import RunDirUnusable
from shoal.launch.remote import Told, line_of
from tests.launch.test_many_hosts import DEADLINE_S, processes_in, running

TOKEN = "a-token-that-nobody-may-hear"


@pytest.fixture(scope="module")
def address() -> str:
    """One that other machines could reach."""
    known = (it.address for each in psutil.net_if_addrs().values() for it in each if it.family == socket.AF_INET)
    found = next((it for it in known if not tls.is_loopback(it)), None)
    if found is None:
        pytest.skip("needs an IPv4 address beside loopback")
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_that_other_hosts_reach_speaks_tls_unasked_and_they_believe_it(tmp_path: Path, address: str) -> None:
    with running(tmp_path, "-H", "localhost/a:1,localhost/b:1", "--own-dirs", "--address", address) as run:
        run.has_on(a=1, b=1)
        job = RunDir(run.dir)
        host, _, port = str(job.address()).rpartition(":")
        assert host == address
        context = ssl.create_default_context(cafile=job.tls_folder / "ca.pem")
        with socket.create_connection((host, int(port)), 10) as plain:
            context.wrap_socket(plain, server_hostname=host).close()  # or it raises
        assert {mode(path) for path in (*job.tls_folder.iterdir(), job.invitation_file)} == {0o600}
        assert json.loads(job.invitation_file.read_text())["certificates"].keys() == {"ca.pem"}
        words = [
            word for process in processes_in(tmp_path) for word in (*process.cmdline(), *process.environ().values())
        ]
        assert words
        assert not [word for word in words if job.token() in word or "BEGIN" in word]
        run.finish()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["its own", "both ways", "plain text"])
def test_a_host_joins_by_a_copy_of_the_invitation(tmp_path: Path, address: str, kind: str) -> None:
    options: tuple[str, ...] = ()
    if kind == "both ways":
        certificates.make(tmp_path / "certs", [address])
        options = ("--tls", "certs", "--mutual")
    elif kind == "plain text":
        options = ("--no-tls",)
    with running(tmp_path, "-n", "1", "--address", address, *options) as run:
        run.until(lambda: run.members() == ["w0"])
        copy = tmp_path / "copy"
        copy.touch(mode=0o600)
        copy.write_text((run.dir / "invitation").read_text())
        assert ("client.key" in copy.read_text()) == (kind == "both ways")
        assert (run.dir / "tls").exists() == (kind != "plain text")
        with open(tmp_path / "joined", "w") as output:
            joined = run.start("join", str(copy), "--slots", "1", "--host-name", "spare", output=output)
        try:
            run.until(lambda: set(run.members()) == {"w0", "spare-w0"})
            joined.send_signal(signal.SIGINT)
            assert joined.wait(DEADLINE_S) == 0, (tmp_path / "joined").read_text()
        finally:
            joined.kill()
            joined.wait()
        commands.status(RunDir(run.dir))
        run.finish()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that it prints before it ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def test_a_certificate_for_another_address_is_refused_before_the_job_begins(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    certificates.make(Path("certs"))
    line = refused(capsys, "run", "--tls", "certs", "--address", address, "train.py")
    assert (
        f"CertificateRefused: {tmp_path}/certs/coordinator.pem: its certificate is not for {address}; make one" in line
    )
    assert not Path("shoal-runs").exists()
    assert "--no-tls and --tls DIR contradict" in refused(capsys, "run", "--tls", "certs", "--no-tls", "train.py")


@contextmanager
def impostor(folder: Path | None) -> Iterator[tuple[str, bytearray]]:
    """Where it listens, and what is said to it. With a folder, by the certificates there."""
    heard = bytearray()
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(folder / "coordinator.pem", folder / "coordinator.key")

    def listen(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                with context.wrap_socket(connection, server_side=True) if context else connection as talk:
                    while data := talk.recv(65536):
                        heard.extend(data)
                        talk.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            except OSError:  # of one connection, or the server is closed
                if server.fileno() < 0:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = threading.Thread(target=listen, args=(server,), daemon=True)
        listening.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
        server.shutdown(socket.SHUT_RDWR)
    listening.join(10)


@pytest.mark.parametrize("speaks_tls", [True, False])
def test_the_token_is_not_sent_to_one_that_is_not_the_jobs_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], speaks_tls: bool
) -> None:
    for name in ("ours", "others"):
        certificates.make(tmp_path / name)
    invitation = tmp_path / "invitation"
    invitation.touch(mode=0o600)
    with impostor(tmp_path / "others" if speaks_tls else None) as (where, heard):
        said = {"address": where, "token": TOKEN, "certificates": {"ca.pem": (tmp_path / "ours/ca.pem").read_text()}}
        invitation.write_text(json.dumps(said))
        line = refused(capsys, "join", str(invitation))
    assert f"CertificateRefused: {where}: " in line
    assert ("of another authority" if speaks_tls else "does not speak TLS") in line
    assert TOKEN.encode() not in heard


def test_an_invitation_that_others_can_read_or_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "invitation"
    assert "cannot be read: No such file" in refused(capsys, "join", str(path))
    path.touch(mode=0o600)
    path.write_text(json.dumps({"address": "127.0.0.1:9", "token": TOKEN, "certificates": {}}))
    assert "JobNotFound: nobody answers at 127.0.0.1:9; is the job over?" in refused(capsys, "join", str(path))
    path.write_text("[1]")
    assert "is no invitation; copy that of the job's run directory again" in refused(capsys, "join", str(path))
    path.chmod(0o640)
    assert f"can be read by others, and has the job's token: chmod 600 {path}" in refused(capsys, "join", str(path))
    assert "a copy of the job's invitation" in refused(capsys, "join")


def test_a_job_whose_certificates_are_gone_does_not_fall_back_to_plain_text(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert run_dir.tls("127.0.0.2") is None
    with pytest.raises(RunDirUnusable, match=r"tls is gone; shoal resume puts it back"):
        run_dir.tls("192.0.2.7")
    run_dir.write_address("192.0.2.7:4000")
    with pytest.raises(RunDirUnusable):
        commands.status(run_dir)
    accepted = Invitation("192.0.2.7:4000", TOKEN, {}).accept(tmp_path / "other", {})
    assert accepted.tls() is None, "a job that was started with --no-tls says so in its invitation"


@pytest.mark.slow
def test_a_host_that_does_not_believe_the_coordinator_says_so_and_ends(tmp_path: Path) -> None:
    for name in ("ours", "others"):
        certificates.make(tmp_path / name)
    (tmp_path / "script.py").touch()
    settings = {"script": str(tmp_path / "script.py"), "budget_s": 1.0, "min": 1, "max": 1, "target": 1}
    with impostor(tmp_path / "others") as (where, heard):
        pems = {"ca.pem": (tmp_path / "ours/ca.pem").read_text()}
        told = Told("far", 1, where, TOKEN, pems, str(tmp_path / "run"), settings, own_dir=True)
        command = [sys.executable, "-m", "shoal", "join", "--told"]
        far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, bufsize=0)
        assert far.stdin is not None
        assert far.stdout is not None
        with far:
            far.stdin.write(told.to_line())
            far.stdin.flush()
            said = []
            for line in far.stdout:
                said.append(json.loads(line))
                with suppress(BrokenPipeError):  # home is still there, as long as it is
                    far.stdin.write(line_of({"ping": where}))
                    far.stdin.flush()
    assert far.returncode == 2
    ((kind, why),) = [it["error"] for it in said if "error" in it]
    assert kind == "CertificateRefused"
    assert f"{where}: its certificate is of another authority; " in why
    assert TOKEN.encode() not in heard
    assert not processes_in(tmp_path)
