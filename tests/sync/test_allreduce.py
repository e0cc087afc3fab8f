"""What AllReduce computes, whatever optimizer, model and number of workers, is what one process computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from shoal import errors
from shoal.sync import allreduce, linear
from shoal.sync.independent import Independent
from shoal.sync.probe import unit_of
from shoal.sync.replica import Replica
from shoal.train.attempt import Policy
from shoal.train.schedules import LinearScaling, Schedule, Situation
from tests.sync.harness import Host, ThreadWorker, state_of

torch.manual_seed(1)
INPUTS = torch.randn(64, 6, dtype=torch.float64)
TARGETS = torch.randn(64, 3, dtype=torch.float64)
BATCHES = [list(range(lo, lo + 13)) for lo in (0, 20, 7, 40, 33, 11, 2, 50)]
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).double()


def mean_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(INPUTS[ids]), TARGETS[ids])


def alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = mean_loss,
    batches: Sequence[Sequence[int]] = BATCHES,
    before_step: Callable[[int], None] = lambda index: None,
    after_step: Callable[[int], None] = lambda index: None,
) -> dict[str, torch.Tensor]:
    for index, ids in enumerate(batches):
        before_step(index)
        optimizer.zero_grad()
        loss(model, torch.tensor(ids)).backward()
        after_step(index)
        optimizer.step()
    return state_of(model)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance), name


def grown(
    host: Host, make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], loss: Any = mean_loss, **how: Any
) -> list[dict[str, torch.Tensor]]:
    """Two workers, then three, then one of the newcomers alone with the eldest, over the batches."""
    workers = [ThreadWorker(host, slot, *make(), **how) for slot in range(3)]
    third = len(BATCHES) // 3
    for number, (slots, batches) in enumerate(
        [((0, 1), BATCHES[:third]), ((0, 1, 2), BATCHES[third : 2 * third]), ((0, 2), BATCHES[2 * third :])], start=1
    ):
        here = [workers[slot] for slot in slots]
        host.together(here, lambda one, number=number, slots=slots: one.enter(number, slots))
        for ids in batches:
            host.together(here, lambda one, ids=ids: one.step(ids, loss))
    return [state_of(workers[0].model), state_of(workers[2].model)]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum, decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD maximize": lambda p: optim.SGD(p, lr=0.001, momentum=0.5, maximize=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Rprop": lambda p: optim.Rprop(p),
    "Adafactor": lambda p: optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_in_one_process_while_workers_come_and_go(name: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, OPTIMIZERS[name](model.parameters())

    wanted = alone(*make())
    for state in grown(Host(tmp_path), make):
        same(state, wanted, 1e-10)


class GlobalNormStep(torch.optim.Optimizer):
    """Looks across all tensors: only one worker can step it, and does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
            p.sub_(0.1 * p.grad / norm)


class Muonish(torch.optim.Optimizer):
    """Refuses anything but whole matrices."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 1 or p.numel() < 3:
                    raise ValueError("matrices only")
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * buffer / (buffer.norm() + 1e-9))


@pytest.mark.parametrize("kind", [GlobalNormStep, Muonish])
def test_an_optimizer_that_looks_at_more_than_elements_is_cut_where_it_may_be(kind: Any, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, kind(model.parameters())

    wanted = alone(*make())
    for state in grown(Host(tmp_path), make):
        same(state, wanted)


def test_parameter_groups_keep_their_own_options(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        groups = [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 0.001, "betas": (0.5, 0.9)},
        ]
        return model, optim.AdamW(groups)

    wanted = alone(*make())
    for state in grown(Host(tmp_path), make):
        same(state, wanted)


def test_learning_rates_may_change_between_steps(tmp_path: Path) -> None:
    model, optimizer = mlp(), None
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = alone(model, optimizer, before_step=lambda index: optimizer.param_groups[0].update(lr=0.1 / (index + 1)))
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    workers = [
        ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for slot, m in enumerate(models)
    ]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    for index, ids in enumerate(BATCHES):
        for one in workers:
            one.optimizer.param_groups[0]["lr"] = 0.1 / (index + 1)
        host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss))
    same(state_of(models[1]), wanted)


def test_workers_whose_hyperparameters_differ_are_told_so(tmp_path: Path) -> None:
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    workers = [ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1)) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    workers[1].optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(errors.WorkersDiffer, match=r"lr of group 0 \((0.1 and 0.2|0.2 and 0.1)\)"):
        host.together(workers, lambda one: one.step(BATCHES[0], mean_loss))


@pytest.mark.parametrize(
    ("policy", "what"),
    [(Policy(clip_norm=2.0), r"clip_norm \((1.0 and 2.0|2.0 and 1.0)\)"), (Policy(nan="skip", clip_norm=1.0), "nan")],
)
def test_workers_whose_settings_differ_are_told_which(policy: Policy, what: str, tmp_path: Path) -> None:
    host = Host(tmp_path)
    policies = [Policy(clip_norm=1.0), policy]
    workers = [
        ThreadWorker(host, slot, (m := mlp()), optim.SGD(m.parameters(), lr=0.1), policy=one)
        for slot, one in enumerate(policies)
    ]
    with pytest.raises(errors.WorkersDiffer, match=what):
        host.together(workers, lambda one: one.enter(1, (0, 1)))


def test_a_schedule_without_a_repr_of_its_own_is_no_difference(tmp_path: Path) -> None:
    class Half(Schedule):
        def factor(self, at: Situation) -> float:
            return 0.5

    host = Host(tmp_path)
    workers = [
        ThreadWorker(host, slot, (m := mlp()), optim.SGD(m.parameters(), lr=0.1), policy=Policy(schedule=Half()))
        for slot in (0, 1)
    ]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    assert host.together(workers, lambda one: one.step(BATCHES[0], mean_loss).learning_rate) == [0.05, 0.05]


def test_hyperparameters_too_long_to_be_kept_whole_are_still_compared(tmp_path: Path) -> None:
    host = Host(tmp_path)
    models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(40))) for _ in range(2)]
    workers = [
        ThreadWorker(host, slot, m, optim.AdamW([{"params": [p]} for p in m.parameters()], lr=0.1))
        for slot, m in enumerate(models)
    ]
    workers[1].optimizer.param_groups[-1]["lr"] = 0.2
    with pytest.raises(errors.WorkersDiffer, match="hyperparameters"):
        host.together(workers, lambda one: one.enter(1, (0, 1)))


@pytest.mark.parametrize("name", ["SGD momentum, decay", "AdamW", "RMSprop", "Adafactor"])
def test_clipping_uses_the_norm_of_the_whole_gradient(name: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = make()
    wanted = alone(model, optimizer, after_step=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    for state in grown(Host(tmp_path), make, policy=Policy(clip_norm=0.05)):
        same(state, wanted)


@pytest.mark.parametrize("large", [1, 10**9])  # gradients go to the lane one by one, or together
@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
def test_micro_batches_add_up_to_the_step(
    accumulate: int, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce, "LARGE", large)
    model = mlp()
    wanted = alone(model, optim.AdamW(model.parameters()))
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    workers = [ThreadWorker(host, slot, m, optim.AdamW(m.parameters())) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    for ids in BATCHES:
        host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss, accumulate))
    same(state_of(models[0]), wanted)


def test_a_sum_as_loss_gives_the_sum_over_the_global_batch(tmp_path: Path) -> None:
    def sum_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids]), TARGETS[ids], reduction="sum")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, optim.SGD(model.parameters(), lr=0.001)

    wanted = alone(*make(), loss=sum_loss)
    for state in grown(Host(tmp_path), make, loss=sum_loss, policy=Policy(loss="sum")):
        same(state, wanted)


def test_more_workers_than_samples_in_a_step_leave_some_with_nothing_to_do(tmp_path: Path) -> None:
    batches = [[3, 5], [8], [1, 2]]
    model = mlp()
    wanted = alone(model, optim.AdamW(model.parameters()), batches=batches)
    host = Host(tmp_path)
    models = [mlp() for _ in range(4)]
    workers = [ThreadWorker(host, slot, m, optim.AdamW(m.parameters())) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, range(4)))
    for ids in batches:
        host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss))
    for m in models:
        same(state_of(m), wanted)


class Branches(nn.Module):
    """The second branch is used in some steps only, and only by samples with an even id."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Linear(6, 3), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.trunk(INPUTS[ids]) * self.scale
        even = ids[ids % 2 == 0]
        total = F.mse_loss(out, TARGETS[ids])
        if len(even) and int(ids[0]) % 3:
            total = total + self.branch(INPUTS[even]).square().sum() / len(ids)
        return total


@pytest.mark.parametrize(
    "make_optimizer", [optim.AdamW, optim.NAdam, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)]
)
def test_a_parameter_without_gradient_in_a_step_is_skipped_and_not_stepped_with_zero(
    make_optimizer: Make, tmp_path: Path
) -> None:
    uses_branch, not_so = [1, 2, 4, 8, 10, 22], [3, 5, 9, 15, 21, 33]
    batches = [not_so, uses_branch, not_so, not_so, uses_branch, uses_branch]
    model = Branches()
    wanted = alone(model, make_optimizer(model.parameters()), loss=lambda m, ids: m.loss(ids), batches=batches)
    host = Host(tmp_path)
    models = [Branches() for _ in range(2)]
    workers = [ThreadWorker(host, slot, m, make_optimizer(m.parameters())) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))

    def loss(m: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        # The same sum as over the whole batch, from a share of it.
        out = F.mse_loss(m.trunk(INPUTS[ids]) * m.scale, TARGETS[ids])
        even = ids[ids % 2 == 0]
        if len(even) and int(current[0]) % 3:
            out = out + m.branch(INPUTS[even]).square().sum() / len(ids)
        return out

    for current in batches:
        host.together(workers, lambda one, ids=current: one.step(ids, loss))
    same(state_of(models[1]), wanted)


def test_frozen_parameters_stay_and_may_be_unfrozen(tmp_path: Path) -> None:
    def train(model: nn.Module, step: Callable[[int], None]) -> None:
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        for index in range(6):
            if index == 3:
                for parameter in model[0].parameters():
                    parameter.requires_grad_(True)
            step(index)

    plain = mlp()
    optimizer = optim.AdamW(plain.parameters())

    def plain_step(index: int) -> None:
        optimizer.zero_grad()
        mean_loss(plain, torch.tensor(BATCHES[index])).backward()
        optimizer.step()

    train(plain, plain_step)
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    for model in models:
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
    workers = [ThreadWorker(host, slot, m, optim.AdamW(m.parameters())) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    host.together(workers, lambda one: train(one.model, lambda index: one.step(BATCHES[index], mean_loss) and None))
    same(state_of(models[0]), state_of(plain))


def test_parameters_outside_the_optimizer_come_from_the_eldest(tmp_path: Path) -> None:
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    with torch.no_grad():
        models[1][0].weight.add_(1.0)  # another start, as without a seed
    workers = [ThreadWorker(host, slot, m, optim.SGD(m[2].parameters(), lr=0.1)) for slot, m in enumerate(models)]
    before = state_of(models[0])
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    host.together(workers, lambda one: one.step(BATCHES[0], mean_loss))
    assert torch.equal(models[1][0].weight, before["0.weight"])
    assert not torch.equal(models[1][2].weight, before["2.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.t().contiguous().clone())
        self.again = nn.Linear(6, 4, bias=False)
        self.again.weight = self.encode.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.again(self.decode(self.encode(x))))


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids]), INPUTS[ids])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied()
        return model, optim.Adam(model.parameters(), lr=0.01)

    wanted = alone(*make(), loss=loss)
    for state in grown(Host(tmp_path), make, loss=loss):
        same(state, wanted)


def test_mixed_dtypes_train_side_by_side(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        model[0].float()
        return model, optim.AdamW(model.parameters(), lr=0.01)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model[2](model[1](model[0](INPUTS[ids].float())).double()), TARGETS[ids])

    wanted = alone(*make(), loss=loss)
    for state in grown(Host(tmp_path), make, loss=loss):
        same(state, wanted, 1e-5)


def test_bfloat16_parameters_train(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp().bfloat16()
        return model, optim.AdamW(model.parameters(), lr=0.01)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids].bfloat16()), TARGETS[ids].bfloat16())

    wanted = alone(*make(), loss=loss)
    for state in grown(Host(tmp_path), make, loss=loss):
        same(state, wanted, 0.05)


def test_channels_last_weights_keep_their_strides(tmp_path: Path) -> None:
    images = torch.randn(64, 3, 6, 6, dtype=torch.float64)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3), nn.Flatten(1), nn.Linear(12, 3))
        return model.double().to(memory_format=torch.channels_last), optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(images[ids].to(memory_format=torch.channels_last)), TARGETS[ids])

    wanted = alone(*make(), loss=loss)
    for state in grown(Host(tmp_path), make, loss=loss):
        same(state, wanted)
    model, optimizer = make()
    ThreadWorker(Host(tmp_path), 0, model, optimizer).enter(1, (0,))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_batchnorm_statistics_are_the_eldest_workers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    host = Host(tmp_path)
    models = [make(), make()]
    workers = [ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1)) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    first = copy.deepcopy(make())
    with torch.no_grad():
        first(INPUTS[torch.tensor(BATCHES[0][:7])])  # rank 0's share of 13
    host.together(workers, lambda one: one.step(BATCHES[0], mean_loss))
    for model in models:
        assert torch.allclose(model[1].running_mean, first[1].running_mean)
        assert int(model[1].num_batches_tracked) == 1


def test_a_loss_that_is_not_finite_stops_every_worker_or_skips_the_step(tmp_path: Path) -> None:
    def poisoned(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return mean_loss(model, ids) * (float("nan") if 12 in ids else 1.0)

    for policy in (Policy(nan="stop"), Policy(nan="skip")):
        host = Host(tmp_path / policy.nan)
        models = [mlp(), mlp()]
        workers = [
            ThreadWorker(host, slot, m, optim.AdamW(m.parameters()), policy=policy) for slot, m in enumerate(models)
        ]
        host.together(workers, lambda one: one.enter(1, (0, 1)))
        host.together(workers, lambda one: one.step(BATCHES[1], mean_loss))
        before = state_of(models[0])
        if policy.nan == "stop":
            with pytest.raises(errors.LossNotFinite, match="step 2 is nan on w1"):
                host.together(workers, lambda one: one.step(BATCHES[0], poisoned))
            continue
        reports = host.together(workers, lambda one: one.step(BATCHES[0], poisoned))
        assert all(report.skipped for report in reports)
        same(state_of(models[1]), before, 0)
        host.together(workers, lambda one: one.step(BATCHES[2], mean_loss))
        plain = mlp()
        same(state_of(models[1]), alone(plain, optim.AdamW(plain.parameters()), batches=[BATCHES[1], BATCHES[2]]))


def test_an_optimizers_state_made_before_attaching_is_kept(tmp_path: Path) -> None:
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    alone(model, optimizer, batches=BATCHES[:2])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    wanted = alone(model, optimizer, batches=BATCHES[2:4])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        again = mlp()
        stepped = optim.AdamW(again.parameters(), lr=0.01)
        again.load_state_dict(saved[0])
        stepped.load_state_dict(saved[1])
        return again, stepped

    host = Host(tmp_path)
    workers = [ThreadWorker(host, slot, *make()) for slot in range(2)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    for ids in BATCHES[2:4]:
        host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss))
    same(state_of(workers[1].model), wanted)


def test_a_schedule_sees_the_number_of_workers(tmp_path: Path) -> None:
    host = Host(tmp_path)
    policy = Policy(schedule=LinearScaling(warmup_steps=1))
    workers = [
        ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1), policy=policy)
        for slot, m in enumerate([mlp(), mlp()])
    ]
    host.together(workers[:1], lambda one: one.enter(1, (0,)))
    rates = [host.together(workers[:1], lambda one: one.step(BATCHES[0], mean_loss))[0].learning_rate for _ in range(2)]
    host.together(workers, lambda one: one.enter(2, (0, 1)))
    rates += [host.together(workers, lambda one: one.step(BATCHES[0], mean_loss))[1].learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2])
    assert workers[0].optimizer.param_groups[0]["lr"] == 0.1


def test_independent_workers_share_the_data_and_nothing_else(tmp_path: Path) -> None:
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    workers = [
        ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1), sync=Independent())
        for slot, m in enumerate(models)
    ]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    host.together(workers, lambda one: one.step(BATCHES[0], mean_loss))
    plain = [mlp(), mlp()]
    wanted = [
        alone(plain[0], optim.SGD(plain[0].parameters(), lr=0.1), batches=[BATCHES[0][:7]]),
        alone(plain[1], optim.SGD(plain[1].parameters(), lr=0.1), batches=[BATCHES[0][7:]]),
    ]
    for model, state in zip(models, wanted, strict=True):
        same(state_of(model), state)


def test_optimizers_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    host = Host(tmp_path)
    model = mlp()
    with pytest.raises(errors.OptimizerUnusable, match="LBFGS cannot be split"):
        ThreadWorker(host, 0, model, optim.LBFGS(model.parameters()))
    with pytest.raises(errors.OptimizerUnusable, match="not the model's"):
        ThreadWorker(host, 0, model, optim.SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(errors.ModelUnusable, match="no parameters"):
        ThreadWorker(host, 0, nn.ReLU(), optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_model_of_other_shapes_than_the_jobs_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path)
    model = mlp()
    worker = ThreadWorker(host, 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.enter(1, (0,))
    other = mlp()
    with pytest.raises(
        errors.WorkersDiffer, match=r"0.bias is 17 float64, with momentum_buffer here and 17 float64 in the job; "
    ):
        ThreadWorker(host, 1, other, optim.SGD(other.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", ["SGD momentum, decay", "Adam", "AdamW", "Adafactor"])
def test_the_loss_curve_does_not_depend_on_the_number_of_workers(
    name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids].to(dtype)), TARGETS[ids].to(dtype))

    curves = []
    for size in (1, 3, 5):
        host = Host(tmp_path / str(size))
        models = [mlp().to(dtype) for _ in range(size)]
        workers = [ThreadWorker(host, slot, m, OPTIMIZERS[name](m.parameters())) for slot, m in enumerate(models)]
        host.together(workers, lambda one, size=size: one.enter(1, range(size)))
        host.together(workers, lambda one: [one.step(BATCHES[i % len(BATCHES)], loss) for i in range(50)])
        curves.append([report.loss for report in workers[0].reports])
    assert curves[0][-1] < 0.9 * curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_large_linear_layers_write_their_gradients_straight_and_get_the_same(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 1)

    class Twice(nn.Module):
        """A layer used twice, one tied to another kind of layer, and one of sequences."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(torch.tanh(self.first(x))))
            sequence = self.again(hidden.unsqueeze(1).expand(-1, 2, -1)).mean(1)
            return self.last(sequence + F.linear(hidden, self.again.weight))

    plain = Twice()
    wanted = alone(plain, optim.AdamW(plain.parameters()))
    host = Host(tmp_path)
    models = [Twice(), Twice()]
    workers = [ThreadWorker(host, slot, m, optim.AdamW(m.parameters())) for slot, m in enumerate(models)]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    assert isinstance(models[0].first, linear.Linear)
    for ids in BATCHES:
        host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss, accumulate))
    same(state_of(models[1]), wanted)


def test_a_backward_of_the_users_own_does_not_touch_the_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 1)
    model = mlp()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.enter(1, (0,))
    copied = copy.deepcopy(model)
    assert copied[0].shoal_target is None

    def penalized(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        inputs = INPUTS[ids].clone().requires_grad_()
        slope = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]
        return mean_loss(model, ids) + slope.square().mean()

    plain = mlp()
    wanted = alone(plain, optim.SGD(plain.parameters(), lr=0.1), loss=penalized, batches=BATCHES[:3])
    for ids in BATCHES[:3]:
        worker.step(ids, penalized)
    same(state_of(model), wanted)


def test_metrics_are_averaged_over_samples_and_known_to_a_worker_with_an_empty_share(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = [
        ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.1)) for slot, m in enumerate([mlp(), mlp(), mlp()])
    ]
    for worker in workers:
        worker.metrics = {"id": lambda ids: ids.double().mean().item()}
    host.together(workers, lambda one: one.enter(1, range(3)))
    for ids in ([3, 9], [1, 2, 6, 7]):
        for report in host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss)):
            assert report.metrics == {"id": pytest.approx(sum(ids) / len(ids))}


def test_more_metrics_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    model = mlp()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.metrics = {f"metric {index}": lambda ids: 1.0 for index in range(40)}
    worker.enter(1, (0,))
    with pytest.raises(errors.SettingsContradict, match="40 metrics"):
        worker.step(BATCHES[0], mean_loss)


def test_independent_workers_accumulate_and_scale_their_rate_too(tmp_path: Path) -> None:
    host = Host(tmp_path)
    models = [mlp(), mlp()]
    policy = Policy(schedule=LinearScaling())
    workers = [
        ThreadWorker(host, slot, m, optim.SGD(m.parameters(), lr=0.05), sync=Independent(), policy=policy)
        for slot, m in enumerate(models)
    ]
    host.together(workers, lambda one: one.enter(1, (0, 1)))
    host.together(workers, lambda one: one.step(BATCHES[0], mean_loss, accumulate=3))
    plain = mlp()
    same(state_of(models[0]), alone(plain, optim.SGD(plain.parameters(), lr=0.1), batches=[BATCHES[0][:7]]))


def test_a_backward_of_the_users_own_leaves_its_gradients_to_the_user(tmp_path: Path) -> None:
    model = mlp()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.enter(1, (0,))

    def attacked(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        mean_loss(model, ids).backward()
        assert model[0].weight.grad is not None
        return mean_loss(model, ids)

    plain = mlp()
    wanted = alone(plain, optim.SGD(plain.parameters(), lr=0.1), batches=BATCHES[:2])
    for ids in BATCHES[:2]:
        worker.step(ids, attacked)
    same(state_of(model), wanted)


def test_another_weight_that_stands_in_for_a_call_gets_its_own_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 1)
    model = mlp()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.enter(1, (0,))
    other = torch.ones(17, 6, dtype=torch.float64, requires_grad=True)
    worker.step(
        BATCHES[0], lambda m, ids: torch.func.functional_call(m, {"0.weight": other}, INPUTS[ids]).square().mean()
    )
    assert other.grad is not None
    assert other.grad.abs().sum() > 0


@pytest.mark.parametrize("rate", [0.0, 1e-7])
def test_what_an_optimizer_is_does_not_depend_on_its_learning_rate(rate: float) -> None:
    model = mlp()
    assert unit_of(optim.Adafactor(model.parameters(), lr=rate), 0, torch.float64) == "tensor"
    assert unit_of(optim.AdamW(model.parameters(), lr=rate), 0, torch.float64) == "element"


def test_a_skipped_step_does_not_keep_the_statistics_of_its_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1), policy=Policy(nan="skip"))
    worker.enter(1, (0,))
    before = state_of(model)
    worker.step(BATCHES[0], lambda m, ids: F.mse_loss(m(INPUTS[ids] * float("nan")), TARGETS[ids]))
    same(state_of(model), before, 0)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: optim.lr_scheduler.MultiStepLR(o, [2, 4], 0.1),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "Sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o, 0.1), optim.lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_from_their_text(name: str) -> None:
    replicas = []
    for _ in range(2):
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer._opt_called = True
        replicas.append(Replica(model, optimizer, [SCHEDULERS[name](optimizer)]))
    veteran, newcomer = replicas
    for _ in range(3):
        veteran.schedulers[0].step()
    newcomer.take_text(veteran.text())
    for _ in range(6):
        assert newcomer.options_text() == veteran.options_text()
        veteran.schedulers[0].step()
        newcomer.schedulers[0].step()


def test_state_that_an_option_needs_cannot_appear_after_attaching(tmp_path: Path) -> None:
    model = mlp()
    worker = ThreadWorker(Host(tmp_path), 0, model, optim.SGD(model.parameters(), lr=0.1))
    worker.enter(1, (0,))
    worker.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(errors.OptimizerUnusable, match=r"after attach\(\)"):
        worker.step(BATCHES[0], mean_loss)
