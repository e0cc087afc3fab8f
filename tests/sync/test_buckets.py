"""Buckets: flat sums of gradients, begun in one order whichever gradients come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.sync.buckets import Buckets


class Sums:
    """Keeps what was begun, and doubles it when it ends, as two ranks with the same gradients do."""

    def __init__(self) -> None:
        self.begun: list[torch.Tensor] = []

    def begin(self, flat: torch.Tensor) -> int:
        self.begun.append(flat)
        return len(self.begun)

    def end(self) -> None:
        for flat in self.begun:
            flat.mul_(2)


def parameters() -> list[nn.Parameter]:
    shapes = [(3, 5), (7,), (2, 3, 4, 5), (11, 2), ()]
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def test_a_bucket_is_summed_as_soon_as_its_gradients_have_come_and_never_before_an_earlier_one() -> None:
    ours, sums = parameters(), Sums()
    buckets = Buckets(ours, sums.begin, bucket_bytes=64, first_bytes=64)
    assert len(buckets) == 5
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    buckets.came(0)
    buckets.came(3)
    assert not sums.begun, "the bucket of the last parameter is the first, on every rank"
    buckets.came(4)
    assert len(sums.begun) == 2
    buckets.came(1)
    assert len(sums.begun) == 2
    buckets.came(2)
    assert len(sums.begun) == 5
    assert len(buckets.finish()) == 6


def test_sums_become_the_gradients_in_the_layout_of_the_parameters() -> None:
    ours, sums = parameters(), Sums()
    buckets = Buckets(ours, sums.begin)
    gradients = [torch.randn_like(parameter) for parameter in ours]
    for parameter, gradient in zip(ours, gradients, strict=True):
        parameter.grad = gradient.clone()
    buckets.finish()
    sums.end()
    buckets.take()
    for parameter, gradient in zip(ours, gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * gradient)
        assert parameter.grad.stride() == parameter.stride()


def test_a_gradient_that_no_rank_has_is_none_and_one_that_another_has_is_not() -> None:
    ours, sums = parameters(), Sums()
    buckets = Buckets(ours, sums.begin)
    ours[1].grad = torch.ones(7)
    buckets.finish()
    sums.begun[-1][2] += 1.0  # another rank had this one
    buckets.take()
    assert [parameter.grad is not None for parameter in ours] == [False, True, True, False, False]
    assert torch.count_nonzero(ours[2].grad) == 0


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_bucket_has_one_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    ours = [nn.Parameter(torch.ones(4, dtype=dtypes[index % 2])) for index in range(6)]
    buckets = Buckets(ours, Sums().begin)
    assert len(buckets) == 2
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    buckets.finish()
    buckets.take()
    assert all(parameter.grad is not None and parameter.grad.dtype == parameter.dtype for parameter in ours)
