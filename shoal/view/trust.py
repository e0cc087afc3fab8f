"""The certificates of a folder, as `shoal doctor` judges them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.control import certificates, tls
from shoal.errors import CertificateRefused, CertificateUnusable
from shoal.view.doctor import Check

_OTHERS = 0o077
_SOON = datetime.timedelta(days=30)


def checks(folder: Path, hosts: Sequence[str], now: datetime.datetime | None = None) -> Iterator[Check]:
    """Whether coordinators at `hosts` would be believed by what is there, and its keys are secret."""
    keys = sorted(folder.glob("*.key"))
    open_keys = [key.name for key in keys if key.stat().st_mode & _OTHERS]
    if open_keys:
        yield Check("keys", f"others can read {', '.join(open_keys)}", "bad", f"chmod 600 {folder}/*.key")
    elif keys:
        yield Check("keys", f"only their owner can read those of {folder}")
    try:
        tls.check(folder, (folder / "client.pem").exists(), hosts)
        until = min(certificates.valid_until(path) for path in folder.glob("*.pem"))
    except (CertificateRefused, CertificateUnusable) as problem:
        found, _, todo = str(problem).partition("; ")
        yield Check("certificates", found, "bad", todo or f"make others with shoal certs {folder}")
        return
    said = f"for {', '.join(hosts)}, valid until {until:%Y-%m-%d}"
    if until - (now or datetime.datetime.now(datetime.timezone.utc)) < _SOON:
        yield Check("certificates", said, "warn", "make them in a new folder with shoal certs, before that")
    else:
        yield Check("certificates", said)
