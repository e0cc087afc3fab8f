"""The value of one step of averaging: made of matrices, graphs and weights, and refused where it averages nothing."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TopologyUnusable
from shoal.sync.mixing import Mixing, Neighborhood

GRAPHS = st.builds(
    lambda workers, chance, seed: nx.gnp_random_graph(workers, chance, seed=seed, directed=True),
    st.integers(1, 12),
    st.floats(0, 1),
    st.integers(0, 99),
)


@given(GRAPHS)
def test_uniform_weights_are_one_over_the_indegree_and_one(graph: nx.DiGraph) -> None:
    matrix = Mixing.from_graph(graph).matrix()
    for i in graph:
        for j in graph:
            expected = 1 / (graph.in_degree(j) + 1) if i == j or graph.has_edge(i, j) else 0.0
            assert matrix[i, j] == pytest.approx(expected, abs=1e-15)


@given(GRAPHS)
def test_metropolis_weights_of_an_undirected_graph_are_doubly_stochastic_and_symmetric(graph: nx.DiGraph) -> None:
    mixing = Mixing.from_graph(graph.to_undirected(), "metropolis")
    assert mixing.stochastic == "doubly"
    assert mixing.symmetric
    assert np.array_equal(mixing.matrix(), mixing.matrix().T)


@given(GRAPHS, st.sampled_from(["uniform", "metropolis"]))
def test_receivers_weights_sum_to_1_on_any_graph_and_none_is_below_0(graph: nx.DiGraph, weights) -> None:
    matrix = Mixing.from_graph(graph, weights).matrix()
    assert matrix.min() >= 0
    assert np.allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)


@given(GRAPHS)
def test_a_matrix_a_graph_and_weights_say_the_same(graph: nx.DiGraph) -> None:
    mixing = Mixing.from_graph(graph, "metropolis")
    parts = [mixing.neighborhood(rank) for rank in range(mixing.workers)]
    assert Mixing.from_matrix(mixing.matrix()) == mixing
    assert Mixing.from_graph(mixing.graph()) == mixing
    assert Mixing.from_weights([part.self_weight for part in parts], [part.sources for part in parts]) == mixing
    assert Mixing.of(mixing.links) == mixing


@given(GRAPHS)
def test_a_ranks_part_is_its_column_and_its_row(graph: nx.DiGraph) -> None:
    mixing = Mixing.from_graph(graph)
    matrix = mixing.matrix()
    for rank in graph:
        part = mixing.neighborhood(rank)
        assert part.self_weight == matrix[rank, rank]
        assert part.sources == {i: matrix[i, rank] for i in graph.predecessors(rank)}
        assert part.destinations == {j: matrix[rank, j] for j in graph.successors(rank)}


@given(GRAPHS)
def test_what_is_told_of_the_graph_is_what_networkx_finds(graph: nx.DiGraph) -> None:
    mixing = Mixing.from_graph(graph)
    assert mixing.connected == nx.is_strongly_connected(graph)
    assert mixing.undirected == all(graph.has_edge(j, i) for i, j in graph.edges)
    degrees = {graph.in_degree(rank) for rank in graph} | {graph.out_degree(rank) for rank in graph}
    assert mixing.regular == (len(degrees) == 1)


def test_weights_that_are_on_the_edges_of_a_graph_are_taken() -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 0, 0.25), (1, 0, 0.75), (1, 1, 1.0)])
    assert Mixing.from_graph(graph).neighborhood(0) == Neighborhood(0, 0.25, {1: 0.75}, {})
    assert Mixing.from_graph(graph).stochastic == "column"
    assert Mixing.from_graph(graph, "uniform").neighborhood(0) == Neighborhood(0, 0.5, {1: 0.5}, {})


def test_both_ends_of_a_one_way_edge_are_not_symmetric() -> None:
    there = Mixing.from_matrix([[0.5, 0.3], [0.5, 0.7]])
    assert there.undirected
    assert not there.symmetric


@pytest.mark.parametrize(
    ("matrix", "stochastic"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], "doubly"),
        ([[1.0, 0.5], [0.0, 0.5]], "column"),
        ([[1.0, 0.0], [0.5, 0.5]], "row"),
        ([[1.0, 0.5], [0.5, 0.5]], "neither"),
        ([[1.5, -0.5], [-0.5, 1.5]], "neither"),
    ],
)
def test_rows_and_columns_are_stochastic_or_not(matrix: list[list[float]], stochastic: str) -> None:
    mixing = Mixing.from_matrix(matrix)
    assert mixing.stochastic == stochastic
    checks = {"column": mixing.require_column_stochastic, "row": mixing.require_row_stochastic}
    for kind, check in checks.items():
        if stochastic in (kind, "doubly"):
            check()
        else:
            with pytest.raises(TopologyUnusable):
                check()
    if stochastic == "doubly":
        mixing.require_doubly_stochastic()
    else:
        with pytest.raises(TopologyUnusable):
            mixing.require_doubly_stochastic()


def test_a_receiver_that_takes_too_much_is_told_with_its_numbers() -> None:
    mixing = Mixing.from_weights([1.0, 0.5, 0.2], [{}, {0: 0.5}, {0: 0.5, 1: 0.5}])
    with pytest.raises(TopologyUnusable, match=r"rank 2 of 3 takes 1\.2 in all \(itself 0\.2, rank 0: 0\.5, rank 1: 0"):
        mixing.require_column_stochastic()


def test_a_sender_whose_value_counts_too_much_is_told_with_its_numbers() -> None:
    star = Mixing.from_graph(nx.star_graph(2), "uniform")
    with pytest.raises(TopologyUnusable, match=r"rank 0 of 3 .* take 1\.33333 in all \(itself 0\.333333, rank 1: 0\.5"):
        star.require_row_stochastic()


def test_workers_that_never_hear_of_each_other_are_named() -> None:
    mixing = Mixing.from_graph(nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(4)))
    with pytest.raises(TopologyUnusable, match=r"7 workers fall into 2 parts .* \{0, 1, 2\} and \{3, 4, 5, 6\}"):
        mixing.require_connected()
    Mixing.from_graph(nx.cycle_graph(4)).require_connected()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mixing.from_matrix([[1.0, 0.0]]), r"shape \(1, 2\)"),
        (lambda: Mixing.from_matrix(np.zeros((0, 0))), r"shape \(0, 0\)"),
        (lambda: Mixing.from_matrix([[1.0, np.nan], [0.0, 1.0]]), r"nan at \(0, 1\)"),
        (lambda: Mixing.from_graph(nx.path_graph([1, 2])), r"graph over \[1, 2\]"),
        (lambda: Mixing.from_graph(nx.DiGraph()), "graph over"),
        (lambda: Mixing.from_graph(nx.DiGraph([(0, 1, {"weight": 0.5}), (1, 0)])), "from rank 1 to rank 0 has no"),
        (lambda: Mixing.from_weights([1.0], [{}, {}]), "1 self weights and sources of 2 ranks"),
        (lambda: Mixing.from_weights([0.5, 1.0], [{2: 0.5}, {}]), "rank 0 is to receive from rank 2"),
        (lambda: Mixing.from_weights([0.5, 1.0], [{0: 0.5}, {}]), "rank 0 is to receive from rank 0"),
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused_with_what_is_wrong(make, said: str) -> None:
    with pytest.raises(TopologyUnusable, match=said):
        make()
