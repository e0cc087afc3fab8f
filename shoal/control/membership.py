"""Who is in: a state machine over frozen values. Events and `now` go in, the next state and instructions come out.

An edge (the coordinator) feeds every event that waits to an `on_…` function, then calls `settle` once, so that several
changes become one generation. Nothing here reads a clock or knows a socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from shoal.control.drift import Drift
from shoal.control.generation import MAX_SLOTS, Generation, Member
from shoal.control.hosts import Host, spread
from shoal.control.instructions import (
    Bye,
    Drop,
    Excuse,
    Fence,
    Heeded,
    Instruction,
    Log,
    Probe,
    Publish,
    Refuse,
    SetTarget,
    Stop,
)
from shoal.control.timeouts import Timeouts
from shoal.data.leases import Lent
from shoal.errors import DataUnusable, OutOfSharedMemory, SettingsContradict, StateDrifted, StateLost
from shoal.wording import counted

# What more workers can bring about: a newcomer that fails so is refused, and the job goes on as it was.
REFUSABLE = (OutOfSharedMemory, DataUnusable, SettingsContradict)


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


# Workers come.


def on_join(
    membership: Membership,
    worker_id: str,
    host: str,
    now: float,
    generation: int = 0,
    slot: int | None = None,
    launched: bool = False,
    address: str = "",
) -> Outcome:
    """A launcher started the worker (`launched`), or it connected, for the first time or again.

    A known worker keeps its slot. `generation` is the newest one it knows of, and `slot` the one it was given: no
    number up to it is used again, and no slot by two, even if the journal was lost. `address`: at which workers of
    other hosts reach it.
    """
    if worker_id in membership.outcasts:
        return membership, [Fence(worker_id)]
    number = number_of(worker_id) + 1
    membership = replace(
        membership,
        number=max(membership.number, generation),
        next_workers={**membership.next_workers, host: max(number, membership.next_workers.get(host, 0))},
    )
    known = membership.worker(worker_id)
    if launched and (here := membership.host(host)) is not None and here.idle:
        membership = _put_host(membership, replace(here, idle=False))
    if known is not None:
        if launched:
            return _put(membership, replace(known, launched=True)), []
        if slot is not None and slot != known.member.slot:
            return fence(membership, known, f"it has slot {slot}, and the job knows it in {known.member.slot}")
        member = replace(known.member, address=address)
        again = replace(known, member=member, life=replace(known.life, alive_at=now, connected=True))
        return _put(membership, again), [Bye(worker_id)] if known.state is State.PARTED else []
    free = free_slots(membership)
    if slot is None:
        slot = next(iter(free), None)
    elif slot not in free:
        return membership, [Log("fenced", worker_id, f"it has slot {slot}, which is another's"), Fence(worker_id)]
    if slot is None:
        return membership, [Refuse(worker_id, f"all {MAX_SLOTS} slots are taken; wait until a worker has gone")]
    life = Life(alive_at=now, connected=not launched)
    founder = membership.newest is None
    worker = Worker(Member(worker_id, slot, host, address), State.JOINING, life, founder=founder, launched=launched)
    membership = replace(membership, workers=(*membership.workers, worker), started=membership.started + 1)
    return membership, [Log("joined", worker_id, f"slot {slot} on {host}", {"slot": slot})]


def on_ready(membership: Membership, worker_id: str, follows: bool = False) -> Outcome:
    """The worker is warm; it becomes a member when `settle` is called, at the founding or later. `follows`: where its
    host has no state yet, it can get it while others train."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state is not State.JOINING:
        return membership, []
    return _put(membership, replace(worker, state=State.WARM, follows=follows)), [Log("ready", worker_id)]


def on_caught_up(membership: Membership, worker_id: str) -> Outcome:
    """The worker has followed until its host has the state: it can be a member, and so can all others there."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state is not State.FOLLOWING or worker.caught_up:
        return membership, []
    return _put(membership, replace(worker, caught_up=True)), [Log("caught_up", worker_id)]


# Workers go.


def on_leave(membership: Membership, worker_id: str, why: str = "asked to") -> Outcome:
    """The worker wants to leave. A member becomes a leaver; one that never was a member may go at once."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state in (State.LEAVING, State.PARTED):
        return membership, []
    told: list[Instruction] = [Log("leaving", worker_id, why), Excuse(worker_id)]
    if worker.state not in (State.MEMBER, State.FOLLOWING):
        return _put(membership, replace(worker, state=State.PARTED)), [*told, Bye(worker_id)]
    membership = _put(membership, replace(worker, state=State.LEAVING))
    return _changed(membership, f"{worker_id} leaves ({why})"), told


def on_parked(membership: Membership, worker_id: str, generation: int) -> Outcome:
    """A leaver has acknowledged `generation`; it may go if that is the newest and lists it as a leaver."""
    worker = membership.worker(worker_id)
    newest = membership.newest
    if worker is None or newest is None or worker.state is not State.LEAVING:
        return membership, []
    if generation != newest.number or not newest.leaves(worker_id):
        return membership, []
    return _let_go(_put(membership, replace(worker, entered=generation)))


def on_entered(membership: Membership, worker_id: str, generation: int) -> Outcome:
    """The worker has heard of everybody in `generation`, which is of several hosts."""
    worker = membership.worker(worker_id)
    if worker is None or generation <= worker.entered:
        return membership, []
    return _let_go(_put(membership, replace(worker, entered=generation)))


def _let_go(membership: Membership) -> Outcome:
    """Leavers that have acknowledged the newest generation may go. With other hosts in it, only when its members have
    heard so: what a leaver told them may be on its way yet. Where all leave, the first of them is to hear the others.
    """
    newest = membership.newest
    if newest is None:
        return membership, []
    hears = (*newest.members, *newest.followers) or newest.leavers[:1]
    entered = {worker.worker_id for worker in membership.workers if worker.entered == newest.number}
    if newest.hosts > 1 and not newest.paused and any(it.worker_id not in entered for it in hears):
        return membership, []
    instructions: list[Instruction] = []
    for worker in membership.in_state(State.LEAVING):
        if worker.worker_id in entered and newest.leaves(worker.worker_id):
            membership = _put(membership, replace(worker, state=State.PARTED))
            instructions.append(Bye(worker.worker_id))
    return membership, instructions


def on_broken(membership: Membership, worker_id: str, generation: int, slot: int) -> Outcome:
    """In `generation` the connection between this worker and the slot's has ended, and no death has explained it since:
    what was on its way is lost, so the generation begins again."""
    ends = _ends(membership, worker_id, generation, slot)
    if ends is None:
        return membership, []
    cause = f"{worker_id} and {ends[1].worker_id} lost their connection"
    return replace(_changed(membership, cause), fault=True), []


def on_unreached(membership: Membership, worker_id: str, generation: int, slot: int) -> Outcome:
    """For a budget this worker and the slot's have not reached each other, and both reach the coordinator: one of their
    hosts must go, or nobody can go on. It is the one whose members came later, and not the job's own; it rests, longer
    each time, before it is tried again."""
    ends = _ends(membership, worker_id, generation, slot)
    hosts = [] if ends is None else [membership.host(end.member.host) for end in ends]
    if len({None if host is None else host.name for host in hosts}) < 2 or None in hosts:
        return membership, []

    def came(host: Host | None) -> tuple[bool, int]:
        assert host is not None
        members = [it.seniority for it in membership.in_state(State.MEMBER) if it.member.host == host.name]
        return not host.home, min(members, default=membership.seniority + 1)

    last = max(hosts, key=came)
    assert ends is not None
    assert last is not None
    name = last.name
    rests = {**membership.rests, name: membership.rests.get(name, 0) + 1}
    why = f"{ends[0].worker_id} and {ends[1].worker_id} do not reach each other"
    return on_host_lost(replace(membership, rests=rests), name, why)


def _ends(membership: Membership, worker_id: str, generation: int, slot: int) -> tuple[Worker, Worker] | None:
    """The two workers of a connection, if both are in that generation, and it is the newest."""
    newest = membership.newest
    if newest is None or generation != newest.number:
        return None
    listed = [it for it in membership.workers if it.state is not State.PARTED and newest.lists(it.worker_id)]
    one = next((it for it in listed if it.worker_id == worker_id), None)
    other = next((it for it in listed if it.member.slot == slot), None)
    return None if one is None or other is None else (one, other)


def on_finished(membership: Membership, worker_id: str, report: Mapping[str, Any] | None = None) -> Outcome:
    """The worker's main returned: it leaves for good, and from now on fewer than `min` members are enough. What it
    reports goes to the event log."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state in (State.LEAVING, State.PARTED):
        return membership, []  # it was asked to leave before: that says nothing about the job
    instructions: list[Instruction] = [Log("finished", worker_id, details=report or {})]
    if not membership.finishing:
        membership, told = _set_target(membership, membership.target, finishing=True)
        instructions += told
    membership, leaving = on_leave(membership, worker_id, "finished")
    return membership, [*instructions, *leaving]


def on_failed(
    membership: Membership, worker_id: str, kind: str, message: str, traceback: str = "", *, ends_job: bool
) -> Outcome:
    """The worker's code raised. That costs the job the worker only if `refuses` says so, or unless it `ends_job`."""
    worker = membership.worker(worker_id)
    if membership.stopping is not None or (worker is not None and worker.failed):
        return membership, []  # the same report again, or the same mistake on another worker
    text = f"{kind}: {message}"
    if worker is not None:
        membership = _put(membership, replace(worker, failed=True))
        if worker.state is State.PARTED:
            return membership, [Log("failed", worker_id, text)]  # it had left: that is its own affair
        if refuses(membership, worker_id, kind):
            return on_refused(membership, worker_id, text)
    told: list[Instruction] = [Log("failed", worker_id, text, {"traceback": traceback})]
    if not ends_job:
        return membership, told
    membership, more = on_stop(membership, Stop(f"{worker_id} failed: {text}", failed=True, kind=kind))
    return membership, [*told, *more]


def refuses(membership: Membership, worker_id: str, kind: str) -> bool:
    """Whether an error of this class costs the job the worker only: it came later, and the others are enough."""
    worker = membership.worker(worker_id)
    if worker is None or worker.founder or kind not in [error.__name__ for error in REFUSABLE]:
        return False
    return len(_without(membership, worker, State.MEMBER)) >= membership.min_size


def on_refused(membership: Membership, worker_id: str, why: str) -> Outcome:
    """The worker failed in a way that `refuses` allows, and is ending: aim at the number there is without it."""
    worker = membership.worker(worker_id)
    assert worker is not None
    others = _without(membership, worker, *ACTIVE)
    there = [other.member.host for other in others]
    membership = replace(
        membership, hosts=tuple(replace(host, share=there.count(host.name)) for host in membership.hosts)
    )
    membership, told = _set_target(membership, len(others), membership.finishing)
    text = f"{why}; the job goes on with {counted(len(others), 'worker')}"
    # A member stays one until it is gone: others may wait for its words.
    membership = _put(membership, replace(worker, refused=True))
    return membership, [Log("refused", worker_id, text), Excuse(worker_id), *told]


def on_gone(membership: Membership, worker_id: str, reason: str = "") -> Outcome:
    """The worker's process is confirmed dead; its slot is free again.

    A member or leaver that was not told Bye is a fault even if it exited with 0: others may wait for its words.
    """
    worker = membership.worker(worker_id)
    if worker is None:
        outcasts = tuple(other for other in membership.outcasts if other != worker_id)
        return replace(membership, outcasts=outcasts), []
    membership = replace(membership, workers=tuple(other for other in membership.workers if other is not worker))
    if worker.state is State.PARTED:
        return membership, [Log("left", worker_id, reason)]
    if worker.state in (State.MEMBER, State.FOLLOWING, State.LEAVING):
        membership = replace(_changed(membership, f"{worker_id} left ({reason or 'died'})"), fault=True)
    return membership, [Log("lost", worker_id, worker.fenced or reason)]


# Hosts.


def on_roster(membership: Membership, host: Host, live: Iterable[str]) -> Outcome:
    """The launcher of `host` is here (again) and says which of its workers live; the others died unheard. `grown` of
    the host is how much the target grows if it is new."""
    if host.life in membership.dropped:
        return membership, [Drop(host.name)]
    instructions: list[Instruction] = []
    known = membership.host(host.name)
    if known is not None and known.life not in ("", host.life):
        membership, instructions = on_host_lost(membership, host.name, "its launcher began anew")
        known = None
    replaced = [other.name for other in membership.hosts if host.home and other.home and other.name != host.name]
    for name in replaced:
        membership, more = on_host_lost(membership, name, f"{host.name} has taken its place")
        instructions += more
    if replaced and membership.newest is not None and not membership.in_state(State.MEMBER, State.LEAVING):
        membership, more = on_stop(membership, state_lost())
        instructions += more
    membership, told = _seat(membership, host, known)
    alive = set(live)
    for worker in membership.workers:
        if not worker.launched or worker.member.host != host.name:
            continue
        if worker.worker_id not in alive:
            membership, more = on_gone(membership, worker.worker_id, "gone while the coordinator was away")
            instructions += more
            continue
        if worker.refused or worker.state in (State.LEAVING, State.PARTED):
            instructions.append(Excuse(worker.worker_id))
        if worker.fenced:
            instructions.append(Fence(worker.worker_id))
    instructions += told
    return membership, instructions if membership.stopping is None else [*instructions, membership.stopping]


def _seat(membership: Membership, host: Host, known: Host | None) -> Outcome:
    """The host has its place, and everybody the shares that follow; told anew where nothing changes."""
    if known is None:
        target = min(membership.target + host.grown, membership.max_size)
        grown = target - membership.target  # it has these itself: the host before it may have no limit
        seated = replace(host, grown=grown, share=grown)
        return _set_target(replace(membership, hosts=(*membership.hosts, seated)), target, membership.finishing)
    seated = replace(known, slots=host.slots, life=host.life, home=host.home, heard_at=host.heard_at)
    membership = _put_host(membership, seated)
    if seated.slots == known.slots:
        return membership, [_told_target(membership)]
    membership, told = _set_target(membership, membership.target, membership.finishing)
    return _shed_from_hosts(membership, told)


def on_slots(membership: Membership, name: str, slots: int) -> Outcome:
    """The host has room for so many workers from now on; with none, all of its workers leave."""
    host = membership.host(name)
    if host is None or host.slots == slots:
        return membership, []
    target = membership.target if slots else max(membership.target - host.grown, membership.min_size)
    membership = _put_host(membership, replace(host, slots=slots, grown=host.grown if slots else 0))
    membership, told = _set_target(membership, target, membership.finishing)
    text = f"{name} has {counted(slots, 'slot')}" if slots else f"{name} leaves"
    return _shed_from_hosts(membership, [Log("host", "", text, {"host": name, "slots": slots}), *told])


def _shed_from_hosts(membership: Membership, told: list[Instruction]) -> Outcome:
    membership, leaving = shed(membership, membership.in_state(*ACTIVE))
    return membership, [*told, *leaving]


def state_lost() -> Stop:
    why = "nobody who had the state of the job is left: go on from the newest checkpoint with shoal resume"
    return Stop(why, failed=True, kind=StateLost.__name__)


def on_host_lost(membership: Membership, name: str, why: str) -> Outcome:
    """The host does not answer, and may be cut off: its workers count as lost although nobody saw them die. Whoever of
    them comes back is fenced, and its launcher begins anew. Its share goes to those that have free slots."""
    host = membership.host(name)
    if host is None:
        return membership, []
    theirs = [worker for worker in membership.workers if worker.member.host == name]
    instructions: list[Instruction] = []
    if theirs or host.slots:
        text = f"{name}: {why}, {counted(len(theirs), 'worker')} lost with it"
        instructions.append(Log("host_lost", "", text, {"host": name}))
    for worker in theirs:
        membership, more = on_gone(membership, worker.worker_id, f"its host {name} is lost")
        instructions += more
    membership = replace(
        membership,
        homes=tuple(home for home in membership.homes if home != name),
        hosts=tuple(other for other in membership.hosts if other is not host),
        dropped=(*membership.dropped, host.life) if host.life else membership.dropped,
        outcasts=(*membership.outcasts, *(worker.worker_id for worker in theirs)),
    )
    membership, told = _set_target(
        membership, max(membership.target - host.grown, membership.min_size), membership.finishing
    )
    return membership, [*instructions, *told]


def on_idle(membership: Membership, name: str) -> Outcome:
    """The workers of the host have ended, of their own accord, and none is to come. When that is so everywhere, the job
    is over."""
    host = membership.host(name)
    if host is None:
        return membership, []
    membership = _put_host(membership, replace(host, idle=True))
    if membership.workers or any(host.share and not host.idle for host in membership.hosts):
        return membership, []
    if membership.stopping is not None:
        return membership, []
    over = Stop("every worker has gone")  # nobody asked for it: the event log tells of an end, and of no stop
    membership, told = _set_target(replace(membership, stopping=over), membership.target, finishing=True)
    return membership, [over, *told]


def on_host_heard(membership: Membership, name: str, now: float) -> Outcome:
    """The launcher of the host says something. One that was lost may never have noticed: its line was not cut."""
    host = membership.host(name)
    if host is None:
        times = membership.rests.get(name, 0)
        rest_s = min(membership.timeouts.budget_s * 2.0**times, membership.timeouts.longest_rest_s) if times else 0.0
        return membership, [Drop(name, rest_s)]
    return _put_host(membership, replace(host, heard_at=now)), []


def _lose_silent_hosts(membership: Membership, now: float) -> Outcome:
    instructions: list[Instruction] = []
    budget_s = membership.timeouts.budget_s
    silent = [host for host in membership.hosts if host.life and not host.home and now - host.heard_at > budget_s]
    # If nobody is a member elsewhere, all that was trained is there: nobody could go on without it. And if all are
    # silent, it is the coordinator that is cut off.
    elsewhere = {worker.member.host for worker in membership.in_state(State.MEMBER)} - {host.name for host in silent}
    for host in silent:
        if elsewhere or not any(worker.member.host == host.name for worker in membership.workers):
            membership, more = on_host_lost(membership, host.name, f"silent for {now - host.heard_at:.1f} s")
            instructions += more
    return membership, instructions


# What is wished for.


def on_wish(membership: Membership, worker_id: str, number: int, target: int, relative: bool) -> Outcome:
    """A worker asks for another number of workers, or for so many more. What it asked for once counts once, by the
    `number` of the wish. Relative steps stop at min and max. Raises SettingsContradict as `on_scale` does."""
    worker = membership.worker(worker_id)
    if worker is None or number <= worker.wishes:
        return membership, [Heeded(worker_id, number)]
    membership = _put(membership, replace(worker, wishes=number))
    if relative:
        target = min(max(membership.target + target, membership.min_size), membership.max_size)
    membership, instructions = on_scale(membership, target)
    return membership, [*instructions, Heeded(worker_id, number)]


def on_scale(membership: Membership, target: int) -> Outcome:
    """Aim at `target` workers; the newest leave if there are more. Raises SettingsContradict out of min … max."""
    if not membership.min_size <= target <= membership.max_size:
        raise SettingsContradict(
            f"cannot scale to {target}: the job runs with {membership.min_size} to {membership.max_size} workers; "
            "choose a number between, or start it with another -n"
        )
    text = f"{membership.target} → {target}"
    membership, told = _set_target(membership, target, membership.finishing)
    if membership.newest is None:
        membership = replace(membership, founders=target)
    membership, leaving = shed(membership, membership.in_state(*ACTIVE))
    return membership, [Log("scaled", "", text), *told, *leaving]


def on_stop(membership: Membership, stop: Stop) -> Outcome:
    """End the job: every worker leaves. If it failed, at once: a step in flight would wait for who has failed. The
    first reason counts."""
    if membership.stopping is not None:
        return membership, []
    membership, told = _set_target(membership, membership.target, finishing=True)
    membership = replace(membership, stopping=stop, fault=membership.fault or stop.failed)
    membership, leaving = dismiss_all(membership)
    return membership, [Log("stopping", "", stop.reason), stop, *told, *leaving]


def on_drift(membership: Membership, drift: Drift, *, only_tell: bool = False) -> Outcome:
    """Copies of the state are not alike. Where most are, whoever has another is ended, and its successor takes the
    state anew. Where nobody can tell which are right the job fails; all are ended then, and nobody writes a
    checkpoint. With `only_tell` the event log tells of it, and the job goes on as it is."""
    if membership.stopping is not None:
        return membership, []
    at, since = f"at step {drift.step:,}, first in {drift.tensor}", f"alike at step {drift.alike_at:,}"
    odd = " and ".join(sorted(_holder(membership, copy) for copy in drift.others))
    if only_tell:
        text = f"the states of {odd} are not those of others {at} ({since}); the job goes on (--on-drift tell)"
    elif drift.majority:
        text = f"the state of {odd} is not that of most {at} ({since}): it is taken anew"
    else:
        text = (
            f"the states of {odd} differ {at} ({since}), and nobody can tell which is right: remove the checkpoints of "
            "later steps, and go on with shoal resume"
        )
    workers = {worker_id for copy in drift.others for worker_id in copy}
    details = {"step": drift.step, "seq": drift.seq, "tensor": drift.tensor, "alike_at": drift.alike_at}
    instructions: list[Instruction] = [Log("drift", "", text, {**details, "workers": sorted(workers)})]
    if only_tell:
        return membership, instructions
    if not drift.majority:
        stop = Stop(text, failed=True, kind=StateDrifted.__name__)
        membership, told = _set_target(replace(membership, stopping=stop), membership.target, finishing=True)
        instructions += [Log("stopping", "", text), stop, *told]
        workers = {worker.worker_id for worker in membership.workers}
    for worker in [it for it in membership.workers if it.worker_id in workers and not it.fenced]:
        membership, more = fence(membership, worker, "its state has drifted")
        instructions += more
    return membership, instructions


def _holder(membership: Membership, copy: Sequence[str]) -> str:
    worker = membership.worker(copy[0])
    return ", ".join(copy) + ("" if worker is None else f" on {worker.member.host}")


# Signs of life.


def on_beat(membership: Membership, worker_id: str, now: float) -> Outcome:
    worker = membership.worker(worker_id)
    return (membership, []) if worker is None else (_put(membership, _alive(worker, now)), [])


def on_waiting(membership: Membership, by: str, awaited: Iterable[str], now: float) -> Outcome:
    """`by` is blocked on `awaited`; nobody when it is not blocked. Replaces what it said before."""
    worker = membership.worker(by)
    if worker is None:
        return membership, []
    life = replace(worker.life, waits_for=tuple(other for other in awaited if other != by))
    return _mark_awaited(_put(membership, replace(worker, life=life)), now), []


def on_evidence(membership: Membership, worker_id: str, stopped: bool, cpu_time_s: float, now: float) -> Outcome:
    """The launcher looked: CPU time that advanced since the last look is a sign of life, unless it is stopped."""
    worker = membership.worker(worker_id)
    if worker is None:
        return membership, []
    before_s = worker.life.cpu_time_s
    if not stopped and before_s is not None and cpu_time_s > before_s:
        worker = _alive(worker, now)
    return _put(membership, replace(worker, life=replace(worker.life, cpu_time_s=cpu_time_s))), []


def on_tick(membership: Membership, now: float) -> Outcome:
    """Call it at least every probe interval: it probes awaited workers that are silent, and fences at the budget."""
    timeouts = membership.timeouts
    ticked_at = now if membership.ticked_at is None else membership.ticked_at
    membership = _mark_awaited(replace(membership, ticked_at=now), now)
    if now - ticked_at > timeouts.budget_s / 2:
        # The coordinator itself was held up: beats wait unread, and silence says nothing.
        excused = (replace(worker, life=replace(worker.life, alive_at=now)) for worker in membership.workers)
        hosts = tuple(replace(host, heard_at=now) for host in membership.hosts)
        return replace(membership, workers=tuple(excused), hosts=hosts), []
    membership, instructions = _lose_silent_hosts(membership, now)
    for worker in membership.workers:
        life = worker.life
        awaited_since = life.awaited_since
        if awaited_since is None or worker.fenced:
            continue
        silent_s = now - life.alive_at
        if silent_s <= timeouts.beat_s:
            continue
        importing = worker.state is State.JOINING and not life.connected  # and has no way to beat yet
        if not life.suspect and not importing:
            life = replace(life, suspect=True)
            instructions.append(Log("suspect", worker.worker_id, f"silent for {silent_s:.1f} s while awaited"))
        allowed_s = timeouts.join_s if importing else timeouts.budget_s
        # A worker may have been silent for long before anybody waited: probes get half the budget to speak for it.
        if silent_s >= allowed_s and now - awaited_since >= timeouts.budget_s / 2:
            reason = f"no sign of life for {silent_s:.1f} s while awaited"
            membership, fencing = fence(membership, replace(worker, life=life), reason)
            instructions += fencing
            continue
        if life.probed_at is None or now - life.probed_at >= timeouts.probe_s:
            life = replace(life, probed_at=now)
            instructions.append(Probe(worker.worker_id))
        membership = _put(membership, replace(worker, life=life))
    return membership, instructions


# Generations.


def settle(membership: Membership) -> Outcome:
    """Publish one generation for everything that changed since the last one, if anything did."""
    instructions: list[Instruction] = []
    if membership.finishing and not membership.workers and not membership.ended:
        instructions = [Log("ended", "", details={"generation": membership.number})]
        if membership.stopping is None:
            over = Stop("every worker has gone")
            membership = replace(membership, stopping=over)
            instructions.append(over)
        return replace(membership, ended=True), instructions
    if membership.newest is None and not _can_found(membership):
        return membership, []
    if membership.finishing and membership.newest is not None:
        for late in membership.in_state(State.JOINING, State.WARM, State.FOLLOWING):
            membership, leaving = on_leave(membership, late.worker_id, "the job is over")
            instructions += leaving
    membership = _let_in(_let_in(membership))  # who was let in may have others follow
    if _state_is_lost(membership):
        membership, stopping = on_stop(membership, state_lost())
        instructions += stopping
    members = sorted(membership.in_state(State.MEMBER), key=lambda worker: worker.seniority)
    # Those who never were members come last: the first keeps what the job has come to.
    leavers = sorted(membership.in_state(State.LEAVING), key=lambda it: (it.seniority == 0, it.seniority))
    followers = membership.in_state(State.FOLLOWING)
    if not membership.dirty or not (members or leavers):
        return membership, instructions
    generation = Generation(
        number=membership.number + 1,
        members=tuple(worker.member for worker in members),
        leavers=tuple(worker.member for worker in leavers),
        followers=tuple(worker.member for worker in followers),
        fault=membership.fault,
        paused=len(members) < membership.min_size and not membership.finishing,
        finishing=membership.finishing,
    )
    publish = Publish(generation, ", ".join(membership.causes))
    membership = replace(
        membership,
        newest=generation,
        number=generation.number,
        homes=tuple(dict.fromkeys(it.host for it in generation.members)) or membership.homes,
        last_fault=generation.number if generation.fault else membership.last_fault,
        dirty=False,
        fault=False,
        causes=(),
    )
    return membership, [*instructions, publish]


def _let_in(membership: Membership) -> Membership:
    """Newcomers become members, as far as there is room. On a host that has no state, the first of them follows until
    it has it, and the others wait for that; unless those who have it are too few to go on. Where all are dead, the next
    of their hosts go on: the state is in its memory. Who follows begins together: what they get is of one moment."""
    members = membership.in_state(State.MEMBER)
    room = membership.max_size - len(members)
    newcomers = membership.in_state(State.WARM, State.FOLLOWING)
    behind: list[Worker] = []
    if membership.newest is not None and not membership.finishing:
        present = (*members, *membership.in_state(State.LEAVING), *(it for it in newcomers if it.caught_up))
        have = (
            {it.member.host for it in present} if members else {*membership.homes, *(it.member.host for it in present)}
        )
        if not members or len(members) >= membership.min_size:
            behind = [it for it in newcomers if it.follows and it.member.host not in have]
        following = {it.member.host for it in behind if it.state is State.FOLLOWING}
        behind += [it for it in newcomers if it not in behind and it.member.host in following]
    for newcomer in [it for it in newcomers if it not in behind][:room]:
        room -= 1
        seniority = membership.seniority + 1
        promoted = replace(newcomer, state=State.MEMBER, seniority=seniority)
        membership = replace(_put(membership, promoted), seniority=seniority)
        membership = _changed(membership, f"{newcomer.worker_id} joined")
    if members and not any(it.state is State.FOLLOWING for it in behind):
        first = {it.member.host: it for it in reversed(behind)}
        for newcomer in list(first.values())[::-1][: max(0, room)]:
            membership = _put(membership, replace(newcomer, state=State.FOLLOWING))
            membership = _changed(membership, f"{newcomer.worker_id} follows")
    return membership


def _state_is_lost(membership: Membership) -> bool:
    """Whether somebody waits for the state, and nobody has it or comes where it is."""
    if membership.newest is None or membership.finishing or membership.in_state(State.MEMBER, State.LEAVING):
        return False
    if not membership.hosts:
        return False  # nobody has told which there are
    wait = [it for it in membership.in_state(State.WARM, State.FOLLOWING) if it.follows]
    shares = {host.name: host.share for host in membership.hosts}
    return bool(wait) and not any(shares.get(home, 0) for home in membership.homes)


def newest_for(membership: Membership, known: int) -> Generation | None:
    """The newest generation, as a worker that last heard of number `known` must see it: with any fault it missed."""
    newest = membership.newest
    if newest is None or newest.number <= known:
        return newest
    return replace(newest, fault=membership.last_fault > known)


def _can_found(membership: Membership) -> bool:
    warm = len(membership.in_state(State.WARM))
    if warm >= membership.founders:
        return True
    # Some died on the way: go on with fewer once everybody has come who was expected, and nobody is on the way.
    complete = membership.started >= membership.founders and not membership.in_state(State.JOINING)
    return complete and warm >= membership.min_size


# Small steps the handlers share.


def number_of(worker_id: str) -> int:
    """The number at the end of a worker's name; -1 if there is none."""
    digits = worker_id[len(worker_id.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def free_slots(membership: Membership) -> list[int]:
    taken = {worker.member.slot for worker in membership.workers}
    return [slot for slot in range(MAX_SLOTS) if slot not in taken]


def _set_target(membership: Membership, target: int, finishing: bool) -> Outcome:
    membership = replace(
        membership,
        target=target,
        finishing=finishing,
        targets=membership.targets + 1,
        hosts=spread(membership.hosts, target),
    )
    return membership, [_told_target(membership)]


def _told_target(membership: Membership) -> SetTarget:
    shares = {host.name: host.share for host in membership.hosts}
    numbers = {name: max(membership.next_worker, membership.next_workers.get(name, 0)) for name in shares}
    return SetTarget(membership.target, membership.finishing, membership.targets, shares, numbers)


def shed(membership: Membership, active: list[Worker]) -> Outcome:
    """As many of the active leave as are above the target, of each host above its share. Those who have contributed
    least go first: not yet warm, not yet members, then the newest members."""
    if not membership.hosts:
        return _shed(membership, active, membership.target)
    instructions: list[Instruction] = []
    for host in membership.hosts:
        here = [worker for worker in active if worker.member.host == host.name]
        membership, leaving = _shed(membership, here, host.share)
        instructions += leaving
    return membership, instructions


def _shed(membership: Membership, active: list[Worker], staying: int) -> Outcome:
    instructions: list[Instruction] = []
    newest = active[::-1]
    dispensable = [worker for worker in newest if worker.state is State.JOINING]
    dispensable += [worker for worker in newest if worker.state is State.WARM]
    dispensable += [worker for worker in newest if worker.state is State.FOLLOWING]
    members = [worker for worker in active if worker.state is State.MEMBER]
    dispensable += sorted(members, key=lambda worker: -worker.seniority)
    for worker in dispensable[: max(0, len(active) - staying)]:
        membership, leaving = on_leave(membership, worker.worker_id, "scaled down")
        instructions += leaving
    return membership, instructions


def dismiss_all(membership: Membership) -> Outcome:
    instructions: list[Instruction] = []
    for worker in membership.workers:
        membership, leaving = on_leave(membership, worker.worker_id, "the job stops")
        instructions += leaving
    return membership, instructions


def fence(membership: Membership, worker: Worker, reason: str) -> Outcome:
    membership = _put(membership, replace(worker, fenced=reason))
    return membership, [Log("fenced", worker.worker_id, reason), Fence(worker.worker_id)]


def _without(membership: Membership, worker: Worker, *states: State) -> list[Worker]:
    """The others in these states, less those that are refused: they are there only until they are gone."""
    return [other for other in membership.in_state(*states) if other is not worker and not other.refused]


def _put(membership: Membership, worker: Worker) -> Membership:
    workers = tuple(worker if other.worker_id == worker.worker_id else other for other in membership.workers)
    return replace(membership, workers=workers)


def _put_host(membership: Membership, host: Host) -> Membership:
    return replace(membership, hosts=tuple(host if other.name == host.name else other for other in membership.hosts))


def _changed(membership: Membership, cause: str) -> Membership:
    return replace(membership, dirty=True, causes=(*membership.causes, cause))


def _alive(worker: Worker, now: float) -> Worker:
    return replace(worker, life=replace(worker.life, alive_at=now, suspect=False))


def _mark_awaited(membership: Membership, now: float) -> Membership:
    # A member is awaited also when nobody says so: if all of them are stopped, there is nobody to say it.
    awaited = {worker.worker_id for worker in membership.in_state(State.MEMBER, State.FOLLOWING)}
    awaited |= {worker_id for worker in membership.workers for worker_id in worker.life.waits_for}
    awaited |= {lease.worker_id for lease in membership.lent.leases}  # the rest of which somebody may need
    if membership.waits_for_joiners:
        awaited |= {worker.worker_id for worker in membership.in_state(State.JOINING)}
    awaited -= {worker.worker_id for worker in membership.in_state(State.PARTED)}
    workers = []
    for worker in membership.workers:
        life = worker.life
        if worker.worker_id not in awaited:
            life = replace(life, awaited_since=None, suspect=False, cpu_time_s=None)
        elif life.awaited_since is None:
            life = replace(life, awaited_since=now)
        workers.append(worker if life == worker.life else replace(worker, life=life))
    return replace(membership, workers=tuple(workers))
