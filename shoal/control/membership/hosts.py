"""Hosts come, change, fail and are lost, with the workers they have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from shoal.control.hosts import Host, slots_of
from shoal.control.instructions import Drop, Excuse, Fence, Instruction, Log, RefuseHost, Stop
from shoal.control.membership.finishing import on_stop, state_lost
from shoal.control.membership.target import set_target, shed, told_target
from shoal.control.membership.values import ACTIVE, Membership, Outcome, State, put_host
from shoal.control.membership.workers import on_gone
from shoal.wording import counted

_REFUSALS = 100  # that are kept, the newest
_REASON_CHARS = 500  # of each; all of it is in the event log


def on_roster(membership: Membership, host: Host, live: Iterable[str]) -> Outcome:
    """The launcher of `host` is here (again) and says which of its workers live; the others died unheard. `grown` of
    the host is how much the target grows if it is new."""
    if (reason := membership.refusals.get(host.life)) is not None:
        return membership, [RefuseHost(host.name, reason)]
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
        return set_target(replace(membership, hosts=(*membership.hosts, seated)), target, membership.finishing)
    seated = replace(known, slots=host.slots, life=host.life, home=host.home, guest=host.guest, heard_at=host.heard_at)
    membership = put_host(membership, seated)
    if seated.slots == known.slots:
        return membership, [told_target(membership)]
    membership, told = set_target(membership, membership.target, membership.finishing)
    return _shed_from_hosts(membership, told)


def on_slots(membership: Membership, name: str, slots: int) -> Outcome:
    """The host has room for so many workers from now on; with none, all of its workers leave."""
    host = membership.host(name)
    if host is None or host.slots == slots:
        return membership, []
    target = membership.target if slots else max(membership.target - host.grown, membership.min_size)
    membership = put_host(membership, replace(host, slots=slots, grown=host.grown if slots else 0))
    membership, told = set_target(membership, target, membership.finishing)
    text = f"{name} has {counted(slots, 'slot')}" if slots else f"{name} leaves"
    return _shed_from_hosts(membership, [Log("host", "", text, {"host": name, "slots": slots}), *told])


def on_unlisted(membership: Membership, names: Collection[str]) -> Outcome:
    """These hosts, and no others, are gone from the list of those that may be used. One that never came is awaited no
    longer. What the others have does not count while they still have it, so that there is something for others to do:
    one of them may alone have the state, and stays until it has handed that over."""
    hosts = tuple(
        replace(host, going=host.name in names)
        for host in membership.hosts
        if host.life or host.home or host.name not in names
    )
    if hosts == membership.hosts:
        return membership, []
    slots = slots_of([host for host in hosts if not host.going])
    founders = min(membership.founders, max(slots, membership.min_size))
    membership = replace(membership, hosts=hosts, founders=founders)
    membership, told = set_target(membership, membership.target, membership.finishing)
    return _shed_from_hosts(membership, told)


def _shed_from_hosts(membership: Membership, told: list[Instruction]) -> Outcome:
    membership, leaving = shed(membership, membership.in_state(*ACTIVE))
    return membership, [*told, *leaving]


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
    membership, told = set_target(
        membership, max(membership.target - host.grown, membership.min_size), membership.finishing
    )
    return membership, [*instructions, *told]


def on_idle(membership: Membership, name: str) -> Outcome:
    """The workers of the host have ended, of their own accord, and none is to come. When that is so everywhere, the job
    is over."""
    host = membership.host(name)
    if host is None:
        return membership, []
    membership = put_host(membership, replace(host, idle=True))
    if membership.workers or any(host.share and not host.idle for host in membership.hosts):
        return membership, []
    if membership.stopping is not None:
        return membership, []
    over = Stop("every worker has gone")  # nobody asked for it: the event log tells of an end, and of no stop
    membership, told = set_target(replace(membership, stopping=over), membership.target, finishing=True)
    return membership, [over, *told]


def on_host_heard(membership: Membership, name: str, now: float) -> Outcome:
    """The launcher of the host says something. One that was lost may never have noticed: its line was not cut."""
    host = membership.host(name)
    if host is None:
        times = membership.rests.get(name, 0)
        rest_s = min(membership.timeouts.budget_s * 2.0**times, membership.timeouts.longest_rest_s) if times else 0.0
        return membership, [Drop(name, rest_s)]
    return put_host(membership, replace(host, heard_at=now)), []


def on_host_failed(membership: Membership, name: str, kind: str, message: str, traceback: str = "") -> Outcome:
    """The launcher of the host says what ends the job, unless that is well without this host."""
    if membership.host(name) is None or membership.stopping is not None:
        return membership, []  # it is lost, or refused, already
    text = f"{kind}: {message}"
    if does_without(membership, name):
        return refuse_host(membership, name, text)
    membership, told = on_stop(membership, Stop(f"{name}: {message}", failed=True, kind=kind))
    return membership, [Log("failed", "", f"{name}: {text}", {"traceback": traceback}), *told]


def does_without(membership: Membership, name: str) -> bool:
    """Whether the host is a guest of a job that was there before it and has members enough elsewhere, one of them with
    the state of the job for certain: what fails there is wrong with that host."""
    host = membership.host(name)
    if host is None or not host.guest or membership.newest is None or membership.finishing:
        return False
    if any(worker.founder for worker in membership.workers if worker.member.host == name):
        return False
    members = [it for it in membership.in_state(State.MEMBER) if not it.refused]
    elsewhere = [it for it in members if it.member.host != name]
    oldest_here = min((it.seniority for it in members if it.member.host == name), default=membership.seniority + 1)
    # Who became a member after those here, and did not follow, may be about to take the state from them.
    has_state = any(it.caught_up or it.seniority < oldest_here for it in elsewhere)
    return has_state and len(elsewhere) >= membership.min_size


def refuse_host(membership: Membership, name: str, why: str) -> Outcome:
    host = membership.host(name)
    assert host is not None
    reason = f"{name} is refused, and the job goes on without it: {why}"
    refusals = [*membership.refusals.items(), (host.life, reason[:_REASON_CHARS])]
    membership = replace(membership, refusals=dict(refusals[-_REFUSALS:]))
    membership, told = on_host_lost(membership, name, "refused")
    told = [it for it in told if not (isinstance(it, Log) and it.kind == "host_lost")]
    return membership, [Log("host_refused", "", reason, {"host": name}), *told, RefuseHost(name, reason)]
