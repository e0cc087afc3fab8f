"""The whole state of a replica on its way from one rank to the others: parameters, buffers, optimizer state."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal import errors
from shoal.sync.communicator import Communicator
from shoal.sync.group import Group
from shoal.sync.replica import Replica, raw_bytes

_CHUNK_BYTES = 64 << 20
_NAME = "replicas: state"


@dataclass(frozen=True)
class Arrived:
    """A state that is there and not installed."""

    model: list[torch.Tensor]
    kept: list[tuple[int, str, Any]]  # the optimizer's: index of the parameter, key, value

    @torch.no_grad()
    def install(self, replica: Replica) -> None:
        for target, tensor in zip(model_tensors(replica), self.model, strict=True):
            target.copy_(tensor)
        parameters = stepped(replica)
        replica.optimizer.state.clear()
        for index, key, value in self.kept:
            replica.optimizer.state[parameters[index]][key] = value


def model_tensors(replica: Replica) -> list[torch.Tensor]:
    return [*(it.detach() for it in replica.model.parameters()), *replica.buffers.gather()]


def stepped(replica: Replica) -> list[torch.Tensor]:
    """The parameters of the optimizer, in its order."""
    return [parameter for group in replica.optimizer.param_groups for parameter in group["params"]]


def kept_state(replica: Replica) -> Iterator[tuple[int, str, Any]]:
    """What the optimizer keeps: index of the parameter, key, value. OptimizerUnusable for what cannot travel."""
    for index, parameter in enumerate(stepped(replica)):
        for key, value in replica.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, (torch.Tensor, bool, int, float, type(None))):
                raise errors.OptimizerUnusable(
                    f"the optimizer keeps a {type(value).__name__} as {key!r}, which cannot be given to other workers: "
                    "use one that keeps tensors and numbers"
                )
            yield index, key, value


def send(replica: Replica, communicator: Communicator, group: Group) -> None:
    """Give this rank's state to the others, who all `receive`. Changed: the generation is over."""
    device, kept, moving = replica.device, [], model_tensors(replica)
    for index, key, value in kept_state(replica):
        if not isinstance(value, torch.Tensor):
            kept.append({"at": index, "key": key, "value": value})
            continue
        about = {"at": index, "key": key, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if value.device == device:
            moving.append(value.detach())
        else:  # numbers that an optimizer keeps on the CPU, as Adam its count of steps
            about["bytes"] = base64.b64encode(raw_bytes(value.detach())).decode()
        kept.append(about)
    group.collectives.share(json.dumps(kept).encode(), _NAME).wait()
    for chunk in _chunks(moving):
        flat = torch.cat([it.contiguous().view(-1).view(torch.uint8) for it in chunk])
        communicator.wait([communicator.broadcast(flat, group.rank)])


def receive(replica: Replica, communicator: Communicator, group: Group, root: int, *, keep: bool = True) -> Arrived:
    """The state of rank `root`; of a rank that has it already, and need not `keep` it, only that it has listened.
    Changed: the generation is over."""
    parameters, device = stepped(replica), replica.device
    kept_on = device if keep else torch.device("meta")  # where tensors have a size and no memory
    model = [torch.empty(it.shape, dtype=it.dtype, device=kept_on) for it in model_tensors(replica)]
    moving, kept = list(model), []
    for about in json.loads(group.collectives.share(b"", _NAME).wait()[root]):
        index, key = about["at"], about["key"]
        if "value" in about:
            kept.append((index, key, about["value"]))
            continue
        dtype, shape = getattr(torch, about["dtype"]), torch.Size(about["shape"])
        if "bytes" in about:
            data = bytearray(base64.b64decode(about["bytes"]))
            value = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
        elif shape == parameters[index].shape:  # laid out like the parameter, as the optimizer itself makes it
            value = torch.empty_like(parameters[index], dtype=dtype, device=kept_on).detach()
        else:
            value = torch.empty(shape, dtype=dtype, device=kept_on)
        if "bytes" not in about:
            moving.append(value)
        kept.append((index, key, value))
    for chunk in _chunks(moving):
        flat = torch.empty(sum(_nbytes(it) for it in chunk), dtype=torch.uint8, device=device)
        communicator.wait([communicator.broadcast(flat, root)])
        at = 0
        for tensor in chunk if keep else ():
            piece = flat[at : at + _nbytes(tensor)].clone()  # aligned, whatever came before it
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
            at += _nbytes(tensor)
    return Arrived(model, kept)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        chunk.append(tensor)
        filled += _nbytes(tensor)
        if filled >= _CHUNK_BYTES:
            yield chunk
            chunk, filled = [], 0
    if chunk:
        yield chunk


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
