"""Collectives: operations on any tensors between the workers of a generation, matched by name and not by the order in
which each worker asks for them.

They have connections of their own, each worker with each, also on one host, which are made when they are first used.
What is under way when a generation ends fails with Changed on every worker.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch

from shoal import errors
from shoal.control.generation import Member
from shoal.errors import Changed
from shoal.sync import words as w
from shoal.sync.group import Group
from shoal.sync.hosts import LOOPBACK, host_of
from shoal.sync.mesh import REDUCES, scaled
from shoal.sync.named import Request
from shoal.sync.notice import NET_S, Notice
from shoal.sync.session import Asked, Session
from shoal.sync.wire import Wire, listen

T = TypeVar("T")
Reduce = Literal["sum", "average", "min", "max", "product"]

STALL_S = 10.0  # after which a wait looks for whom it waits
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
           torch.int32, torch.int64, torch.bool)  # fmt: skip

_log = logging.getLogger(__name__)


class Handle(Generic[T]):
    """An operation under way. What it was given may be changed meanwhile; its result is there once `wait` returns."""

    def __init__(self, about: str, finish: Callable[[torch.Tensor, Sequence[int]], T]) -> None:
        self.about = about
        self.missing: Sequence[str] = ()  # workers that had not asked for it when it last stalled
        self._finish = finish
        self._ask_who: Callable[[], None]  # is missing
        self._look: Callable[[], None]  # whether the generation is over
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._result: tuple[torch.Tensor, Sequence[int]] | None = None
        self._problem: errors.ShoalError | None = None
        self._value: list[T] = []

    def poll(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result. Changed: the generation is over, and with it the operation, on every worker. WorkersDiffer: the
        others mean another operation by that name. Stalled, after the timeout, says who has not asked for it."""
        began_s = time.monotonic()
        limit_s = math.inf if timeout_s is None else timeout_s
        asks_s = min(STALL_S, limit_s / 2)  # early enough to have an answer with the timeout
        while not self._ended.wait(min(NET_S, limit_s / 8)):
            waited_s = time.monotonic() - began_s
            if waited_s >= limit_s:
                raise errors.Stalled(f"{self.about} is not done after {limit_s:g} s: {self._why()}")
            self._look()
            if waited_s >= asks_s:
                asks_s += STALL_S
                self._ask_who()
        if self._problem is not None:
            raise self._problem
        with self._lock:
            if not self._value:
                assert self._result is not None
                self._value.append(self._finish(*self._result))
                self._result = None
        return self._value[0]

    def _why(self) -> str:
        return f"{', '.join(self.missing)} did not ask for it" if self.missing else "it is on its way"

    # What happens to it, on the wire's thread.

    def _done(self, result: torch.Tensor, rows: Sequence[int]) -> None:
        self._result = result, rows
        self._ended.set()

    def _fail(self, problem: errors.ShoalError) -> None:
        self._problem = problem
        self._ended.set()

    def _stalled(self, missing: Sequence[str]) -> None:
        self.missing = missing
        _log.warning("%s waits: %s", self.about, self._why())


class Collectives:
    """One worker's. Every operation returns a `Handle`; `wait` gives the result, a new tensor on the device of the one
    that was given. Names must be the same on all workers and are free again once an operation is done; operations
    without a name are matched by their order in the generation, kind by kind."""

    def __init__(
        self,
        notice: Notice,
        worker_id: str,
        address: str = LOOPBACK,
        on_broken: Callable[[int, int, str], None] = lambda generation, slot, why: None,
        patience_s: float = 5.0,
    ) -> None:
        """`address`: of this host, to listen at. `on_broken`: called with a generation, the slot of whom is not heard
        any more, and why, if no newer generation is known."""
        self._notice, self._worker_id, self._on_broken, self._patience_s = notice, worker_id, on_broken, patience_s
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.RLock()
        self._wire: Wire | None = None  # from the first use on
        self._group: Group | None = None
        self._session: Session | None = None
        self._broken = 0  # the newest generation of which a connection has ended
        self._counts: dict[str, Iterator[int]] = {}  # of operations without a name, by kind
        self._together = 0
        self._failure: errors.ShoalError | None = None  # of the wire
        notice.watchers.append(self._on_notice)

    # Operations.

    def allreduce(
        self, tensor: torch.Tensor, name: str | None = None, *, op: Reduce = "average", prescale: float = 1.0,
        postscale: float = 1.0, out: torch.Tensor | None = None,
    ) -> Handle[torch.Tensor]:  # fmt: skip
        """The tensors of all workers, reduced element by element; whole numbers are averaged towards zero. `out`:
        where the result is written by `wait`, which may be the tensor itself."""
        request = self._request("allreduce", name, tensor, reduce=op, factor=postscale)
        return self._begin(request, _copied(tensor, prescale), partial(_shaped, tensor, out))

    def reducescatter(
        self, tensor: torch.Tensor, name: str | None = None, *, op: Reduce = "average", prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle[torch.Tensor]:  # fmt: skip
        """As allreduce, of which each worker gets its rows: as many for each, the first ones have one more."""
        request = self._request("reducescatter", name, tensor, reduce=op, factor=postscale)
        if not tensor.dim():
            raise errors.SettingsContradict(f"{_about(request)}: a number has no rows to be divided; use allreduce")
        return self._begin(request, _copied(tensor, prescale), partial(_like, tensor))

    def broadcast(
        self, tensor: torch.Tensor, root: int, name: str | None = None, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """The tensor of rank `root`."""
        request = self._request("broadcast", name, tensor, root=root)
        size = self._entered().size
        if not 0 <= root < size:
            raise errors.SettingsContradict(f"{_about(request)}: there is no rank {root} among {size} workers")
        return self._begin(request, _copied(tensor), partial(_shaped, tensor, out))

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> Handle[torch.Tensor]:
        """The rows of all workers, one after the other; each may have any number of them. A number is a row."""
        rows = tensor if tensor.dim() else tensor.view(1)
        return self._begin(self._request("allgather", name, rows), _copied(rows), partial(_like, tensor))

    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | None = None, name: str | None = None
    ) -> Handle[tuple[torch.Tensor, list[int]]]:
        """The rows that all workers have for this one, and how many came from each. `splits`: how many rows go to each
        rank; without them, as many to each."""
        size, rows = self._entered().size, tensor.shape[0] if tensor.dim() else 0
        if splits is None:
            splits = [rows // size] * size
        request = self._request("alltoall", name, tensor, splits=tuple(splits))
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise errors.SettingsContradict(
                f"{_about(request)}: {rows} rows are not divided by {list(splits)} among {size} workers; give splits, "
                "one for each, that add up"
            )
        return self._begin(request, _copied(tensor), lambda result, of: (_like(tensor, result), list(of)))

    def share(self, data: bytes, name: str | None = None) -> Handle[list[bytes]]:
        """What each worker gives, by rank."""
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

        def cut(result: torch.Tensor, of: Sequence[int]) -> list[bytes]:
            return [bytes(it.numpy()) for it in torch.split(result, list(of))]

        return self._begin(self._request("allgather", name, rows), rows, cut)

    def barrier(self, name: str | None = None) -> Handle[None]:
        """Done when all workers have asked for it."""
        return self._begin(self._request("barrier", name), torch.empty(0), lambda result, rows: None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is asked for inside goes as one, as a group of tensors does. Wait for it outside."""
        with self._lock:
            session = self._open()
            self._together += 1
            try:
                yield
            finally:
                self._together -= 1
                if not self._together:
                    session.send()

    def _request(self, kind: str, name: str | None, tensor: torch.Tensor | None = None, **more: Any) -> Request:
        with self._lock:
            self._entered()
            name = f"{kind} {next(self._counts[kind])}" if name is None else name
        if tensor is None:
            return Request(name, kind)
        if (reduce := more.get("reduce", "sum")) not in REDUCES:
            raise errors.SettingsContradict(f"{kind} {name!r}: op is one of {', '.join(REDUCES)}, and not {reduce!r}")
        if tensor.dtype not in _DTYPES or (tensor.dtype is torch.bool and reduce == "average"):
            what = f"{kind} {name!r} ({reduce})" if "reduce" in more else f"{kind} {name!r}"
            raise errors.SettingsContradict(f"{what} of {tensor.dtype} is not known here: convert the tensor")
        size_bytes = tensor.numel() * tensor.element_size()
        return Request(name, kind, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size_bytes, **more)

    def _begin(
        self, request: Request, values: torch.Tensor, finish: Callable[[torch.Tensor, Sequence[int]], T]
    ) -> Handle[T]:
        handle = Handle(_about(request), finish)
        with self._lock:
            session = self._open()
            handle._look, handle._ask_who = self._on_notice, partial(session.ask_about, request.name)
            session.claim(Asked(request, values, handle._done, handle._fail, handle._stalled))
            if not self._together:
                session.send()
        return handle

    # Generations.

    def enter(self, group: Group) -> None:
        """Take part in a generation, with all others of it; what is under way in an older one fails."""
        with self._lock:
            self._end_session(_changed(self._group))
            self._group, group.collectives = group, self
            self._counts = defaultdict(itertools.count)
            if self._wire is not None:
                self._connect(group)

    @property
    def over(self) -> bool:
        """Whether what was under way in this worker's generation has failed because that has ended."""
        session = self._session
        return session is not None and isinstance(session.problem, Changed)

    def close(self) -> None:
        self._notice.watchers.remove(self._on_notice)
        with self._lock:
            self._end_session(_changed(self._group))
            self._group = None
            if self._wire is not None:
                self._wire.close()
            self._listener.close()

    def close_in_child(self) -> None:
        if self._wire is not None:
            self._wire.close_in_child()
        self._listener.close()

    def _entered(self) -> Group:
        if self._group is None:
            raise errors.SettingsContradict(
                f"{self._worker_id} has no group yet: use collectives inside the loop over worker.batches(), or after "
                "worker.regroup()"
            )
        return self._group

    def _open(self) -> Session:
        """That of the present generation; with the first use, the connections are made."""
        group = self._entered()
        if self._session is None:
            self._connect(group)
        assert self._session is not None
        return self._session

    def _connect(self, group: Group) -> None:
        number, members = group.generation.number, group.members
        others = {member.slot: _address(group, member) for member in members if member.slot != group.slot}
        if self._wire is None:
            self._wire = Wire(group.slot, self._listener, self, self._patience_s)
        ids = [member.worker_id for member in members]
        self._session = session = Session(self._wire, number, group.slots, ids, group.rank)
        self._wire.enter(number, group.generation.key, others)
        session.listen()
        self._on_notice()  # which may have come before there was a session
        if self._failure is not None:
            session.end(self._failure)

    def _end_session(self, problem: errors.ShoalError) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end(problem)

    # What other threads tell.

    def _on_notice(self) -> None:
        """A generation is known. It must not wait for this worker's other threads."""
        if (wire := self._wire) is not None:
            wire.ask(self._end_if_over)

    def _end_if_over(self) -> None:
        session, group, notice = self._session, self._group, self._notice
        if session is None or group is None:
            return
        number = session.number
        known = notice.newest if number in (self._broken, notice.broken) else notice.fault
        # Who has moved on may never have connected here; of other hosts' workers it may show in no word.
        if known > number or any(group.words.get(slot, w.ACK) > number for slot in group.slots):
            session.end(_changed(group))

    def connected(self, generation: int) -> None:
        session = self._session
        if session is not None and session.number == generation:
            session.connected()

    def broken(self, generation: int, slot: int, why: str) -> None:
        self._broken = max(self._broken, generation)
        if self._notice.newest <= generation:
            self._on_broken(generation, slot, why)
        self._end_if_over()

    def failed(self, problem: Exception) -> None:
        self._failure = errors.CommunicatorLost(f"the connections of {self._worker_id} failed: {problem!r}")
        if (session := self._session) is not None:
            session.end(self._failure)


def _about(request: Request) -> str:
    return f"{request.kind} {request.name!r}"


def _changed(group: Group | None) -> Changed:
    number = 0 if group is None else group.generation.number
    return Changed(f"generation {number} is over, and what was under way in it; ask again in the next")


def _address(group: Group, member: Member) -> tuple[str, int]:
    port = group.words.get(member.slot, w.PORT)
    if not port:
        raise errors.SettingsContradict(
            f"{member.worker_id} is on another host and has not told where it is reached: between hosts, collectives "
            "need a sync in lockstep"
        )
    return host_of(member), port


def _copied(tensor: torch.Tensor, prescale: float = 1.0) -> torch.Tensor:
    """In this process's memory, row after row."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return copy if prescale == 1.0 else scaled(copy, prescale)


def _like(tensor: torch.Tensor, result: torch.Tensor, rows: Sequence[int] = ()) -> torch.Tensor:
    return result.to(tensor.device)


def _shaped(
    tensor: torch.Tensor, out: torch.Tensor | None, result: torch.Tensor, rows: Sequence[int] = ()
) -> torch.Tensor:
    if out is None:
        return result.view(tensor.shape).to(tensor.device)
    with torch.no_grad():
        return out.copy_(result.view(tensor.shape))
