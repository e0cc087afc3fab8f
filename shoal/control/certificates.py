"""Making a small certificate authority, and what it signs. Only here is the package `cryptography` needed: whoever uses
certificates (`tls`) does without.

    ca.pem, ca.key                     the authority: whoever has its key can make certificates that a job believes
    coordinator.pem, coordinator.key   for the names and addresses at which coordinators are met
    client.pem, client.key             for everybody else, where that is asked for
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import CertificateUnusable

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DEFAULT_DAYS = 365
MAX_DAYS = 3650
LOOPBACK = ("localhost", "127.0.0.1")
_AUTHORITY_DAYS = MAX_DAYS
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


def make(
    folder: Path, hosts: Iterable[str] = (), days: int = DEFAULT_DAYS, now: datetime.datetime | None = None
) -> list[str]:
    """Make what is missing there, and tell what was made, by file. `hosts`: names and addresses of coordinators, beside
    those of loopback. They are valid from `now` on, this moment unless given.

    No key and no authority is ever replaced. A certificate is, for the same key, when it has run out or lacks one of
    the hosts; those it had it keeps. Fails with CertificateUnusable.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        authority = _Authority(folder, now or datetime.datetime.now(datetime.timezone.utc))
        wanted = [*LOOPBACK, *hosts]
        for host in wanted:
            _general_name(host)
        authority.issue("coordinator", "shoal coordinator", wanted, days)
        authority.issue("client", "shoal client", [], days)
    except OSError as problem:
        raise CertificateUnusable(f"{folder}: {problem.strerror}; name a folder that is yours") from problem
    return authority.made


def valid_until(path: Path) -> datetime.datetime:
    """Fails with CertificateUnusable."""
    return _load(path).not_valid_after_utc


class _Authority:
    """The one in a folder, made there if there is none."""

    def __init__(self, folder: Path, now: datetime.datetime) -> None:
        from cryptography import x509

        self._folder = folder
        self._now = now
        self.made: list[str] = []
        if not _pair_exists(folder, "ca"):
            self._key = self._key_of("ca")
            # A name of its own, so that of two authorities it is said which one is not known.
            name = _name(f"shoal authority {secrets.token_hex(4)}")
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            public = self._key.public_key()
            self._certificate = self._sign(
                name,
                name,
                public,
                _AUTHORITY_DAYS,
                [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)],
            )
            self._write("ca.pem", _pem(self._certificate))
        else:
            self._key, self._certificate = _load_key(folder / "ca.key"), _load(folder / "ca.pem")
            if self._certificate.not_valid_after_utc <= self._now:
                raise CertificateUnusable(f"{folder / 'ca.pem'} has expired; make another authority in a new folder")

    def issue(self, name: str, subject: str, hosts: list[str], days: int) -> None:
        """A key and its certificate, as far as they are missing."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        if _pair_exists(self._folder, name):
            key, before = _load_key(self._folder / f"{name}.key"), _load(self._folder / f"{name}.pem")
            known = _hosts_of(before)
            if not set(hosts) - set(known) and before.not_valid_after_utc > self._now:
                return
            hosts = [*known, *(host for host in hosts if host not in known)]
        else:
            key = self._key_of(name)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.KeyUsage(True, False, False, False, False, False, False, False, False), True),
            (x509.ExtendedKeyUsage([purpose]), False),
        ]
        if hosts:
            names = [_general_name(host) for host in dict.fromkeys(hosts)]
            extensions.append((x509.SubjectAlternativeName(names), False))
        certificate = self._sign(_name(subject), self._certificate.subject, key.public_key(), days, extensions)
        self._write(f"{name}.pem", _pem(certificate))

    def _sign(self, subject: x509.Name, issuer: x509.Name, public: Any, days: int, extensions: Any) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        until = self._now + datetime.timedelta(days=days)
        if subject != issuer:
            until = min(until, self._certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCKS_DIFFER)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256())

    def _key_of(self, name: str) -> EllipticCurvePrivateKey:
        """The one that is there, where somebody was killed before it was signed; else a new one."""
        if (self._folder / f"{name}.key").exists():
            return _load_key(self._folder / f"{name}.key")
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        self._write(f"{name}.key", key.private_bytes(encoding, form, serialization.NoEncryption()))
        return key

    def _write(self, name: str, data: bytes) -> None:
        draft = self._folder / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        draft.replace(self._folder / name)
        self.made.append(name)


def _pair_exists(folder: Path, name: str) -> bool:
    """A key alone is none yet: it is made first. Fails with CertificateUnusable for a certificate alone."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    if certificate.exists() and not key.exists():
        raise CertificateUnusable(f"{certificate} is there without {key.name}; put it back, or use a new folder")
    return certificate.exists()


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not all(character.isalnum() or character in "-._*" for character in host) or not host.isascii():
        raise CertificateUnusable(f"--host {host} is neither a host's name nor an IP address; write it without a port")
    return x509.DNSName(host)


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in named]


def _name(common: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _load(path: Path) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise CertificateUnusable(f"{path} is not a certificate; put it back, or use a new folder") from None


def _load_key(path: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
        if isinstance(key, EllipticCurvePrivateKey):
            return key
    except (ValueError, TypeError):
        pass
    raise CertificateUnusable(f"{path} is not a key that shoal certs has made; put it back, or use a new folder")
