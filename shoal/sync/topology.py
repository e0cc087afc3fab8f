"""The graphs over which workers average with their neighbors, for any number of workers.

    ring()   exponential(4)   metropolis(star())   one_peer(exponential_2())   parse("one_peer(exponential_2)")

A `Topology` knows no number of workers; `on(workers, hosts)` makes of it the `Schedule` of one generation, and that
says at each step with whom a rank averages. All of it is computed from the numbers alone, so that workers need not tell
each other. Unless other weights are asked for, those of every static graph here are doubly stochastic: repeated, the
step leads all workers to their average.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import networkx as nx

from shoal.errors import TopologyUnusable
from shoal.sync.mixing import WEIGHTS, Links, Mixing, Neighborhood, Weights

Hosts = Sequence[Hashable]  # the host of each rank
Ranks = Sequence[int]


@dataclass(frozen=True)
class Schedule:
    """A topology over the workers of one generation. After `period` steps it begins again: 1 for a graph that stays the
    same, None for a schedule that never does."""

    workers: int
    period: int | None
    links: Callable[[int], Links]  # of a step

    def neighborhood(self, rank: int, step: int = 0) -> Neighborhood:
        """Of one rank, in the time that its neighbors take and not the graph."""
        return self.links(step).neighborhood(rank)

    def mixing(self, step: int = 0) -> Mixing:
        return Mixing.of(self.links(step))


@dataclass(frozen=True)
class Topology:
    """Equal to another, and printed, by its `spec`, which `parse` reads. `dynamic`: it changes from step to step."""

    spec: str
    dynamic: bool
    _made: Callable[[int, Hosts], Schedule] = field(repr=False, compare=False)
    function: Callable[[int, int], Any] | None = None  # the user's own

    def on(self, workers: int, hosts: Hosts | None = None) -> Schedule:
        """Over that many workers; `hosts` names the host of each rank, one for all if left out. Fails with
        TopologyUnusable if there is no worker, or another number of hosts."""
        if workers < 1:
            raise TopologyUnusable(f"{self.spec} over {workers} workers; there must be 1 or more")
        hosts = (0,) * workers if hosts is None else hosts
        if len(hosts) != workers:
            raise TopologyUnusable(
                f"{self.spec} over {workers} workers with the hosts of {len(hosts)}; name one a rank"
            )
        return self._made(workers, hosts)

    def mixing(self, workers: int, step: int = 0, hosts: Hosts | None = None) -> Mixing:
        return self.on(workers, hosts).mixing(step)

    def __str__(self) -> str:
        return self.spec


# Graphs that stay the same


def ring(style: str = "both") -> Topology:
    """Each with the rank before and the one after it; `left`: each sends to the one before only, `right`: after."""
    distances = {"both": (1, -1), "left": (-1,), "right": (1,)}
    if style not in distances:
        raise TopologyUnusable(f"ring({style}): a ring goes both, left or right")
    return _circulant("ring" if style == "both" else f"ring({style})", lambda _: distances[style])


def fully_connected() -> Topology:
    """Everybody with everybody: one step is the average."""
    return _circulant("fully_connected", lambda workers: range(1, workers))


def exponential(base: int = 2) -> Topology:
    """Each sends to those 1, base, base², … ranks further on: few neighbors, and nobody is far away."""
    _whole("exponential", "base", base, 2)
    return _circulant("exponential_2" if base == 2 else f"exponential({base})", lambda workers: _powers(base, workers))


def exponential_2() -> Topology:
    """Each sends to those 1, 2, 4, 8, … ranks further on."""
    return exponential(2)


def symmetric_exponential(base: int = 4) -> Topology:
    """Each with those 1, base, base², … ranks away, up to half way round, in both directions."""
    _whole("symmetric_exponential", "base", base, 2)

    def distances(workers: int) -> Iterator[int]:
        for distance in _powers(base, workers // 2 + 1):
            yield from (distance, -distance)

    return _circulant(f"symmetric_exponential({base})", distances)


def star() -> Topology:
    """Rank 0 with everybody."""

    def neighbors(workers: int, rank: int) -> Ranks:
        return range(1, workers) if rank == 0 else (0,)

    return _undirected("star", neighbors)


def mesh_2d() -> Topology:
    """A grid, filled row by row. It is the exact one nearest to a square where that is at most twice as wide as high,
    and else ⌈√n⌉ wide with a last row that may be short: a prime number of workers is not a line."""

    def neighbors(workers: int, rank: int) -> Ranks:
        width = _width(workers)
        column = rank % width
        beside = [rank - 1] * (column > 0) + [rank + 1] * (column < width - 1)
        return [other for other in (rank - width, *beside, rank + width) if 0 <= other < workers]

    return _undirected("mesh_2d", neighbors)


def torus() -> Topology:
    """The grid of `mesh_2d` with each row, and each column, closed to a ring of the workers that it has."""

    def neighbors(workers: int, rank: int) -> Ranks:
        width = _width(workers)
        row, column = divmod(rank, width)
        length = min(width, workers - row * width)
        height = -(-(workers - column) // width)
        beside = {row * width + (column + way) % length for way in (-1, 1)}
        above = {(row + way) % height * width + column for way in (-1, 1)}
        return sorted((beside | above) - {rank})

    return _undirected("torus", neighbors)


def hypercube() -> Topology:
    """Each with those whose ranks differ from its own in one binary digit. Where the number of workers is no power of
    two, the corners with higher ranks are missing, and their edges with them: it stays connected (without its highest
    digit a rank is a lower one), and nobody is further away than there are digits."""

    def neighbors(workers: int, rank: int) -> Ranks:
        across = (rank ^ power for power in _powers(2, workers))
        return [other for other in across if other < workers]

    return _undirected("hypercube", neighbors)


def random_regular(degree: int = 4, seed: int = 0) -> Topology:
    """Each with `degree` others, drawn at random and connected. It is less where there are fewer others, and one more
    where degree and number of workers are odd, as no such graph exists."""
    _whole("random_regular", "degree", degree, 2)
    _whole("random_regular", "seed", seed, 0)

    def made(workers: int, hosts: Hosts) -> Schedule:
        graph = _random_regular(workers, degree, seed)
        return _still(Links(workers, graph.__getitem__, graph.__getitem__, WEIGHTS["metropolis"]))

    return Topology(f"random_regular({degree}{f', seed={seed}' if seed else ''})", False, made)


# Schedules


def one_peer(topology: Topology) -> Topology:
    """Each sends to one of its destinations in the static `topology` only, to the next one clockwise at each step. Over
    a graph in which all go the same distances, everybody receives from one too, and the weights are doubly stochastic;
    over exponential_2, a power of two of workers have their exact average after log₂ n steps. Over others somebody may
    receive from several, or from nobody."""
    if not isinstance(topology, Topology) or topology.dynamic:
        raise TopologyUnusable(
            f"one_peer({topology}): it takes a graph that stays the same, as one_peer(exponential_2)"
        )

    def made(workers: int, hosts: Hosts) -> Schedule:
        links = topology.on(workers, hosts).links(0)

        @cache
        def clockwise(rank: int) -> Ranks:
            """How much further on its destinations are."""
            return sorted((other - rank) % workers for other in links.destinations(rank))

        @cache
        def turns(rank: int) -> list[tuple[int, int, int]]:
            """Who sends to this rank, in which of how many turns."""
            ahead = ((source, clockwise(source)) for source in sorted(links.sources(rank)))
            return [(source, bisect_left(of, (rank - source) % workers), len(of)) for source, of in ahead]

        def at(step: int) -> Links:
            def sources(rank: int) -> Ranks:
                return [source for source, turn, of in turns(rank) if step % of == turn]

            def destinations(rank: int) -> Ranks:
                ahead = clockwise(rank)
                return ((rank + ahead[step % len(ahead)]) % workers,) if ahead else ()

            return Links(workers, sources, destinations, WEIGHTS["uniform"])

        degrees = {len(links.destinations(rank)) for rank in range(workers)} - {0}
        return Schedule(workers, math.lcm(*degrees), at)

    return Topology(f"one_peer({topology})", True, made)


def inner_outer_ring() -> Topology:
    """In turn, one worker of each host sends to the one of the next host whose turn it is, in a ring of the hosts; the
    others of a host send to the next in a ring of their own. Nobody sends to, or hears from, more than one. Hosts may
    have different sizes: each takes turns among its own workers. Of two workers of a host one would always be outside
    and they would never meet, so both stay inside at every third step. Without `hosts`, all is inside."""
    return _inner_outer("inner_outer_ring", lambda _: (1,))


def inner_outer_exponential_2() -> Topology:
    """As `inner_outer_ring`, and the distances 1, 2, 4, … take turns, inside and outside."""
    return _inner_outer("inner_outer_exponential_2", lambda size: tuple(_powers(2, size)) or (1,))


def random_matching(seed: int = 0) -> Topology:
    """In pairs that are drawn anew for each step, any two as likely as any others; of an odd number one stays alone."""
    _whole("random_matching", "seed", seed, 0)

    def made(workers: int, hosts: Hosts) -> Schedule:
        def at(step: int) -> Links:
            return _exchange(workers, lambda rank, _: _partner(rank, workers, seed, step))

        return Schedule(workers, None if workers > 2 else 1, at)

    return Topology(f"random_matching({f'seed={seed}' if seed else ''})".removesuffix("()"), True, made)


def global_every(topology: Topology, every: int = 100) -> Topology:
    """At the last of every so many steps all average with all, at the others as `topology` says."""
    _whole("global_every", "every", every, 1)
    if not isinstance(topology, Topology):
        raise TopologyUnusable(f"global_every({topology}): it takes a topology, as global_every(ring, 100)")

    def made(workers: int, hosts: Hosts) -> Schedule:
        base, everybody = topology.on(workers, hosts), fully_connected().on(workers, hosts)

        def at(step: int) -> Links:
            return (everybody if (step + 1) % every == 0 else base).links(step)

        return Schedule(workers, None if base.period is None else math.lcm(base.period, every), at)

    return Topology(f"global_every({topology}, {every})", True, made)


def custom(function: Callable[[int, int], Any], period: int | None = None) -> Topology:
    """What `function(workers, step)` returns: a Mixing, a mixing matrix, or a networkx graph (`Mixing.from_graph`). It
    must return the same on every worker. `period`: after how many steps it begins again, 1 if it never changes."""
    spec = f"custom({getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))})"

    def made(workers: int, hosts: Hosts) -> Schedule:
        def at(step: int) -> Links:
            given = function(workers, step)
            if isinstance(given, nx.Graph):
                given = Mixing.from_graph(given)
            mixing = given if isinstance(given, Mixing) else Mixing.from_matrix(given)
            if mixing.workers != workers:
                raise TopologyUnusable(
                    f"{spec} gave a step of {mixing.workers} workers for {workers} of them, at step {step}; the number "
                    "of workers is its first argument"
                )
            return mixing.links

        return Schedule(workers, period, at)

    return Topology(spec, period != 1, made, function)


# Weights


def uniform(topology: Topology) -> Topology:
    """All that a receiver takes counts the same: 1/(indegree + 1). Columns sum to 1, rows only in regular graphs."""
    return _weighted("uniform", topology)


def metropolis(topology: Topology) -> Topology:
    """1/(1 + the larger indegree of the two): doubly stochastic where every edge goes both ways."""
    return _weighted("metropolis", topology)


# By text

_MAKERS: tuple[Callable[..., Topology], ...] = (
    ring, star, mesh_2d, torus, hypercube, fully_connected, exponential_2, exponential, symmetric_exponential,
    random_regular, one_peer, inner_outer_ring, inner_outer_exponential_2, random_matching, global_every, uniform,
    metropolis,
)  # fmt: skip
KNOWN = {maker.__name__: maker for maker in _MAKERS}
EXAMPLES = (
    "ring", "ring(right)", "star", "mesh_2d", "torus", "hypercube", "fully_connected", "exponential_2",
    "exponential(4)", "symmetric_exponential(4)", "random_regular(4)", "one_peer(ring)", "one_peer(exponential_2)",
    "inner_outer_ring", "inner_outer_exponential_2", "random_matching",
)  # fmt: skip


def parse(spec: str | Topology) -> Topology:
    """The topology of a text such as `ring`, `exponential(4)`, `random_regular(4, seed=7)`, `metropolis(star)`; a
    topology is its own. Fails with TopologyUnusable."""
    if isinstance(spec, Topology):
        return spec
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise TopologyUnusable(f"{spec!r} is not the text of a topology; write it as ring or exponential(4)") from None
    made = _read(tree, spec)
    return made if isinstance(made, Topology) else _make(str(made), spec)


def _read(tree: ast.expr, spec: str) -> Any:
    match tree:
        case ast.Constant(value=int() | str() as value):
            return value
        case ast.Name(id=name):
            return _make(name, spec) if name in KNOWN else name
        case ast.Call(func=ast.Name(id=name)):
            words = {it.arg or "**": _read(it.value, spec) for it in tree.keywords}
            return _make(name, spec, *(_read(it, spec) for it in tree.args), **words)
    raise TopologyUnusable(f"{ast.unparse(tree)!r} in {spec!r} is no topology; write it as ring or exponential(4)")


def _make(name: str, spec: str, *values: Any, **words: Any) -> Topology:
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, 1)
        raise TopologyUnusable(
            f"there is no topology {name!r}{f', did you mean {near[0]}' if near else ''}; there are {', '.join(KNOWN)}"
        )
    signature = inspect.signature(KNOWN[name])
    try:
        signature.bind(*values, **words)
    except TypeError:
        takes = ", ".join(str(parameter).split(":")[0] for parameter in signature.parameters.values())
        raise TopologyUnusable(f"{spec!r} does not fit {name}({takes})") from None
    return KNOWN[name](*values, **words)


# How they are made


def _still(links: Links) -> Schedule:
    return Schedule(links.workers, 1, lambda step: links)


def _circulant(spec: str, distances: Callable[[int], Iterable[int]]) -> Topology:
    """Each sends to those so many ranks further on."""

    def made(workers: int, hosts: Hosts) -> Schedule:
        ahead = sorted({distance % workers for distance in distances(workers)} - {0})

        @cache
        def sources(rank: int) -> Ranks:
            return tuple((rank - distance) % workers for distance in ahead)

        @cache
        def destinations(rank: int) -> Ranks:
            return tuple((rank + distance) % workers for distance in ahead)

        return _still(Links(workers, sources, destinations, WEIGHTS["uniform"]))

    return Topology(spec, False, made)


def _undirected(spec: str, neighbors: Callable[[int, int], Ranks]) -> Topology:
    def made(workers: int, hosts: Hosts) -> Schedule:
        of = cache(partial(neighbors, workers) if workers > 1 else lambda _: ())
        return _still(Links(workers, of, of, WEIGHTS["metropolis"]))

    return Topology(spec, False, made)


def _weighted(weights: Weights, topology: Topology) -> Topology:
    if not isinstance(topology, Topology):
        raise TopologyUnusable(f"{weights}({topology}): it takes a topology, as {weights}(star)")

    def made(workers: int, hosts: Hosts) -> Schedule:
        schedule = topology.on(workers, hosts)
        return replace(schedule, links=lambda step: schedule.links(step).weighted(weights))

    return Topology(f"{weights}({topology})", topology.dynamic, made, topology.function)


def _exchange(workers: int, other: Callable[[int, int], int]) -> Links:
    """Everybody sends to one, `other(rank, 1)`, and receives from one, `other(rank, -1)`; itself stands for nobody."""

    def sources(rank: int) -> Ranks:
        return [source for source in (other(rank, -1),) if source != rank]

    def destinations(rank: int) -> Ranks:
        return [destination for destination in (other(rank, 1),) if destination != rank]

    return Links(workers, sources, destinations, WEIGHTS["uniform"])


def _inner_outer(spec: str, distances: Callable[[int], Ranks]) -> Topology:
    """`distances(size)`: those that take turns in a circle of that size."""

    def made(workers: int, hosts: Hosts) -> Schedule:
        ranks: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        members = list(ranks.values())
        places = {rank: (host, index) for host, here in enumerate(members) for index, rank in enumerate(here)}
        clocks = [3 if len(here) == 2 else len(here) for here in members] if len(members) > 1 else [1]
        longest = max(clocks)
        everywhere = list(range(len(members)))
        elsewhere = [host for host in everywhere if len(members[host]) != 2]  # who has somebody outside at third steps

        def outside(host: int, step: int) -> int:
            """The index of the worker whose turn it is: of none, where all are inside."""
            return step % clocks[host] if len(members) > 1 else len(members[host])

        def other(rank: int, way: int, step: int) -> int:
            host, index = places[rank]
            out = outside(host, step)
            if index == out:
                circle = everywhere if step % 3 < 2 else elsewhere
                ahead = distances(len(circle))
                there = circle[(bisect_left(circle, host) + way * ahead[step // longest % len(ahead)]) % len(circle)]
                return members[there][outside(there, step)]
            size = len(members[host]) - (out < len(members[host]))
            ahead = distances(size)
            at = (index - (index > out) + way * ahead[step % len(ahead)]) % size
            return members[host][at + (at >= out)]

        def at(step: int) -> Links:
            return _exchange(workers, lambda rank, way: other(rank, way, step))

        turns = [len(distances(size)) for here in members for size in (len(here) - 1, len(here))]
        outer = [longest * len(distances(len(circle))) for circle in (everywhere, elsewhere)]
        return Schedule(workers, math.lcm(*clocks, *turns, *outer), at)

    return Topology(spec, True, made)


def _partner(rank: int, workers: int, seed: int, step: int) -> int:
    """Of the rounds of a tournament in which everybody meets everybody once, one is drawn: in round r those meet whose
    ranks sum to r, modulo an odd number of workers; who would meet itself meets the last one, or nobody if the number
    of workers is odd. So nobody needs to draw the pairs of the others to find its own."""
    circle = workers - 1 + workers % 2
    drawn = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    sum_ = int.from_bytes(drawn, "big") % circle
    if rank == circle:
        return sum_ * (workers // 2) % circle  # half of it: twice workers // 2 is 1
    other = (sum_ - rank) % circle
    return other if other != rank else workers - 1 if workers % 2 == 0 else rank


@lru_cache
def _random_regular(workers: int, degree: int, seed: int) -> tuple[Ranks, ...]:
    """The neighbors of each rank."""
    degree = min(degree, workers - 1)
    degree += workers % 2 * degree % 2
    for attempt in itertools.count():
        draw = random.Random(f"{seed} {workers} {attempt}")
        if 2 * degree < workers:
            graph = nx.random_regular_graph(degree, workers, seed=draw)
        else:  # those who are no neighbors are fewer, and few are drawn fast
            graph = nx.complement(nx.random_regular_graph(workers - 1 - degree, workers, seed=draw))
        if nx.is_connected(graph):
            return tuple(tuple(sorted(graph[rank])) for rank in range(workers))
    raise AssertionError("there is always one more attempt")


def _powers(base: int, below: int) -> Iterator[int]:
    """1, base, base², …"""
    power = 1
    while power < below:
        yield power
        power *= base


def _width(workers: int) -> int:
    rows = next(rows for rows in range(math.isqrt(workers), 0, -1) if workers % rows == 0)
    return workers // rows if workers // rows <= 2 * rows else math.isqrt(workers - 1) + 1


def _whole(name: str, what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TopologyUnusable(f"{name}: {what} is {value}; write a whole number from {least} up")
