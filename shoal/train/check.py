"""Now and then, whether this worker's copy of the state is the one that others have: its checksums go to the
coordinator, which compares them (`control/drift.py`).

The lowest rank says with a commit that it is to be checked, so all check the same one. What is committed stays as it is
until the step after the next reduces: a thread sums it up meanwhile, and a step that comes too early waits for it.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable

from shoal.control.drift import Told
from shoal.sync.sync import Sums

EVERY_S = 30.0
_NAME_CHARACTERS = 200
_MOST = 2048  # checksums of one message; where there are more tensors, neighbors share one


class Checker:
    """On one worker. `tell` is given the checksums, on another thread."""

    def __init__(self, tell: Callable[[Told], None]) -> None:
        self._tell = tell
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._seq = 0  # of the commit that is being summed up

    def due(self, *, last: bool) -> bool:
        """For the lowest rank, once a commit. `last`: of a pass."""
        now_s = time.monotonic()
        if not last and now_s < self._due_s:
            return False
        self._due_s = now_s + EVERY_S
        return True

    def take(
        self, generation: int, seq: int, step: int, copies: tuple[tuple[str, ...], ...], sums: Callable[[], Sums]
    ) -> None:
        """Tell of the copy of commit `seq` that this worker holds."""
        self.hold()

        def body() -> None:
            self._tell(Told(generation, seq, step, copies, few(sums())))

        self._seq = seq
        self._thread = threading.Thread(target=body, name="shoal-check", daemon=True)
        self._thread.start()

    def before(self, seq: int) -> None:
        """Call it before commit `seq` is made ready for: from then on its buffers are written to."""
        if seq >= self._seq + 2:
            self.hold()

    def hold(self) -> None:
        """Until nothing is being summed up any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _short(name: str, index: int) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}… ({index})"


def few(sums: Sums, most: int = _MOST) -> Sums:
    """No more than that, with neighbors under the name of the first of them."""
    sums = {_short(name, index): value for index, (name, value) in enumerate(sums.items())}
    each = -(-len(sums) // most)
    if each <= 1:
        return sums
    names = list(sums)
    together = [names[at : at + each] for at in range(0, len(names), each)]
    return {
        f"{some[0]} or one of the next {each - 1}": zlib.crc32(repr([sums[name] for name in some]).encode())
        for some in together
    }
