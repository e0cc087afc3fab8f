"""The replica: one worker's model and optimizer as the user built them, looked at as tensors that can be shared."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal import errors

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes
_Home = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]  # a module's buffers, a name, and what has it
Scheduler = Any  # torch's schedulers share no public base class that covers all of them


class Buffers:
    """The model's buffers (BatchNorm's statistics and the like) as a few flat tensors, one for each dtype. They are
    private while a step runs, and copied as a whole from and to the arena."""

    def __init__(self, model: nn.Module) -> None:
        self._homes: list[_Home] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[_Home]] = {}
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    by_kind.setdefault((buffer.dtype, buffer.device), []).append((module._buffers, name, buffer))
        self.flat: list[torch.Tensor] = []
        for (dtype, device), homes in by_kind.items():
            flat = torch.empty(sum(buffer.numel() for _, _, buffer in homes), dtype=dtype, device=device)
            offset = 0
            for home, name, buffer in homes:
                view = flat[offset : offset + buffer.numel()].view(buffer.shape)
                view.copy_(buffer)
                buffer.data = view
                self._homes.append((home, name, buffer))
                offset += buffer.numel()
            self.flat.append(flat)

    def places(self, flat: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """By the id of each buffer, its place in flat tensors like those of `gather`."""
        places: dict[int, torch.Tensor] = {}
        for whole, ours in zip(flat, self.flat, strict=True):
            start = ours.data_ptr()
            for _, _, buffer in self._homes:
                if (buffer.dtype, buffer.device) == (ours.dtype, ours.device):
                    offset = (buffer.data_ptr() - start) // buffer.element_size() if buffer.numel() else 0
                    places[id(buffer)] = whole[offset : offset + buffer.numel()].view(buffer.shape)
        return places

    def gather(self) -> list[torch.Tensor]:
        """The flat tensors, also when the user's code has put another tensor in a buffer's place."""
        for buffers, name, buffer in self._homes:
            current = buffers[name]
            if current is not buffer and current is not None:
                buffer.copy_(current)
                buffers[name] = buffer
        return self.flat


class Replica:
    """Checks that the optimizer steps parameters of the model, and names every tensor that workers share."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, schedulers: Sequence[Scheduler] = ()) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = dict(model.named_parameters())
        if not parameters:
            raise errors.ModelUnusable("the model has no parameters: attach the module that holds them")
        stepped: set[int] = set()
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise errors.OptimizerUnusable(
                        f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                        f"the model's: build the optimizer from model.parameters()"
                    )
                if id(parameter) in stepped:
                    raise errors.OptimizerUnusable(
                        f"{names[id(parameter)]} is in the optimizer twice: build it from model.parameters()"
                    )
                stepped.add(id(parameter))
        self.device = next(iter(parameters.values())).device
        for name, parameter in parameters.items():
            if parameter.device.type not in ("cpu", "cuda"):
                raise errors.ModelUnusable(
                    f"parameter {name} is on {parameter.device}: only models on a CPU or on a GPU can be attached; "
                    "call model.cpu(), or model.to(worker.device)"
                )
            if parameter.device != self.device:
                raise errors.ModelUnusable(
                    f"parameter {name} is on {parameter.device}, others are on {self.device}: a worker has its whole "
                    "model on one device; call model.to(worker.device)"
                )
            if parameter.layout != torch.strided:
                raise errors.ModelUnusable(
                    f"parameter {name} is {parameter.layout}: only dense parameters can be shared; make it dense"
                )
        self.model = model
        self.optimizer = optimizer
        self.schedulers = tuple(schedulers)
        self.names = names
        self.frozen = [(name, p) for name, p in parameters.items() if id(p) not in stepped]
        self.buffers = Buffers(model)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._written: tuple[list[Any], str] = ([], "[]")

    def named(
        self, parameters: Mapping[str, torch.Tensor], flat: Sequence[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Parameters (by their first names) and buffers under all names of the model's state dict, and, as
        `buffer/<name>`, the buffers that are not in it."""
        by_id = {id(parameter): parameters[name] for name, parameter in self.model.named_parameters()}
        by_id |= self.buffers.places(flat)
        tensors = [*self.model.named_parameters(remove_duplicate=False)]
        tensors += self.model.named_buffers(remove_duplicate=False)  # type: ignore[arg-type]
        kept = self.model.state_dict(keep_vars=True).keys()
        model = {name: by_id[id(tensor)] for name, tensor in tensors if name in kept}
        outside = {f"buffer/{name}": by_id[id(tensor)] for name, tensor in tensors if name not in kept}
        return model, outside

    @contextlib.contextmanager
    def rates_times(self, factor: float) -> Iterator[None]:
        """The learning rates times a factor, for one step; schedulers and the user keep seeing their own."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups] if factor != 1.0 else []
        for group, rate in zip(groups, rates, strict=False):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=False):
                group["lr"] = rate

    def options_text(self) -> str:
        """The hyperparameters of each parameter group as JSON, as far as they can be written down. Worked out anew only
        when one has changed."""
        if [len(group["params"]) for group in self.optimizer.param_groups] != self._sizes:
            raise errors.OptimizerUnusable(
                "the optimizer's parameter groups changed after attach(): add all of them before"
            )
        values = [value for group in self.optimizer.param_groups for key, value in group.items() if key != "params"]
        if any(isinstance(value, torch.Tensor) for value in values):
            values = []  # a tensor may have changed in place
        if not values or values != self._written[0]:
            groups = self.optimizer.param_groups
            options = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
            self._written = values, json.dumps(options)
        return self._written[1]

    def text(self) -> bytes:
        """Hyperparameters and schedulers as they are now, for the record of the commit."""
        schedulers = "[]"  # by hand, because it is written at every step
        if self.schedulers:
            states = [scheduler.state_dict() for scheduler in self.schedulers]
            schedulers = json.dumps([{key: _plain(value) for key, value in state.items()} for state in states])
        return f"[{self.options_text()}, {schedulers}]".encode()

    def take_text(self, text: bytes) -> None:
        """Take hyperparameters and schedulers from the record of a commit."""
        options, schedulers = json.loads(text)
        for group, saved in zip(self.optimizer.param_groups, options, strict=True):
            for key, value in saved.items():
                current = _plain(group.get(key))
                if current != value or type(current) is not type(value):  # 1 is 1.0, and reads differently
                    group[key] = _like(group.get(key), value)
        for scheduler, saved in zip(self.schedulers, schedulers, strict=True):
            current = scheduler.state_dict()
            scheduler.load_state_dict({**current, **{k: _like(current.get(k), v) for k, v in saved.items()}})


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements as they lie in memory, for digests."""
    return memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """What JSON can hold of a value, None where it can hold nothing."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):  # as pairs: JSON would make strings of keys that are numbers
        return {"pairs": [[_plain(key), _plain(item)] for key, item in value.items()]}
    return value if isinstance(value, (bool, int, float, str)) else None


def _like(current: Any, value: Any) -> Any:
    """A value read from JSON, in the type that stands in its place now."""
    if value is None:  # could not be written down: what the script built stays
        return current
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    if isinstance(value, dict):
        pairs = {
            key: _like(current.get(key) if isinstance(current, dict) else None, item) for key, item in value["pairs"]
        }
        return type(current)(pairs) if isinstance(current, dict) else pairs
    if isinstance(value, list):
        items = [_like(was, item) for was, item in zip_longest(current or (), value)][: len(value)]
        return tuple(items) if isinstance(current, tuple) else items
    return value
