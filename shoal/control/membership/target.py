"""How many workers there are to be, each host's share of them, and who leaves when they are too many."""

from __future__ import annotations

from dataclasses import replace

from shoal.control.hosts import slots_of, spread
from shoal.control.instructions import Heeded, Instruction, Log, SetTarget
from shoal.control.membership.values import ACTIVE, Membership, Outcome, State, Worker, put
from shoal.control.membership.workers import on_leave
from shoal.errors import SettingsContradict
from shoal.wording import counted


def on_wish(membership: Membership, worker_id: str, number: int, target: int, relative: bool) -> Outcome:
    """A worker asks for another number of workers, or for so many more. What it asked for once counts once, by the
    `number` of the wish. Relative steps stop at min and max. Raises SettingsContradict as `on_scale` does."""
    worker = membership.worker(worker_id)
    if worker is None or number <= worker.wishes:
        return membership, [Heeded(worker_id, number)]
    membership = put(membership, replace(worker, wishes=number))
    if relative:
        target = min(max(membership.target + target, membership.min_size), membership.max_size)
    membership, instructions = on_scale(membership, target)
    return membership, [*instructions, Heeded(worker_id, number)]


def on_scale(membership: Membership, target: int, named_slots: int | None = None) -> Outcome:
    """Aim at `target` workers; the newest leave if there are more. `named_slots`: of the hosts that the job was started
    with, if no others are to come. Raises SettingsContradict out of min … max, and for more than there are slots."""
    if not membership.min_size <= target <= membership.max_size:
        raise SettingsContradict(
            f"cannot scale to {target}: the job runs with {membership.min_size} to {membership.max_size} workers; "
            "choose a number between, or start it with another -n"
        )
    # A host that is away for now comes back, and one may have joined from this machine.
    slots = None if named_slots is None else max(named_slots, slots_of(membership.hosts))
    if slots is not None and target > slots:
        raise SettingsContradict(
            f"cannot scale to {target}: the hosts of the job have {counted(slots, 'slot')}; choose no more, or start "
            "it with more slots, with --discover, or with --address for hosts that join"
        )
    text = f"{membership.target} → {target}"
    membership, told = set_target(membership, target, membership.finishing)
    if membership.newest is None:
        membership = replace(membership, founders=target)
    membership, leaving = shed(membership, membership.in_state(*ACTIVE))
    return membership, [Log("scaled", "", text), *told, *leaving]


def set_target(membership: Membership, target: int, finishing: bool) -> Outcome:
    membership = replace(
        membership,
        target=target,
        finishing=finishing,
        targets=membership.targets + 1,
        hosts=spread(membership.hosts, target),
    )
    return membership, [told_target(membership)]


def told_target(membership: Membership) -> SetTarget:
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
