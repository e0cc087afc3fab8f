"""Stepped quickly or by the optimizer as a whole: the same bits, and whoever is to be told of a step is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from shoal.sync.quick_step import QuickStep, _strides

Make = Callable[[Iterable[Any]], Optimizer]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KNOWN: list[Make] = [
    lambda p: SGD(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    lambda p: SGD(p, lr=0.1, foreach=True),
    lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True, foreach=True),
    lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    lambda p: Adam(p, lr=0.1, amsgrad=True, weight_decay=0.01),
    lambda p: AdamW(p, lr=0.1),
]


class Pair:
    """The same parameters and optimizer twice: `quick` steps one of them, the other steps by itself."""

    def __init__(self, make: Make, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).to(device) for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        groups = [
            [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}] for model in self.models
        ]
        self.ours, self.plain = (make(it) for it in groups)
        self.quick = QuickStep(self.ours)
        self.same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal

    def step(self, times: int = 1, *, without: int | None = None) -> None:
        for _ in range(times):
            for ours, plain in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
                ours.grad = torch.randn_like(ours)
                plain.grad = ours.grad.clone()
            if without is not None:
                for model in self.models:
                    list(model.parameters())[without].grad = None
            self.quick()
            self.plain.step()
            for ours, plain in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
                assert self.same(ours, plain)
        mine, other = self.ours.state_dict()["state"], self.plain.state_dict()["state"]
        assert mine.keys() == other.keys()
        assert all(self.same(mine[at][key], other[at][key]) for at in mine for key in mine[at])


@pytest.fixture
def whole_steps(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """Whose optimizer stepped as a whole, group by group."""
    found: list[Optimizer] = []
    for kind in (SGD, Adam):
        original = kind._init_group

        def noted(self: Optimizer, *args: Any, original: Any = original) -> Any:
            found.append(self)
            return original(self, *args)

        monkeypatch.setattr(kind, "_init_group", noted)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", KNOWN)
def test_the_same_bits_without_the_optimizers_own_step(make: Make, device: str, whole_steps: list[Optimizer]) -> None:
    pair = Pair(make, device)
    pair.step(5)
    for optimizer in (pair.ours, pair.plain):
        optimizer.param_groups[0]["lr"] = 0.01
    pair.step(2)
    assert whole_steps.count(pair.ours) == (2 if pair.ours.state else 0)  # groups, of the step that makes the state
    assert whole_steps.count(pair.plain) == 2 * 7


@pytest.mark.gpu
@pytest.mark.parametrize("make", KNOWN)
def test_at_once_is_the_same_up_to_rounding(make: Make) -> None:
    pair = Pair(make, "cuda")
    pair.quick = partial(pair.quick, rounds_as_torch=False)  # type: ignore[assignment]
    pair.same = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    pair.step(5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("maximize", [False, True])
def test_one_kernel_for_all_of_a_step_does_what_sgd_does(momentum: float, maximize: bool) -> None:
    pair = Pair(
        lambda p: SGD(p, lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=momentum > 0, maximize=maximize)
    )
    pair.same = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    pair.step(2)
    pair.quick._groups = [replace(it, strides=_strides(it)) for it in pair.quick._groups]
    assert all(it.strides is not None for it in pair.quick._groups)
    pair.quick = partial(pair.quick, rounds_as_torch=False)  # type: ignore[assignment]
    pair.step(3)


def change_momentum(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0 if optimizer.param_groups[0]["momentum"] else 0.5


@pytest.mark.parametrize(
    "change",
    [
        change_momentum,
        lambda it: it.load_state_dict(it.state_dict()),
        lambda it: it.state.clear(),
        lambda it: it.state[it.param_groups[1]["params"][1]].clear(),
        lambda it: it.state.update({it.param_groups[1]["params"][1]: {}}),
    ],
)
def test_what_was_changed_from_outside_is_seen(change: Callable[[Optimizer], None]) -> None:
    pair = Pair(KNOWN[1])
    for _ in range(3):
        pair.step(3)
        for optimizer in (pair.ours, pair.plain):
            change(optimizer)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    pair = Pair(KNOWN[1])
    for without in (None, 1, None, 0, 0, None):
        pair.step(2, without=without)


def test_any_other_optimizer_steps_as_it_is() -> None:
    Pair(lambda p: RMSprop(p, lr=0.1)).step(3)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_hooks_and_replaced_steps_are_called_and_schedulers_are_not_in_the_way(whole_steps: list[Optimizer]) -> None:
    called = list[str]()
    pair = Pair(KNOWN[1])
    torch.optim.lr_scheduler.StepLR(pair.ours, 1)
    pair.step(3)
    assert whole_steps.count(pair.ours) == 2
    hook = pair.ours.register_step_post_hook(lambda *_: called.append("hook"))
    pair.step(2)
    assert called == ["hook"] * 2
    hook.remove()
    original = pair.ours.step

    def step() -> None:
        called.append("mine")
        original()

    pair.ours.step = step  # type: ignore[method-assign,assignment]
    pair.step(2)
    assert called[2:] == ["mine"] * 2
