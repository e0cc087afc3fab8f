"""Proof from the other side that every sample was trained exactly once.

Each worker records what it really fed to a step before it says that it is done with the step, so every member of a
committed step has a record. The audit compares the records with the order that the ledger promised.

Without lockstep a worker records each of its own steps before it says that the samples are used; a record's `seq` is
the number of its lease then, and [step_lo, step_hi) the lease's shard. An empty one says that the pass is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data import leases
from shoal.data.leases import Extent, Lease, Lent, Shard
from shoal.data.ledger import Ids, Pass
from shoal.errors import WorkersDiffer
from shoal.wording import counted


class Fed(NamedTuple):
    """One worker's part in an attempt at a step: the share [lo, hi) of the step's [step_lo, step_hi). An edit has an
    empty one."""

    generation: int
    seq: int
    pass_index: int
    epoch: int
    step_lo: int
    step_hi: int
    lo: int
    hi: int
    ids_digest: int
    skipped: bool
    last: bool = False  # step of its epoch


# In the file a record is its numbers in their order, 8 bytes each.
_RECORD = np.dtype([(name, "<i8") for name in Fed._fields])
_TABLE = np.dtype([*_RECORD.descr, ("worker", object)])
_LINES_SHOWN = 20
_ROLLBACKS = "rollbacks.jsonl"

Records = npt.NDArray[np.void]


def digest(ids: Sequence[Ids]) -> int:
    """One number for the ids of a share in the order they were fed, however they were cut in micro-batches."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in ids:
        hashed.update(np.ascontiguousarray(part, dtype="<i8").data)
    return int.from_bytes(hashed.digest(), "little", signed=True)


class AuditWriter:
    """Appends what one worker fed, one record a step. OSError when a record cannot be written whole."""

    def __init__(self, directory: Path, worker_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{worker_id}.bin"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # A worker that died while it wrote may have left half a record. It never said that it was done with that step,
        # so nothing is lost with it, and the records that follow must be aligned.
        size_bytes = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, size_bytes - size_bytes % _RECORD.itemsize)

    def write(self, fed: Fed) -> None:
        """Call it before the done word is written."""
        record = np.array(fed, _RECORD).tobytes()
        if os.write(self._fd, record) != len(record):
            raise OSError(
                f"{self._path}: a record was cut short, the disk is full; free some space and start the job again"
            )

    def close(self) -> None:
        os.close(self._fd)


def declare(directory: Path, pass_: Pass) -> None:
    """Write down what the pass goes over. WorkersDiffer when another worker wrote something else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"pass-{pass_.index}.json"
    fd, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(pass_), file, default=int)  # a seed may be numpy's number
        # A link appears whole or not at all, and only the first one does.
        os.link(temporary, path)
    except FileExistsError:
        theirs, ours = json.loads(path.read_text()), asdict(pass_)
        if theirs != ours:
            raise _differ(pass_.index, ours, theirs) from None
    finally:
        os.unlink(temporary)


def _differ(index: int, ours: dict[str, Any], theirs: dict[str, Any]) -> WorkersDiffer:
    names = [name for name in ours if ours[name] != theirs.get(name)]
    pairs = ", ".join(f"{name} is {ours[name]} here and {theirs.get(name)} at the first worker" for name in names)
    return WorkersDiffer(f"pass {index}: {pairs}; give every worker the same data and the same arguments of batches()")


def last_generation(directory: Path) -> int:
    """The highest generation in which anybody fed anything."""
    return int(_read(directory)["generation"].max(initial=0))


def roll_back(directory: Path, generation: int, seq: int) -> None:
    """The job goes on from commit `seq`: whatever generations up to this one did after it is taken back."""
    with open(directory / _ROLLBACKS, "a") as file:
        file.write(json.dumps({"generation": generation, "seq": seq}) + "\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class AuditReport:
    """What was trained against what should have been. `mismatches` has a line for each finding, with its place."""

    steps: int
    samples: int
    lost: int
    repeated: int
    skipped_steps: int
    redone: int
    mismatches: list[str]
    # Of the steps and samples, those of passes that learn nothing: evaluations and predictions.
    evaluated_steps: int = 0
    evaluated_samples: int = 0

    @property
    def trained_steps(self) -> int:
        return self.steps - self.evaluated_steps

    @property
    def trained_samples(self) -> int:
        return self.samples - self.evaluated_samples

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.mismatches)

    def __str__(self) -> str:
        steps = counted(self.steps, "step")
        if self.evaluated_steps:
            steps += f", {self.evaluated_steps:,} of them without training"
        return (
            f"audit: {self.lost:,} lost, {self.repeated:,} repeated, {self.skipped_steps:,} skipped "
            f"({steps}, {counted(self.samples, 'sample')}, {counted(self.redone, 'step')} redone)"
        )


def audit(directory: Path, committed_seq: int | None) -> AuditReport:
    """Compare what all workers recorded with the order of each declared pass.

    `committed_seq` is the newest commit of the job. Without it the newest step with records is left out, because they
    do not say whether it was committed. An end that is missing from the newest epoch of a pass is an unfinished epoch,
    not a loss.
    """
    records, leased = _by_kind(directory, _read(directory))
    (records, taken_back), (leased, _) = _standing(directory, records), _standing(directory, leased)
    newest = committed_seq if committed_seq is not None else records["seq"].max(initial=0) - 1
    records = records[records["seq"] <= newest]
    records = records[np.lexsort((records["generation"], records["seq"]))]
    applied, redone = _applied(records)
    # An edit uses no samples; its records only say that a step of the same number was not applied.
    records = records[applied & (records["step_hi"] > records["step_lo"])]
    passes = {int(index): _declared(directory, int(index)) for index in np.unique(records["pass_index"])}
    findings = _Findings()
    for index, pass_ in passes.items():
        if pass_ is None:
            findings.lines.append(f"pass {index}: has records and was never declared, so they cannot be checked")
    _check_steps(records, findings)
    for pass_, epoch, last, here in _epochs(records, passes, findings):
        _check_digests(pass_, epoch, records[here], findings)
        _check_cover(pass_, epoch, last, records[here], findings)
    counts = [
        _check_leased(pass_, leased[leased["pass_index"] == pass_.index], findings) for pass_ in _leased(directory)
    ]
    own_steps, own_samples, own_skipped, own_redone = np.sum(counts, axis=0, dtype=int).tolist() if counts else [0] * 4
    only_used = [index for index, pass_ in passes.items() if pass_ is not None and not pass_.train]
    evaluated = records[np.isin(records["pass_index"], only_used)]
    lines = findings.lines
    if len(lines) > _LINES_SHOWN:
        lines = [*lines[:_LINES_SHOWN], f"and {len(lines) - _LINES_SHOWN:,} more"]
    return AuditReport(
        steps=len(np.unique(records["seq"])) + own_steps,
        samples=int((records["hi"] - records["lo"]).sum()) + own_samples,
        lost=findings.lost,
        repeated=findings.repeated,
        skipped_steps=len(np.unique(records["seq"][records["skipped"] != 0])) + own_skipped,
        redone=redone + taken_back + own_redone,
        mismatches=lines,
        evaluated_steps=len(np.unique(evaluated["seq"])),
        evaluated_samples=int((evaluated["hi"] - evaluated["lo"]).sum()),
    )


def lent(directory: Path, held: Sequence[Lease], heard: int, begun: int, losses: int) -> Lent:
    """What the records know of leases when the journal is lost, for so many times, beside those that workers still
    hold; `heard` is the highest number that any of them was given, `begun` the last pass that any of them is in."""
    records, _ = _standing(directory, _by_kind(directory, _read(directory))[1])
    # Later ones were declared before the job went on from its beginning, and nobody has come to them again.
    begun = max(begun, records["pass_index"].max(initial=-1), *(lease.shard.pass_index for lease in held), -1)
    passes = [pass_ for pass_ in _leased(directory) if pass_.index <= begun]
    number = max(heard, int(records["seq"].max(initial=0)))
    # Somebody who was silent when an earlier journal was lost may hold what was taken back from it then.
    stale = [lease for lease in held if _lent_again(lease, held, records)]
    held = [lease for lease in held if lease not in stale]
    records = records[~np.isin(records["seq"], [lease.number for lease in held])]
    columns = (records[name].tolist() for name in ("pass_index", "epoch", "lo", "hi"))
    used = [Shard(*place) for place in zip(*columns, strict=True) if place[3] > place[2]]
    rebuilt = leases.rebuild([_extent(pass_) for pass_ in passes], used, held, number, losses)
    return replace(rebuilt, strangers=tuple(sorted({lease.worker_id for lease in stale})))


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


class _Findings:
    def __init__(self) -> None:
        self.lost = 0
        self.repeated = 0
        self.lines: list[str] = []


def _read(directory: Path) -> Records:
    """Every whole record, with the worker that wrote it."""
    parts = [np.empty(0, _TABLE)]
    for path in sorted(directory.glob("*.bin")):
        data = path.read_bytes()
        part = np.empty(len(data) // _RECORD.itemsize, _TABLE)
        part[list(Fed._fields)] = np.frombuffer(data, _RECORD, count=len(part))
        part["worker"] = path.stem
        parts.append(part)
    return np.concatenate(parts)


def _standing(directory: Path, records: Records) -> tuple[Records, int]:
    """Without what a job that went on from a checkpoint has taken back, and how many steps that were."""
    path = directory / _ROLLBACKS
    steps = 0
    for line in path.read_text().splitlines() if path.exists() else ():
        back = json.loads(line)
        stands = (records["generation"] > back["generation"]) | (records["seq"] <= back["seq"])
        steps += len(np.unique(records["seq"][~stands & (records["step_hi"] > records["step_lo"])]))
        records = records[stands]
    return records, steps


def _declared(directory: Path, index: int) -> Pass | None:
    path = directory / f"pass-{index}.json"
    return Pass(**json.loads(path.read_text())) if path.exists() else None


def _applied(records: Records) -> tuple[npt.NDArray[np.bool_], int]:
    """Which records belong to an applied step, and how many attempts were not applied.

    A step is attempted again only if it was not committed, so of a step's generations the newest is the one that
    committed it. The records come sorted by (seq, generation).
    """
    if not len(records):
        return np.zeros(0, np.bool_), 0
    seq, generation = records["seq"], records["generation"]
    ends_seq = np.append(seq[1:] != seq[:-1], True)
    ends_attempt = ends_seq | np.append(generation[1:] != generation[:-1], True)
    newest = generation[ends_seq][np.cumsum(np.append(0, ends_seq[:-1]))]
    return generation == newest, int(ends_attempt.sum() - ends_seq.sum())


def _check_steps(records: Records, findings: _Findings) -> None:
    """The members of a step agree on it, and each share lies in it."""
    for record in records[(records["lo"] < records["step_lo"]) | (records["hi"] > records["step_hi"])]:
        findings.lines.append(
            f"seq {record['seq']}: {record['worker']} fed [{record['lo']}, {record['hi']}), "
            f"outside of the step [{record['step_lo']}, {record['step_hi']})"
        )
    same_seq = records["seq"][1:] == records["seq"][:-1]
    for field in ("pass_index", "epoch", "step_lo", "step_hi", "skipped"):
        for index in np.flatnonzero(same_seq & (records[field][1:] != records[field][:-1])):
            one, other = records[index], records[index + 1]
            findings.lines.append(
                f"seq {one['seq']}: {field} is {one[field]} at {one['worker']} and {other[field]} at {other['worker']}"
            )


def _epochs(
    records: Records, passes: dict[int, Pass | None], findings: _Findings
) -> Iterator[tuple[Pass, int, bool, npt.NDArray[np.intp]]]:
    """(pass, epoch, whether it is the pass's newest, indices of its records) of every epoch that should be there."""
    for index, pass_ in passes.items():
        if pass_ is None:
            continue
        beyond = (records["pass_index"] == index) & (records["epoch"] >= pass_.epochs)
        for record in records[beyond]:
            findings.lines.append(
                f"seq {record['seq']}: {record['worker']} fed epoch {record['epoch']} of pass {index}, "
                f"which has {pass_.epochs} epochs"
            )
        of_pass = np.flatnonzero((records["pass_index"] == index) & ~beyond)
        if not len(of_pass):
            continue
        by_epoch = of_pass[np.argsort(records["epoch"][of_pass], kind="stable")]
        newest = int(records["epoch"][by_epoch[-1]])
        cuts = np.searchsorted(records["epoch"][by_epoch], np.arange(newest + 2))
        for epoch in range(newest + 1):
            yield pass_, epoch, epoch == newest, by_epoch[cuts[epoch] : cuts[epoch + 1]]


def _check_digests(pass_: Pass, epoch: int, records: Records, findings: _Findings) -> None:
    """The ids that were fed are the ids of the order."""
    shares = zip(records["lo"].tolist(), records["hi"].tolist(), strict=True)
    expected = [digest([pass_.ids(epoch, lo, hi)]) for lo, hi in shares]
    for record in records[records["ids_digest"] != np.array(expected)]:
        count = int(record["hi"] - record["lo"])
        # Only the digest is known: up to all of the share's samples were left out, and others fed in their place.
        findings.lost += count
        findings.repeated += count
        findings.lines.append(
            f"seq {record['seq']}: {record['worker']} fed other ids than pass {pass_.index}, epoch {epoch} "
            f"has in [{record['lo']}, {record['hi']})"
        )


def _may_end_at(pass_: Pass, reached: int, records: Records) -> bool:
    """Whether the last step of an epoch was one: nothing comes after it, or too little for another step of its
    workers."""
    last = records[records["step_hi"] == reached]
    if pass_.num_samples is None:
        return bool(last["last"].any())
    return pass_.num_samples - reached < pass_.too_few(max(1, len(np.unique(last["worker"]))))


def _check_cover(pass_: Pass, epoch: int, newest: bool, records: Records, findings: _Findings) -> None:
    """The shares of an epoch tile what the epoch should have used."""
    reached = int(records["step_hi"].max(initial=0))
    end = reached if newest or _may_end_at(pass_, reached, records) else pass_.num_samples
    if end is None:
        end = reached
        findings.lost += 1  # or more: a stream does not say how long it is
        findings.lines.append(f"pass {pass_.index}, epoch {epoch}: nobody fed what comes after {reached} in the stream")
    by_lo = np.argsort(records["lo"], kind="stable")
    lo, hi = np.append(records["lo"][by_lo], end), np.append(records["hi"][by_lo], end)
    covered_to = np.maximum.accumulate(np.append(0, hi[:-1]))
    gaps = np.maximum(lo - covered_to, 0)
    overlaps = np.maximum(np.minimum(covered_to, hi) - lo, 0)
    findings.lost += int(gaps.sum())
    findings.repeated += int(overlaps.sum())
    for index in np.flatnonzero(gaps):
        findings.lines.append(
            f"pass {pass_.index}, epoch {epoch}: nobody fed [{covered_to[index]}, {lo[index]}) of the order"
        )
    for index in np.flatnonzero(overlaps):
        findings.lines.append(
            f"seq {records['seq'][by_lo[index]]}: [{lo[index]}, {lo[index] + overlaps[index]}) of pass {pass_.index}, "
            f"epoch {epoch} was fed before"
        )


# Passes without lockstep.


def _leased(directory: Path) -> list[Pass]:
    """Those that were declared, in their order."""
    declared = [Pass(**json.loads(path.read_text())) for path in directory.glob("pass-*.json")]
    return sorted((pass_ for pass_ in declared if pass_.leased), key=lambda pass_: pass_.index)


def _by_kind(directory: Path, records: Records) -> tuple[Records, Records]:
    """Records of steps in lockstep, and of leases."""
    is_leased = np.isin(records["pass_index"], [pass_.index for pass_ in _leased(directory)])
    return records[~is_leased], records[is_leased]


def _extent(pass_: Pass) -> Extent:
    return leases.extent_of(asdict(pass_))


def _check_leased(pass_: Pass, records: Records, findings: _Findings) -> tuple[int, int, int, int]:
    """The newest lease's record of every sample counts, and together they are what the epochs should have used. How
    many steps and samples count, how many of the steps were skipped, and how many do not count.

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
        _check_digests(pass_, epoch, here[stand], findings)
        steps, samples = steps + int(stand.sum()), samples + int(counts.sum())
        skipped, redone = skipped + int((here["skipped"][stand] != 0).sum()), redone + int((~stand).sum())
        if len(marks):
            _check_all_used(pass_, epoch, owner >= 0, findings)
    return steps, samples, skipped, redone


def _check_each_lease(pass_: Pass, complete: bool, records: Records, findings: _Findings) -> None:
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


def _check_replaced(pass_: Pass, old: Any, newer: Any, records: Records, marks: Records, findings: _Findings) -> None:
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


def _check_all_used(pass_: Pass, epoch: int, used: npt.NDArray[np.bool_], findings: _Findings) -> None:
    edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True])).astype(np.int8)))
    for lo, hi in edges.reshape(-1, 2).tolist():
        findings.lost += hi - lo
        findings.lines.append(f"pass {pass_.index}, epoch {epoch}: nobody fed [{lo}, {hi}) of the order")
