"""Signs of life: who is awaited and silent is probed, then fenced; a host that is silent is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shoal.control.instructions import Instruction, Log, Probe
from shoal.control.membership.hosts import on_host_lost
from shoal.control.membership.values import Membership, Outcome, State, Worker, put
from shoal.control.membership.workers import fence


def on_beat(membership: Membership, worker_id: str, now: float) -> Outcome:
    worker = membership.worker(worker_id)
    return (membership, []) if worker is None else (put(membership, _alive(worker, now)), [])


def on_waiting(membership: Membership, by: str, awaited: Iterable[str], now: float) -> Outcome:
    """`by` is blocked on `awaited`; nobody when it is not blocked. Replaces what it said before."""
    worker = membership.worker(by)
    if worker is None:
        return membership, []
    life = replace(worker.life, waits_for=tuple(other for other in awaited if other != by))
    return _mark_awaited(put(membership, replace(worker, life=life)), now), []


def on_evidence(membership: Membership, worker_id: str, stopped: bool, cpu_time_s: float, now: float) -> Outcome:
    """The launcher looked: CPU time that advanced since the last look is a sign of life, unless it is stopped."""
    worker = membership.worker(worker_id)
    if worker is None:
        return membership, []
    before_s = worker.life.cpu_time_s
    if not stopped and before_s is not None and cpu_time_s > before_s:
        worker = _alive(worker, now)
    return put(membership, replace(worker, life=replace(worker.life, cpu_time_s=cpu_time_s))), []


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
        membership = put(membership, replace(worker, life=life))
    return membership, instructions


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
