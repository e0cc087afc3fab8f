"""All that has changed becomes one generation."""

from __future__ import annotations

from dataclasses import replace

from shoal.control.generation import Generation
from shoal.control.instructions import Instruction, Log, Publish, Stop
from shoal.control.membership.finishing import on_stop, state_lost
from shoal.control.membership.values import Membership, Outcome, State, Worker, changed, put
from shoal.control.membership.workers import on_leave


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
    # The first keeps what the job has come to: not one that never was a member, nor one that left the others before.
    before = () if membership.newest is None else membership.newest.leavers
    place = {it.worker_id: number for number, it in enumerate(before, start=1)}
    leavers = sorted(
        membership.in_state(State.LEAVING),
        key=lambda it: (it.seniority == 0, place.get(it.worker_id, 0), it.seniority),
    )
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
    going = {host.name for host in membership.hosts if host.going}
    room = membership.max_size - sum(it.member.host not in going for it in members)
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
        membership = replace(put(membership, promoted), seniority=seniority)
        membership = changed(membership, f"{newcomer.worker_id} joined")
    if members and not any(it.state is State.FOLLOWING for it in behind):
        first = {it.member.host: it for it in reversed(behind)}
        for newcomer in list(first.values())[::-1][: max(0, room)]:
            membership = put(membership, replace(newcomer, state=State.FOLLOWING))
            membership = changed(membership, f"{newcomer.worker_id} follows")
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


def _can_found(membership: Membership) -> bool:
    warm = len(membership.in_state(State.WARM))
    if warm >= membership.founders:
        return True
    # Some died on the way: go on with fewer once everybody has come who was expected, and nobody is on the way.
    complete = membership.started >= membership.founders and not membership.in_state(State.JOINING)
    return complete and warm >= membership.min_size


def newest_for(membership: Membership, known: int) -> Generation | None:
    """The newest generation, as a worker that last heard of number `known` must see it: with any fault it missed."""
    newest = membership.newest
    if newest is None or newest.number <= known:
        return newest
    return replace(newest, fault=membership.last_fault > known)
