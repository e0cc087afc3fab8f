"""Without a journal: the membership from what workers and launchers say, and what the event log and the audit know.

`rebuild` is pure, like `membership`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.control.generation import Generation, Member
from shoal.control.hosts import Host, spread
from shoal.control.instructions import Log, SetTarget, Stop
from shoal.control.membership.finishing import dismiss_all
from shoal.control.membership.target import shed
from shoal.control.membership.values import ACTIVE, Life, Membership, Outcome, State, Worker
from shoal.control.membership.workers import number_of
from shoal.control.rundir import RunDir
from shoal.data.leases import NUMBERS, Lent, Said
from shoal.wording import counted


@dataclass(frozen=True)
class Report:
    """What a worker that reconnects knows. All of them together know what the membership was."""

    worker_id: str
    host: str
    slot: int | None = None  # None: it was never welcomed
    newest: Generation | None = None  # of those that list it
    last_fault: int = 0
    dismissed: bool = False  # it was told Bye
    leases: Said | None = None  # None: it has had none
    address: str = ""


@dataclass(frozen=True)
class Roster:
    """What the launcher of a host knows: its workers, and what it last heard from the coordinator."""

    host: Host
    live: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()  # dead too, but how they ended is still to be told
    target: SetTarget | None = None
    stopping: Stop | None = None


def rebuild(
    founding: Membership,
    reports: Iterable[Report],
    rosters: Iterable[Roster],
    slots: Mapping[str, int],
    number: int,
    now: float,
) -> Outcome:
    """The membership after the journal was lost: `founding` with what those who live say. `slots`, in the order of
    joining, and `number`, the highest generation's, are what the event log knows: it speaks for those who say nothing.

    The newest generation that anybody knows is in force. Who stands in it is what it says there; who stood in an older
    one and not in this was let go; all others have not been members yet. Feed the joins and rosters to the handlers
    afterwards, as after any restart: they bring the deaths.
    """
    joined = {worker_id: place for place, worker_id in enumerate(slots)}
    ordered = sorted(reports, key=lambda report: joined.get(report.worker_id, len(joined)))
    told = {report.worker_id: report for report in ordered}
    rosters = list(rosters)
    known = [report.newest for report in told.values() if report.newest is not None]
    newest = max(known, key=lambda generation: generation.number, default=None)
    listed = () if newest is None else newest.all
    workers: dict[str, Worker] = {}
    for seniority, member in enumerate(listed, 1):
        report = told.get(member.worker_id)
        state = _state_in(newest, member.worker_id)
        if report is not None and report.dismissed:
            state = State.PARTED
        follows = state is State.FOLLOWING
        older = 0 if follows else seniority
        worker = Worker(member, state, Life(alive_at=now), older, founder=False, launched=True, follows=follows)
        workers[member.worker_id] = worker
    taken = {worker.member.slot for worker in workers.values()}
    for report in told.values():
        # Of two that have one slot, the first; the other is fenced when it joins.
        if report.slot is not None and report.worker_id not in workers and report.slot not in taken:
            taken.add(report.slot)
            state = State.PARTED if report.dismissed or report.newest is not None else State.JOINING
            member = Member(report.worker_id, report.slot, report.host, report.address)
            workers[report.worker_id] = Worker(member, state, Life(alive_at=now), founder=newest is None)
    for roster in rosters:
        for worker_id in roster.live:
            slot = slots.get(worker_id)
            if worker_id not in workers and slot is not None and slot not in taken:
                member = Member(worker_id, slot, roster.host.name)
                workers[worker_id] = Worker(member, State.JOINING, Life(alive_at=now), founder=newest is None)
                taken.add(slot)
    heard = max((it.target for it in rosters if it.target is not None), key=lambda it: it.number, default=None)
    stopping = next((roster.stopping for roster in rosters if roster.stopping is not None), None)
    target = founding.target if heard is None else min(max(heard.target, founding.min_size), founding.max_size)
    hosts = _hosts(founding, rosters)
    names = (*slots, *workers, *(worker_id for roster in rosters for worker_id in (*roster.live, *roster.gone)))
    next_worker = max([founding.next_worker, *(number_of(worker_id) + 1 for worker_id in names)])
    membership = replace(
        founding,
        target=target,
        founders=target,
        targets=0 if heard is None else heard.number,
        workers=tuple(workers.values()),
        newest=newest,
        homes=() if newest is None else tuple(dict.fromkeys(it.host for it in newest.members)),
        number=max(number, 0 if newest is None else newest.number),
        last_fault=max((report.last_fault for report in told.values()), default=0),
        seniority=len(listed),
        started=max(len(workers), sum(len(roster.live) + len(roster.gone) for roster in rosters)),
        finishing=any(it is not None and it.finishing for it in (newest, heard)) or stopping is not None,
        stopping=stopping,
        hosts=hosts,
        next_worker=next_worker,
    )
    if sum(host.share for host in hosts) < target:
        membership = replace(membership, hosts=spread(hosts, target), targets=membership.targets + 1)
    # The launcher may have heard of what no worker has.
    if stopping is not None:
        return dismiss_all(membership)
    alive = {worker_id for roster in rosters for worker_id in roster.live}
    active = membership.in_state(*ACTIVE)
    return shed(membership, [worker for worker in active if worker.worker_id in alive])


def _state_in(newest: Generation | None, worker_id: str) -> State:
    if newest is not None and newest.rank(worker_id) is not None:
        return State.MEMBER
    return State.FOLLOWING if newest is not None and newest.follows(worker_id) else State.LEAVING


def _hosts(founding: Membership, rosters: Iterable[Roster]) -> tuple[Host, ...]:
    """Those that are here, in the order of those that were expected, each with the share it last heard of. The others
    come as new ones, if they come."""
    here = {
        it.host.name: replace(it.host, grown=0, share=0 if it.target is None else it.target.share(it.host.name))
        for it in rosters
    }
    expected = tuple(here.pop(host.name) for host in founding.hosts if host.name in here)
    return (*expected, *here.values())


class Rebuilding:
    """The journal is lost: what is heard until there is enough to go on. Decisions wait for that long."""

    def __init__(self, run_dir: RunDir, until: float, expected: Iterable[Host] = ()) -> None:
        """`expected`: the hosts that the job began with."""
        self._until = until
        self._expected = {host.name for host in expected}
        self._audit = run_dir.audit
        self.number, self._slots, self._losses = _remembered(run_dir.events)
        self.reports: dict[str, Report] = {}
        self.rosters: dict[str, Roster] = {}
        self._gone: set[str] = set()

    @property
    def next_lease(self) -> int:
        """Numbers from there on were never given, even if the event log has lost most of what it knew."""
        return (self._losses + 1000) * NUMBERS

    def on_gone(self, worker_id: str) -> None:
        self._gone.add(worker_id)

    def complete(self, now: float) -> bool:
        """Whether the launchers are here and all of their workers have come back or are dead; or it took too long."""
        live = {worker_id for roster in self.rosters.values() for worker_id in roster.live}
        here = bool(self.rosters) and self._expected <= self.rosters.keys()
        return now >= self._until or (here and live <= self.reports.keys() | self._gone)

    def rebuilt(self, founding: Membership, now: float) -> Outcome:
        """The event with which decisions begin again."""
        reports, rosters = self.reports.values(), self.rosters.values()
        membership, instructions = rebuild(founding, reports, rosters, self._slots, self.number, now)
        newest = "no generation" if membership.newest is None else f"generation {membership.newest.number}"
        text = f"{newest}, from {counted(len(self.reports), 'worker')}; the next is {membership.number + 1}"
        lent = self._lent()
        silent = [it.worker_id for it in membership.workers if it.worker_id not in self.reports]
        membership = replace(membership, lent=replace(lent, strangers=(*lent.strangers, *silent)))
        return membership, [Log("rebuilt", "", text), *instructions]

    def _lent(self) -> Lent:
        """What is used, the audit's records know; what is on lease, the workers."""
        from shoal.data.leased_audit import lent  # numpy costs a tenth of a second

        said = [one.leases for one in self.reports.values() if one.leases is not None and not one.dismissed]
        held = [lease for one in said for lease in one.held]
        heard = max((one.heard for one in said), default=0)
        begun = max((one.extent.pass_index for one in said if one.extent is not None), default=-1)
        return lent(self._audit, held, heard, begun, self._losses)


def _remembered(events: Path) -> tuple[int, dict[str, int], int]:
    """The highest number of a generation, the slot of every worker, and how often a journal was lost, from as much of
    the event log as is whole."""
    number, slots, losses = 0, {}, 0
    for line in events.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
            if event["event"] == "generation":
                number = max(number, int(event["number"]))
            elif event["event"] == "joined":
                slots[str(event["worker_id"])] = int(event["slot"])
            elif event["event"] == "journal_lost":
                losses += 1
        except (ValueError, KeyError, TypeError):
            continue
    return number, slots, losses
