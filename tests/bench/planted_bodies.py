"""Bodies for the tests of the measuring seam: no torch, and a cost that the test chose."""

from __future__ import annotations

import hashlib
import os

from shoal.bench.bodies import Buffer, Run, Setup


def digest(setup: Setup) -> Run:
    """Arithmetic in proportion to `size_bytes`: what takes twice the bytes takes twice the time."""
    assert isinstance(setup.work, Buffer)
    data = bytes(setup.work.size_bytes)

    def run(steps: int) -> None:
        for _ in range(steps):
            hashlib.sha256(data).digest()

    return run


def cores(setup: Setup) -> Run:
    """Leaves the cores it runs on and its thread count in the meeting directory's sibling named by the environment."""

    def run(steps: int) -> None:
        with open(os.path.join(os.environ["SEEN_DIR"], str(setup.rank)), "w") as seen:
            seen.write(f"{sorted(os.sched_getaffinity(0))} {setup.threads} {os.environ['OMP_NUM_THREADS']}")

    return run


def dies_at_rank_1(setup: Setup) -> Run:
    def run(steps: int) -> None:
        if setup.rank == 1:
            raise RuntimeError("planted death")

    return run


def refuses(setup: Setup) -> Run:
    raise RuntimeError("planted refusal")
