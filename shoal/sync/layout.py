"""Where every tensor of a model lies in the arena: a plan, made alike by every worker from its own replica."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from shoal.sync.probe import StateSpec, Unit, states_of, unit_of
from shoal.sync.replica import Replica

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class TensorPlan:
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    offset: int  # elements from the start of its segment
    states: tuple[StateSpec, ...]


@dataclass(frozen=True)
class Segment:
    """Tensors of one parameter group and one dtype, one behind the other; cut between workers by `unit`."""

    group: int
    dtype: torch.dtype
    unit: Unit
    tensors: tuple[TensorPlan, ...]
    first: int  # index of its first tensor among all
    numel: int
    planes: tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True)
class Layout:
    segments: tuple[Segment, ...]
    tensors: int
    scalars: tuple[str, ...]  # keys of scalar state, over all segments
    frozen: tuple[TensorPlan, ...]
    frozen_dtypes: tuple[torch.dtype, ...]
    buffers: tuple[tuple[torch.dtype, int], ...]
    digest: int

    @property
    def elements(self) -> int:
        return sum(segment.numel for segment in self.segments)

    def __str__(self) -> str:
        trained = sum(tensor.numel for segment in self.segments for tensor in segment.tensors)
        tensors = self.tensors + len(self.frozen)
        return f"{tensors} tensors, {trained:,} parameters, names and shapes {self.digest & 0xFFFFFFFF:08x}"


def element_bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def aligned(numel: int, dtype: torch.dtype) -> int:
    per = max(1, _ALIGN_BYTES // element_bytes(dtype))
    return -(-numel // per) * per


def pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if they fill its elements without gaps (channels_last does), contiguous ones if not."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and extent == tensor.numel() and 0 not in tensor.stride():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def plan(replica: Replica) -> tuple[Layout, list[nn.Parameter]]:
    """The layout, and the optimizer's parameters in its order."""
    segments: list[Segment] = []
    parameters: list[nn.Parameter] = []
    scalars: dict[str, None] = {}
    for index, group in enumerate(replica.optimizer.param_groups):
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            segment = _segment(replica, index, dtype, members, first=len(parameters))
            segments.append(segment)
            parameters.extend(members)
            for tensor in segment.tensors:
                scalars.update({spec.key: None for spec in tensor.states if spec.kind in ("scalar", "int", "float")})
    frozen, offsets = [], dict[torch.dtype, int]()
    for name, parameter in replica.frozen:
        at = offsets.get(parameter.dtype, 0)
        frozen.append(
            TensorPlan(name, tuple(parameter.shape), dense_stride(parameter), parameter.numel(), at, states=())
        )
        offsets[parameter.dtype] = at + aligned(parameter.numel(), parameter.dtype)
    buffers = tuple((flat.dtype, flat.numel()) for flat in replica.buffers.flat)
    frozen_dtypes = tuple(parameter.dtype for _, parameter in replica.frozen)
    described = repr((segments, frozen, frozen_dtypes, buffers))
    layout = Layout(
        tuple(segments), len(parameters), tuple(scalars), tuple(frozen), frozen_dtypes, buffers,
        zlib.crc32(described.encode()) | 1 << 32,
    )  # fmt: skip
    return layout, parameters


def _segment(replica: Replica, group: int, dtype: torch.dtype, members: list[nn.Parameter], first: int) -> Segment:
    unit = unit_of(replica.optimizer, group, dtype)
    tensors: list[TensorPlan] = []
    planes: dict[str, torch.dtype] = {}
    offset = 0
    # Of a parameter with dimensions, where there is one: of a single number, planes and scalars look alike.
    example = next((parameter for parameter in members if parameter.dim() > 0), members[0])
    common = states_of(replica.optimizer, group, example, (4, 4)) if unit == "element" else None
    for parameter in members:
        shape = tuple(parameter.shape)
        states = common if common is not None else states_of(replica.optimizer, group, parameter, shape)
        planes.update({spec.key: spec.dtype for spec in states if spec.kind == "plane" and spec.dtype is not None})
        tensors.append(
            TensorPlan(
                replica.names[id(parameter)], shape, dense_stride(parameter), parameter.numel(), offset, tuple(states)
            )
        )
        offset += aligned(parameter.numel(), dtype)
    return Segment(group, dtype, unit, tuple(tensors), first, offset, tuple(planes.items()))
