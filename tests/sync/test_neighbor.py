"""Neighbors, as threads with real mailboxes: what they average, and whom they do not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal import topology
from shoal.control.generation import Generation, Member
from shoal.errors import SettingsContradict, TopologyUnusable
from shoal.sync.group import Group
from shoal.sync.local_sgd import LocalSGD
from shoal.sync.neighbor import Neighbor
from shoal.sync.notice import Notice
from shoal.sync.replica import Replica
from shoal.sync.sync import Sync, Verdict
from shoal.sync.words import Words
from tests.sync.harness import JOIN_S, SharedMemory, together

Order = Literal["atc", "awc"]
RATE = 0.5
SPECS = ["ring", "ring('left')", "exponential_2", "star", "mesh_2d", "fully_connected", "one_peer(exponential_2)",
         "random_matching", "metropolis(star)", "random_regular(2)"]  # fmt: skip


class Worker:
    """One vector of parameters, stepped with gradients that are given."""

    def __init__(self, memory: SharedMemory, slot: int, values: Sequence[float], sync: Sync, name: str = "") -> None:
        self.slot, self.name = slot, name or f"w{slot}"
        self.parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        model = nn.ParameterDict({"vector": self.parameter})
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.words = Words(memory)
        self.notice = Notice(self.words)
        self.sync = sync
        sync.bind(Replica(model, self.optimizer), memory, self.words, slot, lambda tensors: None)

    def enter(self, number: int, workers: Sequence[Worker]) -> None:
        members = tuple(Member(it.name, it.slot, "here") for it in workers)
        self.group = Group(self.words, self.notice, Generation(number, members), self.name, spin=False)
        self.sync.enter(self.group)

    def step(self, gradient: Sequence[float]) -> None:
        self.parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        self.sync.prepare(self.group, Verdict(True, None))
        self.group.seq += 1
        self.sync.settle(self.group)

    def steps(self, count: int, gradient: Sequence[float]) -> None:
        """So many, as in a pass: at its end nobody waits for this worker any more."""
        for _ in range(count):
            self.step(gradient)
        self.sync.rest()

    @property
    def values(self) -> Any:
        return self.parameter.detach().numpy().copy()


def made(
    number: int, spec: str | topology.Topology, order: Order = "atc", every: int = 0, **options: Any
) -> list[Worker]:
    """With `every`, in LocalSGD."""
    memory = SharedMemory()
    rng = np.random.default_rng(number)

    def sync() -> Sync:
        inner = Neighbor(spec, order=order, **options)
        return LocalSGD(inner, every=every) if every else inner

    workers = [Worker(memory, slot, rng.normal(size=3).tolist(), sync()) for slot in range(number)]
    together(*[lambda it=it: it.enter(1, workers) for it in workers])  # type: ignore[misc]
    return workers


@given(st.integers(1, 9), st.sampled_from(SPECS), st.sampled_from(["atc", "awc"]), st.integers(0, 2**32 - 1))
def test_each_step_is_what_the_mixing_matrix_says(number: int, spec: str, order: Order, seed: int) -> None:
    workers, steps = made(number, spec, order), 5
    start = workers[0].values
    assert all(np.array_equal(it.values, start) for it in workers), "all begin with the lowest rank's"
    gradients = np.random.default_rng(seed).normal(size=(steps, number, 3))
    together(*[
        lambda it=it: [it.step(gradients[step, it.slot].tolist()) for step in range(steps)]  # type: ignore[misc]
        for it in workers
    ])  # fmt: skip
    expected = np.tile(start, (number, 1))
    schedule = topology.parse(spec).on(number)
    for step in range(steps):
        if order == "atc":
            mixing = schedule.mixing(step + 1).matrix()
            expected = mixing.T @ (expected - RATE * gradients[step])
        else:
            mixing = schedule.mixing(step).matrix()
            expected = mixing.T @ expected - RATE * gradients[step]
    for worker in workers:
        assert np.allclose(worker.values, expected[worker.slot], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_local_sgd_averages_at_the_last_of_every_so_many_steps(number: int, every: int, seed: int) -> None:
    workers, steps = made(number, "ring", every=every), 6
    expected = np.tile(workers[0].values, (number, 1))
    gradients = np.random.default_rng(seed).normal(size=(steps, number, 3))
    together(*[
        lambda it=it: [it.step(gradients[step, it.slot].tolist()) for step in range(steps)]  # type: ignore[misc]
        for it in workers
    ])  # fmt: skip
    for step in range(steps):
        expected = expected - RATE * gradients[step]
        if (step + 1) % every == 0:
            expected = topology.parse("ring").on(number).mixing().matrix().T @ expected
    for worker in workers:
        assert np.allclose(worker.values, expected[worker.slot], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [lambda: LocalSGD(Neighbor(order="awc")), lambda: LocalSGD(Neighbor(), every=0),
                                   lambda: Neighbor(order="cta"), lambda: Neighbor(patience_s=0)])  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: Callable[[], Sync]) -> None:
    with pytest.raises(SettingsContradict):
        wrong()


def test_weights_that_do_not_sum_to_one_are_told() -> None:
    workers = made(2, topology.custom(lambda number, step: np.full((number, number), 0.4), period=1))
    with pytest.raises(TopologyUnusable, match=r"rank . takes 0\.8 of itself and its neighbors"):
        together(*[lambda it=it: it.step([0.0] * 3) for it in workers])  # type: ignore[misc]


def test_without_gradients_all_come_to_the_average_at_the_rate_of_the_spectral_gap() -> None:
    workers, steps = made(7, "metropolis(ring)"), 60
    gradients = np.random.default_rng(0).normal(size=(7, 3))
    together(*[lambda it=it: it.step(gradients[it.slot].tolist()) for it in workers])  # type: ignore[misc]
    mean = np.mean([it.values for it in workers], axis=0)
    before = max(np.abs(it.values - mean).max() for it in workers)
    together(*[lambda it=it: it.steps(steps, [0.0] * 3) for it in workers])  # type: ignore[misc]
    assert all(np.allclose(it.values, mean, atol=1e-6) for it in workers)
    matrix = topology.parse("metropolis(ring)").on(7).mixing().matrix()
    second = sorted(np.abs(np.linalg.eigvals(matrix)))[-2]
    assert max(np.abs(it.values - mean).max() for it in workers) <= 10 * before * second**steps


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_the_weight_of_one_that_rests_is_folded_back_and_nobody_waits_for_it(order: Order) -> None:
    workers = made(4, "fully_connected", order, patience_s=JOIN_S)
    resting, active = workers[3], workers[:3]
    resting.sync.rest()
    together(*[lambda it=it: it.steps(6, [1.0, 0.0, 0.0]) for it in active])  # type: ignore[misc]
    start = resting.values
    # The others agree at all times, so that what they average is their own.
    assert all(np.allclose(it.values, start - np.array([6 * RATE, 0, 0])) for it in active)
    # It comes back at the round of the others, who wait for it and take it into their average again.
    resting.step([0.0] * 3)
    together(*[lambda it=it: it.steps(60, [0.0] * 3) for it in workers])  # type: ignore[misc]
    assert np.ptp([it.values for it in workers], axis=0).max() < 1e-6


def test_one_that_is_silent_is_not_waited_for_again() -> None:
    workers = made(3, "fully_connected", patience_s=0.1)
    together(*[lambda it=it: it.steps(50, [1.0, 0.0, 0.0]) for it in workers[:2]])  # type: ignore[misc]
    assert np.allclose(workers[0].values, workers[1].values)
    assert not np.allclose(workers[0].values, workers[2].values)


def test_a_death_ends_the_wait_for_it_and_the_graph_is_made_anew() -> None:
    workers = made(3, "ring", patience_s=JOIN_S)
    waits = threading.Event()

    def survivor(it: Worker) -> None:
        it.step([0.0] * 3)  # for which the third never comes
        it.enter(2, workers[:2])
        it.step([0.0] * 3)

    def coordinator() -> None:
        for it in workers[:2]:
            while it.notice.awaited is None:
                waits.wait(0.001)
        members = tuple(Member(it.name, it.slot, "here") for it in workers[:2])
        for it in workers[:2]:
            it.notice.tell(Generation(2, members, fault=True))

    together(coordinator, *[lambda it=it: survivor(it) for it in workers[:2]])  # type: ignore[misc]
    assert np.allclose(workers[0].values, workers[1].values)


def test_a_newcomer_begins_where_the_others_are_and_what_its_slot_held_is_nobodys() -> None:
    memory = SharedMemory()
    sync = {"topology": "ring", "patience_s": JOIN_S}
    old = [Worker(memory, slot, [float(slot)] * 3, Neighbor(**sync)) for slot in range(2)]  # type: ignore[arg-type]
    together(*[lambda it=it: it.enter(1, old) for it in old])  # type: ignore[misc]
    together(*[lambda it=it: it.steps(5, [1.0] * 3) for it in old])  # type: ignore[misc]
    newcomer = Worker(memory, 1, [9.0] * 3, Neighbor(**sync), "w7")  # type: ignore[arg-type]
    now = [old[0], newcomer]
    newcomer.enter(2, now)
    assert np.allclose(newcomer.values, old[0].values)
    old[0].enter(2, now)
    together(*[lambda it=it: it.steps(5, [1.0] * 3) for it in now])  # type: ignore[misc]
    assert np.allclose(newcomer.values, old[0].values)
    assert np.allclose(newcomer.values, [-10 * RATE] * 3)
