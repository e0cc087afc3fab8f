"""How fast workers come to agree when they average: facts about steps that are repeated.

Each function takes the mixings of consecutive steps, one for a graph that stays the same, one period for a schedule.
Disagreement is the distance of the workers' values from their mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

import numpy as np

from shoal.sync.mixing import Matrix, Mixing

_ROUNDING = 1e-12  # an eigenvalue that is nearer to 0, or to 1, is not told from it


def product(mixings: Sequence[Mixing]) -> Matrix:
    """The matrix of all these steps, one after the other."""
    return reduce(np.matmul, (mixing.matrix() for mixing in mixings))


def spectral_gap(mixings: Sequence[Mixing]) -> float:
    """1 less the second largest modulus of an eigenvalue of their product: 0, they never agree; 1, at once."""
    return 1.0 - _second(product(mixings))


def rate(mixings: Sequence[Mixing]) -> float:
    """By what disagreement is multiplied in a step, in the long run."""
    return float(_second(product(mixings)) ** (1 / len(mixings)))


def steps_to_hear(mixings: Sequence[Mixing]) -> int | None:
    """After how many steps every rank's value is part of everybody's: for a graph that stays the same, its diameter.
    None if that is never so."""
    workers = mixings[0].workers
    everybody = (1 << workers) - 1
    heard = [1 << rank for rank in range(workers)]  # of whom, a bit each
    unchanged = 0
    for step in itertools.count():
        if all(one == everybody for one in heard):
            return step
        if unchanged == len(mixings):
            return None
        before, heard = (
            heard,
            [_union(heard, column) | heard[rank] for rank, column in enumerate(mixings[step % len(mixings)].columns)],
        )
        unchanged = unchanged + 1 if heard == before else 0
    raise AssertionError("there is always one more step")


def steps_to_agree(mixings: Sequence[Mixing], factor: float = 1000.0) -> int | None:
    """After how many steps disagreement is `factor` times smaller, whatever the values were. None if never. Fails with
    TopologyUnusable unless receivers' weights sum to 1: there is nothing to agree on."""
    for mixing in mixings:
        mixing.require_column_stochastic()
    matrices = [mixing.matrix() for mixing in mixings]
    workers = len(matrices[0])
    centered = np.eye(workers) - 1 / workers
    once = reduce(np.matmul, matrices)
    if _second(once) > 1 - _ROUNDING:
        return None

    def disagrees(matrix: Matrix) -> bool:
        return bool(np.linalg.norm(matrix @ centered, 2) * factor > 1)

    powers = [once]  # of 1, 2, 4, 8, … periods, up to the first that is enough
    while disagrees(powers[-1]):
        powers.append(powers[-1] @ powers[-1])
    done, steps = np.eye(workers), 0
    for exponent in range(len(powers) - 2, -1, -1):
        further = done @ powers[exponent]
        if disagrees(further):
            done, steps = further, steps + len(matrices) * 2**exponent
    while disagrees(done):
        done, steps = done @ matrices[steps % len(matrices)], steps + 1
    return steps


def _union(heard: Sequence[int], ranks: Iterable[int]) -> int:
    return reduce(or_, (heard[rank] for rank in ranks), 0)


def _second(matrix: Matrix) -> float:
    if len(matrix) == 1:
        return 0.0
    symmetric = np.array_equal(matrix, matrix.T)
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    second = float(np.sort(np.abs(values))[-2])
    return second if second > _ROUNDING else 0.0
