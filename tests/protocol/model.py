"""An exhaustive model of the commit protocol: every interleaving, a crash between any two stores.

`docs/design.md` ("Membership", "The commit protocol") is the text; this is the same program in small atomic steps, over
the same words. `explore` visits every state that is reachable within the bounds of a `Scenario`, breadth first, so that
the trace of a `Violation` is a shortest one. What is checked, and where:

- everyone who enters a generation computes the same next seq (`_pass_barrier`);
- whoever reads a state reads one whole state, made in one generation, from the state before it and from lanes of the
  same tag (`_write_lane`, `_begin_slice`, `_end_slice`, `_store_commit`);
- COMMIT never goes back, no seq is committed twice or skipped, and none is begun again once somebody returned from it
  (`_store_commit`, `_write_lane`);
- max(SEEN) is the same before and after COMMIT (`_decide`), and a planned change that stands alone aborts no step
  (`_end_wait`);
- no deadlock: where nothing but the environment can move, everybody has finished (`_check_rest`);
- no livelock: each step moves its worker strictly forward (`_progress`), so there are no cycles and every path ends.

What keeps the graph small:

- A worker learns of a generation when it next looks, not when the message arrives: a look returns any one between
  the one it saw last and the newest. The same holds for deaths: a publication takes any subset of what is waiting.
- A wait looks at all of its words at once: each of them, once right, stays right until the waiter has gone on.
  `each_read` takes that away and makes every read its own step.
- The record of a commit is written by rank 0 between its first and its last store, as is slice part 0: it is that part.

Not in the model: bells and sleeping (a wait here always looks again), stores that are seen out of order, the REDUCED
round of clipping, a coordinator that dies.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

PARTS = 3  # of the model: one a worker with three members, two and one with two, all three with one
TORN = -1  # a part of a buffer that somebody has begun to write and not finished

# Where a worker stands. The order is the order of the program: `_progress` relies on it.
(
    BARRIER,  # ACK is stored; waits for ACK of all members and leavers
    LANE,  # computes gradients from the committed state, is about to write its lane
    READY,
    WAIT_READY,  # the first store into its slice follows: the target is half written then
    END,  # the last store into its slice
    SEEN,
    DONE,
    EARLY,  # EARLY_COMMIT only
    WAIT_DONE,  # the store of COMMIT follows
    DECIDE,  # returned from the step; stays in the generation or leaves it
    IDLE,  # has made all commits; acknowledges whatever comes
    PARKED,  # a leaver that waits for Bye, or a member of a paused generation
    MOVE,  # has to enter a newer generation, as soon as it knows one
    DEAD,  # killed, and no generation without it has been published
    GONE,  # there is no process in this slot
) = range(15)

Trace = tuple[str, ...]


class Mutant(Enum):
    """One mechanism of the protocol taken away."""

    NO_ACK_BARRIER = "a generation is entered without waiting for the others' ACK"
    NO_LEAVER_ACK = "the barrier waits for members only, not for leavers"
    COMMIT_READ_EARLY = "COMMIT is read before the barrier, not after it"
    SINGLE_BUFFER = "the state is stepped in place"
    EARLY_COMMIT = "COMMIT is stored before all DONE were seen"
    ZOMBIE = "a fault is published although the process still runs"
    LEAVER_EXITS = "a leaver exits after its first ACK, without Bye, and a clean exit publishes nothing"
    LEAVER_EXIT_IS_DEATH = "a leaver exits after its first ACK, without Bye, and that exit counts as a death"
    STALE_BYE = "Bye is said after an ACK of any generation that lists the leaver, not of the newest"
    OWN_KNOWLEDGE = "the planned switch is decided by what this worker knows, not by max(SEEN)"
    SEEN_AFTER_DONE = "SEEN is stored after DONE"
    SEQ_ONLY = "READY and DONE are compared by seq, not by generation"
    NO_ACK_EXIT = "a wait does not end when the awaited worker has moved on"
    NEWEST_FLAG = "a wait looks at the fault flag of the newest known generation only"


@dataclass(frozen=True)
class Scenario:
    """The bounds of one exploration. `slots` beyond `members` are free at the start."""

    commits: int = 2
    members: int = 3
    slots: int = 3
    crashes: int = 0
    leaves: int = 0
    joins: int = 0
    min_members: int = 1
    each_read: bool = False
    alone: bool = False  # a planned change comes only when everybody has entered the newest generation
    mutant: Mutant | None = None


class Generation(NamedTuple):
    members: tuple[int, ...]  # slots, in order of seniority
    leavers: tuple[int, ...]
    fault: bool
    paused: bool


class Slot(NamedTuple):
    """The process in a slot (its own variables), then the slot's words and its lane, which outlive it."""

    pc: int
    generation: int
    seq: int
    known: int  # the newest generation it has looked at
    at: int  # how many words of the current wait it has passed; stays 0 unless each_read
    ack: int
    ready: int
    done: int
    seen: int
    lane: int


class State(NamedTuple):
    slots: tuple[Slot, ...]
    commit: int
    buffers: tuple[tuple[int, ...], tuple[int, ...]]  # a part holds the tag of the commit that made it, or TORN
    generations: tuple[Generation, ...]  # generation g is at g - 1
    entered: tuple[int, ...]  # the next seq that the first to enter a generation read; 0 before that
    returned: int  # the newest seq that a step of anybody returned from
    crashes: int  # still to come, at most
    leaves: int
    joins: int


class Violation(Exception):
    """A reachable state breaks a property; `trace` is a shortest way there."""

    def __init__(self, what: str, trace: Trace = ()) -> None:
        super().__init__(what)
        self.what = what
        self.trace = trace

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {number:3d}. {line}" for number, line in enumerate(self.trace, 1))])


class Explored(NamedTuple):
    states: int
    steps: int
    finals: int  # states in which everybody has finished
    late: int  # times that a wait ended early although its seq was already committed
    aborted: int  # times that a wait ended early without any fault, and its seq was not committed


def tag(generation: int, seq: int) -> int:
    return generation << 8 | seq


def seq_of(word: int) -> int:
    return word & 0xFF


def show(word: int) -> str:
    return "torn" if word == TORN else f"{word >> 8}:{seq_of(word)}"


def parts_of(rank: int, members: int) -> range:
    """The parts that a rank steps; ranks of a smaller generation take more, so a redo cuts differently."""
    each = -(-PARTS // members)
    return range(min(rank * each, PARTS), min((rank + 1) * each, PARTS))


class Step(NamedTuple):
    actor: int  # a slot, or COORDINATOR
    what: str
    state: State
    forced: bool  # will happen if nothing else does; a crash or a request need not


COORDINATOR = -1


class Model:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.mutant = scenario.mutant
        self.late = 0
        self.aborted = 0

    def start(self) -> State:
        """All members are about to enter generation 1; the state of commit 0 lies in buffer 0."""
        s = self.scenario
        process = Slot(MOVE, 0, 0, 1, 0, 0, 0, 0, 0, 0)
        free = process._replace(pc=GONE, known=0)
        return State(
            slots=tuple(process if slot < s.members else free for slot in range(s.slots)),
            commit=0,
            buffers=((0,) * PARTS, (TORN,) * PARTS),
            generations=(Generation(tuple(range(s.members)), (), False, s.members < s.min_members),),
            entered=(0,),
            returned=0,
            crashes=s.crashes,
            leaves=s.leaves,
            joins=s.joins,
        )

    def steps(self, state: State) -> Iterator[Step]:
        for i in range(len(state.slots)):
            yield from self._worker(state, i)
        yield from self._coordinator(state)

    # The worker

    def _worker(self, state: State, i: int) -> Iterator[Step]:
        me = state.slots[i]
        pc = me.pc
        if pc >= DEAD:
            return
        if state.crashes and self.mutant is not Mutant.ZOMBIE:
            dead = me._replace(pc=DEAD, generation=0, seq=0, known=0, at=0)
            yield Step(i, "is killed", _put(state, i, dead)._replace(crashes=state.crashes - 1), False)
        if pc in (MOVE, BARRIER, IDLE, PARKED):
            yield from self._move(state, i)
        if pc == BARRIER:
            yield from self._barrier(state, i)
        elif pc == LANE:
            yield self._write_lane(state, i)
        elif pc == READY:
            word = tag(me.generation, me.seq)
            yield Step(i, f"READY = {show(word)}", _put(state, i, me._replace(pc=WAIT_READY, ready=word)), True)
        elif pc == WAIT_READY:
            yield from self._wait(state, i)
        elif pc == END:
            yield self._end_slice(state, i)
        elif pc in (SEEN, DONE):
            yield from self._finish(state, i)
        elif pc == EARLY:
            yield self._store_commit(state, i)
        elif pc == WAIT_DONE:
            yield from self._wait(state, i)
        elif pc == DECIDE:
            yield from self._decide(state, i)

    def _newest(self, state: State, i: int) -> int:
        """The newest generation that worker i may learn of; none is sent to a worker that is not in it."""
        newest = len(state.generations)
        while newest and not _lists(state.generations[newest - 1], i):
            newest -= 1
        return newest

    def _complain(self, state: State, i: int, what: str) -> None:
        """Worker i meets something wrong. One that was published as lost harms only by what it writes (ZOMBIE)."""
        if _lists(state.generations[-1], i):
            raise Violation(what)

    def _move(self, state: State, i: int) -> Iterator[Step]:
        """Look for a newer generation and acknowledge it: nothing older is written by this worker after that."""
        me = state.slots[i]
        for g in range(max(me.known, me.generation + 1), self._newest(state, i) + 1):
            generation = state.generations[g - 1]
            pc = BARRIER
            if i in generation.leavers or generation.paused:
                pc = PARKED
            if i in generation.leavers and self.mutant is Mutant.LEAVER_EXITS:
                pc = GONE
            if i in generation.leavers and self.mutant is Mutant.LEAVER_EXIT_IS_DEATH:
                pc = DEAD
            seq = seq_of(state.commit) + 1 if self.mutant is Mutant.COMMIT_READ_EARLY else 0
            moved = me._replace(pc=pc, generation=g, seq=seq, known=g, at=0, ack=g)
            yield Step(i, f"ACK = {g}", _put(state, i, moved), True)

    def _barrier(self, state: State, i: int) -> Iterator[Step]:
        me = state.slots[i]
        generation = state.generations[me.generation - 1]
        awaited = generation.members + generation.leavers
        if self.mutant is Mutant.NO_LEAVER_ACK:
            awaited = generation.members
        if self.mutant is Mutant.NO_ACK_BARRIER:
            awaited = ()
        if self.scenario.each_read:
            if me.at == len(awaited):
                yield self._pass_barrier(state, i)
            elif state.slots[awaited[me.at]].ack >= me.generation:
                yield Step(i, f"sees ACK of {awaited[me.at]}", _put(state, i, me._replace(at=me.at + 1)), True)
        elif all(state.slots[j].ack >= me.generation for j in awaited):
            yield self._pass_barrier(state, i)

    def _pass_barrier(self, state: State, i: int) -> Step:
        me = state.slots[i]
        seq = me.seq if self.mutant is Mutant.COMMIT_READ_EARLY else seq_of(state.commit) + 1
        entered = state.entered[me.generation - 1]
        if entered and entered != seq:
            self._complain(state, i, f"generation {me.generation} begins with seq {entered}, for worker {i} with {seq}")
        index = me.generation - 1
        after = _put(state, i, me._replace(pc=self._first(seq), seq=seq, at=0))
        after = after._replace(entered=(*state.entered[:index], seq, *state.entered[index + 1 :]))
        return Step(i, f"enters generation {me.generation}, next seq {seq}", after, True)

    def _first(self, seq: int) -> int:
        return LANE if seq <= self.scenario.commits else IDLE

    def _source(self, seq: int) -> int:
        return 0 if self.mutant is Mutant.SINGLE_BUFFER else (seq - 1) & 1

    def _target(self, seq: int) -> int:
        return 0 if self.mutant is Mutant.SINGLE_BUFFER else seq & 1

    def _write_lane(self, state: State, i: int) -> Step:
        me = state.slots[i]
        if me.seq <= state.returned:
            self._complain(state, i, f"worker {i} does seq {me.seq} again, somebody returned from seq {state.returned}")
        source = state.buffers[self._source(me.seq)]
        if seq_of(source[0]) != me.seq - 1 or source != source[:1] * PARTS:
            self._complain(state, i, f"worker {i} computes seq {me.seq} from {[show(part) for part in source]}")
        word = tag(me.generation, me.seq)
        return Step(i, f"writes lane {show(word)}", _put(state, i, me._replace(pc=READY, lane=word)), True)

    def _wait(self, state: State, i: int) -> Iterator[Step]:
        """Wait for READY or DONE of all members, in order. Which is looked at first, word or way out, is left open."""
        me = state.slots[i]
        word = tag(me.generation, me.seq)
        awaited = state.generations[me.generation - 1].members
        passed = 0
        left = False
        for j in awaited[me.at :]:
            other = state.slots[j]
            left = left or other.ack > me.generation
            value = other.ready if me.pc == WAIT_READY else other.done
            if value != word and not (self.mutant is Mutant.SEQ_ONLY and seq_of(value) == me.seq):
                break
            passed += 1
            if self.scenario.each_read:
                break
        if self.scenario.each_read:
            if me.at == len(awaited):
                yield self._go_on(state, i)
            elif passed:
                yield Step(i, f"sees worker {awaited[me.at]}", _put(state, i, me._replace(at=me.at + 1)), True)
        elif passed == len(awaited):
            yield self._go_on(state, i)
        yield from self._end_wait(state, i, left)

    def _go_on(self, state: State, i: int) -> Step:
        me = state.slots[i]
        if me.pc == WAIT_READY:
            return self._begin_slice(state, i)
        if self.mutant is Mutant.EARLY_COMMIT:
            return Step(i, "has seen all DONE", _put(state, i, self._returning(state, i)), True)
        return self._store_commit(state, i)

    def _end_wait(self, state: State, i: int, left: bool) -> Iterator[Step]:
        me = state.slots[i]
        fault = 0
        first = me.known if self.mutant is Mutant.NEWEST_FLAG else me.generation + 1
        for g in range(max(first, me.generation + 1), self._newest(state, i) + 1):
            if state.generations[g - 1].fault:
                fault = g
                break
        if not fault and (not left or self.mutant is Mutant.NO_ACK_EXIT):
            return
        if seq_of(state.commit) >= me.seq:
            self.late += 1
        elif not fault:
            self.aborted += 1
            if self.scenario.alone:
                raise Violation(f"a planned change aborts seq {me.seq} of worker {i}")
        why = f"knows of fault {fault}" if fault else "meets a worker that has moved on"
        after = me._replace(pc=MOVE, known=max(me.known, fault), at=0)
        yield Step(i, f"gives up seq {me.seq}: {why}", _put(state, i, after), True)

    def _check_slice(self, state: State, i: int, source: bool) -> range:
        me = state.slots[i]
        members = state.generations[me.generation - 1].members
        mine = parts_of(members.index(i), len(members))
        word = tag(me.generation, me.seq)
        lanes = [state.slots[j].lane for j in members]
        if any(lane != word for lane in lanes):
            self._complain(state, i, f"worker {i} reduces lanes {[show(lane) for lane in lanes]} for {show(word)}")
        parts = [state.buffers[self._source(me.seq)][part] for part in mine]
        if source and any(part == TORN or seq_of(part) != me.seq - 1 for part in parts):
            self._complain(state, i, f"worker {i} steps {[show(part) for part in parts]} to seq {me.seq}")
        return mine

    def _begin_slice(self, state: State, i: int) -> Step:
        mine = self._check_slice(state, i, source=True)
        me = state.slots[i]
        after = _fill(state, self._target(me.seq), mine, TORN)
        return Step(i, f"begins its slice of seq {me.seq}", _put(after, i, me._replace(pc=END, at=0)), True)

    def _end_slice(self, state: State, i: int) -> Step:
        # In place, the source is gone by now; with two buffers it is read until the last part is written.
        mine = self._check_slice(state, i, source=self.mutant is not Mutant.SINGLE_BUFFER)
        me = state.slots[i]
        after = _fill(state, self._target(me.seq), mine, tag(me.generation, me.seq))
        return Step(i, f"ends its slice of seq {me.seq}", _put(after, i, me._replace(pc=SEEN)), True)

    def _finish(self, state: State, i: int) -> Iterator[Step]:
        me = state.slots[i]
        pc = DONE if me.pc == SEEN else EARLY if self.mutant is Mutant.EARLY_COMMIT else WAIT_DONE
        if (me.pc == SEEN) != (self.mutant is Mutant.SEEN_AFTER_DONE):
            for known in range(me.known, self._newest(state, i) + 1):
                yield Step(i, f"SEEN = {known}", _put(state, i, me._replace(pc=pc, seen=known, known=known)), True)
        else:
            word = tag(me.generation, me.seq)
            yield Step(i, f"DONE = {show(word)}", _put(state, i, me._replace(pc=pc, done=word)), True)

    def _store_commit(self, state: State, i: int) -> Step:
        me = state.slots[i]
        word = tag(me.generation, me.seq)
        if word != state.commit and (me.seq != seq_of(state.commit) + 1 or word < state.commit):
            raise Violation(f"worker {i} stores COMMIT = {show(word)} over {show(state.commit)}")
        target = state.buffers[self._target(me.seq)]
        if any(part != word for part in target):
            raise Violation(f"worker {i} commits {show(word)}, the buffer is {[show(part) for part in target]}")
        if self.mutant is Mutant.EARLY_COMMIT:
            after = _put(state, i, me._replace(pc=WAIT_DONE))
        else:
            after = _put(state, i, self._returning(state, i))
        after = after._replace(commit=word)
        return Step(i, f"COMMIT = {show(word)}", after, True)

    def _returning(self, state: State, i: int) -> Slot:
        """All DONE are seen. What max(SEEN) says now is kept in `at`, to compare with what it says after COMMIT."""
        at = 0 if self.scenario.each_read else int(self._switches(state, i))
        return state.slots[i]._replace(pc=DECIDE, at=at)

    def _switches(self, state: State, i: int) -> bool:
        generation = state.slots[i].generation
        return any(state.slots[j].seen > generation for j in state.generations[generation - 1].members)

    def _decide(self, state: State, i: int) -> Iterator[Step]:
        me = state.slots[i]
        members = state.generations[me.generation - 1].members
        state = state._replace(returned=max(state.returned, me.seq))
        stay = me._replace(pc=self._first(me.seq + 1), seq=me.seq + 1, at=0)
        move = me._replace(pc=MOVE, at=0)
        if self.mutant is Mutant.OWN_KNOWLEDGE:
            for known in range(me.known, self._newest(state, i) + 1):
                after = stay if known == me.generation else move
                yield Step(i, f"returns, knows {known}", _put(state, i, after._replace(known=known)), True)
        elif self.scenario.each_read and me.at < len(members):
            seen = state.slots[members[me.at]].seen
            after = move if seen > me.generation else me._replace(at=me.at + 1)
            yield Step(i, f"reads SEEN = {seen} of {members[me.at]}", _put(state, i, after), True)
        elif not self.scenario.each_read and self._switches(state, i):
            if not me.at:
                raise Violation(f"worker {i} reads another max(SEEN) after COMMIT than before it")
            yield Step(i, f"returns from seq {me.seq}, moves on", _put(state, i, move), True)
        else:
            yield Step(i, f"returns from seq {me.seq}", _put(state, i, stay), True)

    # The coordinator, and the launcher that tells it of deaths

    def _coordinator(self, state: State) -> Iterator[Step]:
        newest = state.generations[-1]
        number = len(state.generations)
        for i in newest.leavers:
            slot = state.slots[i]
            said = slot.pc == PARKED and slot.ack == number
            if self.mutant is Mutant.STALE_BYE:
                said = slot.pc == PARKED
            if said:
                gone = slot._replace(pc=GONE, generation=0, seq=0, known=0)
                after = _put(state, i, gone)
                # Bye takes it off the list of the generations to come. This one keeps it: ACK has been stored.
                yield Step(COORDINATOR, f"says Bye to {i}, which exits", after, True)
        yield from self._publications(state)

    def _publications(self, state: State) -> Iterator[Step]:
        newest = state.generations[-1]
        listed = newest.members + newest.leavers
        waiting = [i for i in listed if state.slots[i].pc == DEAD]
        if self.mutant is Mutant.ZOMBIE and state.crashes:
            waiting = [i for i in listed if state.slots[i].pc < DEAD]
        if not (waiting or state.leaves or state.joins):
            return
        everybody_in = all(
            state.slots[i].generation == len(state.generations) and state.slots[i].pc > BARRIER for i in listed
        )
        planned = everybody_in or not self.scenario.alone
        leaving: list[int | None] = [None]
        if state.leaves and planned:
            leaving += [i for i in newest.members if state.slots[i].pc < DEAD]
        for size in range(len(waiting) + 1):
            for lost in itertools.combinations(waiting, size):
                if self.mutant is Mutant.ZOMBIE and size > state.crashes:
                    continue
                for leaver in leaving:
                    if leaver in lost:
                        continue
                    for join in (False, True):
                        if (join and not (state.joins and planned)) or not (lost or leaver is not None or join):
                            continue
                        step = self._publish(state, lost, leaver, join)
                        if step is not None:
                            yield step

    def _publish(self, state: State, lost: tuple[int, ...], leaver: int | None, join: bool) -> Step | None:
        newest = state.generations[-1]
        number = len(state.generations) + 1
        slots = list(state.slots)
        crashes = state.crashes
        for i in lost:
            if self.mutant is Mutant.ZOMBIE:
                crashes -= 1
            else:
                slots[i] = slots[i]._replace(pc=GONE)
        members = [i for i in newest.members if i not in lost and i != leaver]
        leavers = [i for i in newest.leavers if i not in lost]
        if self.mutant not in (Mutant.LEAVER_EXITS, Mutant.STALE_BYE):
            leavers = [i for i in leavers if slots[i].pc != GONE]
        if leaver is not None:
            leavers.append(leaver)
        joined = None
        if join:
            free = [i for i, slot in enumerate(slots) if slot.pc == GONE and i not in members + leavers]
            if not free:
                return None
            joined = free[0]
            slots[joined] = slots[joined]._replace(pc=MOVE, generation=number - 1, known=number)
            members.append(joined)
        generation = Generation(
            tuple(members), tuple(leavers), bool(lost), paused=len(members) < max(self.scenario.min_members, 1)
        )
        changes = [f"lost {i}" for i in lost]
        changes += [f"{leaver} leaves"] if leaver is not None else []
        changes += [f"new worker in slot {joined}"] if joined is not None else []
        after = state._replace(
            slots=tuple(slots),
            generations=(*state.generations, generation),
            entered=(*state.entered, 0),
            crashes=crashes,
            leaves=state.leaves - (leaver is not None),
            joins=state.joins - join,
        )
        what = f"publishes generation {number} ({', '.join(changes)}): members {members}, leavers {leavers}"
        return Step(COORDINATOR, what, after, forced=bool(lost) and leaver is None and not join)


def _put(state: State, i: int, slot: Slot) -> State:
    slots = state[0]
    return State((*slots[:i], slot, *slots[i + 1 :]), *state[1:])


def _fill(state: State, target: int, parts: range, value: int) -> State:
    filled = tuple(value if part in parts else old for part, old in enumerate(state.buffers[target]))
    buffers = (filled, state.buffers[1]) if target == 0 else (state.buffers[0], filled)
    return state._replace(buffers=buffers)


def _lists(generation: Generation, i: int) -> bool:
    return i in generation.members or i in generation.leavers


def _progress(before: State, step: Step) -> bool:
    """Whether a step is strictly forward: no cycle is made of such steps, so every path ends."""
    if step.actor == COORDINATOR or step.state.slots[step.actor].pc >= DEAD:
        return True  # each uses up a generation of the bounds, or a process
    old, new = before.slots[step.actor], step.state.slots[step.actor]
    return (old.generation, old.seq, old.pc, old.at) < (new.generation, new.seq, new.pc, new.at) or (
        old.generation < new.generation
    )


def _check_rest(state: State) -> None:
    """Nothing but the environment can move: then everybody in the newest generation has finished."""
    newest = state.generations[-1]
    for i in newest.members + newest.leavers:
        slot = state.slots[i]
        finished = slot.pc == IDLE or (newest.paused and slot.pc == PARKED) or (i in newest.leavers and slot.pc == GONE)
        if not finished or (slot.pc != GONE and slot.ack != len(state.generations)):
            raise Violation(f"deadlock: worker {i} waits for ever\n{_describe(state)}")


def _describe(state: State) -> str:
    number, newest = len(state.generations), state.generations[-1]
    lines = [f"  COMMIT {show(state.commit)}, generation {number}: members {newest.members}, leavers {newest.leavers}"]
    for i, slot in enumerate(state.slots):
        words = f"ACK {slot.ack}, READY {show(slot.ready)}, DONE {show(slot.done)}, SEEN {slot.seen}"
        process = "no process" if slot.pc >= DEAD else f"in generation {slot.generation}, seq {slot.seq}"
        lines.append(f"  slot {i}: {words}; {process}")
    return "\n".join(lines)


def explore(scenario: Scenario) -> Explored:
    """Visit every reachable state. Raises Violation with a shortest trace."""
    model = Model(scenario)
    start = model.start()
    came_from: dict[State, tuple[State, int, str] | None] = {start: None}
    frontier = deque([start])
    taken = finals = 0
    while frontier:
        state = frontier.popleft()
        forced = False
        try:
            for step in model.steps(state):
                taken += 1
                forced = forced or step.forced
                if not _progress(state, step):
                    raise Violation(f"no progress: worker {step.actor} {step.what}")
                if step.state not in came_from:
                    came_from[step.state] = (state, step.actor, step.what)
                    frontier.append(step.state)
            if not forced:
                _check_rest(state)
                finals += 1
        except Violation as violation:
            raise Violation(violation.what, _trace(came_from, state)) from None
    return Explored(len(came_from), taken, finals, model.late, model.aborted)


def _trace(came_from: dict[State, tuple[State, int, str] | None], state: State) -> Trace:
    lines: list[str] = []
    while (step := came_from[state]) is not None:
        state, actor, what = step
        lines.append(f"coordinator {what}" if actor == COORDINATOR else f"worker {actor} {what}")
    return tuple(reversed(lines))
