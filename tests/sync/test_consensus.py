"""How fast workers agree, by eigenvalues, against workers that do average."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TopologyUnusable
from shoal.sync import consensus
from shoal.sync.mixing import Mixing

CONNECTED = st.builds(
    lambda workers, chance, seed: nx.compose(
        nx.gnp_random_graph(workers, chance, seed=seed, directed=True), nx.cycle_graph(workers, nx.DiGraph)
    ),
    st.integers(2, 12),
    st.floats(0, 0.5),
    st.integers(0, 99),
)
SPLIT = Mixing.from_graph(nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3)))
SWAP = Mixing.from_matrix([[0.0, 1.0], [1.0, 0.0]])


def averaged(values: np.ndarray, mixings: list[Mixing], steps: int) -> np.ndarray:
    """Each worker by its own part, as workers do it."""
    for step in range(steps):
        mixing = mixings[step % len(mixings)]
        parts = [mixing.neighborhood(rank) for rank in range(mixing.workers)]
        values = np.array(
            [
                part.self_weight * values[part.rank] + sum(weight * values[i] for i, weight in part.sources.items())
                for part in parts
            ]
        )
    return values


def disagreement(values: np.ndarray) -> float:
    return float(np.linalg.norm(values - values.mean()))


@given(CONNECTED)
def test_steps_to_hear_of_everybody_are_the_diameter(graph: nx.DiGraph) -> None:
    assert consensus.steps_to_hear([Mixing.from_graph(graph)]) == nx.diameter(graph)


@given(CONNECTED, st.integers(0, 9))
def test_after_the_steps_told_disagreement_is_a_thousandth_and_a_step_earlier_it_need_not_be(
    graph: nx.DiGraph, seed: int
) -> None:
    mixings = [Mixing.from_graph(graph)]
    steps = consensus.steps_to_agree(mixings)
    assert steps is not None
    values = np.random.default_rng(seed).standard_normal(len(graph))
    assert disagreement(averaged(values, mixings, steps)) <= disagreement(values) / 1000 * (1 + 1e-6)
    before = np.linalg.matrix_power(mixings[0].matrix(), steps - 1)
    left, _, _ = np.linalg.svd(before @ (np.eye(len(graph)) - 1 / len(graph)))
    worst = left[:, 0]  # the values that agree slowest
    assert disagreement(averaged(worst, mixings, steps - 1)) > disagreement(worst) / 1000 * (1 - 1e-6)


@given(st.integers(3, 12), st.floats(0.2, 0.9), st.integers(0, 9))
def test_values_that_are_averaged_again_and_again_agree_at_the_rate_of_the_second_eigenvalue(
    workers: int, chance: float, seed: int
) -> None:
    graph = nx.compose(nx.gnp_random_graph(workers, chance, seed=seed), nx.cycle_graph(workers))
    mixing = Mixing.from_graph(graph, "metropolis")
    rate = consensus.rate([mixing])
    assert consensus.spectral_gap([mixing]) == pytest.approx(1 - rate)
    if rate < 0.01:
        return  # what is left is rounding
    values = np.random.default_rng(seed).standard_normal(workers)
    values -= values.mean()
    for _ in range(2000):  # power iteration: the slowest part is all that is left
        values = averaged(values, [mixing], 1)
        values = (values - values.mean()) / disagreement(values)
    assert disagreement(averaged(values, [mixing], 1)) == pytest.approx(rate, rel=1e-3)


def test_steps_that_differ_are_multiplied_in_their_order() -> None:
    first, second = Mixing.from_matrix([[1, 0.5], [0, 0.5]]), Mixing.from_matrix([[0.2, 0], [0.8, 1]])
    values = np.array([1.0, 5.0])
    assert np.allclose(consensus.product([first, second]).T @ values, averaged(values, [first, second], 2))
    assert not np.allclose(consensus.product([second, first]).T @ values, averaged(values, [first, second], 2))


def test_the_rate_of_a_period_is_a_steps_and_its_gap_the_whole_periods() -> None:
    mixing = Mixing.from_graph(nx.cycle_graph(6), "metropolis")
    assert consensus.rate([mixing] * 3) == pytest.approx(consensus.rate([mixing]))
    assert consensus.spectral_gap([mixing] * 3) == pytest.approx(1 - consensus.rate([mixing]) ** 3)
    assert consensus.steps_to_agree([mixing] * 3) == consensus.steps_to_agree([mixing])


@pytest.mark.parametrize("mixing", [SPLIT, SWAP])
def test_workers_that_never_agree_have_no_gap_and_no_number_of_steps(mixing: Mixing) -> None:
    assert consensus.spectral_gap([mixing]) == pytest.approx(0, abs=1e-12)
    assert consensus.steps_to_agree([mixing]) is None


def test_workers_in_two_parts_never_hear_of_each_other() -> None:
    assert consensus.steps_to_hear([SPLIT]) is None
    assert consensus.steps_to_hear([SPLIT, Mixing.from_graph(nx.cycle_graph(6))]) is not None


def test_one_worker_agrees_with_itself_at_once() -> None:
    alone = [Mixing.from_matrix([[1.0]])]
    assert (consensus.spectral_gap(alone), consensus.steps_to_hear(alone), consensus.steps_to_agree(alone)) == (1, 0, 0)


def test_where_weights_do_not_sum_to_1_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(TopologyUnusable, match="rank 0 of 2 takes 2"):
        consensus.steps_to_agree([Mixing.from_matrix([[2.0, 0], [0, 0.1]])])
