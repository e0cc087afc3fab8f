"""The communicator: torch's process group over the members of one generation, NCCL on GPUs, gloo on CPUs.

Made anew for each generation and ended with it. Whatever waits here also looks at whether the generation is over,
because a collective that lost a rank never ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shoal.errors import Changed, CommunicatorLost

_LOOPBACK = "127.0.0.1"
_POLL_S = 50e-6
# From a failure that a peer's death explains until this worker is told of the death.
_PATIENCE_S = 60.0
# Of a collective: longer than anybody computes. Deaths end it earlier, by `over`.
_FOREVER = timedelta(days=30)
_MEET = timedelta(seconds=60)

# Without these, torch ends the process when a rank of the communicator dies: it is here that this is dealt with.
_SURVIVE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Meeting:
    """Where the ranks of a communicator find each other: a store on loopback, kept by the lowest rank. `invitation` is
    told to the others."""

    def __init__(self) -> None:
        listener = socket.create_server((_LOOPBACK, 0))
        self.port = int(listener.getsockname()[1])
        self.key = secrets.token_hex(16)
        # By a socket of ours: the store by itself would listen on every interface.
        self.store = TCPStore(
            _LOOPBACK, self.port, None, True, timeout=_MEET, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def invitation(self) -> tuple[int, str]:
        return self.port, self.key


class Handle:
    """A collective under way on one tensor."""

    def __init__(self, work: Any, event: torch.cuda.Event | None) -> None:
        self._work, self._event = work, event

    def done(self) -> bool:
        """Whether its result is there, on this rank. RuntimeError: it failed."""
        if self._event is not None:
            # Not the work's own word: that is also given when the communicator has failed.
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True

    def failed(self) -> bool:
        return self._event is not None and bool(self._work.is_completed()) and not self.done()


class Communicator:
    """One rank's end. `over`: whether the generation has ended; then every call here raises Changed, and `abort` is all
    that is left to do."""

    def __init__(self, device: torch.device, rank: int, size: int, over: Callable[[], bool]) -> None:
        self._device, self._rank, self._size, self._over = device, rank, size, over
        self._backend: Any = None
        self._store: Any = None
        self._problem: Exception | None = None
        self._ended = False
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def connect(self, port: int, key: str) -> None:
        """Meet the others at the invitation."""
        # On a thread: it waits for all ranks, and one of them may be dead.
        thread = threading.Thread(target=self._connect, args=(port, key), name="shoal-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self._look()
            thread.join(0.001)
        if self._problem is not None:
            self._explain(self._problem)

    def _connect(self, port: int, key: str) -> None:
        try:
            store = TCPStore(_LOOPBACK, port, None, False, timeout=_MEET, wait_for_workers=False)
            self._store = PrefixStore(key, store)
            if self._device.type == "cuda":
                os.environ.update(_SURVIVE)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _FOREVER
                options.config.blocking = 0  # so that it can be aborted while it is being made
                with torch.cuda.device(self._device):
                    self._backend = backend = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
                    backend.eager_connect_single_device(self._device)
            else:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = _MEET
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
                self._backend = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
            if self._ended:
                self.abort()  # nobody else has it any more
        except Exception as problem:  # of a peer that died, most likely: told where the others' words are known
            self._problem = problem

    def sum(self, tensor: torch.Tensor) -> Handle:
        """Begin to add up the tensor over all ranks, in place, after what the current stream has to do."""
        options = dist.AllreduceOptions()
        options.timeout = _FOREVER
        return self._begin(tensor, lambda: self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        """Begin to give the tensor of rank `root` to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, _FOREVER
        return self._begin(tensor, lambda: self._backend.broadcast([tensor], options))

    def _begin(self, tensor: torch.Tensor, collective: Callable[[], Any]) -> Handle:
        self._look()
        try:
            if self._side is None:
                return Handle(collective(), None)
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                work = collective()
                work.wait()  # the side stream does, not this thread
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._side)
            tensor.record_stream(self._side)
            return Handle(work, event)
        except RuntimeError as problem:
            self._explain(problem)

    def wait(self, handles: Sequence[Handle]) -> None:
        """Until all have their results; the current stream sees them then."""
        suspicious_s = 0.0
        for handle in handles:
            try:
                while not handle.done():
                    self._look()
                    if handle.failed():
                        suspicious_s += _POLL_S
                        if suspicious_s > _PATIENCE_S:
                            raise CommunicatorLost(
                                "the exchange between GPUs failed and nobody died: see the log of this worker with "
                                "NCCL_DEBUG=WARN; it ends, and is replaced"
                            )
                    time.sleep(_POLL_S)
            except RuntimeError as problem:
                self._explain(problem)
        if self._over():  # aborted meanwhile, its results are none
            raise Changed
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def tell(self, name: str, text: bytes) -> None:
        """Put down a text for the others."""
        try:
            self._store.set(name, text)
        except RuntimeError as problem:
            self._explain(problem)

    def hear(self, name: str) -> bytes:
        """The text that another put down, once it has."""
        try:
            while not self._store.check([name]):
                self._look()
                time.sleep(0.001)
            return bytes(self._store.get(name))
        except RuntimeError as problem:
            self._explain(problem)

    def abort(self) -> None:
        """End it, with whatever is under way in it. CommunicatorLost if that cannot be done."""
        self._ended = True
        backend, self._backend, self._store = self._backend, None, None
        if backend is None:
            return
        held = [backend]
        del backend

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # it had failed before
                held[0].abort()
            # gloo's end waits for what is under way, which fails once the peers have hung up too.
            held.clear()

        thread = threading.Thread(target=end, name="shoal-abort", daemon=True)
        thread.start()
        if self._side is None:
            return
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            raise CommunicatorLost("a communicator of GPUs could not be aborted; the worker ends, and is replaced")

    def _look(self) -> None:
        if self._over():
            raise Changed

    def _explain(self, problem: Exception) -> NoReturn:
        """A collective failed: because somebody died, as the coordinator will say soon; or for another reason."""
        if isinstance(problem, (Changed, CommunicatorLost)):
            raise problem
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            self._look()
            time.sleep(0.001)
        raise CommunicatorLost(f"the exchange failed and nobody died: {problem}; the worker ends, and is replaced")
