"""Replicated: each worker has its own replica of the model, on its own device; gradients are summed over all of them.

What a host's memory is to AllReduce, the members' devices are here: the state of a commit is whatever each of them
has after it. Parameters change after the commit only, when every rank has said that all sums have reached it: a step
that comes again has touched nothing, and nobody ever has to be set back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from shoal import errors
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import EXCHANGE
from shoal.sync import transfer
from shoal.sync.batchnorm import SyncBatchNorm, Total
from shoal.sync.buckets import Buckets
from shoal.sync.communicator import Communicator, Work, communicator_for
from shoal.sync.described import described
from shoal.sync.group import Group
from shoal.sync.memory import HostMemory
from shoal.sync.quick_step import QuickStep
from shoal.sync.replica import Replica, raw_bytes
from shoal.sync.scaling import LossScaler
from shoal.sync.sync import MAX_SUM, Agree, State, Sums, Sync, Verdict, bits
from shoal.sync.words import Words


class Replicated(Sync):
    """NCCL between GPUs, our own connections between CPUs. One worker alone has none, and steps as a plain loop does.

    As in a plain loop, a backward of the script's own between a batch and its step adds to that step's gradients.
    """

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.scaler = scaler

    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        if isinstance(replica.optimizer, torch.optim.LBFGS):
            raise errors.OptimizerUnusable("LBFGS computes the loss again in each step: use another optimizer")
        self._replica, self._words, self._device = replica, words, replica.device
        agree(described(replica))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            _several_on_one(slot)
        self._parameters = transfer.stepped(replica)
        self._optimizer_step = QuickStep(replica.optimizer)
        self._norms = [module for module in replica.model.modules() if isinstance(module, SyncBatchNorm)]
        for norm in self._norms:
            norm.total_of_group = self._total_of_group
        self._kept = [flat.clone() for flat in replica.buffers.gather()]  # of the newest commit
        self._group: Group | None = None
        self._communicator: Communicator | None = None
        self._buckets: Buckets[Work] | None = None
        self._hooks: list[RemovableHandle] = []
        self._open = False  # the backward that runs is the step's last
        self._at = 0  # the commit whose state this replica is
        self._attempted = 0  # the commit that was worked towards
        self._then: Callable[[], None] | None = None  # what is done once it has happened
        self._otherwise: Callable[[], None] | None = None  # and where it has not
        self._outside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # parameters as committed, during an edit

    # Generations.

    def enter(self, group: Group) -> None:
        self._conclude(group.seq)
        self._back_to_committed()
        if self._group is not None and self._group.generation.number == group.generation.number:
            return
        self._part()
        self._group = group
        if group.size > 1:
            self._meet(group)
        elif group.seq and self._at != group.seq:
            raise _state_lost(group)

    def _meet(self, group: Group) -> None:
        """Make the communicator of this generation, and have everybody's state be the commit's."""
        said = json.dumps({"holds": self._at}).encode()
        heard = [json.loads(it) for it in group.collectives.share(said, "replicas: holds").wait()]
        self._communicator = communicator_for(self._device, group)
        self._communicator.connect()
        self._hook()
        if not group.seq:
            return
        holders = [rank for rank, one in enumerate(heard) if one["holds"] == group.seq]
        if not holders:
            raise _state_lost(group)
        root = holders[0]
        if len(holders) == group.size:
            return
        if group.rank == root:
            transfer.send(self._replica, self._communicator, group)
            return
        fresh = self._at != group.seq
        arrived = transfer.receive(self._replica, self._communicator, group, root, keep=fresh)
        if fresh:
            self._install(arrived)
            self._at = group.seq

    def _part(self) -> None:
        """End the communicator. Of a generation that ended well, nothing is under way in it."""
        communicator, self._communicator, self._group = self._communicator, None, None
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets = [], None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        self._part()

    def _conclude(self, seq: int) -> None:
        """Do what the commit that was worked towards is, if it has happened; drop it if not."""
        then, otherwise, self._then, self._otherwise = self._then, self._otherwise, None, None
        if then is not None and seq >= self._attempted:
            then()
            self._at = self._attempted
        elif otherwise is not None:
            otherwise()

    def _back_to_committed(self) -> None:
        for parameter, data in self._outside:
            parameter.data = data
        self._outside = []
        _copy(self._replica.buffers.gather(), self._kept)

    def found(self, group: Group) -> None:
        self._attempted, self._then = group.seq + 1, self._keep_buffers
        if self._communicator is not None:
            if group.rank == 0:
                transfer.send(self._replica, self._communicator, group)
            else:
                arrived = transfer.receive(self._replica, self._communicator, group, 0)
                self._then = partial(self._install, arrived)

    # A step.

    def begin(self) -> None:
        if self.scaler is not None:
            self.scaler.move_on()
        if self._buckets is not None:
            self._buckets.reset()
        for parameter in self._parameters:
            parameter.grad = None

    def weight(self, samples: int, share: int, batch: int) -> float:
        return samples / batch

    @property
    def needs_all(self) -> bool:
        return bool(self._norms)

    def closing(self) -> None:
        # Not while the backward itself sums: where ranks have different gradients, the order would not be one.
        self._open = self._buckets is not None and not self._norms

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        if self.scaler is not None:
            weight *= self.scaler.scale
        try:
            super().backward(loss, weight)
        finally:
            self._open = False
        if self._group is not None:
            self._group.seconds.switch(EXCHANGE)

    def prepare(self, group: Group, verdict: Verdict) -> float | None:
        staged: list[torch.Tensor] = []
        if self._communicator is not None and verdict.gradients:
            assert self._buckets is not None
            begun = list(self._buckets.finish())
            fault_point("reduce")
            if verdict.apply:  # the lowest rank's buffers are everybody's
                staged = [flat.clone() for flat in self._replica.buffers.gather()]
                begun += [self._communicator.broadcast(flat, 0) for flat in staged]
            self._communicator.wait(begun)
            self._buckets.take()
        else:
            fault_point("reduce")
        self._attempted = group.seq + 1
        if not verdict.apply:
            self._then = self._back_to_committed
            return None
        norm, factor = self._judge(verdict.clip_norm)
        self._then = partial(self._step, verdict.learning_rate_factor, factor, staged)
        return norm

    def _judge(self, clip_norm: float | None) -> tuple[float | None, float]:
        """The norm of the gradient, where it is needed, and what the gradients are multiplied with: 0 for no step."""
        if clip_norm is None and self.scaler is None:
            return None, 1.0
        gradients = [it.grad for it in self._parameters if it.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item() if gradients else 0.0
        scale = 1.0 if self.scaler is None else self.scaler.scale
        norm /= scale
        if self.scaler is not None:
            # The gradients are alike on all ranks, and so is this.
            self.scaler.found(overflow=not math.isfinite(norm))
            self._otherwise = self.scaler.forget
            if not math.isfinite(norm):
                return norm, 0.0
        return norm, (1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))) / scale

    def settle(self, group: Group) -> None:
        self._conclude(group.seq)

    def _step(self, rate_factor: float, gradient_factor: float, staged: list[torch.Tensor]) -> None:
        fault_point("optimizer")
        if gradient_factor != 0.0:
            if gradient_factor != 1.0:
                torch._foreach_mul_([it.grad for it in self._parameters if it.grad is not None], gradient_factor)
            with self._replica.rates_times(rate_factor):
                self._optimizer_step(rounds_as_torch=self._communicator is not None)
        if staged:
            _copy(self._replica.buffers.flat, staged)
        self._keep_buffers()

    # Gradients on their way.

    def _hook(self) -> None:
        communicator = self._communicator
        assert communicator is not None
        self._buckets = Buckets(self._parameters, communicator.sum)
        for index, parameter in enumerate(self._parameters):
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one may be unfrozen later, and takes no hook while frozen
            hook = parameter.register_post_accumulate_grad_hook(partial(self._came, index))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            parameter.requires_grad_(trained)

    def _came(self, index: int, _: torch.Tensor) -> None:
        if self._open and self._buckets is not None and self._group is not None:
            fault_point("backward")
            if self._group.changed:
                raise Changed
            self._buckets.came(index)

    # Sums inside of a forward or backward pass.

    def _total_of_group(self) -> Total | None:
        return None if self._communicator is None else self._total

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Waits for it, so that the device never waits for another rank: that may be dead, and what the user's code
        then waits for would not come. Where the generation is over the step comes again, and anything will do."""
        if self._communicator is None:
            return tensor
        try:
            self._communicator.wait([self._communicator.sum(tensor)])
        except Changed:
            return torch.ones_like(tensor)
        return tensor

    # Edits.

    def open_edit(self) -> None:
        self._outside = [(parameter, parameter.data) for parameter in self._replica.model.parameters()]
        for parameter, data in self._outside:
            parameter.data = data.clone()

    def edit(self, group: Group, editor: int) -> None:
        edited = [it.clone(memory_format=torch.contiguous_format) for it in transfer.model_tensors(self._replica)]
        if self._communicator is not None:
            # Others may have begun the sums of a step that is not made now: whoever has not takes part in them.
            assert self._buckets is not None
            self._communicator.wait(self._buckets.finish())
            self._buckets.reset()
            self._communicator.wait([self._communicator.broadcast(it, editor) for it in edited])
        self._attempted, self._then = group.seq + 1, partial(self._take_edit, edited)

    @torch.no_grad()
    def _take_edit(self, edited: list[torch.Tensor]) -> None:
        self._back_to_committed()
        for target, tensor in zip(transfer.model_tensors(self._replica), edited, strict=True):
            target.copy_(tensor)
        self._keep_buffers()

    # States.

    def look(self, seq: int) -> None:
        """Nothing to be seen from outside: the state is on the members' devices. The model stays as it was built."""

    def state(self, seq: int) -> State:
        self._conclude(seq)
        replica = self._replica
        names = [replica.names[id(parameter)] for parameter in self._parameters]
        kept = {
            f"optimizer/{names[index]}/{key}": _on_host(torch.as_tensor(value))
            for index, key, value in transfer.kept_state(replica)
            if value is not None
        }
        model, outside = replica.named(dict(replica.model.named_parameters()), self._kept)
        return State(
            {name: _on_host(it) for name, it in model.items()}, kept | {n: _on_host(it) for n, it in outside.items()}
        )

    def copies(self, group: Group) -> tuple[tuple[str, ...], ...]:
        return tuple((member.worker_id,) for member in group.members) if group.size > 1 else ()

    def checksums(self, seq: int) -> Callable[[], Sums]:
        """Summed up on the device, as integers: copies of the state would have to be made first."""
        self._conclude(seq)
        replica = self._replica
        names = [replica.names[id(parameter)] for parameter in self._parameters]
        tensors: dict[str, torch.Tensor] = dict(replica.model.named_parameters())
        tensors |= {f"buffers of {flat.dtype}": flat for flat in self._kept}
        for index, key, value in transfer.kept_state(replica):
            tensors[f"optimizer/{names[index]}/{key}"] = torch.as_tensor(math.nan if value is None else value)
        sums = {name: bits(it).sum() for name, it in tensors.items()}
        away = [name for name, it in sums.items() if it.is_cuda]
        arrived: torch.cuda.Event | None = None
        if away:
            told = torch.empty(len(away), dtype=torch.int64, pin_memory=True)
            told.copy_(torch.stack([sums[name] for name in away]), non_blocking=True)
            sums |= dict(zip(away, told, strict=True))
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()

        def read() -> Sums:
            if arrived is not None:
                arrived.synchronize()
            return {name: int(it) & MAX_SUM for name, it in sums.items()}

        return read

    def digest(self, seq: int) -> str:
        self._conclude(seq)
        if self._at != seq:
            return ""  # it has only looked
        total = hashlib.blake2b(digest_size=8)
        for parameter in self._replica.model.parameters():
            total.update(raw_bytes(parameter.detach()))
        for index, key, value in transfer.kept_state(self._replica):
            total.update(f"{index} {key}".encode())
            total.update(raw_bytes(torch.as_tensor(math.nan if value is None else value).detach()))
        for flat in self._kept:
            total.update(raw_bytes(flat))
        return total.hexdigest()

    def _install(self, arrived: transfer.Arrived) -> None:
        arrived.install(self._replica)
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        _copy(self._kept, self._replica.buffers.gather())


@torch.no_grad()
def _copy(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: the next commit is followed by a step in place."""
    return tensor.detach().to("cpu", copy=True)


def _several_on_one(slot: int) -> None:
    """NCCL takes two ranks on one GPU for a mistake, unless they say that they are on different hosts."""
    turn = slot // torch.cuda.device_count()
    if turn:
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{turn}")


def _state_lost(group: Group) -> errors.StateLost:
    return errors.StateLost(
        f"every worker that had the model of commit {group.seq} on its device is gone, and it with them: go on from "
        "the newest checkpoint with shoal resume"
    )
