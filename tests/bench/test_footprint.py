from __future__ import annotations

import os

from shoal.bench.footprint import footprint


def test_a_private_megabyte_more_is_seen_in_both_counts() -> None:
    before = footprint("me", [os.getpid()])
    held = bytearray(os.urandom(32 << 20))
    after = footprint("me", [os.getpid()])
    assert (after.proportional_bytes - before.proportional_bytes) / len(held) > 0.9
    assert (after.private_bytes - before.private_bytes) / len(held) > 0.9
    assert after.n_workers == 1
