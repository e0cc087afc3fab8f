"""The arena: the shared memory of one host that holds the model.

Parameters, optimizer state, buffers and scalars lie there twice; which is current follows from the parity of the
commit's number. Workers look at parameters through a read-only mapping: a stray in-place write faults instead of
spoiling the model.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from shoal.sync.layout import Layout, TensorPlan, element_bytes, pages
from shoal.sync.memory import HostMemory, map_bytes


class Arena:
    def __init__(self, layout: Layout, memory: HostMemory) -> None:
        self.layout = layout
        self._memory = memory
        self._regions: dict[tuple[str, ...], int] = {}
        size_bytes = 0
        for name, region_bytes in _regions(layout):
            self._regions[name] = size_bytes
            size_bytes += pages(region_bytes)
        self._half = size_bytes // 2  # the regions of the two parities are alike
        fd = memory.open("model", size_bytes)
        self._writable = map_bytes(fd, size_bytes, writable=True)
        self._readable = map_bytes(fd, size_bytes, writable=False)
        os.close(fd)
        # [segment][parity], flat
        self.parameters = [
            [self._tensor(("parameters", str(s), str(k)), segment.dtype, segment.numel) for k in (0, 1)]
            for s, segment in enumerate(layout.segments)
        ]
        self.planes = [
            {
                key: [self._tensor(("plane", str(s), key, str(k)), dtype, segment.numel) for k in (0, 1)]
                for key, dtype in segment.planes
            }
            for s, segment in enumerate(layout.segments)
        ]
        self.blobs = {
            (s, t, spec.key): [
                self._tensor(("blob", str(s), str(t), spec.key, str(k)), spec.dtype, _numel(spec.shape)).view(
                    spec.shape
                )
                for k in (0, 1)
            ]
            for s, segment in enumerate(layout.segments)
            for t, tensor in enumerate(segment.tensors)
            for spec in tensor.states
            if spec.kind == "blob" and spec.dtype is not None
        }
        rows = max(1, len(layout.scalars))
        self.scalars = [self._array(("scalars", str(k)), np.float64, rows * layout.tensors) for k in (0, 1)]
        self.scalars = [array.reshape(rows, layout.tensors) for array in self.scalars]
        self.born = [self._array(("born", str(k)), np.uint8, layout.tensors) for k in (0, 1)]
        # Which of two places holds the parameters outside the optimizer: they move with an edit only.
        self.frozen_place = [self._array(("frozen_place", str(k)), np.uint8, 1) for k in (0, 1)]
        self.buffers = [
            [self._tensor(("buffers", str(i), str(k)), dtype, numel) for k in (0, 1)]
            for i, (dtype, numel) in enumerate(layout.buffers)
        ]
        self._lanes: dict[int, Lane] = {}

    def views(self, parity: int, *, writable: bool) -> list[torch.Tensor]:
        """The optimizer's parameters, in the layout's order, as tensors of their own shapes."""
        views: list[torch.Tensor] = []
        for s, segment in enumerate(self.layout.segments):
            flat = self._tensor(("parameters", str(s), str(parity)), segment.dtype, segment.numel, writable=writable)
            views.extend(shaped(flat, tensor) for tensor in segment.tensors)
        return views

    def frozen_views(self, place: int, *, writable: bool) -> list[torch.Tensor]:
        """The parameters outside the optimizer."""
        sizes = _frozen_sizes(self.layout)
        flat = {
            dtype: self._tensor(("frozen", str(dtype), str(place)), dtype, numel, writable=writable)
            for dtype, numel in sizes.items()
        }
        pairs = zip(self.layout.frozen_dtypes, self.layout.frozen, strict=True)
        return [shaped(flat[dtype], tensor) for dtype, tensor in pairs]

    def image(self, parity: int) -> list[memoryview]:
        """All bytes of the state that lies there: what another host needs to have the same. Parameters outside the
        optimizer lie in one of two places, so both are in it."""
        frozen = ("frozen", str(next(iter(_frozen_sizes(self.layout)), "")))
        first, second = (self._regions.get((*frozen, str(k))) for k in (0, 1))
        start, end = (0, self._half) if parity == 0 else (self._half, len(self._writable))
        whole = memoryview(self._writable)
        image = [whole[start:end]]
        if first is not None and second is not None:
            image.append(whole[second:] if parity == 0 else whole[first : self._half])
        return image

    def lane(self, slot: int) -> Lane:
        """The lane of a slot; its memory is taken when it is first used."""
        if slot not in self._lanes:
            self._lanes[slot] = Lane(self.layout, self._memory, slot)
        return self._lanes[slot]

    def _tensor(
        self, region: tuple[str, ...], dtype: torch.dtype | None, numel: int, *, writable: bool = True
    ) -> torch.Tensor:
        assert dtype is not None
        return tensor_at(self._writable if writable else self._readable, self._regions[region], dtype, numel)

    def _array(self, region: tuple[str, ...], dtype: type, count: int) -> npt.NDArray[np.generic]:
        return np.frombuffer(self._writable, dtype=dtype, count=count, offset=self._regions[region])


class Lane:
    """Where one worker's gradients lie, and which tensors got one."""

    def __init__(self, layout: Layout, memory: HostMemory, slot: int) -> None:
        offsets, size_bytes = [], pages(layout.tensors)
        for segment in layout.segments:
            offsets.append(size_bytes)
            size_bytes += pages(segment.numel * element_bytes(segment.dtype))
        fd = memory.open(f"lane-{slot}", size_bytes)
        mapping = map_bytes(fd, size_bytes, writable=True)
        os.close(fd)
        self.present = np.frombuffer(mapping, dtype=np.uint8, count=layout.tensors)
        self.marks = memoryview(mapping)[: layout.tensors]  # the same bytes, quicker to write one by one
        self.flat = [
            tensor_at(mapping, offset, segment.dtype, segment.numel)
            for offset, segment in zip(offsets, layout.segments, strict=True)
        ]
        self.views = [
            shaped(flat, tensor)
            for flat, segment in zip(self.flat, layout.segments, strict=True)
            for tensor in segment.tensors
        ]


def tensor_at(mapping: mmap.mmap, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # which is what we want
        return torch.frombuffer(mapping, dtype=dtype, count=numel, offset=offset)


def shaped(flat: torch.Tensor, tensor: TensorPlan) -> torch.Tensor:
    return flat[tensor.offset : tensor.offset + tensor.numel].as_strided(
        tensor.shape, tensor.stride, flat.storage_offset() + tensor.offset
    )


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


def _regions(layout: Layout) -> Iterator[tuple[tuple[str, ...], int]]:
    """Every region of the arena with its size, in the order they lie."""
    for k in ("0", "1"):
        for s, segment in enumerate(layout.segments):
            yield ("parameters", str(s), k), segment.numel * element_bytes(segment.dtype)
            for key, dtype in segment.planes:
                yield ("plane", str(s), key, k), segment.numel * element_bytes(dtype)
            for t, tensor in enumerate(segment.tensors):
                for spec in tensor.states:
                    if spec.kind == "blob" and spec.dtype is not None:
                        yield ("blob", str(s), str(t), spec.key, k), _numel(spec.shape) * element_bytes(spec.dtype)
        yield ("scalars", k), max(1, len(layout.scalars)) * layout.tensors * 8
        yield ("born", k), layout.tensors
        yield ("frozen_place", k), 1
        for i, (dtype, numel) in enumerate(layout.buffers):
            yield ("buffers", str(i), k), numel * element_bytes(dtype)
        for dtype, numel in _frozen_sizes(layout).items():
            yield ("frozen", str(dtype), k), numel * element_bytes(dtype)


def _frozen_sizes(layout: Layout) -> dict[torch.dtype, int]:
    """Elements of each dtype outside the optimizer."""
    return {
        dtype: tensor.offset + tensor.numel for dtype, tensor in zip(layout.frozen_dtypes, layout.frozen, strict=True)
    }
