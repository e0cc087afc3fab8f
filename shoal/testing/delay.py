"""Frames held back on their way between network interfaces, because not every kernel has netem.

python -m shoal.testing.delay MILLISECONDS FROM:TO…

What comes in at FROM goes out at TO so much later, in the same order; what comes in at TO goes out at FROM at once.
Run it where the interfaces are; it ends with its parent.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from shoal.process import die_with

_ALL_PROTOCOLS = 3
_SOL_PACKET, _VNET_HEADER = 263, 15
_OUTGOING = 4
_RECEIVE_BUFFER, _SEND_BUFFER = 33, 32  # beyond the limit of other users
_BUFFER_BYTES = 64 << 20
_FRAME_BYTES = 1 << 17
_GONE = (errno.ENETDOWN, errno.ENXIO, errno.ENOBUFS, errno.EAGAIN)  # a link that is down, or has no room, loses frames


def opened(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # With it, what the kernel would still have to do to a frame (cut it, add a checksum) is told, and done later.
    end.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    for buffer in (_RECEIVE_BUFFER, _SEND_BUFFER):
        end.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    end.bind((interface, _ALL_PROTOCOLS))
    end.setblocking(False)
    return end


@dataclass
class Way:
    """One direction between two interfaces."""

    source: socket.socket
    target: socket.socket
    delay_s: float
    held: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        while True:
            try:
                frame, (_, _, kind, *_) = self.source.recvfrom(_FRAME_BYTES)
            except OSError as problem:
                if problem.errno in _GONE:
                    return
                raise
            if kind != _OUTGOING:
                self.held.append((time.monotonic() + self.delay_s, frame))

    def give(self) -> float | None:
        """Send what is due; how long until the next is, None if there is none."""
        while self.held:
            due_s = self.held[0][0] - time.monotonic()
            if due_s > 0:
                return due_s
            try:
                self.target.send(self.held.popleft()[1])
            except OSError as problem:
                if problem.errno not in _GONE:
                    raise
        return None


def main() -> None:
    die_with(os.getppid())
    delay_s = float(sys.argv[1]) / 1000
    selector, ways = selectors.DefaultSelector(), []
    for pair in sys.argv[2:]:
        near, far = map(opened, pair.split(":"))
        for way in (Way(near, far, delay_s), Way(far, near, 0.0)):
            ways.append(way)
            selector.register(way.source, selectors.EVENT_READ, way)
    print("ready", flush=True)
    while True:
        waits = [due_s for way in ways if (due_s := way.give()) is not None]
        for key, _ in selector.select(min(waits, default=None)):
            key.data.take()


if __name__ == "__main__":
    main()
