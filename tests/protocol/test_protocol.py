"""The commit protocol: it holds in every interleaving within the bounds, and each of its mechanisms is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from .model import Mutant, Scenario, Violation, explore


def violation_of(scenario: Scenario) -> Violation:
    """The violation with the shortest trace; fails the test if there is none."""
    try:
        explored = explore(scenario)
    except Violation as violation:
        return violation
    pytest.fail(f"{scenario} holds in all of {explored.states} states: the model is too weak, or this is not needed")


# The floors are a little under what was counted: a change that cuts interleavings off does not pass unseen.
BOUNDS = {
    "nobody comes or goes": (Scenario(commits=3), 700),
    "crash": (Scenario(crashes=1), 15_000),
    "crash, every read a step": (Scenario(commits=1, crashes=1, each_read=True), 20_000),
    "leave": (Scenario(leaves=1), 10_000),
    "leave, every read a step": (Scenario(commits=1, leaves=1, each_read=True), 30_000),
    "join": (Scenario(members=2, joins=1), 2_000),
    "join, every read a step": (Scenario(commits=1, members=2, joins=1, each_read=True), 5_000),
    "leave and join in its slot": (Scenario(leaves=1, joins=1), 40_000),
    "join and crash": (Scenario(members=2, joins=1, crashes=1), 70_000),
    "pause until a join": (Scenario(members=2, min_members=2, joins=1, crashes=1), 65_000),
}

DEEP = {
    "crash and crash": (Scenario(crashes=2), 120_000),
    "leave and crash": (Scenario(commits=1, leaves=1, crashes=1), 150_000),
    "join in the slot of a crash": (Scenario(commits=1, joins=1, crashes=1), 105_000),
    "crash and crash, three commits": (Scenario(commits=3, crashes=2), 195_000),
    "crash and crash, every read a step": (Scenario(crashes=2, each_read=True), 200_000),
    "leave and leave": (Scenario(leaves=2), 140_000),
    "leave and crash, two commits": (Scenario(leaves=1, crashes=1), 340_000),
    "leave and crash, every read a step": (Scenario(commits=1, leaves=1, crashes=1, each_read=True), 360_000),
    "join in the slot of a crash, two commits": (Scenario(joins=1, crashes=1), 230_000),
    "join in the slot of a crash, every read a step": (
        Scenario(commits=1, joins=1, crashes=1, each_read=True),
        590_000,
    ),
    "pause of three until a join": (Scenario(min_members=3, joins=1, crashes=1), 120_000),
    "leave, join, crash and crash": (Scenario(commits=1, members=2, leaves=1, joins=1, crashes=2), 3_400_000),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_every_interleaving_keeps_one_whole_state_and_comes_to_an_end(name: str) -> None:
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


@pytest.mark.parametrize(
    "bounds", [Scenario(commits=1, crashes=1), Scenario(commits=1, leaves=1), Scenario(commits=1, members=2, joins=1)]
)
def test_waits_that_look_at_all_words_at_once_reach_the_same_ends(bounds: Scenario) -> None:
    by_read = replace(bounds, each_read=True)
    assert explore(by_read).finals == explore(bounds).finals


@pytest.mark.parametrize("bounds", [Scenario(leaves=1, alone=True), Scenario(members=2, joins=1, alone=True)])
def test_planned_change_that_stands_alone_aborts_no_step(bounds: Scenario) -> None:
    assert explore(bounds).aborted == 0


def test_planned_change_on_the_heels_of_another_may_abort_a_step() -> None:
    assert explore(Scenario(leaves=1, joins=1)).aborted > 0


@pytest.mark.parametrize("bounds", [Scenario(crashes=1), Scenario(leaves=1)])
def test_step_may_be_committed_although_a_worker_s_wait_ended_early(bounds: Scenario) -> None:
    """So whether a step was applied is read from COMMIT after entering, never from `Changed`."""
    assert explore(bounds).late > 0


MUTANTS = {
    Mutant.NO_ACK_BARRIER: (Scenario(crashes=1), "reduces lanes"),
    Mutant.NO_LEAVER_ACK: (Scenario(leaves=1, crashes=1), "does seq 1 again"),
    Mutant.COMMIT_READ_EARLY: (Scenario(crashes=1), "does seq 1 again"),
    Mutant.SINGLE_BUFFER: (Scenario(crashes=1), "computes seq 1 from .*torn"),
    Mutant.EARLY_COMMIT: (Scenario(), "commits 1:1, the buffer is .*torn"),
    Mutant.ZOMBIE: (Scenario(crashes=1), "generation 2 begins with"),
    Mutant.LEAVER_EXITS: (Scenario(leaves=1, crashes=1), "deadlock"),
    Mutant.STALE_BYE: (Scenario(leaves=1, crashes=1), "deadlock"),
    Mutant.OWN_KNOWLEDGE: (Scenario(leaves=1, alone=True), "a planned change aborts"),
    Mutant.SEEN_AFTER_DONE: (Scenario(leaves=1, alone=True), "another max.SEEN. after COMMIT"),
    Mutant.SEQ_ONLY: (Scenario(crashes=1), "reduces lanes"),
    Mutant.NO_ACK_EXIT: (Scenario(leaves=1, joins=1), "deadlock"),
    Mutant.NEWEST_FLAG: (Scenario(leaves=1, crashes=1), "deadlock"),
}


def test_each_mechanism_has_its_mutant() -> None:
    assert set(MUTANTS) == set(Mutant) - {Mutant.LEAVER_EXIT_IS_DEATH}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_protocol_without_one_of_its_mechanisms_breaks(mutant: Mutant) -> None:
    scenario, message = MUTANTS[mutant]
    violation = violation_of(replace(scenario, mutant=mutant))
    assert re.search(message, violation.what), f"{mutant.value}: broke otherwise than expected\n{violation}"
    assert violation.trace


def test_leaver_may_exit_without_bye_if_that_counts_as_a_death() -> None:
    """Bye spares the others a fault. What must not be is an exit that publishes nothing (LEAVER_EXITS)."""
    explored = explore(Scenario(commits=1, leaves=1, joins=1, mutant=Mutant.LEAVER_EXIT_IS_DEATH))
    assert explored.finals > 0


def test_own_knowledge_instead_of_seen_costs_an_aborted_step_and_no_harm() -> None:
    explored = explore(Scenario(leaves=1, mutant=Mutant.OWN_KNOWLEDGE))
    assert explored.aborted > 0
