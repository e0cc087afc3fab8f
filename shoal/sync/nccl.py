"""Between GPUs: torch's process group over the members of one generation, with NCCL.

Made anew for each generation and ended with it. Whatever waits here also looks at whether the generation is over,
because a collective that lost a rank never ends by itself.
"""

from __future__ import annotations

import contextlib
import json
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
from shoal.sync import words as w
from shoal.sync.communicator import Communicator
from shoal.sync.group import Group
from shoal.sync.hosts import host_of

_POLL_S = 50e-6
# From a failure that a peer's death explains until this worker is told of the death.
_PATIENCE_S = 60.0
# Of a collective: longer than anybody computes. Deaths end it earlier, by `over`.
_FOREVER = timedelta(days=30)
_MEET = timedelta(seconds=60)

# Without these, torch ends the process when a rank of the communicator dies: it is here that this is dealt with. The
# last: its watchdog, for which the end of a communicator waits, sleeps four times as long first, which is a minute.
_SURVIVE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


class _Meeting:
    """Where the ranks find each other: a store at the address of the lowest rank's host, which keeps it. `invitation`
    is told to the others; its names begin with a key that nobody else knows."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        self.invitation = host, port, secrets.token_hex(16)
        # By a socket of ours: the store by itself would listen on every interface.
        self.store = TCPStore(
            host, port, None, True, timeout=_MEET, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class _Work:
    """A collective under way on one tensor."""

    def __init__(self, work: Any, event: torch.cuda.Event) -> None:
        self._work, self._event = work, event

    def done(self) -> bool:
        """Whether its result is there, on this rank. RuntimeError: it failed."""
        # Not the work's own word: that is also given when the communicator has failed.
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def failed(self) -> bool:
        return bool(self._work.is_completed()) and not self.done()


class Nccl(Communicator):
    def __init__(self, device: torch.device, group: Group) -> None:
        self._device, self._group = device, group
        self._backend: Any = None
        self._problem: Exception | None = None
        self._ended = False
        self._meeting: _Meeting | None = None
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def connect(self) -> None:
        told = b""
        if self._group.rank == 0:
            self._meeting = _Meeting(host_of(self._group.members[0]))
            told = json.dumps(self._meeting.invitation).encode()
        invitation = json.loads(self._group.collectives.share(told, "replicas: invitation").wait()[0])
        # On a thread: it waits for all ranks, and one of them may be dead.
        thread = threading.Thread(target=self._connect, args=invitation, name="shoal-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self._look()
            thread.join(0.001)
        if self._problem is not None:
            self._explain(self._problem)

    def _connect(self, host: str, port: int, key: str) -> None:
        try:
            store = PrefixStore(key, TCPStore(host, port, None, False, timeout=_MEET, wait_for_workers=False))
            os.environ.update(_SURVIVE)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _FOREVER
            options.config.blocking = 0  # so that it can be aborted while it is being made
            with torch.cuda.device(self._device):
                self._backend = backend = dist.ProcessGroupNCCL(store, self._group.rank, self._group.size, options)
                backend.eager_connect_single_device(self._device)
            if self._ended:
                self.abort()  # nobody else has it any more
        except Exception as problem:  # of a peer that died, most likely: told where the others' words are known
            self._problem = problem

    def sum(self, tensor: torch.Tensor) -> _Work:
        options = dist.AllreduceOptions()
        options.timeout = _FOREVER
        return self._begin(tensor, lambda: self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, _FOREVER
        return self._begin(tensor, lambda: self._backend.broadcast([tensor], options))

    def _begin(self, tensor: torch.Tensor, collective: Callable[[], Any]) -> _Work:
        self._look()
        try:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                work = collective()
                work.wait()  # the side stream does, not this thread
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._side)
            tensor.record_stream(self._side)
            return _Work(work, event)
        except RuntimeError as problem:
            self._explain(problem)

    def wait(self, works: Sequence[_Work]) -> None:
        suspicious_s = 0.0
        for it in works:
            try:
                while not it.done():
                    self._look()
                    if it.failed():
                        suspicious_s += _POLL_S
                        if suspicious_s > _PATIENCE_S:
                            raise CommunicatorLost(
                                "the exchange between GPUs failed and nobody died: see the log of this worker with "
                                "NCCL_DEBUG=WARN; it ends, and is replaced"
                            )
                    time.sleep(_POLL_S)
            except RuntimeError as problem:
                self._explain(problem)
        self._look()  # aborted meanwhile, its results are none
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def abort(self) -> None:
        """CommunicatorLost if that cannot be done."""
        self._ended = True
        backend, self._backend = self._backend, None
        if backend is None:
            return
        held = [backend]
        del backend

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # it had failed before
                held[0].abort()
            held.clear()

        thread = threading.Thread(target=end, name="shoal-abort", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            raise CommunicatorLost("a communicator of GPUs could not be aborted; the worker ends, and is replaced")

    def _look(self) -> None:
        """Changed, when the generation has ended: a member died, or has gone on without this worker."""
        group, number = self._group, self._group.generation.number
        if group.changed or any(group.words.get(slot, w.ACK) > number for slot in group.slots):
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
