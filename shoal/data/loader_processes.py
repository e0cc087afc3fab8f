"""The processes of torch's DataLoader: what becomes of them, and of the worker, when one of them is killed."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from torch._C import _remove_worker_pids

from shoal.data.nameless import leave_no_names
from shoal.errors import LoaderLost
from shoal.process import die_with

_DYING_S = 1.0
Result = TypeVar("Result")


class LoaderProcesses:
    """Those of one iterator of a DataLoader; none before `take_over`. `what_for` begins the line about one that was
    lost."""

    def __init__(self, what_for: str) -> None:
        self._what_for = what_for
        self._iterator: Any = None
        self._processes: list[BaseProcess] = []
        self._before: Any = None  # who handled the end of a child before, while this does
        self._handles = False
        self._ended = True  # perhaps: a child of this process has, or nobody would tell
        self._inside = False  # of `watched`

    def __bool__(self) -> bool:
        return bool(self._processes)

    def take_over(self, iterator: Any) -> None:
        """torch no longer watches over them: its handler of SIGCHLD would raise wherever the thread is, in the middle
        of a commit too. Other threads than the main one cannot ask to be told, and look each time."""
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        self._iterator = iterator
        self._processes = list(iterator._workers)
        if threading.current_thread() is threading.main_thread():
            # Once for all batches: to ask and to look at each of them would take longer than to get it.
            self._before, self._handles = signal.getsignal(signal.SIGCHLD), True
            signal.signal(signal.SIGCHLD, self._child_ended)

    def keep_asking(self, depth: int, anything_left: Callable[[], object]) -> None:
        """Send requests until `depth` of them are in flight. torch asks for one more with each batch that it gives, and
        does not ask again if there was none."""
        while anything_left() and in_flight(self._iterator) < depth:
            self._iterator._try_put_index()

    def watched(self, act: Callable[[], Result]) -> Result:
        """What `act` returns; LoaderLost when one has ended, before or meanwhile. Not a context manager: what a signal
        raises while one is being left comes by its `except`."""
        if not self._processes:
            return act()
        try:
            try:
                self._inside = True
                if self._ended:
                    self._ended = not self._handles
                    self._wake_if_one_ended()
                return act()
            finally:
                self._inside = False
        except (_LoaderEnded, RuntimeError, OSError, EOFError):
            # Its sockets close before it is dead, and its sentinel closes with them.
            dying = wait([process.sentinel for process in self._processes], timeout=_DYING_S)
            for process in self._processes:
                if process.sentinel in dying:
                    process.join()
            self._raise_if_one_ended()
            raise

    def end(self) -> None:
        """A sample that is being read is waited for, but for seconds at most."""
        if self._iterator is None:
            return
        try:
            self._raise_if_one_ended()
            # What the iterator does when it is collected. A traceback may hold on to it for long.
            self._iterator._shutdown_workers()
        except LoaderLost:
            # One that was killed may have held a lock, for which torch's way to end them would wait for ever.
            self._iterator._shutdown = True
            if (pinning := getattr(self._iterator, "_pin_memory_thread_done_event", None)) is not None:
                pinning.set()
            for requests in self._iterator._index_queues:
                requests.cancel_join_thread()
                requests.close()
            for process in self._processes:
                process.kill()
                process.join()
        self._iterator = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._handles and in_main_thread and signal.getsignal(signal.SIGCHLD) == self._child_ended:
            signal.signal(signal.SIGCHLD, self._before)

    def _child_ended(self, signum: int, frame: FrameType | None) -> None:
        self._ended = True
        try:
            if callable(self._before):
                self._before(signum, frame)
        finally:
            if self._inside:
                self._wake_if_one_ended()

    def _wake_if_one_ended(self) -> None:
        if any(process.exitcode is not None for process in self._processes):
            self._inside = False  # the end of another says nothing new, and would come where nobody expects it
            raise _LoaderEnded

    def _raise_if_one_ended(self) -> None:
        for process in self._processes:
            if (code := process.exitcode) is not None:
                names = {known.value: known.name for known in signal.Signals}
                how = f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")
                raise LoaderLost(
                    f"{self._what_for}: loader process {process.pid} ended with {how}; if memory or /dev/shm ran out, "
                    "lower num_workers, prefetch_factor or the batch"
                )


def in_flight(iterator: Any) -> int:
    """Requests whose batch was not given yet; some may have come before their turn."""
    return int(iterator._send_idx - iterator._rcvd_idx)


@contextmanager
def inheriting() -> Iterator[None]:
    """Start loader processes inside. None of them may collect what the worker has thrown away: a channel of gRPC, say,
    waits at its end for threads that a child does not have. `enter` has each keep all of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def enter(parent_pid: int, in_child: Callable[[], None] | None, loader_index: int) -> None:
    """First thing in a loader process: tie its life to the worker's, and let go of what it inherited."""
    die_with(parent_pid)
    gc.freeze()
    gc.enable()
    leave_no_names()
    if in_child is not None:
        in_child()
    # An interrupt from the keyboard reaches the whole group of processes; the worker decides what becomes of it.
    # torch has already set its own handler of SIGTERM here, and one thread.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _LoaderEnded(BaseException):
    """Not an Exception: torch catches those, and then waits for a lock that a killed process may have held."""
