"""Bodies for the tests of the measuring seam: no torch, and a cost that the test chose."""

from __future__ import annotations

import hashlib
import os

from shoal.bench.bodies import Buffer, Setup, Step


def digest(setup: Setup) -> Step:
    """Arithmetic in proportion to `size_bytes`: what takes twice the bytes takes twice the time."""
    assert isinstance(setup.work, Buffer)
    data = bytes(setup.work.size_bytes)

    def step() -> None:
        hashlib.sha256(data).digest()

    return step


def cores(setup: Setup) -> Step:
    """Leaves the cores it runs on and its thread count in the meeting directory's sibling named by the environment."""

    def step() -> None:
        with open(os.path.join(os.environ["SEEN_DIR"], str(setup.rank)), "w") as seen:
            seen.write(f"{sorted(os.sched_getaffinity(0))} {setup.threads} {os.environ['OMP_NUM_THREADS']}")

    return step


def dies_at_rank_1(setup: Setup) -> Step:
    def step() -> None:
        if setup.rank == 1:
            raise RuntimeError("planted death")

    return step


def refuses(setup: Setup) -> Step:
    raise RuntimeError("planted refusal")
