"""A process that torchrun has started: what its environment says, and where those of one torchrun meet on a host."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

_TOGETHER = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class Torchrun:
    """One round of processes: torchrun starts all of them again when one has failed, and then `restart` is higher."""

    rank: int  # on this host
    size: int  # on this host
    hosts_too: bool  # there are more on other hosts
    restart: int
    hall: str  # an abstract address, the same for all of this round and host

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Torchrun | None:
        """None for a process that somebody else has started."""
        if "TORCHELASTIC_RUN_ID" not in env or "LOCAL_RANK" not in env:
            return None
        # With a port of 0 nothing but the folder of its records tells two torchruns of one machine apart.
        records = os.path.dirname(os.path.dirname(env.get("TORCHELASTIC_ERROR_FILE", "")))
        round_ = "\n".join((*(env.get(name, "") for name in _TOGETHER), records))
        digest = hashlib.sha256(round_.encode()).hexdigest()[:32]
        size = int(env.get("LOCAL_WORLD_SIZE", "1"))
        return cls(
            rank=int(env["LOCAL_RANK"]),
            size=size,
            hosts_too=int(env.get("WORLD_SIZE", "1")) > size,
            restart=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
            hall=f"\0shoal-{os.getuid()}-{digest}",
        )
