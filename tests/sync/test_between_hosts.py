"""What AllReduce computes on several hosts is what one process computes, and every host has the same bits of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from shoal.errors import Changed
from shoal.sync.allreduce import AllReduce
from shoal.sync.far_buckets import Tuning
from shoal.train.attempt import Policy
from tests.sync.harness import Host, ThreadWorker, state_of
from tests.sync.test_allreduce import BATCHES, INPUTS, OPTIMIZERS, TARGETS, alone, mean_loss, mlp, same

LAYOUTS = [(1, 1), (2, 2), (4, 1), (1, 1, 1), (2, 1, 3)]
Made = tuple[nn.Module, torch.optim.Optimizer]


def workers_on(folder: Path, layout: Sequence[int], make: Callable[[], Made], **how: Any) -> list[ThreadWorker]:
    """So many on each host; slots one after the other."""
    hosts = [Host(folder, f"host{index}", networked=True) for index in range(len(layout))]
    homes = [host for host, n in zip(hosts, layout, strict=True) for _ in range(n)]
    sync = how.pop("sync", AllReduce)
    return [ThreadWorker(host, slot, *make(), sync=sync(), **how) for slot, host in enumerate(homes)]


def begin(number: int, workers: Sequence[ThreadWorker]) -> None:
    Host.together(workers, lambda one: one.enter_with(number, workers))


def train(workers: Sequence[ThreadWorker], batches: Sequence[Sequence[int]], loss: Any = mean_loss) -> None:
    for ids in batches:
        Host.together(workers, lambda one, ids=ids: one.step(ids, loss))
        assert len({one.sync.digest(one.group.seq) for one in workers}) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["SGD momentum, decay", "AdamW", "RMSprop", "Adafactor"])
def test_hosts_of_any_size_step_as_one_process_does(name: str, layout: tuple[int, ...], tmp_path: Path) -> None:
    def make() -> Made:
        model = mlp()
        return model, OPTIMIZERS[name](model.parameters())

    workers = workers_on(tmp_path, layout, make)
    begin(1, workers)
    train(workers, BATCHES)
    wanted = alone(*make())
    for worker in workers:
        same(state_of(worker.model), wanted, 1e-10)


@pytest.mark.parametrize("layout", [(2, 1), (1, 3)], ids=str)
def test_hosts_have_the_same_bits_in_single_precision_also_with_clipping_and_batchnorm(
    layout: tuple[int, ...], tmp_path: Path
) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 391), nn.BatchNorm1d(391), nn.Tanh(), nn.Linear(391, 3))
        return model, optim.AdamW(model.parameters(), lr=0.01)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(INPUTS[ids].float()), TARGETS[ids].float())

    workers = workers_on(tmp_path, layout, make, policy=Policy(clip_norm=0.05))
    begin(1, workers)
    train(workers, BATCHES, loss)  # which compares the digests


def test_a_tensor_that_only_one_host_has_a_gradient_for_is_stepped_on_all_and_one_without_on_none(
    tmp_path: Path,
) -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.always, self.low, self.high, self.never = (nn.Linear(6, 3).double() for _ in range(4))

        def forward(self, inputs: torch.Tensor, low: bool, high: bool) -> torch.Tensor:
            outputs: torch.Tensor = self.always(inputs)
            outputs = outputs + self.low(inputs) if low else outputs
            return outputs + self.high(inputs) if high else outputs

    def make() -> Made:
        model = Forked()
        return model, optim.AdamW(model.parameters(), lr=0.01)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        # The first samples of a batch are the first host's: sums over samples make the loss of the whole batch.
        parts = [
            F.mse_loss(model(INPUTS[[index]], position < 6, position >= 6), TARGETS[[index]])
            for index, position in zip(ids.tolist(), places[ids].tolist(), strict=True)
        ]
        return torch.stack(parts).mean()

    places = torch.zeros(64, dtype=torch.long)
    workers = workers_on(tmp_path, (1, 1), make)
    begin(1, workers)
    model, optimizer = make()
    for ids in BATCHES[:4]:
        places[torch.tensor(ids)] = torch.arange(len(ids))
        Host.together(workers, lambda one, ids=ids: one.step(ids, loss))
        optimizer.zero_grad()
        loss(model, torch.tensor(ids)).backward()
        optimizer.step()
    for worker in workers:
        same(state_of(worker.model), state_of(model), 1e-10)


@pytest.mark.parametrize("name", ["SGD momentum, decay", "AdamW", "Adafactor"])
def test_hosts_come_and_go_and_newcomers_have_the_state(name: str, tmp_path: Path) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Linear(17, 3)).double()
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, OPTIMIZERS[name](trained)

    workers = workers_on(tmp_path, (2, 1, 2), make)
    w0, w1, w2, w3, w4 = workers
    for number, (here, batches) in enumerate(
        [
            ([w0, w1], BATCHES[:2]),  # one host
            ([w0, w1, w2], BATCHES[2:3]),  # a second one
            ([w1, w2, w3, w4], BATCHES[3:5]),  # a third, with two at once; the eldest has gone
            ([w2, w3, w4], BATCHES[5:6]),  # the first host has nobody any more
            ([w4], BATCHES[6:]),
        ],
        start=1,
    ):
        begin(number, here)
        train(here, batches)
    same(state_of(w4.model), alone(*make()), 1e-10)


def test_a_host_that_was_given_up_takes_the_state_whatever_its_memory_holds(tmp_path: Path) -> None:
    def make() -> Made:
        model = mlp()
        return model, OPTIMIZERS["AdamW"](model.parameters())

    w0, w1 = workers_on(tmp_path, (1, 1), make)
    begin(1, [w0, w1])
    train([w0, w1], BATCHES[:3])
    begin(2, [w0])
    train([w0], BATCHES[3:5])
    again = ThreadWorker(w1.host, 1, *make())  # a new process in the memory of the one before
    begin(3, [w0, again])
    train([w0, again], BATCHES[5:])
    same(state_of(again.model), alone(*make()), 1e-10)


def test_where_everybody_is_new_the_newest_state_in_memory_goes_on(tmp_path: Path) -> None:
    def make() -> Made:
        model = mlp()
        return model, OPTIMIZERS["AdamW"](model.parameters())

    w0, w1 = workers_on(tmp_path, (1, 1), make)
    begin(1, [w0, w1])
    train([w0, w1], BATCHES[:3])
    begin(2, [w1])
    train([w1], BATCHES[3:5])
    both = [ThreadWorker(w0.host, 0, *make()), ThreadWorker(w1.host, 1, *make())]
    begin(3, both)
    train(both, BATCHES[5:])
    same(state_of(both[0].model), alone(*make()), 1e-10)


def test_an_edit_reaches_every_host(tmp_path: Path) -> None:
    def make() -> Made:
        model = mlp()
        return model, OPTIMIZERS["AdamW"](model.parameters())

    workers = workers_on(tmp_path, (1, 2), make)
    begin(1, workers)
    train(workers, BATCHES[:2])

    def edit(one: ThreadWorker) -> None:
        one.sync.open_edit()
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.mul_(0.5)
        one.stepper.edit(one.group, one.record)
        one.record = one.records.read(one.group.seq)

    before = state_of(workers[2].model)
    Host.together(workers, edit)
    for worker in workers:
        same(state_of(worker.model), {name: 0.5 * value for name, value in before.items()}, 0)
    train(workers, BATCHES[2:])


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_a_narrow_wire_loses_nothing_for_good_and_hosts_agree_on_every_bit(wire: Any, tmp_path: Path) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        return model, optim.SGD(model.parameters(), lr=0.01)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(INPUTS[ids].float()).sum(dim=1).mean()  # the gradient does not depend on the parameters

    workers = workers_on(tmp_path, (1, 1), make, sync=lambda: AllReduce(wire=wire))
    begin(1, workers)
    batches = [BATCHES[0]] * 200
    train(workers, batches, loss)
    wanted = alone(*make(), loss=loss, batches=batches)
    moved = wanted["weight"] - make()[0].weight.detach()
    off = (state_of(workers[0].model)["weight"] - wanted["weight"]).abs().max() / moved.abs().max()
    assert off < 2e-4  # one rounding at most, after 200; without feedback it would be the same error each time


def large() -> Made:
    """With a layer whose gradient goes straight to the lane, and small ones around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 3)).double()
    return model, optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)], ids=str)
def test_gradients_are_on_their_way_before_backward_has_ended(layout: tuple[int, ...], tmp_path: Path) -> None:
    workers = workers_on(tmp_path, layout, large)
    begin(1, workers)
    left: list[int] = []

    def ready(worker: ThreadWorker) -> None:
        exchange = worker.sync._exchange  # type: ignore[attr-defined]
        offer = exchange.offer

        def counted(present: Any, *, trains: bool) -> None:
            left.append(len(exchange._left))
            offer(present, trains=trains)

        exchange.offer = counted

    for worker in workers:
        ready(worker)
    # Enough steps to have tried out every number of buckets.
    train(workers, BATCHES * 3)
    assert 0 in left  # everything was given by then
    same(state_of(workers[0].model), alone(*large(), batches=BATCHES * 3), 1e-9)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_sent_once_they_are_complete(accumulate: int, tmp_path: Path) -> None:
    workers = workers_on(tmp_path, (2, 1), large)
    begin(1, workers)
    for ids in BATCHES * 3:
        Host.together(workers, lambda one, ids=ids: one.step(ids, mean_loss, accumulate))
    same(state_of(workers[2].model), alone(*large(), batches=BATCHES * 3), 1e-9)


def test_a_gradient_that_grows_after_it_was_sent_makes_the_step_come_again_and_waits_from_then_on(
    tmp_path: Path,
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 1024).double()
            self.twice = nn.Linear(1024, 1024, bias=False).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.twice(torch.tanh(self.twice(self.first(inputs))))
            return outputs[:, :3]

    def make() -> Made:
        model = Twice()
        return model, optim.SGD(model.parameters(), lr=0.01)

    workers = workers_on(tmp_path, (1, 1), make)
    begin(1, workers)
    ended: list[int] = []

    def step(one: ThreadWorker, ids: Sequence[int]) -> None:
        try:
            one.step(ids, mean_loss)
        except Changed:
            ended.append(one.slot)
            # As the coordinator does when it is told of a connection that ended.
            assert one.broken

    number, batches = 1, list(BATCHES * 3)
    while batches:
        ended.clear()
        Host.together(workers, lambda one: step(one, batches[0]))
        if ended:
            assert sorted(ended) == [0, 1]
            number += 1
            begin(number, workers)
        else:
            batches.pop(0)
    assert 1 < number <= 4  # once for each tensor of the layer at most
    same(state_of(workers[0].model), alone(*make(), batches=BATCHES * 3), 1e-9)


def test_a_loss_that_is_not_finite_on_one_host_is_skipped_on_all(tmp_path: Path) -> None:
    def make() -> Made:
        model = mlp()
        return model, OPTIMIZERS["AdamW"](model.parameters())

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        value = mean_loss(model, ids)
        return value * torch.nan if bad and 0 in ids else value

    workers = workers_on(tmp_path, (1, 2), make, policy=Policy(nan="skip"))
    begin(1, workers)
    for at, ids in enumerate(BATCHES):
        bad = at == 3
        train(workers, [[*range(13)] if bad else ids], loss)
    kept = [ids for at, ids in enumerate(BATCHES) if at != 3]
    same(state_of(workers[1].model), alone(*make(), batches=kept), 1e-10)


def test_when_some_train_and_one_edits_the_edit_counts_and_the_generation_begins_again(tmp_path: Path) -> None:
    workers = workers_on(tmp_path, (1, 1), large)
    begin(1, workers)
    train(workers, BATCHES[:6])
    before = state_of(workers[0].model)

    def edit_or_train(one: ThreadWorker) -> None:
        if one.slot:
            attempt_step(one)
            return
        one.sync.open_edit()
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.mul_(0.5)
        assert one.stepper.edit(one.group, one.record)  # a newer generation follows
        one.record = one.records.read(one.group.seq)

    def attempt_step(one: ThreadWorker) -> None:
        with pytest.raises(AssertionError):
            one.step(BATCHES[6], mean_loss)  # which says that nothing was committed of it
        one.record = one.records.read(one.group.seq)

    Host.together(workers, edit_or_train)
    assert all(one.broken for one in workers)
    for worker in workers:
        same(state_of(worker.model), {name: 0.5 * value for name, value in before.items()}, 0)
    begin(2, workers)
    train(workers, BATCHES[6:])


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)], ids=str)
def test_checksums_of_hosts_are_alike_and_one_bit_shows_in_the_tensor_that_has_it(
    layout: tuple[int, ...], tmp_path: Path
) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3)).double()
        return model, optim.AdamW(model.parameters(), lr=0.01)

    workers = workers_on(tmp_path, layout, make)
    begin(1, workers)
    train(workers, BATCHES[:3])
    copies = workers[0].sync.copies(workers[0].group)
    assert copies == tuple(
        tuple(one.member.worker_id for one in workers if one.host is host)
        for host in dict.fromkeys(one.host for one in workers)
    )
    first, last = workers[0].sync, workers[-1].sync
    seq = workers[0].group.seq
    assert first.checksums(seq)() == last.checksums(seq)()
    assert {"1.running_mean", "optimizer/3.weight/exp_avg_sq"} <= first.checksums(seq)().keys()
    assert isinstance(last, AllReduce)
    last._arena.planes[0]["exp_avg"][seq & 1].view(torch.int64)[0] ^= 1
    ours, theirs = first.checksums(seq)(), last.checksums(seq)()
    assert [name for name in ours if ours[name] != theirs[name]] == ["optimizer/0.weight/exp_avg"]


@pytest.mark.parametrize(("took_ms", "chosen"), [((101, 100, 100, 100), 0), ((110, 103, 101, 100), 2)])
def test_of_buckets_that_are_as_quick_the_fewest_are_chosen(took_ms: Sequence[int], chosen: int) -> None:
    tuning = Tuning()
    while not tuning.settled:
        candidate = tuning.next()
        tuning.note(candidate, took_ms[candidate] / 1e3)
    assert tuning.next() == chosen
    assert f"in {('1 bucket', '8 buckets', '16 buckets')[chosen]} (" in str(tuning)
