"""What every way of agreeing on parameters offers to the step. A new way is one file beside this one."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.sync.group import Following, Group
from shoal.sync.memory import HostMemory
from shoal.sync.replica import BITS, Replica
from shoal.sync.words import Words


@dataclass(frozen=True)
class Verdict:
    """What a step is to do with the gradients, the same at every member."""

    apply: bool  # false: the step is committed with parameters as they were
    clip_norm: float | None
    learning_rate_factor: float = 1.0
    gradients: bool = True  # false: nobody computed any, it is no training step


@dataclass(frozen=True)
class State:
    """The tensors of one commit: `model` as the model's state dict names them, `training` what else belongs to it,
    as `optimizer/<parameter>/<key>` and `buffer/<name>`."""

    model: dict[str, torch.Tensor]
    training: dict[str, torch.Tensor]


Sums = dict[str, int]  # checksums, by tensor
MAX_SUM = (1 << 64) - 1
# Told the tensors of a worker's model, in words by name: WorkersDiffer where those of the job's model are others.
Agree = Callable[[dict[str, str]], None]


class Sync(ABC):
    """One worker's side of a sync, driven by `train/step.py`:

    bind, then for each generation transfer and enter, then for each step
    begin → (gradients) → offer → prepare → the commit → settle.
    A step that is not committed is followed by enter, never by settle. Without lockstep, `train/leased.py` drives it:
    a step is this worker's own, and `group.seq` counts those.
    """

    lockstep: bool = True  # all workers commit each step together; if not, each goes at its own pace

    @abstractmethod
    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        """Take over the model and the optimizer. Errors in them show here; where models are to be alike, they `agree`
        before anything is shared."""

    @property
    def model(self) -> str:
        """The shared model in a few words, alike on workers whose models have the same tensors. Empty where that does
        not matter."""
        return ""

    def transfer(self, group: Group) -> None:  # noqa: B027, most have nothing to do
        """Between hosts, before `enter`: give the state of commit `group.seq` to whom this worker is to give it, take
        it if it is to take it. Changed: the generation is over."""

    @property
    def follows(self) -> bool:
        """Whether a worker can get the state for its host while others train."""
        return False

    def follow(self, group: Following, caught_up: Callable[[], None]) -> None:
        """Get the state for this host, as far as that goes in one generation; `caught_up` is called when it is here.
        Returns when all enter a newer generation; or Changed."""
        raise NotImplementedError

    @abstractmethod
    def enter(self, group: Group) -> None:
        """Take part in a generation; the model becomes the state of commit `group.seq`, if there is one."""

    @abstractmethod
    def found(self, group: Group) -> None:
        """Write the first state, rank 0's, as commit `group.seq + 1`."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the gradients of an earlier attempt."""

    @abstractmethod
    def weight(self, samples: int, share: int, batch: int) -> float:
        """The weight of a mean loss over `samples` of this worker's `share` of the step's `batch` samples."""

    @property
    def needs_all(self) -> bool:
        """Whether every worker must have samples in every micro-batch."""
        return False

    def closing(self) -> None:  # noqa: B027  # most need not know
        """The next backward is the last of this worker's in the step."""

    def rest(self) -> None:  # noqa: B027  # most are waited for in lockstep only
        """This worker makes no step for a while. Without lockstep, nobody is to wait for it."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back what other processes would miss. The worker ends."""

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Compute the gradients of one micro-batch, times the weight."""
        loss.backward(gradient=torch.full_like(loss, weight))  # type: ignore[no-untyped-call]

    def offer(self, group: Group, *, trains: bool) -> None:  # noqa: B027, most have nothing to tell
        """The gradients of a step are there, or there are none because this worker edits or evaluates: tell what others
        must know of it before the ready word."""

    def give_up(self, group: Group) -> bool:
        """After the ready words: the step is not made. Whether the generation can go on."""
        return True

    @abstractmethod
    def prepare(self, group: Group, verdict: Verdict) -> float | None:
        """Everything of commit `group.seq + 1` before the done word; the gradients' norm where it was needed.
        Changed: the generation is over."""

    @abstractmethod
    def edit(self, group: Group, editor: int) -> None:
        """Write the parameters that rank `editor` holds privately as commit `group.seq + 1`."""

    @abstractmethod
    def open_edit(self) -> None:
        """Give this worker parameters of its own, to be written to."""

    @abstractmethod
    def settle(self, group: Group) -> None:
        """Commit `group.seq` has happened: the model is its state."""

    @abstractmethod
    def look(self, seq: int) -> None:
        """Take a private copy of the state of commit `seq`, without being in a group. It is whole only if no newer
        commit has happened by the time this returns."""

    @abstractmethod
    def state(self, seq: int) -> State:
        """The state of commit `seq`, the newest one. It stays as it is until commit `seq + 2` is made ready for."""

    def copies(self, group: Group) -> tuple[tuple[str, ...], ...]:
        """The workers that have the state, by the copy of it that they share; no matter where each has its own."""
        return ()

    def checksums(self, seq: int) -> Callable[[], Sums]:
        """Of the state of commit `seq`, the newest one. To be called on another thread, before commit `seq + 2` is made
        ready for."""
        state = self.state(seq)

        def sums() -> Sums:
            return {name: _sum(tensor) for name, tensor in (state.model | state.training).items()}

        return sums

    @abstractmethod
    def digest(self, seq: int) -> str:
        """A digest of the state of commit `seq`, which this worker's model is; equal on workers that agree."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(BITS[real.element_size()])


def _sum(tensor: torch.Tensor) -> int:
    """Of its words of 8 bytes, as fast as memory is. By numpy: torch would start a second set of threads for it."""
    data = np.ascontiguousarray(bits(tensor).numpy()).reshape(-1).view(np.uint8)
    whole = data.size - data.size % 8
    return (int(data[:whole].view(np.uint64).sum()) + zlib.crc32(data[whole:].tobytes())) & MAX_SUM
