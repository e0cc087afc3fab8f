"""TLS between the coordinator and whoever speaks to it: what is in a run directory's `tls/`, channels and ports with
it, and why a connection was refused. Without that folder a job speaks plain text: on loopback, or where that was asked
for.

A coordinator that is away and one that is not believed look alike to gRPC. So where a connection fails, a handshake of
our own asks why (`refusal`): nobody there is no refusal.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.control import protocol
from shoal.errors import CertificateRefused, CertificateUnusable

if TYPE_CHECKING:
    import ssl

    from shoal.control.rundir import RunDir

LOOPBACK = "127.0.0.1"  # where a coordinator serves, unless other hosts are to reach it
_PROBE_S = 1.0  # for each answer that a handshake waits for
# What a client of HTTP/2 says first: the preface and empty settings. Whoever lets it in answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_UNKNOWN_AUTHORITY = {2, 7, 18, 19, 20, 21}  # OpenSSL's codes for a chain that does not lead to ours
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = {62, 64}


@dataclass(frozen=True)
class Tls:
    """The certificates in a folder. With a client's certificate among them, the coordinator asks everybody for one."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def mutual(self) -> bool:
        return (self.folder / "client.pem").exists()

    def pair(self, whose: str) -> tuple[Path, Path]:
        """Certificate and key of the `coordinator` or a `client`."""
        return self.folder / f"{whose}.pem", self.folder / f"{whose}.key"

    def for_clients(self) -> dict[str, str]:
        """What others need to speak with the coordinator, by file. Fails with CertificateUnusable."""
        names = ["ca.pem", *(("client.pem", "client.key") if self.mutual else ())]
        return {name: _read(self.folder / name).decode() for name in names}

    def channel(self, address: str) -> Any:
        """A gRPC channel. Fails with CertificateUnusable."""
        import grpc

        certificate, key = map(_read, self.pair("client")) if self.mutual else (None, None)
        credentials = grpc.ssl_channel_credentials(_read(self.authority), key, certificate)
        return grpc.secure_channel(address, credentials, options=protocol.channel_options(address))

    def server_credentials(self) -> Any:
        """For a gRPC server. Fails with CertificateUnusable."""
        import grpc

        certificate, key = map(_read, self.pair("coordinator"))
        authority = _read(self.authority) if self.mutual else None
        return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=self.mutual)

    def check(self, host: str) -> None:
        """A handshake with itself: whoever goes to `host` will believe the coordinator, and it them. Fails with
        CertificateUnusable, CertificateRefused."""
        import ssl

        client = self._context(ssl.PROTOCOL_TLS_CLIENT, "client")
        server = self._context(ssl.PROTOCOL_TLS_SERVER, "coordinator")
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        asks = client.wrap_bio(down, up, server_hostname=host)
        answers = server.wrap_bio(up, down, server_side=True)
        for _ in range(3):  # hello, its answer, the client's certificate
            for side, believed in ((asks, "coordinator.pem"), (answers, "client.pem")):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as problem:
                    why, then = _why(problem, host)
                    then = then if believed == "coordinator.pem" else "make both with shoal certs in one folder"
                    raise CertificateRefused(f"{self.folder / believed}: {why}; {then}") from None

    def _context(self, protocol_: int, whose: str) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(protocol_)
        context.set_alpn_protocols(["h2"])
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        serves = whose == "coordinator"
        try:
            if not serves or self.mutual:
                context.load_verify_locations(self.authority)
            if serves or self.mutual:
                context.load_cert_chain(*self.pair(whose))
        except ssl.SSLError as problem:
            what = "key and certificate do not belong together" if "MISMATCH" in str(problem.reason) else "damaged"
            raise CertificateUnusable(
                f"{self.folder}: ca.pem or {whose}.pem: {what}; make them with shoal certs in a new folder"
            ) from None
        except OSError:
            _read(self.authority), *map(_read, self.pair(whose))  # says which
            raise
        if serves and self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def why_refused(self, address: str) -> str | None:
        """What is wrong between this and whoever answers there; None if nothing is, or nobody answers."""
        import ssl

        context = self._context(ssl.PROTOCOL_TLS_CLIENT, "client")
        host = host_of(address)
        hung_up = 0
        while hung_up < 2:  # once may be because it ends just now
            try:
                with _connected(address) as plain, context.wrap_socket(plain, server_hostname=host) as secure:
                    secure.sendall(_PREFACE)
                    if secure.recv(1):
                        return None
            except ssl.SSLEOFError:
                return None
            except ssl.SSLError as problem:
                return "; ".join(_why(problem, host))
            except ConnectionResetError:
                if hung_up == 0:
                    return None
            except OSError:
                return None
            hung_up += 1
        if self.mutual:
            return "it does not take this client's certificate; use the one of the job's run directory"
        return "it asks for a client's certificate, and there is none; use the run directory of the job"


def channel(tls: Tls | None, address: str) -> Any:
    """A gRPC channel, of plain text without `tls`. Fails with CertificateUnusable."""
    import grpc

    if tls is not None:
        return tls.channel(address)
    return grpc.insecure_channel(address, options=protocol.channel_options(address))


def refusal(run_dir: RunDir, tls: Tls | None, address: str) -> CertificateRefused | None:
    """Why the one at `address` and we do not come together, if it is for certificates; None if nobody answers there.
    Call it when a connection has failed. It is `final` where that is the job's own coordinator, or the job does not
    run: else somebody else has the port for now, and the next coordinator takes another. Fails with
    CertificateUnusable."""
    before = run_dir.serving()
    why = _speaks_tls(address) if tls is None else tls.why_refused(address)
    if why is None:
        return None
    own = before != 0 and run_dir.serving() == before and run_dir.address() == address
    refused = CertificateRefused(f"{address}: {why}")
    refused.final = own or not run_dir.runs()
    return refused


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def needed(settings: Mapping[str, Any], host: str) -> bool:
    """Whether a job with these settings, whose coordinator is met at `host`, speaks TLS and nothing else."""
    return bool(settings.get("tls")) or not (settings.get("plain_text") or is_loopback(host))


def provide(run_dir: RunDir, given: Path, mutual: bool, host: str = LOOPBACK) -> None:
    """Copy what the job needs of the certificates in `given` to its run directory, for a coordinator at `host`. If they
    are not there any more, what was copied before stays. Fails with CertificateUnusable, CertificateRefused."""
    folder = run_dir.tls_folder
    if not given.is_dir() and folder.is_dir():
        return Tls(folder).check(host)
    check(given, mutual, [host])
    names = ["ca.pem", "coordinator.pem", "coordinator.key", *(("client.pem", "client.key") if mutual else ())]
    write(run_dir, {name: _read(given / name).decode() for name in names})


def write(run_dir: RunDir, files: Mapping[str, str]) -> None:
    """Make these the certificates and keys of the run directory."""
    draft = _draft(run_dir)
    draft.mkdir(mode=0o700)
    for name, content in files.items():
        with os.fdopen(os.open(draft / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(content)
    _put(draft, run_dir)


def _draft(run_dir: RunDir) -> Path:
    draft = run_dir.tls_folder.with_name(f".tls.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    return draft


def _put(draft: Path, run_dir: RunDir) -> None:
    # Killed between the two, the job has none, and does not fall back to plain text: see `needed`.
    shutil.rmtree(run_dir.tls_folder, ignore_errors=True)
    draft.rename(run_dir.tls_folder)


def check(given: Path, mutual: bool, hosts: Iterable[str] = (LOOPBACK,)) -> None:
    """Whether a job can use the certificates in `given`, with a coordinator at `hosts`. Fails with CertificateUnusable,
    CertificateRefused."""
    tls = Tls(given)
    if not given.is_dir():
        raise CertificateUnusable(f"--tls {given} is not a folder; make one with shoal certs {given}")
    if mutual:
        for path in tls.pair("client"):
            _read(path)
    for host in hosts:
        tls.check(host)


def make_for_job(run_dir: RunDir, host: str) -> None:
    """An authority for this job alone, with a certificate for its coordinator at `host`, in the run directory. Nobody
    keeps the authority's key: nothing more can be made by it. What the job has already stays, while it is good for
    that host. Fails with CertificateUnusable."""
    from shoal.control import certificates

    if run_dir.tls_folder.is_dir():
        with contextlib.suppress(CertificateRefused, CertificateUnusable):
            return Tls(run_dir.tls_folder).check(host)
    draft = _draft(run_dir)
    certificates.make(draft, [host], certificates.MAX_DAYS)
    for name in ("ca.key", "client.key", "client.pem"):  # clients are known by the token
        (draft / name).unlink()
    _put(draft, run_dir)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CertificateUnusable(
            f"{path} cannot be read: {problem.strerror}; make certificates with shoal certs"
        ) from None


def _connected(address: str) -> socket.socket:
    return socket.create_connection((host_of(address), int(address.rpartition(":")[2])), _PROBE_S)


def _speaks_tls(address: str) -> str | None:
    """For a job of plain text."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(address) as plain, context.wrap_socket(plain):
            return "it speaks TLS, and there are no certificates for it; use the run directory of the job"
    except OSError:  # ssl's own errors are of this class too
        return None


def _why(problem: ssl.SSLError, host: str) -> tuple[str, str]:
    """What is wrong, and what to do."""
    import ssl

    if not isinstance(problem, ssl.SSLCertVerificationError):
        reason = str(problem.reason)
        if "ALERT" in reason:
            return f"it does not take this client's certificate ({reason})", "use the one of the job's run directory"
        return f"it does not speak TLS ({reason or problem}), and the job does", "is that another job's port?"
    code, said = problem.verify_code, problem.verify_message
    if code in _OTHER_NAME:
        return f"its certificate is not for {host}", f"make one with shoal certs DIR --host {host}"
    if code in (_EXPIRED, _NOT_YET):
        how = "has expired" if code == _EXPIRED else "is not valid yet (do the clocks agree?)"
        return f"its certificate {how}", "make another with shoal certs DIR, and shoal resume takes it up"
    if code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is of another authority",
            "use the run directory of the job, or the ca.pem that signed it",
        )
    return f"its certificate is not believed ({said})", "make another with shoal certs"
