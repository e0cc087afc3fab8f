"""Who is in, as frozen values: workers, and all that the job decides by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from shoal.control.generation import MAX_SLOTS, Generation, Member
from shoal.control.hosts import Host, spread
from shoal.control.instructions import Instruction, Stop
from shoal.control.timeouts import Timeouts
from shoal.data.leases import Lent
from shoal.errors import SettingsContradict


class State(str, Enum):
    JOINING = "joining"  # started or connected
    WARM = "warm"  # imported, model built, data open
    FOLLOWING = "following"  # gets the state for its host while the members train
    MEMBER = "member"  # in the newest generation
    LEAVING = "leaving"  # was a member, has not been told Bye
    PARTED = "parted"  # told Bye; alive until its launcher says otherwise


ACTIVE = (State.JOINING, State.WARM, State.FOLLOWING, State.MEMBER)  # on their way in, or in


@dataclass(frozen=True)
class Life:
    """Signs of life, as one coordinator saw them. Not kept in the journal: one that comes back has seen nobody yet."""

    alive_at: float
    connected: bool = False
    waits_for: tuple[str, ...] = ()
    awaited_since: float | None = None
    suspect: bool = False
    probed_at: float | None = None
    cpu_time_s: float | None = None


@dataclass(frozen=True)
class Worker:
    member: Member
    state: State
    life: Life = field(compare=False)
    seniority: int = 0  # the order of becoming a member; 0 before
    founder: bool = True  # it came before the first generation
    failed: bool = False  # it has said that its code raised
    refused: bool = False  # it cannot take part, and is ending
    launched: bool = False  # a launcher watches it, and will say when it is gone
    fenced: str = ""  # why it was fenced, until it is gone
    wishes: int = 0  # how often it asked for another number of workers
    entered: int = 0  # the newest generation of several hosts in which it has heard of everybody
    follows: bool = False  # it can get the state for its host while others train
    caught_up: bool = False  # and has it

    @property
    def worker_id(self) -> str:
        return self.member.worker_id


@dataclass(frozen=True)
class Membership:
    """Signs of life do not take part in comparison: two equal memberships need only one entry in the journal."""

    min_size: int
    max_size: int
    target: int
    founders: int
    timeouts: Timeouts
    workers: tuple[Worker, ...] = ()  # in the order of joining
    newest: Generation | None = None
    number: int = 0  # the highest generation number ever used
    last_fault: int = 0  # the number of the newest generation with a fault
    seniority: int = 0  # the last one given
    started: int = 0  # how many workers ever came
    next_worker: int = 0  # numbers below it were used before this job began
    next_workers: Mapping[str, int] = field(default_factory=dict)  # of each host, the number after the highest used
    hosts: tuple[Host, ...] = ()  # in the order in which they fill
    dropped: tuple[str, ...] = ()  # lives of launchers that the job goes on without
    refusals: Mapping[str, str] = field(default_factory=dict)  # why, of those of them that are not to come again
    rests: Mapping[str, int] = field(default_factory=dict)  # how often a host was given up that others did not reach
    outcasts: tuple[str, ...] = ()  # their workers, of whose death nobody has told
    homes: tuple[str, ...] = ()  # hosts of the newest members: their memory has the state, even if all of them are dead
    dirty: bool = False
    fault: bool = False  # a member or a leaver died since the newest generation
    causes: tuple[str, ...] = ()
    finishing: bool = False
    targets: int = 0  # how often the target was set
    stopping: Stop | None = None
    ended: bool = False  # finishing, and every worker has gone
    lent: Lent = field(default_factory=Lent)  # where workers do not move in lockstep; see `lending`
    ticked_at: float | None = field(default=None, compare=False)

    def worker(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.worker_id == worker_id), None)

    def host(self, name: str) -> Host | None:
        return next((host for host in self.hosts if host.name == name), None)

    def in_state(self, *states: State) -> list[Worker]:
        return [worker for worker in self.workers if worker.state in states]

    @property
    def waits_for_joiners(self) -> bool:
        too_few = self.newest is None or len(self.in_state(State.MEMBER)) < self.min_size
        return too_few and not self.finishing


Outcome = tuple[Membership, list[Instruction]]


def found(
    min_size: int, max_size: int, target: int, timeouts: Timeouts | None = None, hosts: Sequence[Host] = ()
) -> Membership:
    """The membership of a job nobody has joined yet; its `hosts` are those that are expected. Raises
    SettingsContradict when the sizes cannot all hold."""
    if not 1 <= min_size <= target <= max_size <= MAX_SLOTS:
        raise SettingsContradict(
            f"min {min_size}, target {target}, max {max_size}: "
            f"they must satisfy 1 ≤ min ≤ target ≤ max ≤ {MAX_SLOTS}; change -n"
        )
    timeouts, shared = timeouts or Timeouts(), spread(hosts, target)
    return Membership(min_size, max_size, target, founders=target, timeouts=timeouts, hosts=shared)


def put(membership: Membership, worker: Worker) -> Membership:
    workers = tuple(worker if other.worker_id == worker.worker_id else other for other in membership.workers)
    return replace(membership, workers=workers)


def put_host(membership: Membership, host: Host) -> Membership:
    return replace(membership, hosts=tuple(host if other.name == host.name else other for other in membership.hosts))


def changed(membership: Membership, cause: str) -> Membership:
    return replace(membership, dirty=True, causes=(*membership.causes, cause))
