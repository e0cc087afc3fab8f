from __future__ import annotations

import mmap
import os

from shoal.bench.footprint import footprint


def test_private_memory_that_was_added_is_seen_in_both_counts() -> None:
    before = footprint("me", [os.getpid()])
    # A mapping, not an allocation: malloc may still hold pages that an earlier test gave back.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(os.urandom(len(held)))
        after = footprint("me", [os.getpid()])
        assert (after.proportional_bytes - before.proportional_bytes) / len(held) > 0.9
        assert (after.private_bytes - before.private_bytes) / len(held) > 0.9
    assert after.n_workers == 1
