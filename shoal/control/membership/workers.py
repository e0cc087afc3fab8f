"""Workers come and go."""

from __future__ import annotations

from dataclasses import replace

from shoal.control.generation import MAX_SLOTS, Member
from shoal.control.instructions import Bye, Excuse, Fence, Instruction, Log, Refuse
from shoal.control.membership.values import Life, Membership, Outcome, State, Worker, changed, put, put_host


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
        membership = put_host(membership, replace(here, idle=False))
    if known is not None:
        if launched:
            return put(membership, replace(known, launched=True)), []
        if slot is not None and slot != known.member.slot:
            return fence(membership, known, f"it has slot {slot}, and the job knows it in {known.member.slot}")
        member = replace(known.member, address=address)
        again = replace(known, member=member, life=replace(known.life, alive_at=now, connected=True))
        return put(membership, again), [Bye(worker_id)] if known.state is State.PARTED else []
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


def number_of(worker_id: str) -> int:
    """The number at the end of a worker's name; -1 if there is none."""
    digits = worker_id[len(worker_id.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def free_slots(membership: Membership) -> list[int]:
    taken = {worker.member.slot for worker in membership.workers}
    return [slot for slot in range(MAX_SLOTS) if slot not in taken]


def on_ready(membership: Membership, worker_id: str, follows: bool = False) -> Outcome:
    """The worker is warm; it becomes a member when `settle` is called, at the founding or later. `follows`: where its
    host has no state yet, it can get it while others train."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state is not State.JOINING:
        return membership, []
    return put(membership, replace(worker, state=State.WARM, follows=follows)), [Log("ready", worker_id)]


def on_caught_up(membership: Membership, worker_id: str) -> Outcome:
    """The worker has followed until its host has the state: it can be a member, and so can all others there."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state is not State.FOLLOWING or worker.caught_up:
        return membership, []
    return put(membership, replace(worker, caught_up=True)), [Log("caught_up", worker_id)]


def on_leave(membership: Membership, worker_id: str, why: str = "asked to") -> Outcome:
    """The worker wants to leave. A member becomes a leaver; one that never was a member may go at once."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state in (State.LEAVING, State.PARTED):
        return membership, []
    told: list[Instruction] = [Log("leaving", worker_id, why), Excuse(worker_id)]
    if worker.state not in (State.MEMBER, State.FOLLOWING):
        return put(membership, replace(worker, state=State.PARTED)), [*told, Bye(worker_id)]
    membership = put(membership, replace(worker, state=State.LEAVING))
    return changed(membership, f"{worker_id} leaves ({why})"), told


def on_parked(membership: Membership, worker_id: str, generation: int) -> Outcome:
    """A leaver has acknowledged `generation`; it may go if that is the newest and lists it as a leaver."""
    worker = membership.worker(worker_id)
    newest = membership.newest
    if worker is None or newest is None or worker.state is not State.LEAVING:
        return membership, []
    if generation != newest.number or not newest.leaves(worker_id):
        return membership, []
    return _let_go(put(membership, replace(worker, entered=generation)))


def on_entered(membership: Membership, worker_id: str, generation: int) -> Outcome:
    """The worker has heard of everybody in `generation`, which is of several hosts."""
    worker = membership.worker(worker_id)
    if worker is None or generation <= worker.entered:
        return membership, []
    return _let_go(put(membership, replace(worker, entered=generation)))


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
            membership = put(membership, replace(worker, state=State.PARTED))
            instructions.append(Bye(worker.worker_id))
    return membership, instructions


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
        membership = replace(changed(membership, f"{worker_id} left ({reason or 'died'})"), fault=True)
    return membership, [Log("lost", worker_id, worker.fenced or reason)]


def fence(membership: Membership, worker: Worker, reason: str) -> Outcome:
    membership = put(membership, replace(worker, fenced=reason))
    return membership, [Log("fenced", worker.worker_id, reason), Fence(worker.worker_id)]
