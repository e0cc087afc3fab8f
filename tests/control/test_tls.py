"""Certificates made, served and refused, for real over loopback."""

from __future__ import annotations

import datetime
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509

from shoal import cli
from shoal.control import certificates, commands, tls
from shoal.control.client import Client, Progress
from shoal.control.membership.values import found
from shoal.control.rundir import RunDir
from shoal.control.serve import EmbeddedCoordinator
from shoal.control.timeouts import Timeouts
from shoal.errors import CertificateRefused, CertificateUnusable, CoordinatorLost, JobNotFound, RunDirUnusable
from shoal.testing import FaultPlan, LocalJob

QUICK = Timeouts(0.5, beat_s=0.05, join_s=1.0)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certificates.make(tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RunDir]]:
    servers: list[EmbeddedCoordinator] = []

    def start(folder: Path | None, mutual: bool = False) -> RunDir:
        run_dir = RunDir.create(tmp_path / f"run{len(servers)}", {})
        if folder is not None:
            copy(folder, run_dir, mutual)
        server = EmbeddedCoordinator(run_dir, found(1, 2, 1, Timeouts(60.0, beat_s=0.05, probe_s=0.05)))
        server.start()
        servers.append(server)
        return run_dir

    yield start
    for server in servers:
        server.stop()


def copy(folder: Path, run_dir: RunDir, mutual: bool) -> None:
    """Without the checks of `tls.provide`."""
    shutil.rmtree(run_dir.tls_folder, ignore_errors=True)
    shutil.copytree(folder, run_dir.tls_folder)
    if not mutual:
        (run_dir.tls_folder / "client.pem").unlink()


def joins(run_dir: RunDir) -> int:
    client = Client(run_dir, "w0", "here", QUICK, Progress, print)
    try:
        return client.connect()
    finally:
        client.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_in(path: Path) -> set[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    named = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in named}


def with_expired(folder: Path, name: str) -> None:
    """Make one of the certificates anew, as it would have been made two years ago."""
    (folder / f"{name}.pem").unlink()
    now = datetime.datetime.now(datetime.timezone.utc)
    certificates.make(folder, now=now - datetime.timedelta(days=730))


# Making them.


def test_what_is_made_is_readable_by_its_owner_only(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert names == {f"{whose}.{kind}" for whose in ("ca", "coordinator", "client") for kind in ("pem", "key")}
    assert mode(made) == 0o700
    assert {mode(path) for path in made.iterdir()} == {0o600}
    assert names_in(made / "coordinator.pem") == {"localhost", "127.0.0.1"}


def test_made_again_nothing_is_replaced(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.iterdir()}
    assert certificates.make(made) == []
    assert {path: path.read_bytes() for path in made.iterdir()} == before


def test_another_host_gets_into_the_certificate_of_the_same_key_and_authority(made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert certificates.make(made, ["node1", "10.0.0.7"]) == ["coordinator.pem"]
    after = {path.name: path.read_bytes() for path in made.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"coordinator.pem"}
    assert names_in(made / "coordinator.pem") == {"localhost", "127.0.0.1", "node1", "10.0.0.7"}
    tls.check(made, mutual=True, hosts=["node1", "10.0.0.7", "localhost"])


def test_a_key_that_was_not_signed_when_its_maker_was_killed_is_signed_later(made: Path) -> None:
    before = (made / "client.key").read_bytes()
    (made / "client.pem").unlink()
    assert certificates.make(made) == ["client.pem"]
    assert (made / "client.key").read_bytes() == before
    tls.check(made, mutual=True)


def test_a_certificate_that_has_expired_is_made_anew(made: Path) -> None:
    with_expired(made, "coordinator")
    with pytest.raises(CertificateRefused, match=r"has expired; make another with shoal certs"):
        tls.check(made, mutual=False)
    assert certificates.make(made) == ["coordinator.pem"]
    tls.check(made, mutual=False)


@pytest.mark.parametrize("whose", ["coordinator", "client"])
def test_certificates_of_two_authorities_are_refused_before_a_job_begins(
    made: Path, tmp_path: Path, whose: str
) -> None:
    certificates.make(tmp_path / "others")
    shutil.copy(tmp_path / "others" / f"{whose}.pem", made)
    with pytest.raises(CertificateUnusable, match="key and certificate do not belong together"):
        tls.check(made, mutual=True)
    shutil.copy(tmp_path / "others" / f"{whose}.key", made)
    with pytest.raises(CertificateRefused, match=rf"{whose}\.pem: its certificate is of another authority; "):
        tls.check(made, mutual=True)


@pytest.mark.parametrize("missing", ["ca.key", "coordinator.key"])
def test_a_certificate_without_its_key_is_not_replaced(made: Path, missing: str) -> None:
    (made / missing).unlink()
    with pytest.raises(CertificateUnusable, match=f"without {missing}"):
        certificates.make(made, ["node1"])


@pytest.mark.parametrize("host", ["", "a b", "node1:8080", "näher"])
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(CertificateUnusable, match="neither a host's name nor an IP address"):
        certificates.make(tmp_path / "certs", [host])


def test_a_machine_that_only_uses_certificates_needs_no_package_for_them(made: Path) -> None:
    code = f"""
import sys
sys.modules["cryptography"] = None
import pathlib
from shoal.control import tls
tls.check(pathlib.Path({str(made)!r}), mutual=True)
found = tls.Tls(pathlib.Path({str(made)!r}))
found.server_credentials(), found.channel("127.0.0.1:1").close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Using them.


@pytest.mark.parametrize("mutual", [False, True])
def test_workers_and_commands_reach_a_coordinator_that_speaks_tls(
    serve: Callable[..., RunDir], made: Path, mutual: bool
) -> None:
    run_dir = serve(made, mutual)
    assert joins(run_dir) == 0
    assert commands.status(run_dir)["phase"] == "starting"


def test_a_job_makes_its_own_for_an_address(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    assert run_dir.tls() is None
    tls.make_for_job(run_dir, "10.0.0.7")
    found = run_dir.tls()
    assert found is not None
    assert not found.mutual
    found.check("10.0.0.7")
    with pytest.raises(CertificateRefused, match=r"not for 10\.0\.0\.8; make one with shoal certs DIR --host 10"):
        found.check("10.0.0.8")
    assert {path.name for path in run_dir.tls_folder.iterdir()} == {"ca.pem", "coordinator.pem", "coordinator.key"}
    assert mode(run_dir.tls_folder) == 0o700
    assert {mode(path) for path in run_dir.tls_folder.iterdir()} == {0o600}
    before = (run_dir.tls_folder / "ca.pem").read_bytes()
    tls.make_for_job(run_dir, "10.0.0.7")
    assert (run_dir.tls_folder / "ca.pem").read_bytes() == before
    tls.make_for_job(run_dir, "10.0.0.8")  # it goes on at another address
    found.check("10.0.0.8")


def test_a_job_keeps_its_own_copies_and_takes_up_renewed_ones(made: Path, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {"tls": str(made)})
    with pytest.raises(RunDirUnusable, match="shoal resume"):
        run_dir.tls()
    tls.provide(run_dir, made, mutual=True)
    copied = {path.name for path in run_dir.tls_folder.iterdir()}
    assert copied == {"ca.pem", "coordinator.pem", "coordinator.key", "client.pem", "client.key"}
    assert mode(run_dir.tls_folder) == 0o700
    assert {mode(path) for path in run_dir.tls_folder.iterdir()} == {0o600}
    certificates.make(made, ["node1"])
    tls.provide(run_dir, made, mutual=True)
    assert "node1" in names_in(run_dir.tls_folder / "coordinator.pem")
    shutil.rmtree(made)
    tls.provide(run_dir, made, mutual=True)
    assert run_dir.tls() is not None


def other_authority(made: Path, run_dir: RunDir) -> None:
    certificates.make(made.with_name("others"))
    shutil.copy(made.with_name("others") / "ca.pem", run_dir.tls_folder)


def no_certificate(made: Path, run_dir: RunDir) -> None:
    (run_dir.tls_folder / "client.pem").unlink()


def strangers_certificate(made: Path, run_dir: RunDir) -> None:
    certificates.make(made.with_name("others"))
    for name in ("client.pem", "client.key"):
        shutil.copy(made.with_name("others") / name, run_dir.tls_folder)


def plain_text(made: Path, run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.tls_folder)


REFUSALS = {
    other_authority: "of another authority",
    no_certificate: "asks for a client's certificate, and there is none",
    strangers_certificate: "does not take this client's certificate",
    plain_text: "speaks TLS, and there are no certificates for it",
}


@pytest.mark.parametrize("spoil", REFUSALS, ids=lambda spoil: spoil.__name__)
def test_whoever_is_not_believed_is_told_why_at_once(
    serve: Callable[..., RunDir], made: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[..., None]
) -> None:
    run_dir = serve(made, mutual=True)
    address = run_dir.address()
    assert address is not None
    spoil(made, run_dir)
    with run_dir.held():  # the job runs, and this is its coordinator: there is nothing to wait for
        with pytest.raises(CertificateRefused, match=f"^{address}: it.*{REFUSALS[spoil]}.*; ") as by_command:
            commands.status(run_dir)
        with pytest.raises(CertificateRefused, match=REFUSALS[spoil]):
            joins(run_dir)
        with pytest.raises(SystemExit, match="2"):
            cli.main(["status", str(run_dir.path)])
    told = capsys.readouterr().err
    assert told == f"shoal: CertificateRefused: {by_command.value}\n"


def test_a_coordinator_whose_certificate_has_expired_is_refused(serve: Callable[..., RunDir], made: Path) -> None:
    with_expired(made, "coordinator")
    run_dir = serve(made)
    with pytest.raises(CertificateRefused, match="its certificate has expired; make another"):
        commands.status(run_dir)
    with pytest.raises(CertificateRefused, match="its certificate has expired"):
        joins(run_dir)


def test_a_coordinator_that_is_met_by_another_name_than_its_certificates_is_refused(
    serve: Callable[..., RunDir], made: Path
) -> None:
    run_dir = serve(made)
    port = str(run_dir.address()).rpartition(":")[2]
    run_dir.write_address(f"127.1:{port}")  # the same place
    with pytest.raises(CertificateRefused, match=r"not for 127\.1; make one with shoal certs DIR --host 127\.1"):
        commands.status(run_dir)
    with pytest.raises(CertificateRefused, match="not for"):
        joins(run_dir)
    run_dir.write_address(f"localhost:{port}")
    assert joins(run_dir) == 0


def test_tls_against_a_coordinator_of_plain_text_is_refused(serve: Callable[..., RunDir], made: Path) -> None:
    run_dir = serve(None)
    copy(made, run_dir, mutual=False)
    with pytest.raises(CertificateRefused, match=r"it does not speak TLS .*; is that another job's port"):
        commands.status(run_dir)
    with pytest.raises(CertificateRefused, match="it does not speak TLS"):
        joins(run_dir)


def test_a_coordinator_that_is_away_is_not_taken_for_one_that_refuses(made: Path, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    copy(made, run_dir, mutual=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        run_dir.write_address(f"127.0.0.1:{silent.getsockname()[1]}")
        assert tls.refusal(run_dir, run_dir.tls(), str(run_dir.address())) is None
    with pytest.raises(JobNotFound):
        commands.status(run_dir)
    with pytest.raises(CoordinatorLost):
        joins(run_dir)


def test_another_job_at_the_port_of_a_coordinator_that_is_away_is_waited_for(
    serve: Callable[..., RunDir], made: Path, tmp_path: Path
) -> None:
    certificates.make(tmp_path / "others")
    other = serve(tmp_path / "others")
    run_dir = RunDir.create(tmp_path / "run", {})
    copy(made, run_dir, mutual=False)
    run_dir.write_address(str(other.address()))
    with run_dir.held():
        refused = tls.refusal(run_dir, run_dir.tls(), str(other.address()))
        assert refused is not None
        assert not refused.final
        with pytest.raises(CertificateRefused, match="another authority"):  # not for ever
            commands.status(run_dir, timeout_s=0.2)


# A job.

TRAINING = """
import torch, shoal

def main(worker):
    model = torch.nn.Linear(4, 1)
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for (x,) in worker.batches(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=8, epochs=2):
        worker.step(model(x).mean())

shoal.run(main)
"""


def test_a_job_trains_with_tls_both_ways_and_its_coordinator_may_be_killed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    plan = FaultPlan().kill_coordinator(generation=1, during="told")
    options = ["--tls", str(made), "--mutual", "--budget", "2"]
    job = LocalJob(tmp_path / "train.py", workers=2, directory=tmp_path / "run", options=options, plan=plan)
    result = job.run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert len(result.of("restarted")) == 1
    run_dir = RunDir.open(tmp_path / "run")
    assert run_dir.settings()["mutual"]
    assert run_dir.tls() is not None


def test_a_folder_without_certificates_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    run = [sys.executable, "-m", "shoal", "run", "--dir", str(tmp_path / "run"), "--tls"]
    nowhere, script = str(tmp_path / "nowhere"), str(tmp_path / "train.py")
    said = subprocess.run([*run, nowhere, script], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert f"CertificateUnusable: --tls {nowhere} is not a folder; make one with shoal certs {nowhere}" in said.stderr
    assert not (tmp_path / "run").exists()
