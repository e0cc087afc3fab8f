"""One agreed set of workers: what the coordinator publishes, and workers train in."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_SLOTS = 256


@dataclass(frozen=True)
class Member:
    worker_id: str
    slot: int
    host: str
    address: str = ""  # at which workers of other hosts reach it; empty where the job has one host


@dataclass(frozen=True)
class Generation:
    """One agreed set of workers. A member's rank is its index; leavers must acknowledge before others go on. Followers
    get the state of the job, one on each host that has none, and hear of every commit until they have it."""

    number: int
    members: tuple[Member, ...]
    leavers: tuple[Member, ...] = ()
    fault: bool = False
    paused: bool = False
    finishing: bool = False  # some worker's script has come to its end, or the job was stopped
    key: bytes = field(default=b"", repr=False, compare=False)  # by which workers of different hosts know each other
    followers: tuple[Member, ...] = ()

    def rank(self, worker_id: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.worker_id == worker_id), None)

    def leaves(self, worker_id: str) -> bool:
        return any(member.worker_id == worker_id for member in self.leavers)

    def follows(self, worker_id: str) -> bool:
        return any(member.worker_id == worker_id for member in self.followers)

    @property
    def all(self) -> tuple[Member, ...]:
        return (*self.members, *self.followers, *self.leavers)

    @property
    def hosts(self) -> int:
        return len({member.host for member in self.all})

    def lists(self, worker_id: str) -> bool:
        return any(member.worker_id == worker_id for member in self.all)
