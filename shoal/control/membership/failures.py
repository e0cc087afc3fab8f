"""What goes wrong: code that raises, connections that break, states that drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shoal.control.drift import Drift
from shoal.control.hosts import Host
from shoal.control.instructions import Excuse, Instruction, Log, Stop
from shoal.control.membership.finishing import on_stop
from shoal.control.membership.hosts import does_without, on_host_lost, refuse_host
from shoal.control.membership.target import set_target
from shoal.control.membership.values import ACTIVE, Membership, Outcome, State, Worker, changed, put
from shoal.control.membership.workers import fence
from shoal.errors import DataUnusable, OutOfSharedMemory, ScriptFailed, SettingsContradict, StateDrifted
from shoal.wording import counted

OnError = Literal["stop", "relaunch"]  # what comes of it when a worker's code raises

# What more workers can bring about: a newcomer that fails so is refused, and the job goes on as it was.
REFUSABLE = (OutOfSharedMemory, DataUnusable, SettingsContradict)


def on_failed(
    membership: Membership,
    worker_id: str,
    kind: str,
    message: str,
    traceback: str = "",
    *,
    ends_job: bool,
    fresh: bool = False,
) -> Outcome:
    """The worker's code raised, in a newcomer or a member that is `fresh`: it has not made a step with the others. That
    costs the job the worker only if `refuses` says so, or the host if it is a newcomer's that the job does without, or
    nothing more unless it `ends_job`."""
    worker = membership.worker(worker_id)
    if worker is None or membership.stopping is not None or worker.failed:
        # The same report again, or the same mistake on another worker; or its launcher has told what came of it.
        return membership, []
    text = f"{kind}: {message}"
    worker = replace(worker, failed=True)
    membership = put(membership, worker)
    if worker.state is State.PARTED:
        return membership, [Log("failed", worker_id, text)]  # it had left: that is its own affair
    host = worker.member.host
    alone = not any(it.member.host == host for it in _without(membership, worker, *ACTIVE))
    dispensable = refuses(membership, worker_id, kind)
    fresh = (fresh or not worker.seniority) and (ends_job or kind != ScriptFailed.__name__)
    if (alone if dispensable else fresh) and does_without(membership, host):
        return refuse_host(membership, host, text)
    if dispensable:
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
    # Who is going counts again: else its share would come to this worker's host at once, and be refused once more.
    hosts = tuple(replace(host, share=there.count(host.name), going=False) for host in membership.hosts)
    membership = replace(membership, hosts=hosts)
    membership, told = set_target(membership, len(others), membership.finishing)
    text = f"{why}; the job goes on with {counted(len(others), 'worker')}"
    # A member stays one until it is gone: others may wait for its words.
    membership = put(membership, replace(worker, refused=True))
    return membership, [Log("refused", worker_id, text), Excuse(worker_id), *told]


def _without(membership: Membership, worker: Worker, *states: State) -> list[Worker]:
    """The others in these states, less those that are refused: they are there only until they are gone."""
    return [other for other in membership.in_state(*states) if other is not worker and not other.refused]


def on_broken(membership: Membership, worker_id: str, generation: int, slot: int) -> Outcome:
    """In `generation` the connection between this worker and the slot's has ended, and no death has explained it since:
    what was on its way is lost, so the generation begins again."""
    ends = _ends(membership, worker_id, generation, slot)
    if ends is None:
        return membership, []
    cause = f"{worker_id} and {ends[1].worker_id} lost their connection"
    return replace(changed(membership, cause), fault=True), []


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
        membership, told = set_target(replace(membership, stopping=stop), membership.target, finishing=True)
        instructions += [Log("stopping", "", text), stop, *told]
        workers = {worker.worker_id for worker in membership.workers}
    for worker in [it for it in membership.workers if it.worker_id in workers and not it.fenced]:
        membership, more = fence(membership, worker, "its state has drifted")
        instructions += more
    return membership, instructions


def _holder(membership: Membership, copy: Sequence[str]) -> str:
    worker = membership.worker(copy[0])
    return ", ".join(copy) + ("" if worker is None else f" on {worker.member.host}")
