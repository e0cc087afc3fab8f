"""Leases follow the membership: who is a member may have some, and what the others had goes back. Pure, like
`membership`: events go in, the next state and instructions come out."""

from __future__ import annotations

from dataclasses import replace

from shoal.control.instructions import Granted, Instruction, Log, PassOver, Settled
from shoal.control.membership.values import Membership, Outcome, State
from shoal.control.membership.workers import fence
from shoal.data import leases
from shoal.data.leases import Said, Wish
from shoal.wording import counted


def on_said(membership: Membership, worker_id: str, said: Said) -> Outcome:
    """A worker says what it holds and how far it is; for the first time or again.

    One that holds what the job has taken back, because the journal was lost and the worker silent for too long, is
    fenced: what it used since dies with it, and may be used by another. A newcomer in a pass that others have left
    early leaves it too, and meets them in the next.
    """
    worker = membership.worker(worker_id)
    if worker is None or worker.fenced or worker.state not in (State.MEMBER, State.LEAVING):
        return membership, []
    lent, settled = membership.lent, []
    if worker_id in lent.strangers:
        if said.held:
            return fence(membership, worker, "it comes too late with its leases: the job has taken them back")
        lent = replace(lent, strangers=tuple(other for other in lent.strangers if other != worker_id))
    for lease in said.held:
        known = lent.lease(lease.number)
        if known is not None and known.worker_id == worker_id:
            lent = leases.note(lent, lease.number, lease.used)
        elif lease.number not in said.ended:
            return fence(membership, worker, f"it has lease {lease.number}, which the job has taken back")
        if lease.number in said.ended:
            lent = leases.end(lent, lease.number)
            settled.append(lease.number)
    untold = [lease for lease in lent.leases if lease.worker_id == worker_id and lease.number > said.heard]
    instructions: list[Instruction] = [Granted(worker_id, lease) for lease in untold]
    if said.extent is not None and said.wants and not untold:
        lent = leases.begin(lent, said.extent)
        index = said.extent.pass_index
        if not said.heard and leases.left_early(lent, index):
            instructions.append(PassOver(worker_id, index, complete=leases.complete(lent, index)))
        else:
            lent = leases.wish(lent, Wish(worker_id, index, said.wants))
    if settled:
        instructions.append(Settled(worker_id, tuple(settled)))
    return replace(membership, lent=lent), instructions


def lend(membership: Membership) -> Outcome:
    """Take back what those had who have gone, and grant what can be granted. Call it once all that happened at the same
    time was handled, after `settle`."""
    instructions: list[Instruction] = []
    lent = membership.lent
    present = {worker.worker_id for worker in membership.in_state(State.MEMBER, State.LEAVING)}
    for worker_id in dict.fromkeys(lease.worker_id for lease in lent.leases if lease.worker_id not in present):
        rest = [lease.shard.hi - lease.used for lease in lent.leases if lease.worker_id == worker_id]
        text = f"{counted(sum(rest), 'sample')} of {counted(len(rest), 'lease')}"
        instructions.append(Log("returned", worker_id, text, {"samples": sum(rest)}))
        lent = leases.take_back(lent, worker_id)
    members = {worker.worker_id for worker in membership.in_state(State.MEMBER) if not worker.fenced}
    for wish in lent.wishes:
        if wish.worker_id not in members:
            lent = leases.forget_wish(lent, wish.worker_id)
            continue
        lent, lease = leases.grant(lent, wish.pass_index, wish.worker_id, wish.steps, len(members))
        if lease is not None:
            instructions.append(Granted(wish.worker_id, lease))
        elif leases.complete(lent, wish.pass_index):
            instructions.append(PassOver(wish.worker_id, wish.pass_index))
        elif wish.pass_index in lent.left:
            instructions.append(PassOver(wish.worker_id, wish.pass_index, complete=False))
        else:
            continue  # others have the rest, and may still die with it
        lent = leases.forget_wish(lent, wish.worker_id)
    return replace(membership, lent=lent), instructions
