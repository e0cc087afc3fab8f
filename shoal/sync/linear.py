"""Gradients of large linear layers, written straight into the lane.

A gradient otherwise goes through memory three times: the product writes it, the hook reads it and writes the lane. For
a weight of millions of elements that is a tenth of a step. Here the product's own target is the lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Below this the time saved is less than what a Python function in the backward pass costs.
SMALLEST = 1_000_000


class Target:
    """A place in the lane for one weight. It belongs to one model: copies and pickles of that model come without it."""

    def __init__(
        self,
        parameter: torch.Tensor,
        view: torch.Tensor,
        mark: Callable[[], bool],
        made: Callable[[], None],
        rows: Callable[[], tuple[int, ...]],
        made_rows: Callable[[int], None],
    ) -> None:
        """`mark()` says that the tensor gets a gradient; whether it had one already in this step. `made()` is called
        when it has got it. If `rows()` gives ends of blocks, it is made block by block, and `made_rows` is called with
        the number of each instead."""
        self.parameter = parameter
        self.view = view
        self.mark = mark
        self.made = made
        self.rows, self.made_rows = rows, made_rows
        self.open = False  # only while the step's own backward runs; any other backward is the user's business

    def write(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        rows, columns = gradient.flatten(0, -2), inputs.flatten(0, -2)
        if self.mark():
            self.view.addmm_(rows.t(), columns)
        elif ends := self.rows():
            start = 0
            for block, end in enumerate(ends):
                torch.mm(rows.t()[start:end], columns, out=self.view[start:end])
                self.made_rows(block)
                start = end
            return
        else:
            torch.mm(rows.t(), columns, out=self.view)
        self.made()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: Target
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.target = target
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        to_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        to_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        to_weight = None
        if ctx.needs_input_grad[1] and ctx.target.open:
            ctx.target.write(gradient, inputs)
        elif ctx.needs_input_grad[1]:
            to_weight = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
        return to_inputs, to_weight, to_bias, None


class Linear(nn.Linear):
    """What a large `nn.Linear` of an attached model becomes; in every other respect it is one."""

    shoal_target: Target | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        target = self.shoal_target
        # Another weight may stand in for a call (functional_call), and hooks want to see the gradient.
        if target is None or self.weight is not target.parameter or self.weight._backward_hooks:
            return F.linear(input, self.weight, self.bias)
        if not _plain(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        output: torch.Tensor = _Straight.apply(input, self.weight, self.bias, target)  # type: ignore[no-untyped-call]
        return output


def _plain(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is an ordinary eager forward, and not one under autocast, a transform or a compiler."""
    return (
        inputs.dim() >= 2
        and inputs.dtype == weight.dtype
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def redirect(model: nn.Module, target_of: Callable[[torch.Tensor], Target | None]) -> list[Target]:
    """Let the large linear layers of the model write to the targets of their weights."""
    targets = []
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST and "forward" not in vars(module):
            target = target_of(module.weight)
            if target is not None:
                module.__class__ = Linear
                module.shoal_target = target  # type: ignore[assignment]
                targets.append(target)
    return targets
