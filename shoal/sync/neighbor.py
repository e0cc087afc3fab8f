"""Neighbor: each worker steps its own model, and averages it with those of its neighbors in a graph.

Nobody waits for anybody but its neighbors, and for these only while they are there: the weight of one that has died,
left, rests or went quiet is folded back to the worker's own, and the graph is made anew with the next generation.

Rounds are counted by each worker and are the same for all that keep up: round k of one is averaged with round k of the
others. Who was away goes on with the round that its neighbors are in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from shoal import errors
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import WAIT
from shoal.sync.described import described
from shoal.sync.group import Group
from shoal.sync.independent import Independent
from shoal.sync.layout import aligned, dense_stride
from shoal.sync.mailbox import PLACES, Mailbox, life_of
from shoal.sync.memory import HostMemory
from shoal.sync.replica import Replica
from shoal.sync.sync import Agree
from shoal.sync.topology import Schedule, Topology, exponential_2, parse
from shoal.sync.words import Words

_TRIES = 10
_TOLERANCE = 1e-6  # of weights that are to sum to 1
_CHUNK = 256 * 1024  # elements that are averaged at a time: they stay in the cache from one neighbor to the next


@dataclass(frozen=True)
class _Other:
    """A member of the generation, as the others see it."""

    slot: int
    life: int
    mailbox: Mailbox = field(compare=False)


class Neighbor(Independent):
    """Averages parameters with the neighbors of a topology at each step.

    topology: a graph of `shoal.topology`, or its name.
    order: "atc", adapt then combine: step, then average what all have stepped to. "awc", adapt with combine: average
    what all had before the step, and step that with the gradient at the worker's own; what neighbors had is there
    before this worker has computed its gradient, so that nobody waits for one that is in the same step.
    patience_s: a neighbor that is silent for so long is not waited for any more, until it is heard again.

    Each worker goes on with samples that it leases; a newcomer begins with the parameters of whoever is furthest.
    """

    def __init__(
        self,
        topology: str | Topology | None = None,
        *,
        order: Literal["atc", "awc"] = "atc",
        patience_s: float = 2.0,
    ) -> None:
        super().__init__(lockstep=False)
        if order not in ("atc", "awc"):
            raise errors.SettingsContradict(f"Neighbor(order={order!r}): order is 'atc' or 'awc'")
        if patience_s <= 0:
            raise errors.SettingsContradict(f"Neighbor(patience_s={patience_s}): it is a time above 0")
        self.topology = exponential_2() if topology is None else parse(topology)
        self.order, self._patience_s = order, patience_s
        self._schedule: Schedule
        self._others: dict[int, _Other] = {}  # by rank
        self._mailboxes: dict[int, Mailbox] = {}  # by slot
        self._round = -1  # of the newest that this worker has published
        self._quiet: set[_Other] = set()  # those that are not waited for

    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        super().bind(replica, memory, words, slot, agree)
        agree(described(replica))
        self._memory, self._words, self._slot = memory, words, slot
        self._flat = _flattened(replica)
        self._mine = self._mailbox(slot)
        self._mine.reset()

    def _mailbox(self, slot: int) -> Mailbox:
        if slot not in self._mailboxes:
            like = [*self._flat, *self._replica.buffers.flat]
            self._mailboxes[slot] = Mailbox(self._memory, slot, like)
        return self._mailboxes[slot]

    # Generations.

    def enter(self, group: Group) -> None:
        hosts = [member.host for member in group.members]
        if len(set(hosts)) > 1:
            raise errors.SettingsContradict(
                "Neighbor between several hosts is not built yet: use AllReduce, or one host"
            )
        self._schedule = self.topology.on(group.size, hosts)
        self._others = {
            rank: _Other(member.slot, life_of(member.worker_id), self._mailbox(member.slot))
            for rank, member in enumerate(group.members)
        }
        self._life = life_of(group.members[group.rank].worker_id)
        self._quiet.intersection_update(self._others.values())
        if self._round < 0:
            self._begin(group)

    def _begin(self, group: Group) -> None:
        """With the parameters of whoever is furthest; if nobody has begun, with those of the lowest rank."""
        others = [it for rank, it in self._others.items() if rank != group.rank]
        if group.rank and all(it.mailbox.published(it.life) < 0 for it in others):
            first = self._others[0]
            self._wait(group, first, lambda: any(it.mailbox.published(it.life) >= 0 for it in others))
        round_, furthest = max(
            ((it.mailbox.published(it.life), it) for it in others), key=lambda it: it[0], default=(-1, None)
        )
        if furthest is not None and round_ >= 0:
            round_ = self._take(furthest, round_)
        self._publish(group, max(round_, 0))

    def _take(self, other: _Other, round_: int) -> int:
        """Copy what it has published; again, where it has written there meanwhile, but not for ever: parts of two
        rounds are as good a beginning. The round it is of."""
        for _ in range(_TRIES):
            for target, source in zip(
                (*self._flat, *self._replica.buffers.gather()), other.mailbox.place(round_), strict=True
            ):
                target.copy_(source)
            now = other.mailbox.published(other.life)
            if now < round_ + PLACES - 1 or other.mailbox.rests:
                break
            round_ = now
        return round_

    # A step.

    def settle(self, group: Group) -> None:
        if self._verdict is None:
            return
        round_ = self._next_round(group)
        if self.order == "awc":
            self._combine(group, round_ - 1)
            super().settle(group)
            self._publish(group, round_)
        else:
            super().settle(group)
            self._publish(group, round_)
            self._combine(group, round_)

    def _next_round(self, group: Group) -> int:
        """The one after this worker's last, or that of its sources, where those have gone on without it."""
        round_ = self._round + 1
        sources = self._schedule.neighborhood(group.rank, round_).sources
        ahead = max((it.mailbox.published(it.life) for it in map(self._others.__getitem__, sources)), default=-1)
        return round_ if ahead <= round_ + 1 else ahead

    def _publish(self, group: Group, round_: int) -> None:
        overwritten = round_ - PLACES
        if overwritten >= 0:  # and those who read it have, once they publish the next
            for rank in self._schedule.neighborhood(group.rank, overwritten).destinations:
                self._come(group, self._others[rank], overwritten + 1)
        fault_point("lane")
        for place, tensor in zip(self._mine.place(round_), (*self._flat, *self._replica.buffers.gather()), strict=True):
            place.copy_(tensor)
        fault_point("ready")
        self._mine.publish(self._life, round_)
        self._words.ring(self._slot)
        self._round = round_

    def _combine(self, group: Group, round_: int) -> None:
        hood = self._schedule.neighborhood(group.rank, round_)
        fault_point("reduce")
        come = {rank: weight for rank, weight in hood.sources.items() if self._come(group, self._others[rank], round_)}
        taken = hood.self_weight + sum(hood.sources.values())
        if abs(taken - 1.0) > _TOLERANCE:
            raise errors.TopologyUnusable(
                f"{self.topology}: at step {round_} rank {group.rank} takes {taken:.6g} of itself and its neighbors; "
                "what a receiver takes must sum to 1"
            )
        own = hood.self_weight + sum(weight for rank, weight in hood.sources.items() if rank not in come)
        self._average(own, come, round_)

    @torch.no_grad()
    def _average(self, own: float, weights: Mapping[int, float], round_: int) -> None:
        """In place: what this worker has, times `own`, and each rank's of that round, times its weight."""
        sources = []
        for rank, weight in weights.items():
            it = self._others[rank]
            newest = it.mailbox.published(it.life)
            # One that has gone on without waiting for this worker has overwritten the round: then its newest.
            sources.append((it.mailbox.place(round_ if newest < round_ + PLACES else newest), weight))
        for index, flat in enumerate(self._flat):
            for lo in range(0, flat.numel(), _CHUNK):
                part = flat[lo : lo + _CHUNK].mul_(own)
                for place, weight in sources:
                    part.add_(place[index][lo : lo + _CHUNK].to(part.device), alpha=weight)

    # Waits.

    def _come(self, group: Group, it: _Other, round_: int) -> bool:
        """Wait until that member has published the round. False: it is not waited for, because it is gone, rests or is
        silent."""

        def there() -> bool:
            return it.mailbox.published(it.life) >= round_

        def over() -> bool:
            return there() or it.mailbox.rests or it.mailbox.published(it.life) < 0 or time.monotonic() > until_s

        until_s = time.monotonic() + self._patience_s
        if not there() and it not in self._quiet:
            try:
                self._wait(group, it, over)
            except Changed:  # somebody has died, if not this one
                return there()
            if time.monotonic() > until_s:
                self._quiet.add(it)
        if there():
            self._quiet.discard(it)
        return there()

    def _wait(self, group: Group, it: _Other, over: Callable[[], bool]) -> None:
        was = group.seconds.switch(WAIT)
        try:
            group.wait(it.slot, over)
        finally:
            group.seconds.switch(was)

    def rest(self) -> None:
        self._mine.rest()
        self._words.ring(self._slot)

    def close(self) -> None:
        self.rest()


def _flattened(replica: Replica) -> list[torch.Tensor]:
    """The model's parameters in one flat tensor for each dtype, of which they are views from here on."""
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in replica.model.parameters():
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    flats = []
    for dtype, parameters in by_dtype.items():
        flat = torch.zeros(sum(aligned(it.numel(), dtype) for it in parameters), dtype=dtype, device=replica.device)
        offset = 0
        for parameter in parameters:
            view = flat.as_strided(parameter.shape, dense_stride(parameter), offset)
            view.copy_(parameter.detach())
            parameter.data = view
            offset += aligned(parameter.numel(), dtype)
        flats.append(flat)
    return flats
