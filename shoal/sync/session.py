"""Named operations of one generation, as one worker takes part in them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from shoal import errors
from shoal.sync.mesh import Mesh, copy
from shoal.sync.named import Decision, Request, Table
from shoal.sync.wire import Wire

_MOST_NOTE_BYTES = 16 << 20
_NOTE_ENTRIES = 500  # of requests or decisions


@dataclass(frozen=True)
class Asked:
    """An operation that this worker has asked for. One of the three is called, on the wire's thread: `done` with the
    result and how many rows of it came from each rank, `failed`; `stalled`, before, with those who have not asked for
    it."""

    request: Request
    values: torch.Tensor  # a copy, to be used up
    done: Callable[[torch.Tensor, Sequence[int]], None]
    failed: Callable[[errors.ShoalError], None]
    stalled: Callable[[Sequence[str]], None]


class Session:
    """`claim`, `send`, `end` and `ask_about` may be called by any thread; the rest runs on the wire's."""

    def __init__(self, wire: Wire, number: int, slots: Sequence[int], ids: Sequence[str], rank: int) -> None:
        self._wire, self.number, self._slots, self._ids = wire, number, slots, ids
        self._mesh = Mesh(wire, number, slots, rank)
        self._lock = threading.Lock()
        self._asked: dict[str, Asked] = {}
        self._unsent: list[Request] = []
        self.problem: errors.ShoalError | None = None  # why it has ended
        self._connected = self._flushes = self._decides = False
        self._ops = 0
        self._sent = [0] * len(slots)  # notes so far, by rank
        self._heard = [0] * len(slots)
        self._table = Table(ids) if rank == 0 else None

    def listen(self) -> None:
        """Once the wire has entered the generation."""
        for rank in self._mesh.others if self._table is not None else (0,):
            self._listen(rank)

    def claim(self, asked: Asked) -> None:
        """It is asked for with the next `send`. SettingsContradict, if one of that name is under way."""
        request = asked.request
        with self._lock:
            if self.problem is None:
                if request.name in self._asked:
                    raise errors.SettingsContradict(
                        f"{request.kind} {request.name!r}: an operation of that name is under way on this worker; wait "
                        "for it, or use another name"
                    )
                self._asked[request.name] = asked
                self._unsent.append(request)
                return
        asked.failed(self.problem)

    def send(self) -> None:
        with self._lock:
            flush, self._flushes = not self._flushes, True
        if flush:
            self._wire.ask(self._flush)

    def end(self, problem: errors.ShoalError) -> None:
        """What is under way fails, and whatever is asked for from here on."""
        with self._lock:
            if self.problem is not None:
                return
            self.problem = problem
            asked, self._asked = self._asked, {}
        for it in asked.values():
            it.failed(problem)

    def ask_about(self, name: str) -> None:
        """Have `stalled` called."""
        self._wire.ask(partial(self._ask_about, name))

    def connected(self) -> None:
        self._connected = True
        self._flush()

    def _ask_about(self, name: str) -> None:
        if not self._connected:
            unreached = self._wire.unreached()
            self._stalled(name, [it for it, slot in zip(self._ids, self._slots, strict=True) if slot in unreached])
        elif self._table is not None:
            self._stalled(name, self._table.missing(name))
        else:
            self._note(0, {"about": name})

    def _stalled(self, name: str, missing: Sequence[str]) -> None:
        with self._lock:
            asked = self._asked.get(name)
        if asked is not None:
            asked.stalled(missing)

    # Requests to the lowest rank, decisions from it.

    def _flush(self) -> None:
        with self._lock:
            self._flushes = False
            if not self._connected:
                return  # what is posted now would go nowhere
            requests, self._unsent = self._unsent, []
        if self._table is not None:
            self._submitted(0, requests)
        else:
            for some in _in_pieces(requests):
                self._note(0, {"requests": some})

    def _note(self, rank: int, body: dict[str, Any]) -> None:
        self._sent[rank] += 1
        self._mesh.post_note(rank, self._sent[rank], json.dumps(body).encode())

    def _listen(self, rank: int) -> None:
        self._heard[rank] += 1
        self._mesh.expect_note(rank, self._heard[rank], _MOST_NOTE_BYTES, partial(self._hear, rank))

    def _hear(self, rank: int, note: memoryview) -> None:
        self._listen(rank)
        body = json.loads(bytes(note))
        if self._table is not None:
            self._submitted(rank, [Request.parse(it) for it in body.get("requests", ())])
            if "about" in body:
                self._note(rank, {**body, "missing": self._table.missing(body["about"])})
        elif "about" in body:
            self._stalled(body["about"], body["missing"])
        else:
            self._begin([Decision.parse(it) for it in body["decisions"]])

    def _submitted(self, rank: int, requests: Sequence[Request]) -> None:
        assert self._table is not None
        for request in requests:
            self._table.submit(rank, request)
        if not self._decides:
            self._decides = True
            self._wire.ask(self._decide)  # after what else has come by now

    def _decide(self) -> None:
        assert self._table is not None
        self._decides = False
        decisions = self._table.decide()
        for some in _in_pieces(decisions):
            for rank in self._mesh.others:
                self._note(rank, {"decisions": some})
        self._begin(decisions)

    # Operations, in the order of the decisions.

    def _begin(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            with self._lock:
                asked = [self._asked.get(name) for name in decision.names]
            here = [it for it in asked if it is not None]
            if len(here) < len(asked):
                return  # the session has ended
            if decision.problem:
                for it in here:
                    self._over(it)
                    it.failed(errors.WorkersDiffer(decision.problem))
                continue
            self._ops += 1
            self._begin_one(self._ops, here, decision.rows)

    def _begin_one(self, op: int, asked: Sequence[Asked], rows: Sequence[Sequence[int]]) -> None:
        first, mesh = asked[0], self._mesh
        request, values = first.request, first.values
        if request.kind == "allreduce":
            if len(asked) > 1:
                values = values.new_empty(sum(it.values.numel() for it in asked))
                for it, part in zip(asked, _parts(asked, values), strict=True):
                    copy(part, it.values)
            mesh.allreduce(op, values, request.reduce, request.factor, partial(self._share, asked))
        elif request.kind == "reducescatter":
            mesh.reducescatter(op, values, request.reduce, request.factor, partial(self._done, first, ()))
        elif request.kind == "broadcast":
            mesh.broadcast(op, values, request.root, partial(self._done, first, ()))
        elif request.kind == "allgather":
            of_each = [it[0] for it in rows]
            mesh.allgather(op, values, of_each, partial(self._done, first, of_each))
        elif request.kind == "alltoall":
            to_me = [it[mesh.rank] for it in rows]
            mesh.alltoall(op, values, request.splits, to_me, partial(self._done, first, to_me))
        else:
            assert request.kind == "barrier", request
            self._done(first, (), values)

    def _share(self, asked: Sequence[Asked], result: torch.Tensor) -> None:
        if len(asked) == 1:
            self._done(asked[0], (), result)
            return
        for it, part in zip(asked, _parts(asked, result), strict=True):
            copy(it.values, part)
            self._done(it, (), it.values)

    def _over(self, asked: Asked) -> None:
        """Before the worker hears of it: then the name may be used again."""
        with self._lock:
            self._asked.pop(asked.request.name, None)

    def _done(self, asked: Asked, rows: Sequence[int], result: torch.Tensor) -> None:
        self._over(asked)
        asked.done(result, rows)


def _parts(asked: Sequence[Asked], flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(flat, [it.values.numel() for it in asked])


def _in_pieces(entries: Sequence[Request] | Sequence[Decision]) -> Iterator[list[dict[str, Any]]]:
    for at in range(0, len(entries), _NOTE_ENTRIES):
        yield [asdict(it) for it in entries[at : at + _NOTE_ENTRIES]]
