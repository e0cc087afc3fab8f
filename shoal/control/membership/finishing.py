"""The job comes to its end, or is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.control.instructions import Instruction, Log, Stop
from shoal.control.membership.target import set_target
from shoal.control.membership.values import Membership, Outcome, State
from shoal.control.membership.workers import on_leave
from shoal.errors import StateLost


def on_finished(membership: Membership, worker_id: str, report: Mapping[str, Any] | None = None) -> Outcome:
    """The worker's main returned: it leaves for good, and from now on fewer than `min` members are enough. What it
    reports goes to the event log."""
    worker = membership.worker(worker_id)
    if worker is None or worker.state in (State.LEAVING, State.PARTED):
        return membership, []  # it was asked to leave before: that says nothing about the job
    instructions: list[Instruction] = [Log("finished", worker_id, details=report or {})]
    if not membership.finishing:
        membership, told = set_target(membership, membership.target, finishing=True)
        instructions += told
    membership, leaving = on_leave(membership, worker_id, "finished")
    return membership, [*instructions, *leaving]


def on_stop(membership: Membership, stop: Stop) -> Outcome:
    """End the job: every worker leaves. If it failed, at once: a step in flight would wait for who has failed. The
    first reason counts."""
    if membership.stopping is not None:
        return membership, []
    membership, told = set_target(membership, membership.target, finishing=True)
    membership = replace(membership, stopping=stop, fault=membership.fault or stop.failed)
    membership, leaving = dismiss_all(membership)
    return membership, [Log("stopping", "", stop.reason), stop, *told, *leaving]


def dismiss_all(membership: Membership) -> Outcome:
    instructions: list[Instruction] = []
    for worker in membership.workers:
        membership, leaving = on_leave(membership, worker.worker_id, "the job stops")
        instructions += leaving
    return membership, instructions


def state_lost() -> Stop:
    why = "nobody who had the state of the job is left: go on from the newest checkpoint with shoal resume"
    return Stop(why, failed=True, kind=StateLost.__name__)
