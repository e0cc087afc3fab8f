"""Proof from the other side that every sample was trained exactly once.

The audit compares what workers recorded (`fed`) with the order that the ledger promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.data import leased_audit
from shoal.data.fed import Findings, Records, check_digests, declared, read, standing
from shoal.data.ledger import Pass
from shoal.wording import counted

_LINES_SHOWN = 20


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
    epoch: int = field(default=0, compare=False)  # of the newest step that learned

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
    records, passes = read(directory), declared(directory)
    records, leased = leased_audit.by_kind(records, passes)
    (records, taken_back), (leased, _) = standing(directory, records), standing(directory, leased)
    newest = committed_seq if committed_seq is not None else records["seq"].max(initial=0) - 1
    records = records[records["seq"] <= newest]
    records = records[np.lexsort((records["generation"], records["seq"]))]
    applied, redone = _applied(records)
    # An edit uses no samples; its records only say that a step of the same number was not applied.
    records = records[applied & (records["step_hi"] > records["step_lo"])]
    findings = Findings()
    for index in np.setdiff1d(records["pass_index"], [pass_.index for pass_ in passes]):
        findings.lines.append(f"pass {index}: has records and was never declared, so they cannot be checked")
    _check_steps(records, findings)
    for pass_, epoch, last, here in _epochs(records, passes, findings):
        check_digests(pass_, epoch, records[here], findings)
        _check_cover(pass_, epoch, last, records[here], findings)
    own_steps, own_samples, own_skipped, own_redone = leased_audit.check(leased, passes, findings)
    only_used = np.isin(records["pass_index"], [pass_.index for pass_ in passes if not pass_.train])
    evaluated, trained = records[only_used], records[~only_used]
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
        epoch=int(trained["epoch"][-1]) if len(trained) else 0,
    )


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


def _check_steps(records: Records, findings: Findings) -> None:
    """The members of a step agree on it, and each share lies in it."""
    for record in records[(records["lo"] < records["step_lo"]) | (records["hi"] > records["step_hi"])]:
        findings.lines.append(
            f"seq {record['seq']}: {record['worker']} fed [{record['lo']}, {record['hi']}), "
            f"outside of the step [{record['step_lo']}, {record['step_hi']})"
        )
    same_seq = records["seq"][1:] == records["seq"][:-1]
    for name in ("pass_index", "epoch", "step_lo", "step_hi", "skipped"):
        for index in np.flatnonzero(same_seq & (records[name][1:] != records[name][:-1])):
            one, other = records[index], records[index + 1]
            findings.lines.append(
                f"seq {one['seq']}: {name} is {one[name]} at {one['worker']} and {other[name]} at {other['worker']}"
            )


def _epochs(
    records: Records, passes: list[Pass], findings: Findings
) -> Iterator[tuple[Pass, int, bool, npt.NDArray[np.intp]]]:
    """(pass, epoch, whether it is the pass's newest, indices of its records) of every epoch that should be there."""
    for pass_ in passes:
        of_pass = records["pass_index"] == pass_.index
        beyond = of_pass & (records["epoch"] >= pass_.epochs)
        for record in records[beyond]:
            findings.lines.append(
                f"seq {record['seq']}: {record['worker']} fed epoch {record['epoch']} of pass {pass_.index}, "
                f"which has {pass_.epochs} epochs"
            )
        within = np.flatnonzero(of_pass & ~beyond)
        if not len(within):
            continue
        by_epoch = within[np.argsort(records["epoch"][within], kind="stable")]
        newest = int(records["epoch"][by_epoch[-1]])
        cuts = np.searchsorted(records["epoch"][by_epoch], np.arange(newest + 2))
        for epoch in range(newest + 1):
            yield pass_, epoch, epoch == newest, by_epoch[cuts[epoch] : cuts[epoch + 1]]


def _may_end_at(pass_: Pass, reached: int, records: Records) -> bool:
    """Whether the last step of an epoch was one: nothing comes after it, or too little for another step of its
    workers."""
    last = records[records["step_hi"] == reached]
    if pass_.num_samples is None:
        return bool(last["last"].any())
    return pass_.num_samples - reached < pass_.too_few(max(1, len(np.unique(last["worker"]))))


def _check_cover(pass_: Pass, epoch: int, newest: bool, records: Records, findings: Findings) -> None:
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
