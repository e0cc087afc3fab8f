"""Which samples are on lease to whom, for syncs without lockstep: pure functions over frozen values.

There is no step of all workers then, and no cursor that moves with it. A worker borrows a shard of the order, a few of
its own steps, and says how far it has used it. At every moment each sample of each epoch is in exactly one place: not
lent yet, returned, on lease, or used; so "exactly once" is a property of the few functions that move it.

A sample is used when the worker that has it on lease says so. What was not said when a worker died is lent again: the
model that had learned from it has died with the worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Numbers begin anew at a multiple of this with every journal that is lost: a worker that lives, and says nothing then,
# may have a lease that is newer than all that are known.
NUMBERS = 10**9
# So many passes that were left early are remembered whole: somebody may still be in one.
_KEPT = 4


@dataclass(frozen=True)
class Extent:
    """What there is to lend of a pass."""

    pass_index: int
    samples: int  # of an epoch, without an end that is dropped
    epochs: int
    step_samples: int  # of one worker's step


def extent_of(declared: Mapping[str, Any]) -> Extent:
    """Of a pass, by the names of its fields."""
    step_samples, samples = declared["worker_batch"] * declared["accumulate"], declared["num_samples"]
    dropped = samples % step_samples if declared["drop_last"] else 0
    return Extent(declared["index"], samples - dropped, declared["epochs"], step_samples)


@dataclass(frozen=True)
class Shard:
    """The range [lo, hi) of one epoch's order. It begins with a step, and only an epoch's end cuts its last one."""

    pass_index: int
    epoch: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Lease:
    """How far it is used does not take part in comparison: two that differ in it need only one entry in the journal."""

    number: int  # never given twice
    worker_id: str
    shard: Shard
    used: int = field(compare=False)  # [shard.lo, used) is


@dataclass(frozen=True)
class Wish:
    worker_id: str
    pass_index: int
    steps: int


@dataclass(frozen=True)
class Lending:
    """One pass: the place in its order up to which everything was lent, and what came back."""

    extent: Extent
    epoch: int = 0
    position: int = 0
    returned: tuple[Shard, ...] = ()  # sorted
    used: int = 0  # samples of leases that have ended

    @property
    def left(self) -> int:
        """How many samples could be lent now."""
        extent = self.extent
        ahead = (extent.epochs - self.epoch) * extent.samples - self.position
        return ahead + sum(shard.hi - shard.lo for shard in self.returned)


@dataclass(frozen=True)
class Lent:
    """All of a job's leases."""

    number: int = 0  # of the newest lease
    passes: tuple[Lending, ...] = ()  # in the order they were begun, but those in `over`
    over: tuple[int, ...] = ()  # indices of older passes that are complete
    left: tuple[int, ...] = ()  # of those that all have left early
    leases: tuple[Lease, ...] = ()
    samples: int = 0  # used, of leases that have ended, in all passes
    steps: int = 0  # likewise
    strangers: tuple[str, ...] = ()  # who live, and did not say in time what they held when the journal was lost
    wishes: tuple[Wish, ...] = field(default=(), compare=False)  # each worker says its own again to a new coordinator

    def lease(self, number: int) -> Lease | None:
        return next((lease for lease in self.leases if lease.number == number), None)

    def lending(self, pass_index: int) -> Lending | None:
        return next((one for one in self.passes if one.extent.pass_index == pass_index), None)

    def used(self) -> tuple[int, int]:
        """Samples and steps that all workers together have used so far."""
        samples, steps = self.samples, self.steps
        for lease in self.leases:
            samples += lease.used - lease.shard.lo
            steps += _steps(self, lease)
        return samples, steps

    def epoch(self) -> int:
        """Of the newest pass: how many times its data were used."""
        if not self.passes:
            return 0
        newest = self.passes[-1]
        on_lease = sum(it.used - it.shard.lo for it in self.leases if it.shard.pass_index == newest.extent.pass_index)
        return min((newest.used + on_lease) // max(newest.extent.samples, 1), newest.extent.epochs - 1)


@dataclass(frozen=True)
class Said:
    """All that a worker knows of its leases. It says the whole again whenever something has changed."""

    extent: Extent | None = None  # of the pass it is in; None between passes
    held: tuple[Lease, ...] = ()
    ended: tuple[int, ...] = ()  # numbers of those held of which it uses no more
    heard: int = 0  # the highest number it was ever given
    wants: int = 0  # steps of one lease more; 0: none


def begin(lent: Lent, extent: Extent) -> Lent:
    """A worker is in this pass; for all but the first that changes nothing."""
    if extent.pass_index in (*lent.over, *lent.left) or lent.lending(extent.pass_index) is not None:
        return lent
    done = tuple(one.extent.pass_index for one in lent.passes if complete(lent, one.extent.pass_index))
    held = {lease.shard.pass_index for lease in lent.leases} | {wanted.pass_index for wanted in lent.wishes}
    older = [one.extent.pass_index for one in lent.passes if one.extent.pass_index not in done]
    left = tuple(index for index in older[:-_KEPT] if index not in held)
    kept = tuple(one for one in lent.passes if one.extent.pass_index not in (*done, *left))
    return replace(lent, passes=(*kept, Lending(extent)), over=(*lent.over, *done), left=(*lent.left, *left))


def complete(lent: Lent, pass_index: int) -> bool:
    """Whether every sample of every epoch of the pass is used."""
    lending = lent.lending(pass_index)
    if lending is None:
        return pass_index in lent.over
    return not lending.left and not any(lease.shard.pass_index == pass_index for lease in lent.leases)


def wish(lent: Lent, wanted: Wish) -> Lent:
    """The worker waits for a lease; a wish of its own before is replaced."""
    return replace(lent, wishes=(*_without(lent, wanted.worker_id), wanted))


def left_early(lent: Lent, pass_index: int) -> bool:
    """Whether somebody is in a later pass already; this one need not be complete."""
    return pass_index in lent.left or any(one.extent.pass_index > pass_index for one in lent.passes)


def forget_wish(lent: Lent, worker_id: str) -> Lent:
    return replace(lent, wishes=_without(lent, worker_id))


def grant(lent: Lent, pass_index: int, worker_id: str, steps: int, among: int) -> tuple[Lent, Lease | None]:
    """Lend the worker up to that many steps, fewer when little is left for `among` workers: at the end of a pass all
    should run out at about the same time. What was returned goes first. None: nothing is there now."""
    lending = lent.lending(pass_index)
    if lending is None or not lending.left:
        return lent, None
    extent = lending.extent
    fair = lending.left // (2 * among * extent.step_samples)
    most = max(1, min(steps, fair)) * extent.step_samples
    if lending.returned:
        first, *others = lending.returned
        shard = replace(first, hi=min(first.hi, first.lo + most))
        rest = [replace(first, lo=shard.hi)] if shard.hi < first.hi else []
        lending = replace(lending, returned=(*rest, *others))
    else:
        shard = Shard(pass_index, lending.epoch, lending.position, min(lending.position + most, extent.samples))
        ended = shard.hi == extent.samples
        lending = replace(
            lending, epoch=lending.epoch + 1 if ended else lending.epoch, position=0 if ended else shard.hi
        )
    lease = Lease(lent.number + 1, worker_id, shard, shard.lo)
    lent = replace(_put(lent, lending), number=lease.number, leases=(*lent.leases, lease))
    return lent, lease


def note(lent: Lent, number: int, used: int) -> Lent:
    """The lease is used up to there, if that is news."""
    return replace(
        lent,
        leases=tuple(
            replace(lease, used=min(max(lease.used, used), lease.shard.hi)) if lease.number == number else lease
            for lease in lent.leases
        ),
    )


def end(lent: Lent, number: int) -> Lent:
    """The lease is over: what is used of it stays so, the rest is returned."""
    lease = lent.lease(number)
    if lease is None:
        return lent
    lending, used = lent.lending(lease.shard.pass_index), lease.used - lease.shard.lo
    assert lending is not None, f"{lease} is of a pass that is over"
    returned = lending.returned
    if lease.used < lease.shard.hi:
        rest = replace(lease.shard, lo=lease.used)
        returned = tuple(sorted((*returned, rest), key=lambda shard: (shard.epoch, shard.lo)))
    steps = lent.steps + _steps(lent, lease)
    lent = _put(lent, replace(lending, returned=returned, used=lending.used + used))
    leases = tuple(other for other in lent.leases if other.number != number)
    return replace(lent, leases=leases, samples=lent.samples + used, steps=steps)


def take_back(lent: Lent, worker_id: str) -> Lent:
    """The worker is gone: end all of its leases."""
    for lease in lent.leases:
        if lease.worker_id == worker_id:
            lent = end(lent, lease.number)
    return forget_wish(lent, worker_id)


def rebuild(extents: Iterable[Extent], used: Iterable[Shard], held: Iterable[Lease], number: int, losses: int) -> Lent:
    """Without a journal: what is `used` by leases that nobody holds any more, and what is `held`, of passes in their
    order. All else was not lent, or is returned. `number` is the highest that is known; `losses` says how often a
    journal was lost, this time too."""
    used, held = list(used), tuple(held)
    lent = Lent(number=max(number, losses * NUMBERS), leases=held)
    for extent in extents:
        of_pass = _by_epoch(shard for shard in used if shard.pass_index == extent.pass_index)
        on_lease = _by_epoch(lease.shard for lease in held if lease.shard.pass_index == extent.pass_index)
        last = max((*of_pass, *on_lease), default=0)
        reached = max((hi for _, hi in (*of_pass[last], *on_lease[last])), default=0)
        returned: list[Shard] = []
        samples = steps = 0
        for epoch in range(last + 1):
            end_ = reached if epoch == last else extent.samples
            leased = _merged(on_lease[epoch])
            # What is on lease again does not count as used by the lease before.
            free = _merged(of_pass[epoch])
            spent = [part for lo, hi in free for part in _gaps(leased, lo, hi)]
            samples += sum(hi - lo for lo, hi in spent)
            steps += sum(-(-(hi - lo) // extent.step_samples) for lo, hi in spent)
            gaps = _gaps(_merged([*leased, *spent]), 0, end_)
            returned += [Shard(extent.pass_index, epoch, lo, hi) for lo, hi in gaps]
        at = (last + 1, 0) if reached == extent.samples else (last, reached)
        lending = Lending(extent, *at, tuple(returned), samples)
        lent = replace(lent, passes=(*lent.passes, lending), samples=lent.samples + samples, steps=lent.steps + steps)
    return lent


def _by_epoch(shards: Iterable[Shard]) -> defaultdict[int, list[tuple[int, int]]]:
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for shard in shards:
        found[shard.epoch].append((shard.lo, shard.hi))
    return found


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same places as sorted ranges that do not touch."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(hi, merged[-1][1])
        else:
            merged.append((lo, hi))
    return merged


def _gaps(ranges: Iterable[tuple[int, int]], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """What the sorted ranges leave of [lo, hi)."""
    for start, stop in ranges:
        if lo < min(start, hi):
            yield lo, min(start, hi)
        lo = max(lo, stop)
    if lo < hi:
        yield lo, hi


def _put(lent: Lent, lending: Lending) -> Lent:
    index = lending.extent.pass_index
    return replace(lent, passes=tuple(lending if one.extent.pass_index == index else one for one in lent.passes))


def _without(lent: Lent, worker_id: str) -> tuple[Wish, ...]:
    return tuple(other for other in lent.wishes if other.worker_id != worker_id)


def _steps(lent: Lent, lease: Lease) -> int:
    lending = lent.lending(lease.shard.pass_index)
    assert lending is not None, f"{lease} is of a pass that is over"
    return -(-(lease.used - lease.shard.lo) // lending.extent.step_samples)


# The journal's form is `dataclasses.asdict`.


def from_dict(value: Mapping[str, Any]) -> Lent:
    """What `asdict` made of it; without the wishes, which are said again."""
    return Lent(
        number=value["number"],
        strangers=tuple(value["strangers"]),
        passes=tuple(
            Lending(
                **{
                    **one,
                    "extent": Extent(**one["extent"]),
                    "returned": tuple(Shard(**shard) for shard in one["returned"]),
                }
            )
            for one in value["passes"]
        ),
        over=tuple(value["over"]),
        left=tuple(value["left"]),
        leases=tuple(Lease(**{**lease, "shard": Shard(**lease["shard"])}) for lease in value["leases"]),
        samples=value["samples"],
        steps=value["steps"],
    )
