"""Between CPUs: the group's collectives, under names that count what is begun."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from shoal.sync.collectives import Handle
from shoal.sync.communicator import Communicator
from shoal.sync.group import Group


class Meshed(Communicator):
    def __init__(self, group: Group) -> None:
        self._collectives, self._begun = group.collectives, itertools.count()

    def connect(self) -> None:
        pass  # with the first use

    def sum(self, tensor: torch.Tensor) -> Handle[torch.Tensor]:
        return self._collectives.allreduce(tensor, self._name(), op="sum", out=tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        return self._collectives.broadcast(tensor, root, self._name(), out=tensor)

    def _name(self) -> str:
        return f"replicas: {next(self._begun)}"

    def wait(self, works: Sequence[Handle[torch.Tensor]]) -> None:
        for work in works:
            work.wait()

    def abort(self) -> None:
        pass  # what is under way ends with the generation
