"""From one generation to the next: park, agree on what is committed, go on with whoever is there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.control.client import Client
from shoal.control.generation import Generation
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import Seconds
from shoal.sync.group import Following, Group, Standing, acknowledge
from shoal.sync.hosts import Relay
from shoal.sync.notice import Notice
from shoal.sync.words import ACK, Words


class Leave(BaseException):
    """This worker is no longer wanted in the job; not an Exception, so that user code does not catch it by accident."""


@dataclass(frozen=True)
class Reconfiguration:
    """A new generation, as `on_reconfigure` sees it."""

    generation: int
    workers: tuple[str, ...]
    rank: int
    step: int  # the newest committed one
    redone: bool  # whether a step in flight was given up and comes again
    took_s: float  # from giving up or finishing the last step until this worker could go on
    redone_s: float = 0.0  # what this worker had spent on the step that was given up
    waited_s: float = 0.0  # and how long it had waited there for somebody who may have died

    def __str__(self) -> str:
        again = f", step {self.step + 1} again" if self.redone else ""
        there = f"rank {self.rank} of {len(self.workers)}"
        return f"generation {self.generation}: {there}, {self.took_s * 1e3:.1f} ms{again}"


class Parking:
    """One worker's way between generations."""

    def __init__(
        self,
        client: Client,
        words: Words,
        notice: Notice,
        seconds: Seconds,
        worker_id: str,
        slot: int,
        patience_s: float,
        comes_back: Callable[[], bool],  # whether a coordinator that is away will be followed by another
        relay: Relay | None,  # to other hosts
    ) -> None:
        self._client, self._words, self._notice, self._seconds = client, words, notice, seconds
        self._worker_id, self._slot, self._patience_s = worker_id, slot, patience_s
        self._comes_back, self._relay = comes_back, relay
        self.incumbent = False  # this worker has had a state
        self.follow: Callable[[Following, Callable[[], None]], None] = lambda group, caught_up: None
        self._meets = True  # it has met others in a generation, and not only taken note of one

    def enter(self, above: int, *, meet: bool = True) -> Group:
        """The group of the newest generation, which is above number `above`; waits while there is none, or too few
        members, and for the others to come there too, unless they need not `meet`. Leave, when this worker is to leave
        the job."""
        self._meets = meet
        while True:
            generation = self._client.wait_newer(above, self._patience_s)
            if generation is None:
                if self._client.dismissed:
                    raise Leave
                continue
            if generation.leaves(self._worker_id):
                self._part(generation)
                raise Leave
            if generation.paused:
                if generation.lists(self._worker_id):
                    acknowledge(self._words, self._slot, generation, self._relay)
                above = generation.number
                continue
            if generation.rank(self._worker_id) is None:
                if generation.follows(self._worker_id):
                    self._follow(generation)
                above = generation.number
                continue
            # With a core for each, looking again for a moment takes none from a neighbor.
            spin = len(generation.members) <= (os.cpu_count() or 1)
            group = Group(
                self._words, self._notice, generation, self._worker_id,
                spin=spin, seconds=self._seconds, relay=self._relay,
            )  # fmt: skip
            if not meet:
                acknowledge(self._words, self._slot, generation)
                fault_point("park")
                if generation.hosts > 1:
                    self._client.entered(generation.number)  # nobody's words are waited for
                return group
            try:
                group.enter(incumbent=self.incumbent)
            except Changed:
                continue
            if group.far is not None:
                self._client.entered(generation.number)
            return group

    def _follow(self, generation: Generation) -> None:
        """Until it is over."""
        group = Following(self._words, self._notice, generation, self._worker_id, relay=self._relay)
        with contextlib.suppress(Changed):
            group.enter(incumbent=self.incumbent)
            self._client.entered(generation.number)
            self.follow(group, self._caught_up)

    def _caught_up(self) -> None:
        self.incumbent = True
        self._client.caught_up()

    def leave(self, number: int) -> None:
        """Having said that this worker leaves, acknowledge every generation that lists it until the coordinator says
        Bye. While the coordinator is away, wait for the next one: whoever left unheard would be missed as dead."""
        while not self._client.dismissed:
            generation = self._client.wait_newer(number, self._patience_s)
            if generation is None:
                if self._comes_back():
                    continue
                return
            number = generation.number
            if generation.leaves(self._worker_id):
                self._part(generation)
                return
            self._park(generation)

    def all_left(self) -> bool:
        """Whether all workers leave, this one as the first of them, and nobody can commit any more. Waits for their
        acknowledgements; false where they do not come in time."""
        newest = self._client.newest
        if newest is None or newest.members:
            return False
        if not newest.leavers or newest.leavers[0].worker_id != self._worker_id:
            return False
        deadline_s = time.monotonic() + self._patience_s
        while any(self._words.get(leaver.slot, ACK) < newest.number for leaver in newest.leavers):
            if time.monotonic() > deadline_s:
                return False  # somebody may still be committing
            time.sleep(0.001)
        return True

    def _part(self, generation: Generation) -> None:
        while not self._client.dismissed:
            if self._park(generation):
                self._client.parked(generation.number)
            newer = self._client.wait_newer(generation.number, self._patience_s)
            if newer is not None:
                generation = newer
            elif not self._comes_back():
                return

    def _park(self, generation: Generation) -> bool:
        """Acknowledge a generation that this worker takes no part in any more. False: it is over already."""
        if generation.hosts < 2 or generation.paused or not self._meets:
            acknowledge(self._words, self._slot, generation, self._relay)
            return True
        standing = Standing(self._words, self._notice, generation, self._worker_id, relay=self._relay)
        self._notice.entering = True
        try:
            standing.park(incumbent=self.incumbent)
            if not generation.members and generation.leavers[0].worker_id == self._worker_id:
                standing.wait_all_parked()  # it is to know what the job has come to
                standing.begins()
        except Changed:
            return False
        finally:
            self._notice.entering = False
        return True


class Placement:
    """Gives a worker its part of the host's cores, anew in each generation. With more workers than cores they share
    them, one thread each."""

    def __init__(self, threads: int, pin: bool) -> None:
        """`threads`: of each worker, 0 for its share of the cores."""
        self._threads, self._pin = threads, pin
        self._cpus = sorted(os.sched_getaffinity(0))

    def apply(self, group: Group) -> None:
        host = group.members[group.rank].host
        here = [member.slot for member in group.members if member.host == host]
        share = len(self._cpus) // len(here)
        torch.set_num_threads(self._threads or max(1, share))
        at = here.index(group.slot) * share
        wanted = self._cpus[at : at + share] if self._pin and share else self._cpus
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                os.sched_setaffinity(int(task), wanted)
