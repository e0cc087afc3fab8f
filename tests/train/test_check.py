from __future__ import annotations

import threading

from shoal.control.drift import Told
from shoal.train.check import Checker, few


def test_a_step_that_would_overwrite_what_is_summed_up_waits_for_it() -> None:
    told: list[Told] = []
    go, passed = threading.Event(), threading.Event()

    def sums() -> dict[str, int]:
        assert go.wait(30)
        return {"weight": 1}

    checker = Checker(told.append)
    checker.take(1, 5, 4, (("w0",), ("w1",)), sums)
    checker.before(6)  # which writes to the other buffers
    thread = threading.Thread(target=lambda: (checker.before(7), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    go.set()
    assert passed.wait(30)
    assert [(it.seq, it.sums) for it in told] == [(5, {"weight": 1})]


def test_a_check_is_due_at_first_and_with_the_last_step_of_a_pass() -> None:
    checker = Checker(lambda told: None)
    assert [checker.due(last=last) for last in (False, False, True, False)] == [True, False, True, False]


def test_more_tensors_than_a_message_takes_share_checksums_and_a_change_of_any_shows() -> None:
    sums = {f"layer{index}": index for index in range(10)}
    before, after = few(sums, most=4), few({**sums, "layer7": 0}, most=4)
    assert len(before) == 4
    assert [name for name in before if before[name] != after[name]] == ["layer6 or one of the next 2"]
    assert few(sums, most=10) == sums
