"""The commit protocol between hosts: it holds in every interleaving within the bounds, and each mechanism is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from .hosts import Mutant, Scenario, Violation, explore

TWO = Scenario(host_of=(0, 1))  # a worker each
THREE = Scenario(host_of=(0, 0, 1), commits=1)

# The floors are a little under what was counted: a change that cuts interleavings off does not pass unseen.
BOUNDS = {
    "nobody comes or goes": (Scenario(commits=3), 1_000),
    "crash": (replace(TWO, crashes=1), 26_000),
    "leave": (replace(TWO, leaves=1), 8_500),
    "a host out of reach": (replace(TWO, drops=1), 14_000),
}

DEEP = {
    "a host out of reach, and a crash": (replace(TWO, drops=1, crashes=1), 100_000),
    "two workers and one, crash": (replace(THREE, crashes=1), 450_000),
    "two workers and one, leave": (replace(THREE, leaves=1), 270_000),
    "two workers and one, a host out of reach": (replace(THREE, drops=1), 360_000),
}

MUTANTS = {
    Mutant.OWN_COMMIT: (replace(TWO, leaves=1), "does seq 1 again"),
    Mutant.TOLD_EARLY: (replace(THREE, crashes=1), "sums lanes"),
    Mutant.NEAR_DONE_ONLY: (replace(TWO, leaves=1), "commits 1:1, its host's buffer is"),
    Mutant.NO_SUMS: (replace(TWO, leaves=1), "steps with sums"),
    Mutant.OLD_FRAMES: (replace(THREE, leaves=1), "sums lanes"),
    Mutant.SILENT_MOVE: (replace(TWO, leaves=1), "deadlock"),
    Mutant.EARLY_BYE: (replace(TWO, leaves=1), "deadlock"),
    Mutant.NO_FAR_LEAVER: (replace(TWO, leaves=1), "does seq 1 again"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_every_interleaving_keeps_hosts_alike_and_comes_to_an_end(name: str) -> None:
    scenario, floor = BOUNDS[name]
    explored = explore(scenario)
    assert explored.states > floor
    assert explored.finals > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DEEP)
def test_every_interleaving_of_a_deeper_bound_holds(name: str) -> None:
    scenario, floor = DEEP[name]
    explored = explore(scenario)
    assert explored.states > floor
    assert explored.finals > 0


def test_a_host_may_learn_of_a_commit_only_when_the_next_generation_begins() -> None:
    assert explore(replace(TWO, leaves=1)).rolled > 0


def test_each_mechanism_has_its_mutant() -> None:
    assert set(MUTANTS) == set(Mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_protocol_without_one_of_its_mechanisms_breaks(mutant: Mutant) -> None:
    scenario, message = MUTANTS[mutant]
    with pytest.raises(Violation) as caught:
        explore(replace(scenario, mutant=mutant))
    assert re.search(message, caught.value.what), f"{mutant.value}: broke otherwise than expected\n{caught.value}"
    assert caught.value.trace
