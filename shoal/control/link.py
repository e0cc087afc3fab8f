"""A stream to the coordinator that is opened again whenever it breaks, in the background.

What was said on the old stream is said again. Where the coordinator is says the run directory, anew at each attempt:
another one may have another port. gRPC is imported when the first stream is opened, not with this module.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from shoal.control import protocol, tls
from shoal.control.rundir import RunDir
from shoal.control.timeouts import Timeouts
from shoal.errors import UserMistake

_log = logging.getLogger("shoal.link")


class Link:
    """One stream, kept open from a thread of its own until `close`.

    Every time it is opened, `opening()` and then whatever was said with `keep` go out first. `beat`, if given, makes a
    message whenever the beat interval has passed. `hear` is called on the link's thread, and no call is made with a
    lock held.
    """

    def __init__(
        self,
        run_dir: RunDir,
        method: str,
        response: Any,
        timeouts: Timeouts,
        opening: Callable[[], Any],
        hear: Callable[[Any], None],
        beat: Callable[[], Any] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._token = run_dir.token()
        self._tls = run_dir.tls()
        self._method = method
        self._response = response
        self._timeouts = timeouts
        self._opening = opening
        self._hear = hear
        self._beat = beat
        self._lock = threading.RLock()  # the handler of a signal may speak while the thread it interrupts does
        self._kept: dict[str, Any] = {}
        self._outbox: queue.SimpleQueue[Any] | None = None
        self._call: Any = None
        self._closing = threading.Event()
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-{method.lower()}", daemon=True)
        self.token_refused = threading.Event()
        self.refused: UserMistake | None = None  # why the newest attempt failed, if for certificates
        self.address = run_dir.address() or "127.0.0.1:0"  # of the newest attempt
        self._term = 0  # of the newest coordinator that was heard
        self.answered = False  # the coordinator has said something on the present stream

    def start(self) -> None:
        self._thread.start()

    def keep(self, key: str, message: Any) -> None:
        """Say it now, and again on every later stream; a later message under the same key replaces it."""
        with self._lock:
            self._kept[key] = message
            if self._outbox is not None:
                self._outbox.put(message)

    def drop(self, key: str) -> None:
        """Do not say it again."""
        with self._lock:
            self._kept.pop(key, None)

    def say(self, message: Any) -> None:
        """Say it once, if the stream is open; one that breaks just then loses it. What can be called is made only when
        its turn comes: it is not older than a beat before it."""
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(message)

    def close(self, patience_s: float = 0.0) -> None:
        """Deliver what was said, as long as that takes no more than a beat, and end. While there is no stream, wait
        that patiently for one."""
        self._open.wait(patience_s)
        self._closing.set()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(None)
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(self._timeouts.beat_s)
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._thread.join(self._timeouts.budget_s)

    def _run(self) -> None:
        pause_s = self._timeouts.backoff_first_s
        while not self._closing.is_set():
            try:
                if self._converse():
                    pause_s = self._timeouts.backoff_first_s
            except UserMistake as mistake:  # a certificate cannot be read
                self._note(mistake)
            # Jitter: the workers of a job lose the coordinator at the same moment.
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timeouts.backoff_max_s)

    def _converse(self) -> bool:
        """Open a stream and listen until it ends. Whether anything was heard."""
        import grpc

        # A reader of gRPC's wakes up ten times a second to see whether it was interrupted, which takes more than all
        # beats; what it waits for wakes it at once, however long this is.
        grpc._common.MAXIMUM_WAIT_TIMEOUT = self._timeouts.budget_s
        heard = False
        self.address = self._run_dir.address() or self.address
        with tls.channel(self._tls, self.address) as channel:
            outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            with self._lock:
                for message in self._kept.values():
                    outbox.put(message)
                self._outbox = outbox
                if self._closing.is_set():
                    outbox.put(None)
                method = channel.stream_stream(
                    f"/{protocol.SERVICE}/{self._method}",
                    request_serializer=protocol.to_bytes,
                    response_deserializer=self._response.FromString,
                )
                self._call = method(self._outgoing(outbox), metadata=protocol.credentials(self._token))
            try:
                for message in self._call:
                    if (term := protocol.term_from_wire(self._call.initial_metadata())) < self._term:
                        _log.warning("%s is an old coordinator: another has taken its place", self.address)
                        break
                    self._term = term
                    heard = self.answered = True
                    self.refused = None
                    self._open.set()
                    self._hear(message)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self.token_refused.set()
                elif error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    _log.warning("%s does not take what was said: %s", self.address, error.details())
                elif error.code() is grpc.StatusCode.UNAVAILABLE and not heard and not self._closing.is_set():
                    self._note(tls.refusal(self._run_dir, self._tls, self.address))
            finally:
                with self._lock:
                    self._outbox = self._call = None
                    self.answered = False
                    self._open.clear()
                outbox.put(None)
        return heard

    def _note(self, refused: UserMistake | None) -> None:
        if refused is not None and str(refused) != str(self.refused):
            _log.warning("%s: %s", type(refused).__name__, refused)
        self.refused = refused

    @property
    def refused_for_good(self) -> bool:
        return self.refused is not None and getattr(self.refused, "final", True)

    def _outgoing(self, outbox: queue.SimpleQueue[Any]) -> Iterator[Any]:
        """gRPC asks for the next message when the last one is out, so no beats pile up while a coordinator hangs."""
        # Made only now that whatever is said goes to this stream's outbox: nothing falls between the two.
        yield self._opening()
        due = time.monotonic()  # a coordinator that has just come knows nothing of how far the job is
        while True:
            try:
                message = outbox.get(timeout=max(0.0, due - time.monotonic()) if self._beat else None)
            except queue.Empty:
                assert self._beat is not None
                message = self._beat()
                due = time.monotonic() + self._timeouts.beat_s
            if message is None:
                return
            yield message() if callable(message) else message


def close_inherited(address: str) -> None:
    """Close every socket of this process that is connected to `address`, or that a server there left behind.

    For a forked child only: gRPC's own state in it still names these descriptors and must not be used.
    """
    host, _, port = address.rpartition(":")
    end = (host, int(port))
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                ours = end in (_plain(copy.getsockname()), _peer(copy))
            if ours:
                os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself, or one that is no internet socket


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        return _plain(connection.getpeername())
    except OSError:
        return None


def _plain(name: Any) -> tuple[str, int] | None:
    """Host and port of a socket's name, with an IPv4 address inside IPv6 written as IPv4."""
    return (name[0].removeprefix("::ffff:"), name[1]) if isinstance(name, tuple) and len(name) >= 2 else None
