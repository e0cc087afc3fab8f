"""What a machine that does not see the run directory must know of a job: where its coordinator is, how that proves
itself, and the token. In one file, which is as secret as the token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.control import tls
from shoal.control.rundir import RunDir, write_atomically
from shoal.errors import SettingsContradict

_OTHERS = 0o077


@dataclass(frozen=True)
class Invitation:
    """`certificates`: by file, what a client needs for TLS; none in a job that speaks plain text."""

    address: str
    token: str
    certificates: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Fails with SettingsContradict."""
        try:
            if path.stat().st_mode & _OTHERS:
                raise SettingsContradict(f"{path} can be read by others, and has the job's token: chmod 600 {path}")
            said = json.loads(path.read_text())
            return cls(str(said["address"]), str(said["token"]), dict(said["certificates"]))
        except OSError as problem:
            raise SettingsContradict(
                f"{path} cannot be read: {problem.strerror}; name a copy of the file invitation in the run directory "
                "of a job that was started with --address or -H"
            ) from None
        except (ValueError, TypeError, KeyError):
            raise SettingsContradict(f"{path} is no invitation; copy that of the job's run directory again") from None

    def accept(self, path: Path, settings: Mapping[str, Any]) -> RunDir:
        """A new run directory there, of a machine's own, by which the job is spoken with. Variables of the workers are
        not written to it: it stays behind when who made it is killed, and they may be secret."""
        kept = {name: value for name, value in settings.items() if name != "env"}
        run_dir = RunDir.create(path, {**kept, "plain_text": not self.certificates})
        write_atomically(run_dir.token_file, self.token)
        if self.certificates:
            tls.write(run_dir, self.certificates)
        run_dir.write_address(self.address)
        return run_dir


def certificates_of(run_dir: RunDir, host: str) -> dict[str, str]:
    """What clients need for TLS with the coordinator at `host`. Fails with CertificateUnusable, RunDirUnusable."""
    found = run_dir.tls(host)
    return found.for_clients() if found is not None else {}


def invite(run_dir: RunDir, address: str) -> None:
    """Write the invitation, if the job is one for several hosts."""
    settings = run_dir.settings()
    if settings.get("hosts") or settings.get("address"):
        invitation = Invitation(address, run_dir.token(), certificates_of(run_dir, tls.host_of(address)))
        write_atomically(run_dir.invitation_file, json.dumps(asdict(invitation), indent=1))
