"""Who averages with whom in one step, and with which weights.

A step of averaging makes of the workers' values x the values x'[j] = sum over i of W[i, j] x[i]: column j of the mixing
matrix W holds what receiver j takes of everybody, row i what becomes of sender i's value. Where every column sums to 1,
workers that agree go on agreeing; where every row does, the workers' average stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import networkx as nx
import numpy as np
import numpy.typing as npt

from shoal.errors import TopologyUnusable

Matrix = npt.NDArray[np.float64]
Weights = Literal["uniform", "metropolis"]
Stochastic = Literal["doubly", "column", "row", "neither"]

_SHOWN = 8  # ranks that a message names
_TOLERANCE = 1e-9  # of sums that are to be 1: far above rounding, far below what anybody means


@dataclass(frozen=True)
class Neighborhood:
    """One rank's part of a step: what it takes of its own value and of each source's, and what each destination takes
    of it."""

    rank: int
    self_weight: float
    sources: Mapping[int, float]
    destinations: Mapping[int, float]


@dataclass(frozen=True)
class Links:
    """Who sends to whom in one step, asked for rank by rank: a worker of a thousand learns of its own neighbors without
    the other edges ever being made. `weight(links, i, j)` is what j takes of i; `own(j)` what it takes of itself, the
    rest to 1 if it is None."""

    workers: int
    sources: Callable[[int], Sequence[int]]
    destinations: Callable[[int], Sequence[int]]
    weight: Callable[[Links, int, int], float]
    own: Callable[[int], float] | None = None

    def weighted(self, weights: Weights) -> Links:
        return replace(self, weight=WEIGHTS[weights], own=None)

    def neighborhood(self, rank: int) -> Neighborhood:
        sources = self._taken(rank)
        destinations = {other: self.weight(self, rank, other) for other in self.destinations(rank)}
        return Neighborhood(rank, self._own(rank, sources), sources, destinations)

    def column(self, rank: int) -> dict[int, float]:
        """All that a receiver takes, its own value included."""
        sources = self._taken(rank)
        return {**sources, rank: self._own(rank, sources)}

    def _taken(self, rank: int) -> dict[int, float]:
        return {other: self.weight(self, other, rank) for other in self.sources(rank)}

    def _own(self, rank: int, sources: Mapping[int, float]) -> float:
        return self.own(rank) if self.own is not None else 1.0 - math.fsum(sources.values())


def _uniform(links: Links, source: int, destination: int) -> float:
    """All that a receiver takes counts the same."""
    return 1.0 / (1 + len(links.sources(destination)))


def _metropolis(links: Links, source: int, destination: int) -> float:
    """The rule of Metropolis and Hastings. Where edges go both ways, both ends take the same: doubly stochastic."""
    return 1.0 / (1 + max(len(links.sources(source)), len(links.sources(destination))))


WEIGHTS: dict[Weights, Callable[[Links, int, int], float]] = {"uniform": _uniform, "metropolis": _metropolis}


@dataclass(frozen=True)
class Mixing:
    """All ranks' parts of one step. `columns[j][i]` is W[i, j], what j takes of i; there is no entry where nothing is
    sent, but for j itself. What a sender's destinations take of it is read off the same numbers."""

    columns: tuple[Mapping[int, float], ...]

    @classmethod
    def of(cls, links: Links) -> Mixing:
        return cls(tuple(links.column(rank) for rank in range(links.workers)))

    @classmethod
    def from_matrix(cls, matrix: npt.ArrayLike) -> Mixing:
        """W[i, j] is the weight with which i's value goes into j's. Fails with TopologyUnusable if it is not square or
        not finite."""
        given = np.asarray(matrix, dtype=np.float64)
        if given.ndim != 2 or given.shape[0] != given.shape[1] or not given.size:
            raise TopologyUnusable(f"a mixing matrix of shape {given.shape}; it needs a row and a column for each rank")
        if not np.isfinite(given).all():
            i, j = np.argwhere(~np.isfinite(given))[0]
            raise TopologyUnusable(f"the mixing matrix has {given[i, j]} at ({i}, {j}); weights are finite numbers")
        return cls(tuple({int(i): float(given[i, j]) for i in np.flatnonzero(given[:, j])} for j in range(len(given))))

    @classmethod
    def from_graph(cls, graph: Any, weights: Weights | None = None) -> Mixing:
        """Of a networkx graph over the ranks 0 to n - 1; an undirected edge goes both ways. Without `weights`, those of
        the edges' attribute `weight` (a loop's is the rank's own), and uniform ones where there is none at all. Fails
        with TopologyUnusable for other ranks, and where only some edges have a weight."""
        directed = graph if graph.is_directed() else graph.to_directed()
        if not len(directed) or set(directed) != set(range(len(directed))):
            raise TopologyUnusable(
                f"a graph over {sorted(directed, key=repr)}; its {len(directed)} workers are to be 0 to n - 1"
            )
        links = _links_of(directed)
        if weights is not None:
            return cls.of(links.weighted(weights))
        bare = [(i, j) for i, j, weight in directed.edges(data="weight") if weight is None]
        if not bare and directed.number_of_edges():
            columns: list[dict[int, float]] = [{} for _ in directed]
            for i, j, weight in directed.edges(data="weight"):
                columns[j][i] = float(weight)
            return cls(tuple(columns))
        if len(bare) < directed.number_of_edges():
            i, j = bare[0]
            raise TopologyUnusable(
                f"the edge from rank {i} to rank {j} has no weight, others have; give all of them one, or none"
            )
        return cls.of(links)

    @classmethod
    def from_weights(cls, self_weights: Sequence[float], sources: Sequence[Mapping[int, float]]) -> Mixing:
        """By rank: what it takes of itself, and of each source. Fails with TopologyUnusable for ranks that are not
        there."""
        if len(self_weights) != len(sources) or not sources:
            raise TopologyUnusable(
                f"{len(self_weights)} self weights and sources of {len(sources)} ranks; each rank needs both"
            )
        for rank, taken in enumerate(sources):
            for other in taken:
                if other == rank or not 0 <= other < len(sources):
                    raise TopologyUnusable(
                        f"rank {rank} is to receive from rank {other}; sources are other ranks from 0 to "
                        f"{len(sources) - 1}, and its own weight goes into self_weights"
                    )
        return cls(tuple({**taken, rank: self_weights[rank]} for rank, taken in enumerate(sources)))

    @property
    def workers(self) -> int:
        return len(self.columns)

    @cached_property
    def rows(self) -> tuple[Mapping[int, float], ...]:
        """`rows[i][j]` is W[i, j]: what j takes of i."""
        rows: list[dict[int, float]] = [{} for _ in self.columns]
        for j, column in enumerate(self.columns):
            for i, weight in column.items():
                rows[i][j] = weight
        return tuple(rows)

    def neighborhood(self, rank: int) -> Neighborhood:
        column, row = self.columns[rank], self.rows[rank]
        return Neighborhood(rank, column.get(rank, 0.0), _without(column, rank), _without(row, rank))

    @property
    def links(self) -> Links:
        """The same, as a schedule gives it."""
        return Links(
            self.workers,
            sources=lambda rank: tuple(_without(self.columns[rank], rank)),
            destinations=lambda rank: tuple(_without(self.rows[rank], rank)),
            weight=lambda _, source, destination: self.columns[destination][source],
            own=lambda rank: self.columns[rank].get(rank, 0.0),
        )

    def matrix(self) -> Matrix:
        matrix = np.zeros((self.workers, self.workers))
        for j, column in enumerate(self.columns):
            matrix[list(column), j] = list(column.values())
        return matrix

    def graph(self) -> Any:
        """A networkx DiGraph with the attribute `weight`, self weights as loops."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.workers))
        graph.add_weighted_edges_from(
            (i, j, weight) for j, column in enumerate(self.columns) for i, weight in column.items()
        )
        return graph

    @property
    def in_degrees(self) -> list[int]:
        return [len(_without(column, rank)) for rank, column in enumerate(self.columns)]

    @property
    def out_degrees(self) -> list[int]:
        return [len(_without(row, rank)) for rank, row in enumerate(self.rows)]

    @property
    def undirected(self) -> bool:
        """Whoever is sent to sends back."""
        return all(column.keys() - {rank} == row.keys() - {rank} for rank, (column, row) in enumerate(self._both))

    @property
    def symmetric(self) -> bool:
        """Both ends of every edge take the same of each other."""
        return self.undirected and all(
            math.isclose(column[other], row[other], abs_tol=_TOLERANCE)
            for rank, (column, row) in enumerate(self._both)
            for other in column.keys() - {rank}
        )

    @property
    def regular(self) -> bool:
        """Everybody receives from as many, and sends to as many, as everybody else."""
        return len({*self.in_degrees, *self.out_degrees}) == 1

    @property
    def connected(self) -> bool:
        """Every rank's value gets to every other, if the step is repeated."""
        return bool(nx.is_strongly_connected(self.graph()))

    @property
    def stochastic(self) -> Stochastic:
        column, row = _off(self.columns) is None, _off(self.rows) is None
        return "doubly" if column and row else "column" if column else "row" if row else "neither"

    def require_column_stochastic(self) -> None:
        """Or TopologyUnusable: workers that agree would not go on agreeing."""
        rank = _off(self.columns)
        if rank is not None:
            raise TopologyUnusable(
                f"rank {rank} of {self.workers} takes {_said(self.columns[rank], rank)}; what a receiver takes is 0 or "
                "more and sums to 1: change these weights, or leave all of them out for 1/(indegree + 1)"
            )

    def require_row_stochastic(self) -> None:
        """Or TopologyUnusable: the average of all workers would move."""
        rank = _off(self.rows)
        if rank is not None:
            raise TopologyUnusable(
                f"of the value of rank {rank} of {self.workers} others and itself take {_said(self.rows[rank], rank)}; "
                "unless that is 0 or more and sums to 1 the average moves: change these weights, or use metropolis "
                "weights on an undirected graph"
            )

    def require_doubly_stochastic(self) -> None:
        """Or TopologyUnusable."""
        self.require_column_stochastic()
        self.require_row_stochastic()

    def require_connected(self) -> None:
        """Or TopologyUnusable: workers that never hear of each other never agree."""
        parts = sorted(map(sorted, nx.strongly_connected_components(self.graph())))
        if len(parts) > 1:
            raise TopologyUnusable(
                f"the {self.workers} workers fall into {len(parts)} parts that do not hear of each other both ways, "
                f"{_listed(parts[0])} and {_listed(parts[1])} among them; add edges there and back between them"
            )

    @property
    def _both(self) -> zip[tuple[Mapping[int, float], Mapping[int, float]]]:
        return zip(self.columns, self.rows, strict=True)


def _links_of(graph: Any) -> Links:
    return Links(
        len(graph),
        sources=lambda rank: [other for other in graph.pred[rank] if other != rank],
        destinations=lambda rank: [other for other in graph.succ[rank] if other != rank],
        weight=_uniform,
    )


def _off(lines: Sequence[Mapping[int, float]]) -> int | None:
    """The first rank with a weight below 0, or whose weights do not sum to 1."""
    for rank, line in enumerate(lines):
        if any(weight < 0 for weight in line.values()) or abs(math.fsum(line.values()) - 1) > _TOLERANCE:
            return rank
    return None


def _said(line: Mapping[int, float], rank: int) -> str:
    """`1.2 in all (itself 0.5, rank 4: 0.7)`."""
    shown = [f"itself {line.get(rank, 0.0):.6g}", *(f"rank {it}: {line[it]:.6g}" for it in sorted(line) if it != rank)]
    more = ", …" if len(shown) > _SHOWN else ""
    return f"{math.fsum(line.values()):.6g} in all ({', '.join(shown[:_SHOWN])}{more})"


def _listed(ranks: Sequence[int]) -> str:
    more = ", …" if len(ranks) > _SHOWN else ""
    return f"{{{', '.join(map(str, ranks[:_SHOWN]))}{more}}}"


def _without(weights: Mapping[int, float], rank: int) -> dict[int, float]:
    return {other: weight for other, weight in weights.items() if other != rank}
