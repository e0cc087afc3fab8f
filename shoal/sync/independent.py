"""Independent: workers share the data and nothing else. Each has its own model; the ceiling that syncs are held
against."""

from __future__ import annotations

import hashlib

import torch

from shoal.sync.group import Group
from shoal.sync.memory import HostMemory
from shoal.sync.replica import Replica, raw_bytes
from shoal.sync.sync import Agree, State, Sync, Verdict
from shoal.sync.words import Words


class Independent(Sync):
    """Samples are still used exactly once: the workers commit together, and each steps its own model afterwards, when
    nothing can be taken back any more. A newcomer starts from the model its script builds.

    Without lockstep each worker takes samples as fast as it can, and waits for nobody."""

    def __init__(self, *, lockstep: bool = True) -> None:
        self.lockstep = lockstep

    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        self._replica = replica
        self._verdict: Verdict | None = None
        self._attempted = 0

    def enter(self, group: Group) -> None:
        if group.seq >= self._attempted:  # the generation ended before this worker knew, but the step was committed
            self.settle(group)
        self._verdict = None

    def found(self, group: Group) -> None:
        pass

    def begin(self) -> None:
        self._replica.optimizer.zero_grad(set_to_none=True)

    def weight(self, samples: int, share: int, batch: int) -> float:
        return samples / share

    def prepare(self, group: Group, verdict: Verdict) -> float | None:
        self._verdict, self._attempted = verdict, group.seq + 1
        return None

    def open_edit(self) -> None:
        pass

    def edit(self, group: Group, editor: int) -> None:
        pass

    def settle(self, group: Group) -> None:
        verdict, self._verdict = self._verdict, None
        if verdict is None or not verdict.apply:
            return
        if verdict.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._replica.model.parameters(), verdict.clip_norm)
        with self._replica.rates_times(verdict.learning_rate_factor):
            self._replica.optimizer.step()

    def look(self, seq: int) -> None:
        pass

    def state(self, seq: int) -> State:
        replica = self._replica
        kept = {
            f"optimizer/{replica.names[id(parameter)]}/{key}": torch.as_tensor(value).clone()
            for parameter, state in replica.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, (torch.Tensor, bool, int, float))
        }
        # Copies: the next commit is followed by a step in place.
        model, outside = replica.named(dict(replica.model.named_parameters()), replica.buffers.gather())
        return State(_cloned(model), kept | _cloned(outside))

    def digest(self, seq: int) -> str:
        total = hashlib.blake2b(digest_size=8)
        for parameter in self._replica.model.parameters():
            total.update(raw_bytes(parameter.detach()))
        return total.hexdigest()


def _cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
