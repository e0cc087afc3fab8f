from __future__ import annotations

import pytest

from shoal.control.drift import Alike, Checks, Drift, Told
from shoal.control.instructions import Fence, Log, Stop
from shoal.control.membership.failures import on_drift
from shoal.control.membership.settling import settle
from shoal.control.membership.values import Membership, found
from shoal.control.membership.workers import on_join, on_ready

COPIES = (("a-w0", "a-w1"), ("b-w0",), ("c-w0",))
SUMS = {"0.weight": 1, "0.bias": 2}


def told(seq: int = 8, copies: tuple[tuple[str, ...], ...] = COPIES, **changed: int) -> Told:
    return Told(3, seq, seq - 1, copies, {**SUMS, **{name.replace("_", "."): value for name, value in changed.items()}})


def test_copies_are_judged_once_all_have_told_and_the_newest_step_at_which_they_were_alike_is_known() -> None:
    checks = Checks()
    assert checks.on_told("a-w0", told()) is None
    assert checks.on_told("a-w0", told()) is None, "who tells it twice, to another coordinator, is still one"
    assert checks.on_told("c-w0", told()) is None
    assert checks.on_told("b-w0", told()) == Alike(7)
    assert checks.alike_at == 7


def test_the_copy_that_is_not_as_most_are_is_named_with_its_first_tensor() -> None:
    checks = Checks()
    checks.on_told("a-w0", told())
    checks.on_told("b-w0", told(**{"0_bias": 5}))
    drift = checks.on_told("c-w0", told())
    assert drift == Drift(7, 8, "0.bias", COPIES, (("b-w0",),), majority=True, alike_at=0)


@pytest.mark.parametrize("copies", [COPIES[:2], COPIES], ids=["two", "three"])
def test_where_no_copy_is_in_the_majority_all_are_in_doubt(copies: tuple[tuple[str, ...], ...]) -> None:
    checks = Checks()
    *_, drift = [checks.on_told(copy[0], told(copies=copies, **{"0_weight": at})) for at, copy in enumerate(copies)]
    assert isinstance(drift, Drift)
    assert not drift.majority
    assert drift.others == copies
    assert drift.tensor == "0.weight"


def test_copies_of_which_one_has_more_tensors_are_not_alike() -> None:
    checks = Checks()
    checks.on_told("a-w0", told(copies=COPIES[:2]))
    drift = checks.on_told("b-w0", told(copies=COPIES[:2], more=1))
    assert isinstance(drift, Drift)
    assert drift.tensor == "the names of tensors"


def test_a_check_of_which_somebody_died_is_forgotten_and_the_next_is_judged() -> None:
    checks = Checks()
    for seq in range(8, 40):
        assert checks.on_told("a-w0", told(seq, COPIES[:2])) is None
    assert checks.on_told("b-w0", told(39, COPIES[:2])) == Alike(38)
    assert checks.on_told("b-w0", told(8, COPIES[:2])) is None


def members() -> Membership:
    membership = found(1, 8, 4)
    for worker_id in ("a-w0", "a-w1", "b-w0", "c-w0"):
        membership, _ = on_join(membership, worker_id, worker_id[0], 0.0, launched=True)
        membership, _ = on_ready(membership, worker_id)
    membership, _ = settle(membership)
    return membership


def test_whoever_has_another_state_than_most_is_ended_and_the_job_goes_on() -> None:
    drift = Drift(7, 8, "0.bias", COPIES, (("a-w0", "a-w1"),), majority=True, alike_at=3)
    membership, told = on_drift(members(), drift)
    assert [it.worker_id for it in told if isinstance(it, Fence)] == ["a-w0", "a-w1"]
    assert membership.stopping is None
    log = next(it for it in told if isinstance(it, Log))
    assert log.text.startswith("the state of a-w0, a-w1 on a is not that of most at step 7, first in 0.bias (alike at")
    again, told = on_drift(membership, drift)
    assert again == membership
    assert not [it for it in told if isinstance(it, Fence)]


def test_a_drift_that_is_only_to_be_told_of_ends_nobody() -> None:
    drift = Drift(7, 8, "0.bias", COPIES, COPIES, majority=False, alike_at=3)
    before = members()
    membership, told = on_drift(before, drift, only_tell=True)
    assert membership == before
    assert [it.kind for it in told if isinstance(it, Log)] == ["drift"]
    assert len(told) == 1


def test_where_nobody_can_tell_which_is_right_the_job_fails_and_all_are_ended() -> None:
    drift = Drift(7, 8, "0.bias", COPIES, COPIES, majority=False, alike_at=3)
    membership, told = on_drift(members(), drift)
    assert [it.worker_id for it in told if isinstance(it, Fence)] == ["a-w0", "a-w1", "b-w0", "c-w0"]
    [stop] = [it for it in told if isinstance(it, Stop)]
    assert (stop.failed, stop.kind) == (True, "StateDrifted")
    assert on_drift(membership, drift) == (membership, [])
