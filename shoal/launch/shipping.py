"""What workers write on a host with a run directory of its own, on its way home."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.control import pieces
from shoal.control.rundir import RunDir

_LOOK_S = 0.25
_AGAIN_S = 2.0  # a piece that got no answer is sent again: the stream may have broken


class Shipping:
    """`send` is called with path, offset and bytes of each piece, and `on_kept` is to be called with the answer. Of
    each file one piece is under way at a time."""

    def __init__(self, run_dir: RunDir, host: str, send: Callable[[str, int, bytes], None]) -> None:
        self._run_dir, self._host, self._send = run_dir, host, send
        self._kept: dict[str, int] = {}  # how much home has of each file
        self._sent_at: dict[str, float] = {}

    def on_kept(self, path: str, size_bytes: int) -> None:
        self._kept[path] = size_bytes
        self._sent_at.pop(path, None)
        self._send_next(path)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def finish(self, within_s: float) -> bool:
        """Whether all of it is home, when nobody writes any more; or it took too long."""
        latest_s = asyncio.get_running_loop().time() + within_s
        while left := self._look():
            if asyncio.get_running_loop().time() > latest_s:
                break
            await asyncio.sleep(_LOOK_S / 10)
        return not left

    def _look(self) -> bool:
        """Send what is new. Whether there is anything that home does not have."""
        left = [path for path in pieces.written(self._run_dir, self._host) if self._send_next(path)]
        return bool(left)

    def _send_next(self, path: str) -> bool:
        now, offset = asyncio.get_running_loop().time(), self._kept.get(path, 0)
        if now - self._sent_at.get(path, -_AGAIN_S) < _AGAIN_S:
            return True
        with open(self._run_dir.path / path, "rb") as file:
            file.seek(offset)
            data = file.read(pieces.PIECE_BYTES)
        if data:
            self._sent_at[path] = now
            self._send(path, offset, data)
        return bool(data)
