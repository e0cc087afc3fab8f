from __future__ import annotations

import subprocess
import sys

from shoal.bench.footprint import footprint

HELD = 64 << 20
# A process with little that it could share: what others map of the same files makes its share of those smaller.
HOLDS = f"import os; print('', flush=True); input(); held = os.urandom({HELD}); print('', flush=True); input()"


def test_private_memory_that_was_added_is_seen_in_both_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = footprint("child", [child.pid])
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = footprint("child", [child.pid])
        child.kill()
    assert (after.proportional_bytes - before.proportional_bytes) / HELD > 0.9
    assert (after.private_bytes - before.private_bytes) / HELD > 0.9
    assert after.n_workers == 1
