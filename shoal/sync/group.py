"""The group: the workers of one generation that reduce together, and the commit protocol between them.

`docs/design.md` tells the protocol, `tests/protocol/` checks it exhaustively. Every wait here ends: when the awaited
word comes, or with `Changed` when the generation is over. Words of workers on other hosts are mirrored into this host's
(`sync/hosts.py`), so that a wait for them is like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from shoal import errors
from shoal.control.generation import Generation, Member
from shoal.errors import Changed
from shoal.metrics import fault_point
from shoal.seconds import EXCHANGE, WAIT, Seconds
from shoal.sync import words as w
from shoal.sync.hosts import Far, Places, Relay
from shoal.sync.notice import NET_S, Notice
from shoal.sync.words import Words, fence, seq_of, tag

if TYPE_CHECKING:
    from shoal.sync.collectives import Collectives

# Below a scheduler's wake-up, so that a neighbor that is nearly there costs no system call.
SPIN_S = 50e-6


class Standing:
    """One worker's place in one generation, as a member or as a leaver."""

    def __init__(
        self,
        words: Words,
        notice: Notice,
        generation: Generation,
        worker_id: str,
        *,
        spin: bool = False,
        relay: Relay | None = None,
    ) -> None:
        """`relay`: the way to other hosts, where the job may have some."""
        self.words = words
        self.generation = generation
        self.places = Places(generation)
        self._mine = next(member for member in generation.all if member.worker_id == worker_id)
        self.slot = self._mine.slot
        self.slots = [member.slot for member in generation.members]
        several = len(self.places.hosts) > 1
        self.far = Far(relay, words, notice, self.places, self._mine) if several and relay is not None else None
        self._relay, self._notice = relay, notice
        self._ids = {member.slot: member.worker_id for member in generation.all}
        self._spin_s = SPIN_S if spin else 0.0

    def park(self, *, incumbent: bool) -> None:
        """Leave the older generations, and wait until everybody of this host has: from then on its COMMIT stays as it
        is, and can be told to the other hosts. `incumbent`: this worker has had a state before."""
        words = self.words
        if self.far is None and len(self.places.hosts) > 1:
            raise errors.SettingsContradict(
                f"{self._mine.worker_id} has no address for workers of other hosts ({', '.join(self.places.hosts)}): "
                "start the job with -H, or with --address"
            )
        acknowledge(words, self.slot, self.generation, self._relay)
        fault_point("park")
        self._wait_parked(self.places.on(self._mine.host))
        if self.far is not None:
            words.put(self.slot, w.TOLD, words.commit)
            words.put(self.slot, w.INCUMBENT, int(incumbent))
            if self.places.leaders.get(self._mine.host) == self.slot:
                self.far.listen()
            self.far.connect()
            self.far.tell()

    def enter(self, *, incumbent: bool = True) -> None:
        """Park until everybody has left the older generations. Changed when there is a newer one by then."""
        self._notice.entering = True
        try:
            self.park(incumbent=incumbent)
            self.wait_all_parked()
        finally:
            self._notice.entering = False
        if self._notice.newest > self.generation.number:
            raise Changed

    def wait_all_parked(self) -> None:
        """Until everybody elsewhere has parked too."""
        if self.far is not None:
            self._wait_parked(self.far.workers)

    def begins(self) -> tuple[int, dict[str, bool]]:
        """Once all have parked: the newest commit of all hosts, and which of them have its state."""
        words, places = self.words, self.places
        told = {
            host: [(words.get(it.slot, w.INCUMBENT), words.get(it.slot, w.TOLD)) for it in places.on(host)]
            for host in places.hosts
        }
        for follower in self.generation.followers:  # it is here to get the state, whatever its memory holds
            told[follower.host] = [it for it in told[follower.host] if it[0]]
        # A host whose workers are all new has no state, whatever its memory holds: it may be of a life of its own,
        # after it was given up. Where nobody has had a state, what lies in memory is the only one.
        anybody = any(incumbent for one in told.values() for incumbent, _ in one)
        commit = max(commit for one in told.values() for incumbent, commit in one if incumbent or not anybody)
        has = {host: any(it[0] if anybody else it[1] == commit for it in one) for host, one in told.items()}
        if has[self._mine.host] and words.commit != commit:
            # Somebody elsewhere saw every done word, and nobody here did: what this host wrote before its own is whole.
            assert seq_of(words.commit) + 1 == seq_of(commit), (words.commit, commit)
            words.commit = commit
        return commit, has

    def _wait_parked(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.slot != self.slot:
                self._wait_word(member.slot, w.ACK, self.generation.number, at_least=True)
        fence()

    def _wait_word(self, slot: int, word: int, value: int, *, at_least: bool = False) -> None:
        """Until the slot's word is `value` (or above it). Changed when that can no longer be."""
        words, number = self.words, self.generation.number
        # A far worker's words come through whoever leads this host, as long as that one is here.
        is_far = self.far is not None and slot in self.far.slots
        through = self.places.leaders.get(self._mine.host, slot) if is_far else slot

        def come() -> bool:
            seen = words.get(slot, word)
            if seen == value or (at_least and seen > value):
                return True
            if not at_least and max(words.get(slot, w.ACK), words.get(through, w.ACK)) > number:
                raise Changed
            return False

        self.wait(slot, come)

    def wait(self, slot: int, come: Callable[[], bool]) -> None:
        """Until it has come, which is looked at when the slot's worker rings its bell. Changed when the generation is
        over."""
        words, notice = self.words, self._notice
        with notice.waits(self.generation.number, slot, self._ids[slot]):
            while True:
                bell = words.bell(slot)
                fence()
                if come():
                    return
                if notice.over():
                    raise Changed
                if time.monotonic() - notice.awaited_since_s >= self._spin_s:
                    words.sleep(slot, bell, NET_S)


class Group(Standing):
    """A member's place in one generation."""

    def __init__(
        self,
        words: Words,
        notice: Notice,
        generation: Generation,
        worker_id: str,
        *,
        spin: bool,
        seconds: Seconds | None = None,
        relay: Relay | None = None,
    ) -> None:
        super().__init__(words, notice, generation, worker_id, spin=spin, relay=relay)
        self.seconds = seconds or Seconds()
        self.members: Sequence[Member] = generation.members
        self.size = len(generation.members)
        self.rank = self.members.index(self._mine)
        self.near = [member.slot for member in generation.members if member.host == self._mine.host]
        self.leads = self.near[0] == self.slot  # does what is done once a host
        self._others = [slot for slot in self.slots if slot != self.slot]
        self.followers = [follower.slot for follower in generation.followers]
        self.collectives: Collectives  # of this generation, once they have entered it
        self.seq = 0  # of the newest commit, known once entered
        self.checked = False  # that commit is to be
        self.behind = False  # this host does not have that commit's state yet
        self.gives: tuple[int, ...] = ()  # slots of workers to whom this one gives that state
        self.takes: int | None = None  # the slot from which this one, which leads its host, takes it

    def enter(self, *, incumbent: bool = True) -> None:
        """As before; then `seq` is what is committed."""
        super().enter(incumbent=incumbent)
        if self.far is None:
            self.seq = seq_of(self.words.commit)
        else:
            self._agree()

    def _agree(self) -> None:
        """Find out where all hosts begin, and who has not got that far."""
        self._begins, has = self.begins()
        self.seq = seq_of(self._begins)
        if not self.seq:
            return
        leaders = {host: slot for host, slot in self.places.leaders.items() if slot in self.slots}
        givers = [leaders[host] for host in leaders if has[host]]
        takers = [leaders[host] for host in leaders if not has[host]]
        self.behind = not has[self._mine.host]
        if not givers:  # all that had it leave: the job is over
            return
        self.gives = tuple(it for at, it in enumerate(takers) if givers[at % len(givers)] == self.slot)
        self.takes = givers[takers.index(self.slot) % len(givers)] if self.slot in takers else None

    @property
    def followers_know(self) -> bool:
        """Whether some follower has the state by now, of which the coordinator may not have heard."""
        return any(self.words.get(slot, w.INCUMBENT) for slot in self.followers)

    def renew(self, why: str) -> NoReturn:
        """What is on its way between hosts is of no use: have the generation begin again. Raises Changed."""
        assert self.far is not None
        self.far.renew(why)
        raise Changed

    def adopt(self) -> None:
        """The state of a host that was behind is there: whoever leads it says so, the others wait for that."""
        leader = self.near[0]
        if self.leads:
            self.words.commit = self._begins
            self.words.ring(self.slot)
        else:
            self.wait(leader, lambda: self.words.commit == self._begins)
        self.behind = False

    @property
    def changed(self) -> bool:
        """Whether a death ended this generation: what is being computed for it is in vain."""
        return self._notice.fault > self.generation.number

    def ready(self) -> None:
        """Say that my lane is written; wait until everyone's is."""
        self._meet(w.READY, "ready")

    def reduced(self) -> None:
        """Say that my slice is reduced and my partial norm posted; wait until everyone's is."""
        self._meet(w.REDUCED, None)

    def commit(self, *, check: bool = False) -> bool:
        """Commit step `seq + 1`; `check`, of the lowest rank: it is to be checked. True if all members now move to a
        newer generation together. Changed: this worker does not know whether it was committed; the next generation's
        COMMIT says."""
        words, step = self.words, tag(self.generation.number, self.seq + 1)
        words.put(self.slot, w.SEEN, self._notice.newest)
        if check:
            words.put(self.slot, w.CHECK, self.seq + 1)
        fault_point("before_done")
        self._meet(w.DONE, "after_done", self.followers)
        self.checked = words.get(self.slots[0], w.CHECK) == self.seq + 1
        planned = max(words.get(slot, w.SEEN) for slot in self.slots) > self.generation.number
        fault_point("before_commit")
        words.commit = step  # the commit point: the same store by every member
        fault_point("after_commit")
        self.seq += 1
        return planned

    def _meet(self, word: int, point: str | None, followers: Sequence[int] = ()) -> None:
        words, step = self.words, tag(self.generation.number, self.seq + 1)
        words.put(self.slot, word, step)
        if self._others:
            words.ring(self.slot)
        if self.far is not None:
            self.far.tell()
        if point is not None:
            fault_point(point)
        for slot in (*self._others, *followers):
            if words.get(slot, word) != step:
                self.seconds.switch(WAIT)
                try:
                    self._wait_word(slot, word, step)
                finally:
                    self.seconds.switch(EXCHANGE)
        fence()


class Following(Standing):
    """A follower's place in one generation."""

    def enter(self, *, incumbent: bool = True) -> None:
        """As before; then `newest` is the tag of what is committed, 0 for nothing."""
        super().enter(incumbent=incumbent)
        self.newest, _ = self.begins()

    def follow(self, step: int) -> bool:
        """Say that all of this step is here; wait until it is committed. True: all now enter a newer generation."""
        words = self.words
        assert self.far is not None
        words.put(self.slot, w.DONE, step)
        words.ring(self.slot)
        self.far.tell()
        others = [follower.slot for follower in self.generation.followers if follower.slot != self.slot]
        for slot in (*self.slots, *others):  # without one of them the members do not commit
            self._wait_word(slot, w.DONE, step)
        fence()
        return max(words.get(slot, w.SEEN) for slot in self.slots) > self.generation.number


def acknowledge(words: Words, slot: int, generation: Generation, relay: Relay | None = None) -> None:
    """Promise that this worker writes nothing of a generation before this one any more, nor does its wire."""
    if relay is not None:
        relay.enter(slot, generation)
    words.put(slot, w.ACK, generation.number)
    words.ring(slot)
    if relay is not None:
        relay.ring_mirrored()
