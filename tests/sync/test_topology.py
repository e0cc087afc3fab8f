"""Graphs and schedules of neighbors, for any number of workers and any hosts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import shoal
from shoal.errors import TopologyUnusable
from shoal.sync import consensus, topology
from shoal.sync.mixing import Mixing
from shoal.sync.topology import EXAMPLES, Schedule, Topology, parse

MORE = (
    "ring(left)", "exponential(3)", "symmetric_exponential(2)", "random_regular(2, seed=3)", "random_regular(3)",
    "random_regular(9, seed=1)", "random_matching(seed=5)",
    "global_every(ring, 3)", "one_peer(star)", "one_peer(mesh_2d)", "one_peer(hypercube)", "one_peer(fully_connected)",
    "one_peer(random_regular(3))", "uniform(star)", "uniform(mesh_2d)", "metropolis(one_peer(star))",
    "metropolis(exponential_2)",
)  # fmt: skip
ALL = [parse(spec) for spec in (*EXAMPLES, *MORE)]
STATIC = [it for it in ALL if not it.dynamic]
UNDIRECTED = [parse(spec) for spec in ("ring", "star", "mesh_2d", "torus", "hypercube", "fully_connected",
              "symmetric_exponential(4)", "random_regular(4)")]  # fmt: skip
ONE_TO_ONE = [parse(spec) for spec in ("one_peer(ring)", "one_peer(exponential_2)", "one_peer(fully_connected)",
              "inner_outer_ring", "inner_outer_exponential_2", "random_matching")]  # fmt: skip

MATCHED = [[[2], [], [0], [6], [5], [4], [3]], [[4], [3], [], [1], [0], [6], [5]]]
REGULAR = [[1, 4, 5], [0, 3, 5], [3, 4, 5], [1, 2, 4], [0, 2, 3], [0, 1, 2]]

WORKERS = st.integers(1, 33)
STEPS = st.integers(0, 10**9)
HOSTS = st.lists(st.integers(0, 4), min_size=1, max_size=33)
ONE = st.sampled_from


def a_period(schedule: Schedule, most: int = 120) -> list[Mixing]:
    """Of a schedule that never repeats, or not for long, its beginning."""
    return [schedule.mixing(step) for step in range(min(schedule.period or most, most))]


# Every topology


@given(ONE(ALL), HOSTS, STEPS)
def test_a_ranks_own_view_is_its_column_and_row_of_the_matrix(it: Topology, hosts: list[int], step: int) -> None:
    schedule = it.on(len(hosts), hosts)
    mixing = schedule.mixing(step)
    for rank in range(len(hosts)):
        view = schedule.neighborhood(rank, step)
        expected = mixing.neighborhood(rank)
        assert view == expected
        assert rank not in view.sources
        assert rank not in view.destinations
        for destination, weight in view.destinations.items():
            assert schedule.neighborhood(destination, step).sources[rank] == weight


@given(ONE(ALL), HOSTS, STEPS)
def test_what_a_receiver_takes_sums_to_1(it: Topology, hosts: list[int], step: int) -> None:
    matrix = it.mixing(len(hosts), step, hosts).matrix()
    assert matrix.min() >= 0
    assert np.allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)


@given(ONE(ALL), HOSTS, STEPS)
def test_after_a_period_it_begins_again(it: Topology, hosts: list[int], step: int) -> None:
    schedule = it.on(len(hosts), hosts)
    if schedule.period is not None:
        assert schedule.mixing(step) == schedule.mixing(step + schedule.period)


@given(ONE(ALL), HOSTS)
def test_every_value_gets_to_everybody(it: Topology, hosts: list[int]) -> None:
    assert consensus.steps_to_hear(a_period(it.on(len(hosts), hosts))) is not None


@pytest.mark.parametrize("spec", [spec for spec in EXAMPLES if spec != "fully_connected"])
def test_one_of_a_thousand_workers_learns_of_its_neighbors_without_all_the_others_edges(spec: str) -> None:
    tracemalloc.start()
    try:
        schedule = parse(spec).on(1000, [rank // 8 for rank in range(1000)])
        _, bound = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        view = schedule.neighborhood(417, step=5)
        _, after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert view.sources
    assert bound < 2_000_000  # a matrix would be 8 MB
    assert after - before < 20_000  # and a line of it 8 KB


def test_all_of_it_is_the_same_in_processes_that_hash_differently() -> None:
    code = (
        "import json; from shoal.sync.topology import *\n"
        f"specs = {[it.spec for it in ALL]!r}\n"
        "out = [repr(parse(s).mixing(n, k, [['b', 'a', 'c'][i % 3] for i in range(n)])) "
        "for s in specs for n in (1, 2, 3, 8, 21) for k in (0, 1, 1234)]\n"
        "print(json.dumps(out))"
    )
    told = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert told[0].returncode == 0, told[0].stderr
    assert told[0].stdout == told[1].stdout
    assert len(set(json.loads(told[0].stdout))) > len(ALL)


def test_what_is_drawn_does_not_change_from_one_version_to_the_next() -> None:
    """Workers of a job may have started from different ones."""
    matching = topology.random_matching(seed=7).on(7)
    assert [[[*matching.neighborhood(rank, step).sources] for rank in range(7)] for step in (0, 2)] == MATCHED
    regular = topology.random_regular(3, seed=7).on(6)
    assert [[*regular.neighborhood(rank).sources] for rank in range(6)] == REGULAR


# Graphs that stay the same


@given(ONE(STATIC), WORKERS)
def test_a_static_graph_is_connected_and_stays_the_same(it: Topology, workers: int) -> None:
    schedule = it.on(workers)
    assert schedule.period == 1
    assert schedule.mixing(0) == schedule.mixing(17)
    assert schedule.mixing().connected


@given(ONE([it for it in STATIC if not it.spec.startswith("uniform")]), WORKERS)
def test_weights_of_a_static_graph_are_doubly_stochastic(it: Topology, workers: int) -> None:
    matrix = it.mixing(workers).matrix()
    assert np.allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-12)
    it.mixing(workers).require_doubly_stochastic()


@given(ONE(UNDIRECTED), WORKERS)
def test_graphs_without_a_direction_are_symmetric(it: Topology, workers: int) -> None:
    mixing = it.mixing(workers)
    assert mixing.undirected
    assert mixing.symmetric


@given(ONE(["ring", "ring(left)", "ring(right)", "exponential_2", "exponential(3)", "fully_connected",
            "symmetric_exponential(4)"]), WORKERS)  # fmt: skip
def test_where_all_go_the_same_distances_the_graph_is_regular(spec: str, workers: int) -> None:
    assert parse(spec).mixing(workers).regular


@given(st.integers(3, 33), st.floats(0, 1000), ONE(STATIC))
def test_workers_that_average_again_and_again_come_to_agree_on_their_mean(
    workers: int, scale: float, it: Topology
) -> None:
    mixing = it.mixing(workers)
    assume(mixing.stochastic == "doubly")
    values = scale * np.random.default_rng(workers).standard_normal(workers)
    steps = consensus.steps_to_agree([mixing])
    assert steps is not None
    after = np.linalg.matrix_power(mixing.matrix().T, steps) @ values
    assert after.mean() == pytest.approx(values.mean(), abs=1e-9 * (1 + scale))
    assert np.linalg.norm(after - values.mean()) <= np.linalg.norm(values - values.mean()) / 1000 * (1 + 1e-6)


@pytest.mark.parametrize("workers", [3, 7, 8, 20, 33])
def test_the_gap_of_a_ring_is_the_one_in_the_books(workers: int) -> None:
    expected = 1 - max(abs(1 + 2 * np.cos(2 * np.pi * k / workers)) / 3 for k in range(1, workers))
    assert consensus.spectral_gap([parse("ring").mixing(workers)]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("digits", [1, 2, 3, 4, 5])
def test_the_gap_of_exponential_2_over_a_power_of_two_is_the_one_in_the_books(digits: int) -> None:
    assert consensus.spectral_gap([parse("exponential_2").mixing(2**digits)]) == pytest.approx(2 / (digits + 1))


def edges(spec: str, workers: int) -> set[tuple[int, int]]:
    return {(i, j) for i, j in parse(spec).mixing(workers).graph().edges if i != j}


def both_ways(graph: nx.Graph) -> set[tuple[int, int]]:
    order = {node: rank for rank, node in enumerate(sorted(graph))}
    return {(order[i], order[j]) for i, j in graph.to_directed().edges if i != j}


@pytest.mark.parametrize(
    ("spec", "workers", "graph"),
    [
        ("ring", 7, nx.cycle_graph(7)),
        ("star", 7, nx.star_graph(6)),
        ("fully_connected", 7, nx.complete_graph(7)),
        ("mesh_2d", 12, nx.grid_2d_graph(3, 4)),
        ("mesh_2d", 8, nx.grid_2d_graph(2, 4)),
        ("torus", 12, nx.grid_2d_graph(3, 4, periodic=True)),
        ("torus", 8, nx.grid_2d_graph(2, 4, periodic=True)),
        ("torus", 9, nx.grid_2d_graph(3, 3, periodic=True)),
        ("hypercube", 16, nx.hypercube_graph(4)),
        ("symmetric_exponential(4)", 20, nx.circulant_graph(20, [1, 4])),
        ("symmetric_exponential(4)", 7, nx.cycle_graph(7)),  # 4 is more than half way round
        ("random_regular(20)", 9, nx.complete_graph(9)),
    ],
)
def test_a_graph_that_has_a_name_is_the_one_of_that_name(spec: str, workers: int, graph: nx.Graph) -> None:
    assert edges(spec, workers) == both_ways(graph)


def test_directed_graphs_go_the_way_they_say() -> None:
    assert edges("ring(right)", 4) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert edges("ring(left)", 4) == {(0, 3), (1, 0), (2, 1), (3, 2)}
    assert {j for i, j in edges("exponential_2", 11) if i == 10} == {0, 1, 3, 7}
    assert {j for i, j in edges("exponential(3)", 11) if i == 0} == {1, 3, 9}


@given(WORKERS)
def test_nobody_in_a_hypercube_is_further_away_than_there_are_digits(workers: int) -> None:
    steps = consensus.steps_to_hear([parse("hypercube").mixing(workers)])
    assert steps is not None
    assert steps <= (workers - 1).bit_length()


@given(st.integers(4, 33), ONE(["mesh_2d", "torus"]))
def test_a_grid_is_never_a_line_whatever_the_number_of_workers(workers: int, spec: str) -> None:
    steps = consensus.steps_to_hear([parse(spec).mixing(workers)])
    assert steps is not None
    assert steps <= 3 * workers**0.5 - 2
    assert max(parse(spec).mixing(workers).in_degrees) <= 4


@given(WORKERS, st.integers(2, 12), st.integers(0, 20))
def test_a_random_regular_graph_has_the_degree_that_is_possible(workers: int, degree: int, seed: int) -> None:
    mixing = topology.random_regular(degree, seed).mixing(workers)
    possible = min(degree, workers - 1)
    assert set(mixing.in_degrees) == {possible + (possible % 2 and workers % 2)}
    assert mixing.connected


def test_random_regular_graphs_differ_by_their_seed() -> None:
    assert edges("random_regular(4, seed=1)", 16) != edges("random_regular(4, seed=2)", 16)


# Schedules


@given(ONE(ONE_TO_ONE), HOSTS, STEPS)
def test_everybody_sends_to_one_at_most_and_hears_from_as_many(it: Topology, hosts: list[int], step: int) -> None:
    mixing = it.mixing(len(hosts), step, hosts)
    assert max(mixing.in_degrees) <= 1
    assert max(mixing.out_degrees) <= 1
    mixing.require_doubly_stochastic()


@given(WORKERS, STEPS, ONE(["one_peer(exponential_2)", "one_peer(ring)"]))
def test_nobody_is_left_out_where_all_go_the_same_distance(workers: int, step: int, spec: str) -> None:
    assume(workers > 1)
    mixing = parse(spec).mixing(workers, step)
    assert set(mixing.in_degrees) == set(mixing.out_degrees) == {1}


@pytest.mark.parametrize("digits", [0, 1, 2, 3, 4, 5])
def test_one_neighbor_at_a_time_a_power_of_two_of_workers_has_its_exact_average_after_one_period(digits: int) -> None:
    schedule = parse("one_peer(exponential_2)").on(2**digits)
    assert schedule.period == max(1, digits)
    averaging = consensus.product(a_period(schedule))
    assert np.array_equal(averaging, np.full((2**digits, 2**digits), 0.5**digits))
    assert consensus.steps_to_agree(a_period(schedule)) == digits


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 12, 33])
def test_other_numbers_of_workers_come_nearer_to_it_with_every_period(workers: int) -> None:
    period = a_period(parse("one_peer(exponential_2)").on(workers))
    assert 0.5 < consensus.spectral_gap(period) < 1


@given(ONE(STATIC), WORKERS, STEPS)
def test_one_neighbor_at_a_time_is_the_next_clockwise(it: Topology, workers: int, step: int) -> None:
    there = it.mixing(workers)
    schedule = topology.one_peer(it).on(workers)
    for rank in range(workers):
        clockwise = sorted(there.neighborhood(rank).destinations, key=lambda other: (other - rank) % workers)
        expected = [clockwise[step % len(clockwise)]] if clockwise else []
        assert [*schedule.neighborhood(rank, step).destinations] == expected


def hosts_of(sizes: list[int]) -> list[int]:
    return [host for host, size in enumerate(sizes) for _ in range(size)]


def test_one_of_each_host_is_outside_in_turn_and_the_others_go_round_without_it() -> None:
    schedule = topology.inner_outer_ring().on(8, hosts_of([4, 4]))
    sent = [[[*schedule.neighborhood(rank, step).destinations] for rank in range(8)] for step in range(4)]
    assert sent[0] == [[4], [2], [3], [1], [0], [6], [7], [5]]
    assert sent[1] == [[2], [5], [3], [0], [6], [1], [7], [4]]
    assert sent[3] == [[1], [2], [0], [7], [5], [6], [4], [3]]


@given(HOSTS, STEPS, ONE(["inner_outer_ring", "inner_outer_exponential_2"]))
def test_of_each_host_one_at_most_is_outside(hosts: list[int], step: int, spec: str) -> None:
    schedule = parse(spec).on(len(hosts), hosts)
    outside = Counter(
        hosts[rank]
        for rank in range(len(hosts))
        for other in schedule.neighborhood(rank, step).destinations
        if hosts[other] != hosts[rank]
    )
    assert max(outside.values(), default=0) <= 1


@given(HOSTS, ONE(["inner_outer_ring", "inner_outer_exponential_2"]))
def test_workers_of_all_hosts_come_to_agree_whatever_their_sizes(hosts: list[int], spec: str) -> None:
    assert consensus.steps_to_agree(a_period(parse(spec).on(len(hosts), hosts))) is not None


@pytest.mark.parametrize("sizes", [[3] * 5, [1] * 9, [4, 4, 4], [2] * 5, [5, 2, 1], [6]])
@pytest.mark.parametrize("spec", ["inner_outer_ring", "inner_outer_exponential_2"])
def test_schedules_inside_and_outside_repeat_after_their_period(spec: str, sizes: list[int]) -> None:
    schedule = parse(spec).on(sum(sizes), hosts_of(sizes))
    assert schedule.period is not None
    for step in range(schedule.period):
        assert schedule.mixing(step) == schedule.mixing(step + schedule.period)


def test_distances_outside_take_turns_by_powers_of_two() -> None:
    schedule = topology.inner_outer_exponential_2().on(8, range(8))
    assert [[*schedule.neighborhood(0, step).destinations] for step in range(4)] == [[1], [2], [4], [1]]


@given(WORKERS, STEPS, st.integers(0, 99))
def test_a_matching_is_of_pairs_and_leaves_one_of_an_odd_number_alone(workers: int, step: int, seed: int) -> None:
    schedule = topology.random_matching(seed).on(workers)
    alone = 0
    for rank in range(workers):
        view = schedule.neighborhood(rank, step)
        alone += not view.sources
        assert view.sources == view.destinations
        for other in view.sources:
            assert [*schedule.neighborhood(other, step).sources] == [rank]
            assert view.self_weight == view.sources[other] == 0.5
    assert alone == workers % 2


@pytest.mark.parametrize("workers", [3, 4, 5, 6, 8, 9, 16])
def test_any_two_are_matched_about_as_often_as_any_others(workers: int) -> None:
    schedule = topology.random_matching(seed=1).on(workers)
    draws = 4000
    pairs: Counter[tuple[int, int]] = Counter()
    for step in range(draws):
        for rank in range(workers):
            pairs.update((rank, other) for other in schedule.neighborhood(rank, step).sources if rank < other)
    expected = draws * (workers // 2) / (workers * (workers - 1) / 2)
    counts = [pairs[pair] for pair in itertools.combinations(range(workers), 2)]
    assert max(abs(count - expected) for count in counts) < 0.25 * expected


def test_matchings_differ_by_step_and_by_seed() -> None:
    def pairs(seed: int, step: int) -> Mixing:
        return topology.random_matching(seed).mixing(301, step)

    assert len({repr(pairs(seed, step)) for seed in range(5) for step in range(5)}) > 20


def test_a_users_function_of_the_step_is_a_topology() -> None:
    def back_and_forth(workers: int, step: int) -> nx.DiGraph:
        return nx.DiGraph([(i, (i + (-1) ** step) % workers) for i in range(workers)])

    mine = topology.custom(back_and_forth, period=2)
    assert mine.spec == f"custom({__name__}.{back_and_forth.__qualname__})"
    assert mine.dynamic
    assert mine.mixing(5, 0) == topology.ring("right").mixing(5)
    assert mine.mixing(5, 3) == topology.ring("left").mixing(5)
    assert topology.custom(lambda workers, step: np.eye(workers), period=1).mixing(3).stochastic == "doubly"
    assert topology.custom(lambda workers, step: topology.star().mixing(workers)).mixing(4) == parse("star").mixing(4)


def test_a_users_function_that_forgets_the_number_of_workers_is_told_so() -> None:
    with pytest.raises(TopologyUnusable, match="gave a step of 4 workers for 3 of them, at step 9"):
        topology.custom(lambda workers, step: np.eye(4)).mixing(3, step=9)


# Text


@pytest.mark.parametrize("it", ALL, ids=str)
def test_a_topology_is_read_again_from_its_own_text(it: Topology) -> None:
    again = parse(str(it))
    assert again == it
    assert hash(again) == hash(it)
    assert again.mixing(13, 5) == it.mixing(13, 5)


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("ring()", topology.ring()),
        (" ring ", topology.ring()),
        ("ring('left')", topology.ring("left")),
        ("ring(both)", topology.ring()),
        ("exponential(2)", topology.exponential_2()),
        ("exponential(base=4)", topology.exponential(4)),
        ("random_regular(4, 7)", topology.random_regular(4, seed=7)),
        ("one_peer( exponential(4) )", topology.one_peer(topology.exponential(4))),
        ("metropolis(one_peer(star))", topology.metropolis(topology.one_peer(topology.star()))),
    ],
)
def test_texts_that_mean_the_same_are_equal(spec: str, same: Topology) -> None:
    assert parse(spec) == same


def test_topologies_that_are_not_the_same_are_not_equal() -> None:
    assert len(set(ALL)) == len(ALL)
    assert topology.custom(lambda workers, step: 1) != topology.custom(lambda workers, step: 1)


def test_a_topology_is_its_own_text() -> None:
    assert parse(topology.ring()) == topology.ring()
    assert shoal.topology.ring() == topology.ring()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rng", "there is no topology 'rng', did you mean ring; there are ring, star"),
        ("custom", "there is no topology 'custom'"),
        ("", "'' is not the text of a topology"),
        ("ring(", r"'ring\(' is not the text of a topology"),
        ("ring + star", "'ring \\+ star' in 'ring \\+ star' is no topology"),
        ("exponential-2", "is no topology"),
        ("4", "there is no topology '4'"),
        ("ring(up)", r"ring\(up\): a ring goes both, left or right"),
        ("ring(left, right)", r"'ring\(left, right\)' does not fit ring\(style"),
        ("ring(way=left)", "does not fit ring"),
        ("exponential(1)", "exponential: base is 1; write a whole number from 2 up"),
        ("exponential(ring)", "exponential: base is ring"),
        ("random_regular(1)", "degree is 1; write a whole number from 2 up"),
        ("random_matching(-1)", "is no topology"),
        ("one_peer(random_matching)", r"one_peer\(random_matching\): it takes a graph that stays the same"),
        ("one_peer(7)", r"one_peer\(7\)"),
        ("one_peer", "does not fit one_peer"),
        ("metropolis(up)", r"metropolis\(up\): it takes a topology"),
        ("__import__('os')", "there is no topology '__import__'"),
        ("ring(*star)", "is no topology"),
        ("ring(**star)", "does not fit ring"),
        ("(" * 5000, "is not the text of a topology"),
    ],
)
def test_a_text_that_is_no_topology_is_told_what_is_wrong(spec: str, said: str) -> None:
    with pytest.raises(TopologyUnusable, match=said):
        parse(spec)


def test_no_workers_and_hosts_that_are_not_theirs_are_refused() -> None:
    with pytest.raises(TopologyUnusable, match="ring over 0 workers"):
        topology.ring().on(0)
    with pytest.raises(TopologyUnusable, match="ring over 3 workers with the hosts of 2"):
        topology.ring().on(3, ["a", "b"])


def test_at_every_third_step_all_average_with_all() -> None:
    schedule = parse("global_every(one_peer(exponential_2), 3)").on(6)
    values = np.arange(6.0)
    for step in range(6):
        before, values = values, schedule.mixing(step).matrix().T @ values
        assert np.allclose(values, 2.5) == (step >= 2), before
    assert schedule.period == 3
