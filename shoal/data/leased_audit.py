"""The audit where workers do not move in lockstep and samples come as leases, and what it knows of a lost journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data import leases
from shoal.data.fed import Findings, Records, check_digests, declared, read, standing
from shoal.data.leases import Extent, Lease, Lent, Shard
from shoal.data.ledger import Pass


def lent(directory: Path, held: Sequence[Lease], heard: int, begun: int, losses: int) -> Lent:
    """What the records know of leases when the journal is lost, for so many times, beside those that workers still
    hold; `heard` is the highest number that any of them was given, `begun` the last pass that any of them is in."""
    records, passes = read(directory), declared(directory)
    records, _ = standing(directory, by_kind(records, passes)[1])
    # Later ones were declared before the job went on from its beginning, and nobody has come to them again.
    begun = max(begun, records["pass_index"].max(initial=-1), *(lease.shard.pass_index for lease in held), -1)
    extents = [_extent(pass_) for pass_ in passes if pass_.leased and pass_.index <= begun]
    number = max(heard, int(records["seq"].max(initial=0)))
    # Somebody who was silent when an earlier journal was lost may hold what was taken back from it then.
    places = {extent.pass_index: extent for extent in extents}
    stale = [it for it in held if not _is_of(it.shard, places) or _lent_again(it, held, records)]
    held = [lease for lease in held if lease not in stale]
    records = records[~np.isin(records["seq"], [lease.number for lease in held])]
    columns = (records[name].tolist() for name in ("pass_index", "epoch", "lo", "hi"))
    used = [Shard(*place) for place in zip(*columns, strict=True) if place[3] > place[2]]
    rebuilt = leases.rebuild(extents, used, held, number, losses)
    return replace(rebuilt, strangers=tuple(sorted({lease.worker_id for lease in stale})))


def _is_of(shard: Shard, extents: Mapping[int, Extent]) -> bool:
    """Whether there is such a part of one of the passes."""
    extent = extents.get(shard.pass_index)
    return extent is not None and shard.epoch < extent.epochs and shard.hi <= extent.samples


def _lent_again(lease: Lease, held: Sequence[Lease], records: Records) -> bool:
    """Whether a newer lease has, or had, some of what this one has."""
    shard = lease.shard
    newer = records[(records["seq"] > lease.number) & (records["hi"] > records["lo"])]
    newer = newer[(newer["pass_index"] == shard.pass_index) & (newer["epoch"] == shard.epoch)]
    others = [
        other.shard
        for other in held
        if other.number > lease.number and replace(other.shard, lo=shard.lo, hi=shard.hi) == shard
    ]
    return bool(((newer["lo"] < shard.hi) & (newer["hi"] > shard.lo)).any()) or any(
        other.lo < shard.hi and other.hi > shard.lo for other in others
    )


def _extent(pass_: Pass) -> Extent:
    return leases.extent_of(asdict(pass_))


def by_kind(records: Records, passes: Iterable[Pass]) -> tuple[Records, Records]:
    """Records of steps in lockstep, and of leases."""
    is_leased = np.isin(records["pass_index"], [pass_.index for pass_ in passes if pass_.leased])
    return records[~is_leased], records[is_leased]


def check(records: Records, passes: Iterable[Pass], findings: Findings) -> tuple[int, int, int, int]:
    """How many steps and samples count, how many of the steps were skipped, and how many do not count."""
    counts = [
        _check_pass(pass_, records[records["pass_index"] == pass_.index], findings) for pass_ in passes if pass_.leased
    ]
    steps, samples, skipped, redone = (sum(column) for column in zip((0, 0, 0, 0), *counts, strict=True))
    return steps, samples, skipped, redone


def _check_pass(pass_: Pass, records: Records, findings: Findings) -> tuple[int, int, int, int]:
    """The newest lease's record of every sample counts, and together they are what the epochs should have used. Counts
    as `check` does.

    A record that does not count is of a worker that died before it had told of it. What nobody has used of a pass that
    is not complete is not lost: it is on lease, or to be lent.
    """
    extent, is_mark = _extent(pass_), records["hi"] <= records["lo"]
    marks, records = records[is_mark], records[~is_mark]
    _check_each_lease(pass_, len(marks) > 0, records, findings)
    beyond = (records["epoch"] >= extent.epochs) | (records["hi"] > extent.samples)
    for record in records[beyond]:
        findings.lines.append(
            f"lease {record['seq']}: {record['worker']} fed [{record['lo']}, {record['hi']}) of epoch "
            f"{record['epoch']}, and pass {pass_.index} has {extent.epochs} epochs of {extent.samples} samples"
        )
    records = records[~beyond]
    steps = samples = skipped = redone = 0
    for epoch in range(extent.epochs) if len(marks) else np.unique(records["epoch"]).tolist():
        here = records[records["epoch"] == epoch]
        here = here[np.argsort(here["seq"], kind="stable")]
        owner = np.full(extent.samples, -1, np.int64)  # the place in `here` of each sample's newest record
        for index, (lo, hi) in enumerate(zip(here["lo"].tolist(), here["hi"].tolist(), strict=True)):
            owner[lo:hi] = index
        counts = np.bincount(owner[owner >= 0], minlength=len(here))
        for replaced in np.flatnonzero(counts < here["hi"] - here["lo"]).tolist():
            owners = owner[here["lo"][replaced] : here["hi"][replaced]]
            newer = here[owners[owners != replaced][0]]
            _check_replaced(pass_, here[replaced], newer, records, marks, findings)
        stand = counts > 0
        check_digests(pass_, epoch, here[stand], findings)
        steps, samples = steps + int(stand.sum()), samples + int(counts.sum())
        skipped, redone = skipped + int((here["skipped"][stand] != 0).sum()), redone + int((~stand).sum())
        if len(marks):
            _check_all_used(pass_, epoch, owner >= 0, findings)
    return steps, samples, skipped, redone


def _check_each_lease(pass_: Pass, complete: bool, records: Records, findings: Findings) -> None:
    """A lease is one worker's, and used from its beginning on without a gap, nothing twice. What is missing of a pass
    that is complete is counted elsewhere."""
    records = records[np.lexsort((records["lo"], records["seq"]))]
    if not len(records):
        return
    begins = np.append(True, records["seq"][1:] != records["seq"][:-1])
    reached = np.where(begins, records["step_lo"], np.append(0, records["hi"][:-1]))
    outside = (records["lo"] < records["step_lo"]) | (records["hi"] > records["step_hi"])
    differs = np.zeros(len(records), np.bool_)
    for field in ("worker", "epoch", "step_lo", "step_hi"):
        differs |= ~begins & np.append(False, records[field][1:] != records[field][:-1])
    for index in np.flatnonzero(outside | differs | (records["lo"] != reached)):
        record, at = records[index], int(reached[index])
        lo, hi = int(record["lo"]), int(record["hi"])
        who = f"lease {record['seq']}: {record['worker']} fed [{lo}, {hi})"
        if differs[index]:
            what = f"and {records[index - 1]['worker']} fed of another lease with that number"
        elif outside[index]:
            what = f"outside of its shard [{record['step_lo']}, {record['step_hi']})"
        elif lo > at:
            findings.lost += 0 if complete else lo - at
            what = f"and not what is before, from {at} on"
        else:
            findings.repeated += min(at, hi) - lo
            what = "which it had fed before"
        findings.lines.append(f"{who} of pass {pass_.index}, epoch {record['epoch']}, {what}")


def _check_replaced(pass_: Pass, old: Any, newer: Any, records: Records, marks: Records, findings: Findings) -> None:
    """What another lease has used again was its worker's last: a worker that goes on has used it too."""
    if old["seq"] == newer["seq"]:
        return  # told already
    later = (records["worker"] == old["worker"]) & (records["seq"] > newer["seq"])
    if later.any() or (marks["worker"] == old["worker"]).any():
        lo, hi = max(old["lo"], newer["lo"]), min(old["hi"], newer["hi"])
        findings.repeated += int(hi - lo)
        findings.lines.append(
            f"lease {newer['seq']}: {newer['worker']} fed [{lo}, {hi}) of pass {pass_.index}, epoch {old['epoch']}, "
            f"and so did {old['worker']} by lease {old['seq']}, which trained on afterwards"
        )


def _check_all_used(pass_: Pass, epoch: int, used: npt.NDArray[np.bool_], findings: Findings) -> None:
    edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True])).astype(np.int8)))
    for lo, hi in edges.reshape(-1, 2).tolist():
        findings.lost += hi - lo
        findings.lines.append(f"pass {pass_.index}, epoch {epoch}: nobody fed [{lo}, {hi}) of the order")
