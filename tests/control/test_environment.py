from __future__ import annotations

import os

from shoal.control.environment import WorkerEnvironment


def test_what_a_worker_is_told_survives_the_environment() -> None:
    told = WorkerEnvironment("w3", "here", "/run", 0.5, 7, 2, False, "module:function", "/plan.json")
    assert WorkerEnvironment.from_env({**os.environ, **told.to_env()}) == told


def test_what_is_left_out_overrides_what_the_environment_says_otherwise() -> None:
    stale = WorkerEnvironment("w3", threads=4, pin=False, faults="/plan.json").to_env()
    assert WorkerEnvironment.from_env({**stale, **WorkerEnvironment().to_env()}) == WorkerEnvironment()
    assert WorkerEnvironment.from_env({}) == WorkerEnvironment()
