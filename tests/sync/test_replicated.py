"""Replicas of one model: what a step, an edit, a skipped step and a newcomer come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import errors
from shoal.sync.batchnorm import SyncBatchNorm
from shoal.sync.replicated import Replicated
from shoal.sync.scaling import LossScaler
from shoal.train.attempt import Policy
from tests.sync.harness import Host, ThreadWorker, state_of

# Ranks that share a GPU are processes, so those are in tests/job. Here is one worker on a GPU, and threads on CPUs.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = list(range(24))

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def network(device: str, *, norm: bool = False, seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 9), nn.Tanh(), nn.Linear(9, 5)]
    if norm:
        layers.insert(1, nn.BatchNorm2d(8))
    return nn.Sequential(*layers).to(device, dtype).to(memory_format=torch.channels_last)


def loss_on(device: str, dtype: torch.dtype = torch.float64, factor: float = 1.0) -> Loss:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, 3, 6, 6, generator=generator, dtype=torch.float64).to(device, dtype)
    targets = torch.arange(24, device=device) % 5
    return lambda net, ids: factor * nn.functional.cross_entropy(net(inputs[ids]), targets[ids])


def replica(host: Host, slot: int, device: str = "cpu", sync: Replicated | None = None, **more: Any) -> ThreadWorker:
    policy, schedulers = more.pop("policy", None), more.pop("schedulers", ())
    net = network(device, **more)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return ThreadWorker(host, slot, net, optimizer, sync or Replicated(), policy, schedulers)


def three(host: Host, **more: Any) -> list[ThreadWorker]:
    workers = [replica(host, slot, seed=slot, **more) for slot in range(3)]
    host.together(workers, lambda one: one.enter(1, [0, 1, 2]))
    return workers


def alike(workers: list[ThreadWorker]) -> bool:
    assert workers[0].sync.digest(workers[0].group.seq)
    return len({one.sync.digest(one.group.seq) for one in workers}) == 1


def plain(device: str, steps: int, clip_norm: float | None = None, seed: int = 1) -> dict[str, torch.Tensor]:
    net, loss = network(device, seed=seed), loss_on(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net, torch.tensor(IDS)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return state_of(net)


def close(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(value, state[name], rtol=0, atol=1e-9) for name, value in state_of(model).items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_replica_takes_the_steps_of_a_plain_loop(tmp_path: Path, device: str, accumulate: int) -> None:
    alone = replica(Host(tmp_path), 0, device, policy=Policy(clip_norm=0.1))
    alone.enter(1, [0])
    reports = [alone.step(IDS, loss_on(device), accumulate) for _ in range(4)]
    assert close(alone.model, plain(device, 4, clip_norm=0.1))
    assert all(report.gradient_norm is not None and report.gradient_norm > 0.1 for report in reports)
    assert reports[0].loss > reports[-1].loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_replicas_begin_with_rank_0s_model_and_take_the_steps_of_one(tmp_path: Path, accumulate: int) -> None:
    host = Host(tmp_path)
    workers = three(host, policy=Policy(clip_norm=0.1))
    for _ in range(4):
        host.together(workers, lambda one: one.step(IDS, loss_on("cpu"), accumulate))
    assert alike(workers)
    assert close(workers[0].model, plain("cpu", 4, clip_norm=0.1, seed=0))


def test_a_worker_without_samples_takes_the_same_step(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host)
    host.together(workers, lambda one: one.step(IDS[:2], loss_on("cpu")))  # rank 2's share is empty
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    assert alike(workers)


def test_a_parameter_without_gradient_anywhere_is_not_stepped(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host)
    before = workers[0].model[4].weight.clone()
    host.together(workers, lambda one: one.step(IDS, lambda net, ids: net[0].weight.square().sum()))
    assert torch.equal(workers[0].model[4].weight, before)
    assert alike(workers)


def test_statistics_of_batchnorm_are_the_lowest_ranks_after_each_commit(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host, norm=True)
    for step in range(1, 4):
        host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
        assert alike(workers)
        assert workers[2].model[1].num_batches_tracked == step


def test_a_step_that_is_given_up_leaves_no_trace(tmp_path: Path) -> None:
    alone = replica(Host(tmp_path), 0, norm=True)
    alone.enter(1, [0])
    alone.step(IDS, loss_on("cpu"))
    before = alone.sync.digest(alone.group.seq)
    alone.sync.begin()
    alone.sync.backward(loss_on("cpu")(alone.model, torch.tensor(IDS)), 1.0)
    alone.enter(2, [0])
    assert alone.sync.digest(alone.group.seq) == before
    assert alone.model[1].num_batches_tracked == 1


def test_a_loss_that_is_not_finite_changes_nothing_on_any_replica(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host, norm=True, policy=Policy(nan="skip"))
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    before = state_of(workers[1].model)
    poisoned = [loss_on("cpu", factor=float("nan") if slot == 1 else 1.0) for slot in range(3)]
    reports = host.together(workers, lambda one: one.step(IDS, poisoned[one.slot]))
    assert all(report.skipped for report in reports)
    assert all(torch.equal(value, before[name]) for name, value in state_of(workers[1].model).items())
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    assert alike(workers)


def test_newcomers_get_model_buffers_and_optimizer_state_and_go_on_as_the_others(tmp_path: Path) -> None:
    host = Host(tmp_path)
    first = replica(host, 0, norm=True)
    first.enter(1, [0])
    for _ in range(3):
        first.step(IDS, loss_on("cpu"))
    workers = [first, replica(host, 1, norm=True, seed=8), replica(host, 2, norm=True, seed=9)]
    host.together(workers, lambda one: one.enter(2, [0, 1, 2]))
    assert alike(workers)
    assert workers[2].optimizer.state[workers[2].model[0].weight]["step"] == 3
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    assert alike(workers)


def test_an_edit_of_one_is_everybodys(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host)

    def edit(one: ThreadWorker) -> None:
        one.sync.open_edit()
        with torch.no_grad():
            one.model[0].weight.fill_(float(one.slot + 7))
        one.stepper.edit(one.group, one.record)

    places = [one.model[0].weight.data_ptr() for one in workers]
    host.together(workers, edit)
    assert all(bool((one.model[0].weight == 7.0).all()) for one in workers)
    assert alike(workers)
    assert places == [one.model[0].weight.data_ptr() for one in workers]


def test_nobody_left_with_the_state_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    host = Host(tmp_path)
    first = replica(host, 0)
    first.enter(1, [0])
    first.step(IDS, loss_on("cpu"))
    with pytest.raises(errors.StateLost, match="shoal resume"):
        replica(host, 1).enter(2, [1])


def test_a_newcomer_with_another_model_is_told_when_it_attaches(tmp_path: Path) -> None:
    host = Host(tmp_path)
    replica(host, 0).enter(1, [0])
    with pytest.raises(errors.WorkersDiffer, match=r"is not the job's: .* is not in the job's"):
        replica(host, 1, norm=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_was_kept_is_the_one_of_that_commit(tmp_path: Path, device: str) -> None:
    alone = replica(Host(tmp_path), 0, device, norm=True)
    alone.enter(1, [0])
    alone.step(IDS, loss_on(device))
    kept = alone.sync.state(alone.group.seq)
    expected = {name: value.cpu() for name, value in state_of(alone.model).items()}
    alone.step(IDS, loss_on(device))
    assert all(torch.equal(value, expected[name]) for name, value in kept.model.items())
    assert kept.training["optimizer/0.weight/step"] == 1
    assert all(value.device.type == "cpu" for value in (*kept.model.values(), *kept.training.values()))


# BatchNorm over all.


def test_synced_batchnorm_of_three_is_the_batchnorm_of_one_and_follows_the_group(tmp_path: Path) -> None:
    host, loss = Host(tmp_path), loss_on("cpu")
    workers = []
    for slot in range(3):
        net = SyncBatchNorm.convert(network("cpu", norm=True))
        workers.append(ThreadWorker(host, slot, net, torch.optim.SGD(net.parameters(), lr=0.1), Replicated()))
    one = network("cpu", norm=True)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for number, slots in ((1, [0, 1, 2]), (2, [0, 2]), (3, [2])):
        here = [workers[slot] for slot in slots]
        host.together(here, lambda it, number=number, slots=slots: it.enter(number, slots))
        for ids in (IDS, IDS[:13]):  # the second is split unevenly
            host.together(here, lambda it, ids=ids: it.step(ids, loss))
            optimizer.zero_grad()
            loss(one, torch.tensor(ids)).backward()
            optimizer.step()
        assert alike(here)
        assert close(here[0].model, state_of(one))


# Scaled losses.


def test_an_overflow_halves_the_scale_and_leaves_the_model_as_it_is() -> None:
    scaler = LossScaler(8.0, growth_interval=2)
    scaler.found(overflow=True)
    assert scaler.scale == 8.0, "it is not committed yet"
    scaler.move_on()
    assert scaler.scale == 4.0
    for _ in range(2):
        scaler.found(overflow=False)
        scaler.move_on()
    assert scaler.scale == 8.0
    scaler.found(overflow=True)
    scaler.forget()
    scaler.move_on()
    assert scaler.scale == 8.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaled_loss_takes_the_same_steps_and_an_overflow_none(tmp_path: Path, device: str) -> None:
    scaler = LossScaler(1024.0)
    alone = replica(Host(tmp_path), 0, device, Replicated(scaler), schedulers=(scaler,))
    alone.enter(1, [0])
    for _ in range(3):
        alone.step(IDS, loss_on(device))
    assert close(alone.model, plain(device, 3))
    scaler.scale = float("inf")
    before = state_of(alone.model)
    alone.step(IDS, loss_on(device))
    assert all(torch.equal(value, before[name]) for name, value in state_of(alone.model).items())


def test_replicas_agree_on_an_overflow_that_one_of_them_has_and_a_newcomer_on_the_scale(tmp_path: Path) -> None:
    host = Host(tmp_path)
    scalers = [LossScaler(1024.0) for _ in range(4)]
    workers = [
        replica(host, slot, sync=Replicated(scalers[slot]), schedulers=(scalers[slot],), seed=slot) for slot in range(3)
    ]
    host.together(workers, lambda one: one.enter(1, [0, 1, 2]))
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))

    def overflow(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        weight = net[0].weight
        return (weight.abs().sum() * 1e300).clamp(max=1.0) * 0.0 + weight.square().sum() * 1e306

    losses = [loss_on("cpu"), overflow, loss_on("cpu")]
    host.together(workers, lambda one: one.step(IDS, losses[one.slot]))
    newcomer = replica(host, 3, sync=Replicated(scalers[3]), schedulers=(scalers[3],), seed=3)
    workers.append(newcomer)
    host.together(workers, lambda one: one.enter(2, [0, 1, 2, 3]))
    newcomer.replica.take_text(newcomer.records.text(newcomer.record.text_place, newcomer.record.text_bytes))
    newcomer.stepper.fresh = True
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    assert {scaler.scale for scaler in scalers} == {512.0}
    assert alike(workers)


# Half precision, compiled.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_precision_and_a_compiled_model_take_the_steps_of_the_plain_loop(
    tmp_path: Path, dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    scaler = LossScaler(2.0**12) if dtype == torch.float16 else None
    alone = replica(Host(tmp_path), 0, "cuda", Replicated(scaler), norm=True, dtype=torch.float32)
    other = network("cuda", norm=True, dtype=torch.float32)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    theirs = torch.amp.GradScaler("cuda", init_scale=2.0**12, enabled=scaler is not None)
    forwards = [torch.compile(net) if compiled else net for net in (alone.model, other)]
    loss = loss_on("cuda", torch.float32)

    def mixed(index: int, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return loss(forwards[index], ids)

    alone.enter(1, [0])
    for _ in range(5):
        alone.step(IDS, lambda net, ids: mixed(0, ids))
        optimizer.zero_grad()
        theirs.scale(mixed(1, torch.tensor(IDS))).backward()
        theirs.step(optimizer)
        theirs.update()
    for name, value in state_of(alone.model).items():
        assert torch.allclose(value, state_of(other)[name], rtol=0, atol=1e-5), name


def test_checksums_of_ranks_are_alike_and_one_bit_shows_in_the_tensor_that_has_it(tmp_path: Path) -> None:
    host = Host(tmp_path)
    workers = three(host, norm=True)
    host.together(workers, lambda one: one.step(IDS, loss_on("cpu")))
    assert workers[0].sync.copies(workers[0].group) == (("w0",), ("w1",), ("w2",))
    sums = [one.sync.checksums(one.group.seq)() for one in workers]
    assert sums[0] == sums[1] == sums[2]
    with torch.no_grad():
        workers[1].model[3].bias.view(torch.int64)[0] ^= 1
    after = workers[1].sync.checksums(workers[1].group.seq)()
    assert [name for name in after if after[name] != sums[1][name]] == ["3.bias"]


@pytest.mark.gpu
def test_checksums_on_a_device_see_one_bit(tmp_path: Path) -> None:
    alone = replica(Host(tmp_path), 0, "cuda", norm=True)
    alone.enter(1, [0])
    alone.step(IDS, loss_on("cuda"))
    before = alone.sync.checksums(alone.group.seq)()
    assert before == alone.sync.checksums(alone.group.seq)()
    with torch.no_grad():
        alone.model[3].bias.view(torch.int64)[0] ^= 1
    after = alone.sync.checksums(alone.group.seq)()
    assert [name for name in after if after[name] != before[name]] == ["3.bias"]
