"""What carries sums and states between replicas, in one generation. A new way is one file beside this one, and its line
in `communicator_for`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from shoal.sync.group import Group

Work: TypeAlias = Any  # a collective under way, as the communicator that began it knows it


class Communicator(ABC):
    """One rank's end. Every rank begins the same collectives in the same order. Whatever waits raises Changed when the
    generation is over, and then `abort` is all that is left to do. CommunicatorLost where this worker cannot go on."""

    @abstractmethod
    def connect(self) -> None:
        """Meet the other ranks."""

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> Work:
        """Begin to add up the tensor over all ranks, in place, after what the current stream has to do."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to give the tensor of rank `root` to all, in place."""

    @abstractmethod
    def wait(self, works: Sequence[Work]) -> None:
        """Until all have their results; the current stream sees them then."""

    @abstractmethod
    def abort(self) -> None:
        """End it, with whatever is under way in it."""


def communicator_for(device: torch.device, group: Group) -> Communicator:
    """NCCL between GPUs, connections of our own between CPUs."""
    if device.type == "cuda":
        from shoal.sync.nccl import Nccl  # torch.distributed takes a while to be imported

        return Nccl(device, group)
    from shoal.sync.meshed import Meshed

    return Meshed(group)
