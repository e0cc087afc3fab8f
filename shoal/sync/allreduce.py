"""AllReduce: one model a host, stepped together with the gradient of the whole global batch."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import nn

from shoal import errors
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import EXCHANGE
from shoal.sync import words as w
from shoal.sync.arena import Arena, shaped
from shoal.sync.described import described
from shoal.sync.exchange import Cut, Exchange, Sent
from shoal.sync.far_buckets import Tuning
from shoal.sync.following import CARRIED, GIVEN, STEPPED, Follower, Source, Told
from shoal.sync.group import Following, Group
from shoal.sync.hosts import BUFFERS, STATE
from shoal.sync.layout import plan
from shoal.sync.linear import Target, redirect
from shoal.sync.memory import HostMemory, OwnMemory
from shoal.sync.ranges import owned
from shoal.sync.replica import Replica, raw_bytes
from shoal.sync.slices import Slice
from shoal.sync.sums import bytes_of
from shoal.sync.sync import Agree, State, Sync, Verdict
from shoal.sync.words import Words, tag

# A gradient of at least so many elements goes to the lane as soon as it is there: later it would have left the cache,
# and kept its memory until then. Smaller ones go together after the backward pass: a call for each costs more than its
# copy.
LARGE = 64 * 1024
# One small parameter in so many looks, during the backward pass, whether its result is still wanted.
_LOOK_EVERY = 16
_WIRE: dict[str, torch.dtype | None] = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class AllReduce(Sync):
    """Each worker writes its gradients into its lane; worker k of n on a host reduces slice k over all lanes there,
    exchanges it with the other hosts, and steps it.

    wire: "bf16" or "fp16" sends gradients between hosts in half the bytes; what that rounds off is added to what is
    sent next. On one host nothing is sent.
    """

    def __init__(self, *, wire: Literal["full", "bf16", "fp16"] = "full") -> None:
        if wire not in _WIRE:
            raise errors.SettingsContradict(f"AllReduce(wire={wire!r}): wire is 'full', 'bf16' or 'fp16'")
        self._wire = wire

    def bind(self, replica: Replica, memory: HostMemory, words: Words, slot: int, agree: Agree) -> None:
        self._replica = replica
        layout, self._parameters = plan(replica)
        agree(described(replica, layout))
        self._arena, self._words = Arena(layout, memory), words
        self._lane = self._arena.lane(slot)
        # A worker that is alone is told of a stray write by the step; with others it must not happen at all.
        self._alone = isinstance(memory, OwnMemory)
        self._views = [self._arena.views(parity, writable=self._alone) for parity in (0, 1)]
        self._versions: list[int] = []
        self._frozen_shown: int | None = None
        self._group: Group | None = None
        self._follower: Follower | None = None
        self._exchange: Exchange | None = None
        self._sent: Sent = "none"  # of the sums of a step that was given up
        self._last = False  # the backward that runs or comes next is the last of this worker's step
        self._carried = False  # the commit under way leaves parameters and state as they are
        self._alike = False  # the newest commit did, so that both buffers hold the same
        self._open = False
        small = [index for index, parameter in enumerate(self._parameters) if parameter.numel() < LARGE]
        self._looking = set(small[::_LOOK_EVERY])
        self._hooked: set[int] = set()
        self._split: set[int] = set()  # tensors whose gradients are made row by row, where that is wanted
        self._late: set[int] = set()  # tensors whose gradients grew after they seemed to be made
        self._tuning, self._stepped_s = Tuning(), 0.0
        self._set_hooks(it for it, one in enumerate(self._parameters) if it in self._looking or one.numel() >= LARGE)
        self._targets = redirect(replica.model, self._target)
        self._source = Source(self._arena, words, slot)

    def _set_hooks(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._hooked:
                continue
            self._hooked.add(index)
            parameter = self._parameters[index]
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one may be unfrozen later, and takes no hook while frozen
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._open:  # if not, it is a backward of the user's own, whose gradients are the user's
                self._look()
                if self._parameters[index].grad is None:
                    return  # it was written straight to the lane
                if self._parameters[index].numel() >= LARGE:
                    self._to_lane([index])
                self._made(index)

        return hook

    def _made(self, index: int) -> None:
        """The gradient of this tensor is made, as far as one can tell before backward has ended."""
        exchange = self._exchange
        if exchange is not None and self._last and (buckets := exchange.made(index)):
            self._to_lane(exchange.tensors(buckets))
            exchange.announce(buckets)

    def _rows(self, index: int) -> tuple[int, ...]:
        exchange = self._exchange
        return () if exchange is None or not self._last else exchange.rows(index)

    def _made_rows(self, index: int, block: int) -> None:
        assert self._exchange is not None
        self._exchange.made_rows(index, block)

    def _look(self) -> None:
        """Changed ends the backward early, when its result is not wanted any more."""
        fault_point("backward")
        if self._group is not None and self._group.changed:
            raise Changed

    def _mark(self, index: int) -> bool:
        """Say that this tensor gets a gradient; whether it had one already in this step."""
        marks = self._lane.marks
        marked = bool(marks[index])
        marks[index] = 1
        return marked

    def _to_lane(self, indices: Iterable[int]) -> None:
        """Move gradients of these parameters into the lane, added to those of an earlier micro-batch."""
        views, parameters = self._lane.views, self._parameters
        first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        further: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index in indices:
            gradient = parameters[index].grad
            if gradient is None:
                continue
            parameters[index].grad = None
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            to, of = further if self._mark(index) else first
            to.append(views[index])
            of.append(gradient)
        if first[0]:
            torch._foreach_copy_(*first)
        if further[0]:
            torch._foreach_add_(*further)

    def _target(self, parameter: torch.Tensor) -> Target | None:
        index = next((i for i, one in enumerate(self._parameters) if one is parameter), None)
        if index is None or not self._lane.views[index].is_contiguous():
            return None

        def mark() -> bool:
            self._look()
            return self._mark(index)

        self._split.add(index)
        rows, made_rows = partial(self._rows, index), partial(self._made_rows, index)
        return Target(
            self._parameters[index], self._lane.views[index], mark, partial(self._made, index), rows, made_rows
        )

    @property
    def model(self) -> str:
        return str(self._arena.layout) + ("" if self._wire == "full" else f", {self._wire} between hosts")

    def transfer(self, group: Group) -> None:
        assert group.far is not None
        for slot in group.gives:
            group.far.post_checked(slot, group.seq, STATE, self._arena.image(group.seq & 1))
        if group.takes is not None:
            group.far.take_checked(group.takes, group.seq, STATE, self._arena.image(group.seq & 1))

    @property
    def follows(self) -> bool:
        return True

    def follow(self, group: Following, caught_up: Callable[[], None]) -> None:
        if self._follower is None:
            self._follower = Follower(self._arena, self._replica, self._words, group.slot, _WIRE[self._wire])
        self._follower.follow(group, Cut.of(self._arena.layout, group.places.members), caught_up)

    def enter(self, group: Group) -> None:
        if group is not self._group:
            self._group, self._follower = group, None
            self._source.enter(group)
            layout, near = self._arena.layout, group.near
            lanes = [self._arena.lane(slot) for slot in near]
            several = len(group.places.members) > 1 or bool(group.followers)
            narrow = _WIRE[self._wire]
            self._exchange = Exchange(layout, group, narrow, lanes, self._split) if several else None
            self._stepped_s = 0.0
            if several:
                self._set_hooks(range(len(self._parameters)))
            place = near.index(group.slot)
            ranges = self._exchange.ranges if self._exchange else owned(layout, place, place + 1, len(near))
            self._slice = Slice(self._arena, self._replica.optimizer, lanes, ranges, self._exchange)
        self._alike = self._carried = False
        if group.seq:
            self._show(group.seq)
            self._load_buffers(group.seq)

    def found(self, group: Group) -> None:
        seq = group.seq + 1
        self._source.tell(Told(tag(group.generation.number, seq), GIVEN, source=group.slots[0]))
        if group.rank == 0:
            self._found(seq)
        self._share(group, seq, 0)

    def _share(self, group: Group, seq: int, rank: int) -> None:
        """Bring the state of commit `seq`, which that rank's host has, to the other hosts."""
        if group.far is None:
            return
        source, image = group.slots[rank], self._arena.image(seq & 1)
        if group.rank == rank:
            for leader in group.far.leaders:
                group.far.post_checked(leader, seq, STATE, image)
        elif group.leads and source in group.far.slots:
            group.far.take_checked(source, seq, STATE, image)

    def _found(self, seq: int) -> None:
        parity = seq & 1
        for view, parameter in zip(self._arena.views(parity, writable=True), self._parameters, strict=True):
            view.copy_(parameter.detach())
        self._store_frozen(seq, 0)
        self._found_state(parity)
        self._store_buffers(seq)

    def begin(self) -> None:
        self._lane.present[:] = 0
        if self._alone:
            self._check_unwritten()

    def _check_unwritten(self) -> None:
        for parameter, version in zip(self._parameters, self._versions, strict=False):
            if parameter._version != version:
                raise errors.ModelUnusable(
                    f"{self._replica.names[id(parameter)]} was written to in place between two steps: do that inside "
                    f"`with worker.edit():`, or other workers will not see it"
                )

    def weight(self, samples: int, share: int, batch: int) -> float:
        return samples / batch

    def closing(self) -> None:
        self._last = True

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        for parameter in self._parameters:
            parameter.grad = None  # what a backward of the user's own has left is not this step's
        if self._exchange is not None and self._group is not None and self._last:
            late = [index for index, one in enumerate(self._parameters) if not one.requires_grad]
            self._exchange.begin(self._group.seq + 1, self._late.union(late))
        self._set_open(True)
        try:
            super().backward(loss, weight)
        finally:
            self._set_open(False)
            self._last = False
        if self._group is not None:
            self._group.seconds.switch(EXCHANGE)
        self._to_lane(range(len(self._parameters)))
        if self._exchange is not None and self._exchange.spoiled is not None:
            # It is used in more than one way, and what was sent of it is not all. From now on it waits.
            self._late.add(self._exchange.spoiled)
            assert self._group is not None
            self._group.renew("a gradient was sent before it was complete")

    def _set_open(self, open_: bool) -> None:
        """Gradients go to the lane while the step's own backward runs."""
        self._open = open_
        for target in self._targets:
            target.open = open_

    def offer(self, group: Group, *, trains: bool) -> None:
        if self._exchange is not None:
            self._exchange.begin(group.seq + 1, ())
            self._exchange.offer(self._lane.present, trains=trains)

    def give_up(self, group: Group) -> bool:
        self._sent = "none" if self._exchange is None else self._exchange.give_up()
        return self._sent != "some"

    def _tune(self, group: Group, exchange: Exchange) -> None:
        """Whoever leads the host chooses how large buckets are, for the next step."""
        now_s = time.perf_counter()
        if self._stepped_s and self._tuning.note(exchange.choice, now_s - self._stepped_s) and group.rank == 0:
            print(f"shoal: {self._tuning}", file=sys.stderr)
        self._stepped_s = now_s
        group.words.set_buckets(tag(group.generation.number, group.seq + 2), self._tuning.next())

    def prepare(self, group: Group, verdict: Verdict) -> float | None:
        seq = group.seq + 1
        norm = None
        self._carried = not verdict.apply
        step = tag(group.generation.number, seq)
        if not verdict.apply:
            if not self.give_up(group):
                group.renew("some trained, others did not")
            self._source.tell(Told(step, CARRIED, self._sent))
            if not self._alike:
                self._slice.carry(seq)
            self._load_buffers(group.seq)  # those of the forward that went wrong are not kept either
        else:
            self._slice.plan(seq)
            scale = None
            if verdict.clip_norm is not None:
                self._slice.reduce()
                group.words.set_value(group.slot, w.NORM, self._slice.square())
                group.reduced()
                # Those of one host, which has all slices: elsewhere they may be cut, and so rounded, in another way.
                norm = sum(group.words.value(slot, w.NORM) for slot in group.places.members[0]) ** 0.5
                scale = min(1.0, verdict.clip_norm / (norm + 1e-6))
            if group.followers:
                rate, marks, threads = verdict.learning_rate_factor, self._slice.marks(), torch.get_num_threads()
                clipped = math.nan if scale is None else scale
                self._source.tell(Told(step, STEPPED, "all", 0, clipped, rate, threads, marks))
            with self._replica.rates_times(verdict.learning_rate_factor):
                self._slice.step(seq, scale)
            if self._exchange is not None and group.leads and len(group.places.members) > 1:
                self._tune(group, self._exchange)
        self._keep_buffers(group, seq, moved=verdict.apply)
        if group.leads:
            self._arena.frozen_place[seq & 1][0] = self._arena.frozen_place[group.seq & 1][0]
        return norm

    def _keep_buffers(self, group: Group, seq: int, *, moved: bool) -> None:
        """Rank 0's, on every host."""
        if group.rank == 0 or (group.leads and not moved):
            self._store_buffers(seq)
        if group.far is None or not moved or not self._arena.buffers:
            return
        flat = [bytes_of(places[seq & 1]) for places in self._arena.buffers]
        if group.rank == 0:
            for leader in group.far.leaders:
                group.far.post(leader, seq, BUFFERS, flat)
        elif group.leads:
            group.far.take(group.slots[0], seq, BUFFERS, flat)

    def open_edit(self) -> None:
        self._frozen_shown = None
        for parameter in self._all_parameters():
            parameter.data = parameter.detach().clone()

    def edit(self, group: Group, editor: int) -> None:
        seq = group.seq + 1
        self._source.tell(Told(tag(group.generation.number, seq), GIVEN, self._sent, group.slots[editor]))
        if group.rank == editor:
            ranges = owned(self._arena.layout, 0, 1, 1)
            whole = Slice(self._arena, self._replica.optimizer, [self._lane], ranges)
            whole.overwrite(seq, [parameter.detach() for parameter in self._parameters])
            self._store_frozen(seq, 1 - int(self._arena.frozen_place[group.seq & 1][0]))
            self._store_buffers(seq)
        self._share(group, seq, editor)

    def settle(self, group: Group) -> None:
        self._alike = self._carried
        self._show(group.seq)
        if group.rank != 0:
            self._load_buffers(group.seq)

    def look(self, seq: int) -> None:
        self._show(seq)
        self.open_edit()
        self._load_buffers(seq)

    def state(self, seq: int) -> State:
        parity, arena, replica = seq & 1, self._arena, self._replica
        names = [replica.names[id(parameter)] for parameter in self._parameters]
        parameters = dict(zip(names, self._views[parity], strict=True))
        frozen = arena.frozen_views(int(arena.frozen_place[parity][0]), writable=False)
        parameters |= {name: view for (name, _), view in zip(replica.frozen, frozen, strict=True)}
        replica.buffers.gather()
        model, outside = replica.named(parameters, [places[parity] for places in arena.buffers])
        kept = {
            f"optimizer/{names[index]}/{key}": value
            for index in range(len(names))
            for key, value in self._kept_state(parity, index)
        }
        return State(model, kept | outside)

    def _kept_state(self, parity: int, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizer keeps of one tensor."""
        arena = self._arena
        if not arena.born[parity][index]:
            return
        s, segment = next(
            (s, it) for s, it in enumerate(arena.layout.segments) if it.first <= index < it.first + len(it.tensors)
        )
        tensor = segment.tensors[index - segment.first]
        for spec in tensor.states:
            if spec.kind == "plane":
                yield spec.key, shaped(arena.planes[s][spec.key][parity], tensor)
            elif spec.kind == "blob":
                yield spec.key, arena.blobs[s, index - segment.first, spec.key][parity]
            elif spec.kind != "none":
                scalar = arena.scalars[parity][arena.layout.scalars.index(spec.key), index]
                yield spec.key, torch.tensor(float(scalar), dtype=torch.float64)

    def copies(self, group: Group) -> tuple[tuple[str, ...], ...]:
        hosts = group.places.members
        ids = {member.slot: member.worker_id for member in group.members}
        return tuple(tuple(ids[slot] for slot in slots) for slots in hosts) if len(hosts) > 1 else ()

    def digest(self, seq: int) -> str:
        parity = seq & 1
        total = hashlib.blake2b(digest_size=8)
        for parameter in self._all_parameters():
            total.update(raw_bytes(parameter.detach()))
        for planes in self._arena.planes:
            for plane in planes.values():
                total.update(raw_bytes(plane[parity]))
        total.update(self._arena.scalars[parity].tobytes())
        for flat in self._replica.buffers.gather():
            total.update(raw_bytes(flat))
        return total.hexdigest()

    def _all_parameters(self) -> list[nn.Parameter]:
        return [*self._parameters, *(parameter for _, parameter in self._replica.frozen)]

    def _show(self, seq: int) -> None:
        for parameter, view in zip(self._parameters, self._views[seq & 1], strict=True):
            parameter.data = view
        if self._alone:
            self._versions = [parameter._version for parameter in self._parameters]
        place = int(self._arena.frozen_place[seq & 1][0])
        if place != self._frozen_shown:
            self._frozen_shown = place
            for (_, parameter), view in zip(
                self._replica.frozen, self._arena.frozen_views(place, writable=False), strict=True
            ):
                parameter.data = view

    def _store_frozen(self, seq: int, place: int) -> None:
        for view, (_, parameter) in zip(
            self._arena.frozen_views(place, writable=True), self._replica.frozen, strict=True
        ):
            view.copy_(parameter.detach())
        self._arena.frozen_place[seq & 1][0] = place

    def _found_state(self, parity: int) -> None:
        """Optimizer state that is there before the first step: made by its constructor, or loaded by the user."""
        arena = self._arena
        for s, segment in enumerate(arena.layout.segments):
            for t, tensor in enumerate(segment.tensors):
                index = segment.first + t
                state = self._replica.optimizer.state.get(self._parameters[index], {})
                arena.born[parity][index] = 1 if state else 0
                for spec in tensor.states:
                    if spec.key not in state:
                        continue
                    if spec.kind == "plane":
                        shaped(arena.planes[s][spec.key][parity], tensor).copy_(state[spec.key])
                    elif spec.kind == "blob":
                        arena.blobs[s, t, spec.key][parity].copy_(state[spec.key])
                    elif spec.kind != "none":
                        arena.scalars[parity][arena.layout.scalars.index(spec.key), index] = float(state[spec.key])

    def _store_buffers(self, seq: int) -> None:
        for places, flat in zip(self._arena.buffers, self._replica.buffers.gather(), strict=True):
            places[seq & 1].copy_(flat)

    def _load_buffers(self, seq: int) -> None:
        for places, flat in zip(self._arena.buffers, self._replica.buffers.gather(), strict=True):
            flat.copy_(places[seq & 1])
