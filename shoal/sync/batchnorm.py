"""SyncBatchNorm: statistics of the whole group's batch, whoever is in the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

# The sum of a tensor over all ranks; None where there is one only.
Total = Callable[[torch.Tensor], torch.Tensor]


class SyncBatchNorm(_BatchNorm):
    """As BatchNorm, over the micro-batches of all workers together. Followed by `Replicated`, which tells each of them
    how to sum in the present generation; alone, or in eval mode, it is BatchNorm itself.

    Every worker must pass through it as often as the others: a step needs a sample for each of them.
    """

    total_of_group: Callable[[], Total | None] | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 or more dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total = self.total_of_group() if self.training and self.total_of_group is not None else None
        if total is None:
            plain: torch.Tensor = super().forward(input)
            return plain
        self._check_input_dim(input)
        return _together(self, input, total)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """The same module with each BatchNorm in it replaced, parameters and statistics kept."""
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            made = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            made._parameters, made._buffers, made.training = module._parameters, module._buffers, module.training
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child))
        return module


@_disable_dynamo  # it waits for other processes
def _together(norm: SyncBatchNorm, input: torch.Tensor, total: Total) -> torch.Tensor:
    output, mean, variance, count = _Normalize.apply(input, norm.weight, norm.bias, norm.eps, total)  # type: ignore[no-untyped-call]
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            momentum = norm.momentum
            if momentum is None:
                momentum = 1.0 / float(norm.num_batches_tracked)  # type: ignore[arg-type]
            unbiased = variance * (count / (count - 1).clamp(min=1))
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)  # type: ignore[union-attr]
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)  # type: ignore[union-attr]
    return output  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        total: Total,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims, shape = _dims(input), _shape(input)
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        variance, mean = torch.var_mean(input.to(wide), dims, correction=0)
        # In float64, so that means far from zero cost no digits of the variance.
        variance, mean = variance.double(), mean.double()
        size = torch.full((1,), float(input.numel() // input.size(1)), dtype=torch.float64, device=input.device)
        sums = total(torch.cat([mean * size, (variance + mean * mean) * size, size]))
        count = sums[-1:]
        mean, square = sums[:-1].div(count).chunk(2)
        variance = (square - mean * mean).clamp(min=0.0)
        mean, variance = mean.to(wide), variance.to(wide)
        inverse = torch.rsqrt(variance + eps)
        output = (input.to(wide) - mean.view(shape)) * inverse.view(shape)
        if weight is not None and bias is not None:
            output = output * weight.to(wide).view(shape) + bias.to(wide).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.total = total
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        input, weight, mean, inverse, count = ctx.saved_tensors
        dims, shape, wide = _dims(input), _shape(input), mean.dtype
        gradient = gradient.to(wide)
        normal = (input.to(wide) - mean.view(shape)) * inverse.view(shape)
        of_bias, of_weight = gradient.sum(dims), (gradient * normal).sum(dims)
        means = ctx.total(torch.cat([of_bias, of_weight]).double()).div(count).to(wide)
        mean_gradient, mean_product = (it.view(shape) for it in means.chunk(2))
        scale = inverse if weight is None else inverse * weight.to(wide)
        of_input = (gradient - mean_gradient - normal * mean_product) * scale.view(shape)
        if weight is None:
            return of_input.to(input.dtype), None, None, None, None
        # Of weight and bias only this worker's part: the step sums them with all other gradients.
        return of_input.to(input.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _dims(input: torch.Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _shape(input: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (input.dim() - 2)]
