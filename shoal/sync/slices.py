"""One worker's slice of the model: reduce it over all lanes, step it into the other buffer.

A slice is cut into *runs*: neighboring elements whose tensors are alike in this step (same lanes have a gradient, same
scalars, state there or not yet). When all is well that is one run a parameter group, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from shoal import errors
from shoal.metrics import fault_point
from shoal.sync.arena import Arena, Lane
from shoal.sync.kernels import Chunk, ChunkedStep, kernel_for
from shoal.sync.layout import Segment
from shoal.sync.probe import StateSpec, twin_of
from shoal.sync.ranges import Range, Run


class Summed(Protocol):
    """Sums over hosts, as a slice needs them."""

    def elsewhere(self) -> npt.NDArray[np.uint8]:
        """Which tensors have a gradient on other hosts."""

    def plan(self, runs: Sequence[Run]) -> None:
        """What the slice is made of, until the next plan."""

    def run(self) -> Iterator[Range]:
        """What is summed, as it comes, until all of the slice is."""

    def view(self, segment: int, lo: int, hi: int) -> torch.Tensor:
        """These elements of them."""


class Slice:
    """The slice of one worker in one generation. `exchange`: with the other hosts, where there are some."""

    def __init__(
        self,
        arena: Arena,
        optimizer: Optimizer,
        lanes: Sequence[Lane],
        ranges: list[Range],
        exchange: Summed | None = None,
    ) -> None:
        self._arena = arena
        self._optimizer = optimizer
        self._lanes = lanes
        self.ranges = ranges
        self._exchange = exchange
        self._key: bytes | None = None
        self._present: npt.NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)
        self._runs: list[Run] = []
        self._steppers: list[ChunkedStep | None] = []
        self._general: list[General | None] = [None, None]
        self._gradients: dict[int, torch.Tensor] = {}

    def plan(self, seq: int) -> None:
        """Look at which lanes have gradients, and cut the slice into runs."""
        born = self._arena.born[(seq - 1) & 1]
        elsewhere = [] if self._exchange is None else [self._exchange.elsewhere()]
        present = np.stack([*(lane.present for lane in self._lanes), *elsewhere])
        self._present = present
        key = present.tobytes() + born.tobytes()
        if key != self._key:
            self._key = key
            self._runs = self._cut_runs(present, born, self._arena.scalars[(seq - 1) & 1])
            self._steppers = [self._stepper(run) for run in self._runs]
            self._general = [None, None]
            if self._exchange is not None:
                self._exchange.plan(self._runs)

    def marks(self) -> bytes:
        """Which tensors have a gradient anywhere, as bits. After `plan`."""
        return np.packbits(np.any(self._present, axis=0)).tobytes()

    def reduce(self) -> None:
        """Reduce the slice into private memory, over all hosts. Changed, when one of them is not heard any more."""
        if self._exchange is not None:
            for _ in self._exchange.run():
                pass
            self._gradients = {
                index: self._exchange.view(run.segment, run.lo, run.hi)
                for index, run in enumerate(self._runs)
                if run.stepped
            }
            return
        for index, run in enumerate(self._runs):
            if index == len(self._runs) // 2:
                fault_point("reduce")
            if run.lanes:
                self._reduced(index, run)

    def square(self) -> float:
        """The sum of the squares of what `reduce` has left, for the global norm."""
        total = 0.0
        for index, run in enumerate(self._runs):
            if run.stepped:
                gradient = self._gradients[index]
                wide = gradient.float() if gradient.element_size() < 4 else gradient  # small squares would vanish
                total += float(torch.linalg.vector_norm(wide)) ** 2
        return total

    def step(self, seq: int, scale: float | None) -> None:
        """Write the slice of commit `seq`. `scale` multiplies gradients that `reduce` has left; None: reduce here, and
        step what other hosts have a part in as it comes."""
        parity = seq & 1
        scalars_old, scalars_new = self._arena.scalars[1 - parity], self._arena.scalars[parity]
        general: list[tuple[int, Run]] = []
        awaited: list[tuple[Run, ChunkedStep]] = []
        if not self._runs:
            fault_point("reduce")
            fault_point("optimizer")
        for index, (run, stepper) in enumerate(zip(self._runs, self._steppers, strict=True)):
            tensors = slice(run.tensors.start, run.tensors.stop)
            scalars_new[:, tensors] = scalars_old[:, tensors]
            self._arena.born[parity][tensors] = 1 if run.stepped or run.born else 0
            if not run.stepped:
                self._carry(run, parity)
            elif stepper is not None:
                group = self._optimizer.param_groups[self._arena.layout.segments[run.segment].group]
                keys = self._arena.layout.scalars
                before = {key: float(scalars_old[keys.index(key), run.tensors.start]) for key in stepper.kernel.scalars}
                for name, value in stepper.kernel.begin(group, before, run.born).items():
                    scalars_new[keys.index(name), tensors] = value
                if scale is not None:
                    stepper.run(parity, [self._gradients[index]], scale, _midway)
                elif self._exchange is not None:
                    awaited.append((run, stepper))
                else:
                    lanes = [self._lanes[lane].flat[run.segment][run.lo : run.hi] for lane in run.lanes]
                    stepper.run(parity, lanes, 1.0, _midway)
            else:
                general.append((index, run))
        if scale is None and self._exchange is not None:
            self._step_as_summed(self._exchange, awaited, parity)
        if general:
            fault_point("reduce")
            built = self._general[parity]
            if built is None:
                runs = [run for _, run in general]
                built = self._general[parity] = General(self._arena, self._optimizer, runs, parity)
            built.step([self._gradient(index, run, scale) for index, run in general])

    def _step_as_summed(self, exchange: Summed, runs: Sequence[tuple[Run, ChunkedStep]], parity: int) -> None:
        for piece in exchange.run():
            for run, stepper in runs:
                lo, hi = max(run.lo, piece.lo), min(run.hi, piece.hi)
                if run.segment == piece.segment and lo < hi:
                    stepper.run_part(parity, lo - run.lo, exchange.view(run.segment, lo, hi))
        fault_point("optimizer")

    def _gradient(self, index: int, run: Run, scale: float | None) -> torch.Tensor:
        if scale is not None:
            return self._gradients[index] * scale  # not in place: it may still be on its way to a follower
        if self._exchange is not None:
            return self._exchange.view(run.segment, run.lo, run.hi)
        return self._reduced(index, run)

    def carry(self, seq: int) -> None:
        """Write the slice of commit `seq` as it was in the one before: a step that is skipped."""
        parity = seq & 1
        for range_ in self.ranges:
            tensors = _tensors_of(self._arena.layout.segments[range_.segment], range_)
            self._carry(Run(range_, tensors, (), False), parity)
            at = slice(tensors.start, tensors.stop)
            self._arena.scalars[parity][:, at] = self._arena.scalars[1 - parity][:, at]
            self._arena.born[parity][at] = self._arena.born[1 - parity][at]

    def overwrite(self, seq: int, values: Sequence[torch.Tensor]) -> None:
        """Write the slice of commit `seq` with other parameters (one tensor each, in layout order) and state as it
        was."""
        self.carry(seq)
        parity = seq & 1
        for range_ in self.ranges:
            segment = self._arena.layout.segments[range_.segment]
            flat = self._arena.parameters[range_.segment][parity]
            for index in _tensors_of(segment, range_):
                tensor = segment.tensors[index - segment.first]
                source = torch.empty_strided(tensor.shape, tensor.stride, dtype=segment.dtype)
                source.copy_(values[index])
                elements = source.as_strided((tensor.numel,), (1,))
                lo, hi = max(range_.lo, tensor.offset), min(range_.hi, tensor.offset + tensor.numel)
                flat[lo:hi].copy_(elements[lo - tensor.offset : hi - tensor.offset])

    def _cut_runs(
        self, present: npt.NDArray[np.generic], born: npt.NDArray[np.generic], scalars: npt.NDArray[np.generic]
    ) -> list[Run]:
        runs = []
        for range_ in self.ranges:
            segment = self._arena.layout.segments[range_.segment]
            tensors = _tensors_of(segment, range_)
            begin = tensors.start
            for index in tensors:
                after = index + 1
                if (
                    segment.unit == "element"
                    and after < tensors.stop
                    and born[index] == born[after]
                    and np.array_equal(present[:, index], present[:, after])
                    and np.array_equal(scalars[:, index], scalars[:, after])
                ):
                    continue
                first, last = segment.tensors[begin - segment.first], segment.tensors[index - segment.first]
                lo = max(range_.lo, first.offset)
                end = segment.tensors[after - segment.first].offset if after < tensors.stop else range_.hi
                hi = min(range_.hi, end if segment.unit == "element" else last.offset + last.numel)
                marked = present[:, index]
                lanes = tuple(int(lane) for lane in np.flatnonzero(marked[: len(self._lanes)]))
                elsewhere = bool(np.any(marked[len(self._lanes) :]))
                found = Range(range_.segment, lo, hi)
                runs.append(Run(found, range(begin, after), lanes, bool(born[index]), elsewhere))
                begin = after
        return runs

    def _stepper(self, run: Run) -> ChunkedStep | None:
        segment = self._arena.layout.segments[run.segment]
        kernel = kernel_for(self._optimizer, self._optimizer.param_groups[segment.group], segment.dtype)
        if kernel is None or segment.unit != "element" or not run.stepped:
            return None
        if set(kernel.planes) != {key for key, _ in segment.planes}:
            return None  # options changed since the layout was made; the general way says what is wrong
        whole = self._arrays(run, kernel.planes)
        return ChunkedStep(kernel, [(whole[1], whole[0]), (whole[0], whole[1])], run.hi - run.lo)

    def _arrays(self, run: Run, planes: Sequence[str]) -> list[Chunk]:
        """Parameters and planes of a run, for each parity."""
        return [
            tuple(
                array[parity][run.lo : run.hi]
                for array in (
                    self._arena.parameters[run.segment],
                    *(self._arena.planes[run.segment][key] for key in planes),
                )
            )
            for parity in (0, 1)
        ]

    def _carry(self, run: Run, parity: int) -> None:
        segment = self._arena.layout.segments[run.segment]
        arrays = self._arrays(run, [key for key, _ in segment.planes])
        for new, old in zip(arrays[parity], arrays[1 - parity], strict=True):
            new.copy_(old)
        for index in run.tensors:
            for spec in segment.tensors[index - segment.first].states:
                if spec.kind == "blob":
                    blob = self._arena.blobs[run.segment, index - segment.first, spec.key]
                    blob[parity].copy_(blob[1 - parity])

    def _reduced(self, index: int, run: Run) -> torch.Tensor:
        parts = [self._lanes[lane].flat[run.segment][run.lo : run.hi] for lane in run.lanes]
        gradient = self._gradients.get(index)
        if gradient is None or gradient.numel() != run.hi - run.lo or gradient.dtype != parts[0].dtype:
            gradient = self._gradients[index] = torch.empty(run.hi - run.lo, dtype=parts[0].dtype)
        if len(parts) == 1:
            gradient.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=gradient)
            for part in parts[2:]:
                gradient.add_(part)
        return gradient


class General:
    """The user's own optimizer over the runs of one slice and one parity, in place after a copy."""

    def __init__(self, arena: Arena, optimizer: Optimizer, runs: Sequence[Run], parity: int) -> None:
        self._arena, self._optimizer, self._runs, self._parity = arena, optimizer, list(runs), parity
        self._parameters: list[nn.Parameter] = []
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for run in runs:
            segment = arena.layout.segments[run.segment]
            parameter = nn.Parameter(self._shape(arena.parameters[run.segment][parity][run.lo : run.hi], run))
            self._parameters.append(parameter)
            groups[segment.group].append(parameter)
        self._twin = twin_of(optimizer, groups)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for mine, users in zip(self._twin.param_groups, self._optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in users.items() if key != "params"})
        self._twin.state.clear()
        for run, parameter, gradient in zip(self._runs, self._parameters, gradients, strict=True):
            old = self._arena.parameters[run.segment][1 - self._parity][run.lo : run.hi]
            parameter.data.copy_(self._shape(old, run))
            parameter.grad = self._shape(gradient, run)
            if run.born:
                self._twin.state[parameter] = {spec.key: self._state(run, spec) for spec in self._specs(run)}
        fault_point("optimizer")
        self._twin.step()
        for run, parameter in zip(self._runs, self._parameters, strict=True):
            self._keep(run, self._twin.state.get(parameter, {}))

    def _specs(self, run: Run) -> tuple[StateSpec, ...]:
        segment = self._arena.layout.segments[run.segment]
        return segment.tensors[run.tensors.start - segment.first].states

    def _shape(self, flat: torch.Tensor, run: Run) -> torch.Tensor:
        """A run as the optimizer sees it: flat where it works by element, the tensor itself where it does not."""
        segment = self._arena.layout.segments[run.segment]
        if segment.unit == "element":
            return flat
        tensor = segment.tensors[run.tensors.start - segment.first]
        return flat.as_strided(tensor.shape, tensor.stride, flat.storage_offset())

    def _state(self, run: Run, spec: StateSpec) -> Any:
        """One entry of state, brought from the committed buffer into the one that is being written."""
        parity, segment = self._parity, self._arena.layout.segments[run.segment]
        if spec.kind == "plane":
            plane = self._arena.planes[run.segment][spec.key]
            new = plane[parity][run.lo : run.hi]
            new.copy_(plane[1 - parity][run.lo : run.hi])
            return self._shape(new, run)
        if spec.kind == "blob":
            blob = self._arena.blobs[run.segment, run.tensors.start - segment.first, spec.key]
            return blob[parity].copy_(blob[1 - parity])
        if spec.kind == "none":
            return None
        row = self._arena.layout.scalars.index(spec.key)
        value = float(self._arena.scalars[1 - parity][row, run.tensors.start])
        if spec.kind == "scalar":
            return torch.tensor(value, dtype=spec.dtype)
        return int(value) if spec.kind == "int" else value

    def _keep(self, run: Run, state: dict[str, Any]) -> None:
        """Write what the optimizer left as state into the buffer, where it is not there already."""
        parity, segment = self._parity, self._arena.layout.segments[run.segment]
        specs = {spec.key: spec for spec in self._specs(run)}
        for key, value in state.items():
            if key not in specs:
                raise errors.OptimizerUnusable(
                    f"{type(self._optimizer).__name__} began to keep {key!r} after attach(): "
                    f"set the options that need it before"
                )
            spec = specs[key]
            if spec.kind in ("plane", "blob"):
                target = (
                    self._shape(self._arena.planes[run.segment][key][parity][run.lo : run.hi], run)
                    if spec.kind == "plane"
                    else self._arena.blobs[run.segment, run.tensors.start - segment.first, key][parity]
                )
                if value.data_ptr() != target.data_ptr():
                    target.copy_(value)
            elif spec.kind != "none":
                row = self._arena.layout.scalars.index(key)
                self._arena.scalars[parity][row, run.tensors.start : run.tensors.stop] = float(value)


def _tensors_of(segment: Segment, range_: Range) -> range:
    """Indices, among all, of the tensors that have elements in the range."""
    starts = [tensor.offset for tensor in segment.tensors]
    first = int(np.searchsorted(starts, range_.lo, side="right")) - 1
    last = int(np.searchsorted(starts, range_.hi - 1, side="right")) - 1
    return range(segment.first + first, segment.first + last + 1)


def _midway() -> None:
    fault_point("reduce")
    fault_point("optimizer")
