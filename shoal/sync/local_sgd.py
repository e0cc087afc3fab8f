"""LocalSGD: some steps of one's own between two exchanges of the sync inside."""

from __future__ import annotations

import torch

from shoal import errors
from shoal.sync.group import Group
from shoal.sync.independent import Independent
from shoal.sync.memory import HostMemory
from shoal.sync.neighbor import Neighbor
from shoal.sync.replica import Replica
from shoal.sync.sync import Agree, State, Sync, Verdict
from shoal.sync.words import Words


class LocalSGD(Sync):
    """Parameters are averaged as `inner` says, at the last of every so many steps. With a graph in which all average
    with all, that is what the literature calls local SGD: `LocalSGD(Neighbor("fully_connected"), every=16)`."""

    lockstep = False

    def __init__(self, inner: Neighbor, *, every: int = 16) -> None:
        if not isinstance(inner, Neighbor):
            raise errors.SettingsContradict(
                f"LocalSGD({type(inner).__name__}): it takes a sync that averages parameters, as Neighbor()"
            )
        if inner.order != "atc":
            raise errors.SettingsContradict("LocalSGD averages what was stepped to: give it Neighbor(order='atc')")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise errors.SettingsContradict(f"LocalSGD(every={every}): it is a number of steps, 1 or more")
        self.inner, self._every = inner, every
        self._made = 0

    def settle(self, group: Group) -> None:
        self._made += 1
        if self._made % self._every:
            Independent.settle(self.inner, group)
        else:
            self.inner.settle(group)

    # All else is as inside.

    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        self.inner.bind(replica, memory, words, slot, agree)

    def enter(self, group: Group) -> None:
        self.inner.enter(group)

    def found(self, group: Group) -> None:
        self.inner.found(group)

    def begin(self) -> None:
        self.inner.begin()

    def weight(self, samples: int, share: int, batch: int) -> float:
        return self.inner.weight(samples, share, batch)

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        self.inner.backward(loss, weight)

    def prepare(self, group: Group, verdict: Verdict) -> float | None:
        return self.inner.prepare(group, verdict)

    def open_edit(self) -> None:
        self.inner.open_edit()

    def edit(self, group: Group, editor: int) -> None:
        self.inner.edit(group, editor)

    def rest(self) -> None:
        self.inner.rest()

    def close(self) -> None:
        self.inner.close()

    def look(self, seq: int) -> None:
        self.inner.look(seq)

    def state(self, seq: int) -> State:
        return self.inner.state(seq)

    def digest(self, seq: int) -> str:
        return self.inner.digest(seq)
