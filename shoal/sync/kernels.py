"""Optimizer steps out of place, chunk by chunk, for the optimizers most people use.

The general way (`slices.py`) copies a slice into the other buffer, reduces the lanes, then runs the user's optimizer
in place: three trips through memory. Here a chunk that fits the cache is reduced, stepped and written in one trip.
Same arithmetic as torch's, for exactly these classes; anything else, and any option not listed, goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from shoal import errors

# Elements of a chunk for each thread: small enough that lanes, old and new values stay in cache between two operations,
# large enough that Python's share of the time stays small.
CHUNK = 128 * 1024

Chunk = tuple[torch.Tensor, ...]
_Part = tuple[torch.Tensor, torch.Tensor, Chunk, Chunk]  # gradient, scratch, old, new


class Kernel(Protocol):
    """One optimizer's step. `planes` names the state it moves, in order."""

    @property
    def planes(self) -> tuple[str, ...]: ...

    @property
    def scalars(self) -> tuple[str, ...]: ...

    def begin(self, group: dict[str, Any], scalars: dict[str, float], born: bool) -> dict[str, float]:
        """Take the options and scalars of this step; the scalars after it."""

    def chunk(self, gradient: torch.Tensor, scratch: torch.Tensor, old: Chunk, new: Chunk) -> None:
        """Step one chunk. `gradient` may be changed only if it is `scratch`."""


class SGDKernel:
    scalars: tuple[str, ...] = ()

    def __init__(self, group: dict[str, Any]) -> None:
        self.planes: tuple[str, ...] = ("momentum_buffer",) if group["momentum"] else ()

    def begin(self, group: dict[str, Any], scalars: dict[str, float], born: bool) -> dict[str, float]:
        self._lr = float(group["lr"])
        self._momentum = float(group["momentum"])
        _check_planes("momentum", bool(self._momentum), bool(self.planes))
        self._keep = 1.0 - float(group["dampening"])
        self._decay = float(group["weight_decay"])
        self._nesterov = bool(group["nesterov"])
        self._maximize = bool(group["maximize"])
        self._born = born
        return {}

    def chunk(self, gradient: torch.Tensor, scratch: torch.Tensor, old: Chunk, new: Chunk) -> None:
        if self._maximize:
            gradient = torch.neg(gradient, out=scratch)
        if self._decay:
            gradient = torch.add(gradient, old[0], alpha=self._decay, out=scratch)
        if self._momentum:
            if not self._born:
                new[1].copy_(gradient)
            elif self._keep == 1.0:
                torch.add(gradient, old[1], alpha=self._momentum, out=new[1])
            else:
                torch.mul(old[1], self._momentum, out=new[1]).add_(gradient, alpha=self._keep)
            ahead = self._momentum if self._nesterov else None
            gradient = new[1] if ahead is None else torch.add(gradient, new[1], alpha=ahead, out=scratch)
        elif self.planes:  # momentum is off for now; what it has gathered stays
            new[1].copy_(old[1])
        torch.add(old[0], gradient, alpha=-self._lr, out=new[0])


class AdamKernel:
    scalars: tuple[str, ...] = ("step",)

    def __init__(self, group: dict[str, Any], decoupled: bool) -> None:
        self.planes: tuple[str, ...] = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        self._fused = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def begin(self, group: dict[str, Any], scalars: dict[str, float], born: bool) -> dict[str, float]:
        step = scalars["step"] + 1.0 if born else 1.0
        self._born = born
        self._step = [torch.tensor(step, dtype=torch.float32)]
        beta1, beta2 = group["betas"]
        _check_planes("amsgrad", bool(group["amsgrad"]), len(self.planes) > 2)
        self._options: dict[str, Any] = {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(group["weight_decay"]),
            "eps": float(group["eps"]),
            "amsgrad": bool(group["amsgrad"]),
            "maximize": bool(group["maximize"]),
        }
        return {"step": step}

    def chunk(self, gradient: torch.Tensor, scratch: torch.Tensor, old: Chunk, new: Chunk) -> None:
        if self._born:
            torch._foreach_copy_(new, old)
        else:
            new[0].copy_(old[0])
            for plane in new[1:]:
                plane.zero_()
        self._fused(
            [new[0]], [gradient], [new[1]], [new[2]], list(new[3:]), self._step, **self._options
        )  # the fused step is one pass over the chunk, which the copy has just brought into the cache


def _check_planes(option: str, wanted: bool, kept: bool) -> None:
    if wanted and not kept:
        raise errors.OptimizerUnusable(
            f"{option} was turned on after attach(), and there is no room for the state it needs: build the optimizer "
            f"with {option} and attach that"
        )


def kernel_for(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> Kernel | None:
    """The kernel for this group's options, None for the general way."""
    if not dtype.is_floating_point or dtype.itemsize < 4 or group.get("differentiable") or group.get("capturable"):
        return None
    if type(optimizer) is SGD:
        return SGDKernel(group)
    if type(optimizer) in (Adam, AdamW) and hasattr(torch, "_fused_adamw_"):
        if isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
            return None
        return AdamKernel(group, decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")))
    return None


class ChunkedStep:
    """A kernel over one run of elements: views of every chunk are made once and used step after step."""

    def __init__(self, kernel: Kernel, old_new: Sequence[tuple[Chunk, Chunk]], numel: int) -> None:
        """`old_new[parity]`: whole-run tensors to read from and to write to when stepping into `parity`."""
        self.kernel = kernel
        size = CHUNK * torch.get_num_threads()
        self._whole = old_new
        self._bounds = [(lo, min(lo + size, numel)) for lo in range(0, numel, size)]
        self._chunks = [
            [(tuple(t[lo:hi] for t in old), tuple(t[lo:hi] for t in new)) for lo, hi in self._bounds]
            for old, new in old_new
        ]
        dtype = old_new[0][0][0].dtype
        self._scratch = torch.empty(min(size, numel), dtype=dtype)
        self._sources: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}
        self._parts: dict[tuple[int, ...], list[_Part]] = {}

    def run(self, parity: int, sources: Sequence[torch.Tensor], scale: float, midway: Callable[[], None]) -> None:
        """Reduce the sources (lanes, or one gradient that is reduced already) and step, chunk by chunk."""
        cut = self._cut(sources)
        middle = len(self._bounds) // 2
        for index, (old, new) in enumerate(self._chunks[parity]):
            parts = cut[index]
            gradient = parts[0]
            scratch = self._scratch[: gradient.numel()] if index == len(self._bounds) - 1 else self._scratch
            if len(parts) > 1:
                gradient = torch.add(parts[0], parts[1], out=scratch)
                for part in parts[2:]:
                    gradient.add_(part)
            if scale != 1.0:
                gradient = torch.mul(gradient, scale, out=scratch)
            if index == middle:
                midway()
            self.kernel.chunk(gradient, scratch, old, new)

    def run_part(self, parity: int, at: int, gradient: torch.Tensor) -> None:
        """Step the elements from `at` on, of which this is the gradient."""
        key = parity, at, gradient.data_ptr(), gradient.numel()
        if key not in self._parts:
            self._parts[key] = self._cut_part(*self._whole[parity], at, gradient)
        for part in self._parts[key]:
            self.kernel.chunk(*part)

    def _cut_part(self, old: Chunk, new: Chunk, at: int, gradient: torch.Tensor) -> list[_Part]:
        parts, size = [], self._scratch.numel()
        for lo in range(0, gradient.numel(), size):
            part = gradient[lo : lo + size]
            here = slice(at + lo, at + lo + part.numel())
            parts.append(
                (part, self._scratch[: part.numel()], tuple(t[here] for t in old), tuple(t[here] for t in new))
            )
        return parts

    def _cut(self, sources: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        key = tuple(source.data_ptr() for source in sources)
        if key not in self._sources:
            self._sources = {key: [[source[lo:hi] for source in sources] for lo, hi in self._bounds]}
        return self._sources[key]
