"""The commit protocol between hosts, exhaustively: what `model.py` shows for one host, where the words of other hosts'
workers arrive late, in order, or never.

Each host has its own COMMIT and its own two buffers. A worker's words are read directly on its host; on others they are
mirrored: every store is also posted, and a mirrored line becomes what was posted, one after the other, for as long as
both ends are in the generation that it was posted in. Workers of a host that is *dropped* (nobody can reach it) live on
and go on as far as they can.

What is checked: everyone that enters a generation begins from the same commit, which is one whole state and was made by
the same generation on every host; COMMIT of a host never goes back, and what is committed is whole; no step is done
again that a worker of the generation has returned from; nobody waits for ever.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .model import Trace, Violation, seq_of, show, tag

TORN = -1

# Where a worker stands, in the order of the program.
(
    NEAR,  # ACK is stored; waits for ACK of the members and leavers of its host
    FAR,  # has told its ACK and its host's COMMIT; waits for those of the other hosts
    LANE,
    WAIT_READY,  # has stored and posted READY
    WAIT_SUMS,  # has posted its part of the host's sum; the first store into its slice follows
    END,
    DONE,
    POST_DONE,
    WAIT_DONE,  # the store of COMMIT follows
    DECIDE,
    IDLE,
    PARKED,  # a leaver that waits for Bye
    MOVE,
    DEAD,
    GONE,
) = range(15)


class Mutant(Enum):
    OWN_COMMIT = "a generation begins at the COMMIT of one's own host"
    TOLD_EARLY = "ACK and COMMIT are told before the host's workers have parked"
    NEAR_DONE_ONLY = "COMMIT is stored when the DONE words of one's own host are there"
    NO_SUMS = "a slice is stepped without waiting for the other hosts' sums"
    OLD_FRAMES = "words are compared by seq alone, and posted words outlive their generation"
    SILENT_MOVE = "nobody is told that a worker of another host has moved on to a newer generation"
    EARLY_BYE = "a leaver may exit before everybody has entered: what it posted is lost with it"
    NO_FAR_LEAVER = "the barrier does not wait for leavers of other hosts"


@dataclass(frozen=True)
class Scenario:
    host_of: tuple[int, ...] = (0, 0, 1)  # by slot; all are members at the start
    commits: int = 2
    crashes: int = 0
    leaves: int = 0
    drops: int = 0  # hosts, by number from the highest, that may become unreachable
    mutant: Mutant | None = None


class Generation(NamedTuple):
    members: tuple[int, ...]
    leavers: tuple[int, ...]
    fault: bool


class Words(NamedTuple):
    """A worker's line. `commit` is its host's, told with ACK. `left` is mirrored only: the generation whose connections
    the worker has closed, since it has moved on."""

    ack: int = 0
    commit: int = 0
    ready: int = 0
    summed: int = 0
    done: int = 0
    seen: int = 0
    left: int = 0


class Worker(NamedTuple):
    pc: int
    generation: int
    seq: int
    known: int
    lane: int
    returned: int
    words: Words


class Host(NamedTuple):
    commit: int
    buffers: tuple[tuple[int, ...], tuple[int, ...]]  # a part for each of its workers
    mirrored: tuple[Words, ...]  # by slot; its own workers' are not used


class State(NamedTuple):
    workers: tuple[Worker, ...]
    hosts: tuple[Host, ...]
    posted: tuple[tuple[tuple[tuple[int, Words], ...], ...], ...]  # by slot, by host: (generation, words)
    generations: tuple[Generation, ...]
    entered: tuple[int, ...]  # the tag that the first to enter began from; TORN before that
    crashes: int
    leaves: int
    drops: int


class Step(NamedTuple):
    what: str
    state: State
    forced: bool = True


class Model:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.mutant = scenario, scenario.mutant
        self.host_of = scenario.host_of
        self.n_hosts = max(scenario.host_of) + 1
        self.near = [[j for j, h in enumerate(scenario.host_of) if h == host] for host in range(self.n_hosts)]
        self.rolled = 0  # times that a host stored a COMMIT that it had not seen all DONE words of

    def start(self) -> State:
        n = len(self.host_of)
        worker = Worker(MOVE, 0, 0, 1, 0, 0, Words())
        host = tuple(
            Host(0, ((0,) * len(self.near[h]), (TORN,) * len(self.near[h])), (Words(),) * n)
            for h in range(self.n_hosts)
        )
        s = self.scenario
        return State(
            (worker,) * n, host, (((),) * self.n_hosts,) * n, (Generation(tuple(range(n)), (), False),), (TORN,),
            s.crashes, s.leaves, s.drops,
        )  # fmt: skip

    def steps(self, state: State) -> Iterator[Step]:
        for i, me in enumerate(state.workers):
            if me.pc < DEAD:
                if state.crashes:
                    dead = me._replace(pc=DEAD)
                    yield Step(f"{i} is killed", put(state, i, dead)._replace(crashes=state.crashes - 1), False)
                yield from self._worker(state, i)
            yield from self._deliver(state, i)
        yield from self._coordinator(state)

    # Words, near and far

    def _read(self, state: State, i: int, j: int) -> Words:
        host = self.host_of[i]
        return state.workers[j].words if self.host_of[j] == host else state.hosts[host].mirrored[j]

    def _post(self, state: State, i: int, words: Words | None = None) -> State:
        """Send worker i's words to every other host."""
        me = state.workers[i]
        queues = tuple(
            queue if host == self.host_of[i] else (*queue, (me.generation, words or me.words))
            for host, queue in enumerate(state.posted[i])
        )
        return state._replace(posted=(*state.posted[:i], queues, *state.posted[i + 1 :]))

    def _deliver(self, state: State, i: int) -> Iterator[Step]:
        for host, queue in enumerate(state.posted[i]):
            if not queue:
                continue
            (number, words), *rest = queue
            queues = (*state.posted[i][:host], tuple(rest), *state.posted[i][host + 1 :])
            posted = (*state.posted[:i], queues, *state.posted[i + 1 :])
            mirror = next((j for j in state.generations[number - 1].members if self.host_of[j] == host), None)
            at = -1 if mirror is None or state.workers[mirror].pc >= DEAD else state.workers[mirror].generation
            sender_left = state.workers[i].generation > number or state.workers[i].pc >= DEAD
            if at == number or (self.mutant is Mutant.OLD_FRAMES and at > number):
                old = state.hosts[host]
                lines = (*old.mirrored[:i], words, *old.mirrored[i + 1 :])
                hosts = (*state.hosts[:host], old._replace(mirrored=lines), *state.hosts[host + 1 :])
                yield Step(f"host {host} hears of {i}: {words}", state._replace(hosts=hosts, posted=posted))
            # Whoever hangs up may take the last words with it; that it has hung up is seen.
            if (at > number or at == -1 or (sender_left and not words.left)) and self.mutant is not Mutant.OLD_FRAMES:
                yield Step(f"what {i} posted to host {host} is lost", state._replace(posted=posted))

    # The worker

    def _newest(self, state: State, i: int) -> int:
        newest = len(state.generations)
        while newest and not lists(state.generations[newest - 1], i):
            newest -= 1
        return newest

    def _worker(self, state: State, i: int) -> Iterator[Step]:
        me = state.workers[i]
        generation = state.generations[me.generation - 1]
        word = tag(me.generation, me.seq)
        if me.pc in (MOVE, NEAR, FAR, IDLE, PARKED):
            for g in range(max(me.known, me.generation + 1), self._newest(state, i) + 1):
                words = me.words._replace(ack=g)
                hung_up = state
                if me.generation and self.mutant is not Mutant.SILENT_MOVE:
                    hung_up = self._post(state, i, me.words._replace(left=me.generation))
                moved = me._replace(pc=NEAR, generation=g, known=g, words=words)
                yield Step(f"{i} ACK = {g}", put(hung_up, i, moved))
        if me.pc == NEAR:
            near = [j for j in (*generation.members, *generation.leavers) if self.host_of[j] == self.host_of[i]]
            parked = all(state.workers[j].words.ack >= me.generation for j in near)
            if parked or self.mutant is Mutant.TOLD_EARLY:
                words = me.words._replace(commit=state.hosts[self.host_of[i]].commit)
                pc = PARKED if i in generation.leavers else FAR
                after = put(state, i, me._replace(pc=pc, words=words))
                yield Step(f"{i} tells ACK with COMMIT {show(words.commit)}", self._post(after, i))
        elif me.pc == FAR:
            yield from self._enter(state, i)
        elif me.pc == LANE:
            words = me.words._replace(ready=word)
            yield Step(f"{i} READY {show(word)}", self._post(put(state, i, self._lane(state, i, words)), i))
        elif me.pc == WAIT_READY:
            if self._all(state, i, lambda words: words.ready, word):
                self._check_lanes(state, i)
                words = me.words._replace(summed=word)
                yield Step(f"{i} sums", self._post(put(state, i, me._replace(pc=WAIT_SUMS, words=words)), i))
            yield from self._give_up(state, i)
        elif me.pc == WAIT_SUMS:
            if self.mutant is Mutant.NO_SUMS or self._all(state, i, lambda words: words.summed, word, far=True):
                yield Step(f"{i} begins its slice", self._fill(put(state, i, me._replace(pc=END)), i, TORN))
            yield from self._give_up(state, i)
        elif me.pc == END:
            self._check_lanes(state, i)
            yield Step(f"{i} ends its slice", self._fill(put(state, i, me._replace(pc=DONE)), i, word))
        elif me.pc == DONE:
            for known in range(me.known, self._newest(state, i) + 1):
                words = me.words._replace(seen=known, done=word)
                done = me._replace(pc=POST_DONE, known=known, words=words)
                yield Step(f"{i} DONE {show(word)}, SEEN {known}", put(state, i, done))
        elif me.pc == POST_DONE:
            yield Step(f"{i} posts DONE", self._post(put(state, i, me._replace(pc=WAIT_DONE)), i))
        elif me.pc == WAIT_DONE:
            near = self.mutant is Mutant.NEAR_DONE_ONLY
            if self._all(state, i, lambda words: words.done, word, near=near):
                yield Step(f"{i} COMMIT {show(word)}", self._commit(put(state, i, me._replace(pc=DECIDE)), i, word))
            yield from self._give_up(state, i)
        elif me.pc == DECIDE:
            moves = any(self._read(state, i, j).seen > me.generation for j in generation.members)
            if moves:
                after = me._replace(pc=MOVE, returned=me.seq)
            else:
                after = me._replace(pc=self._first(me.seq + 1), seq=me.seq + 1, returned=me.seq)
            yield Step(f"{i} returns from seq {me.seq}", put(state, i, after))

    def _first(self, seq: int) -> int:
        return LANE if seq <= self.scenario.commits else IDLE

    def _enter(self, state: State, i: int) -> Iterator[Step]:
        me = state.workers[i]
        generation = state.generations[me.generation - 1]
        host = self.host_of[i]
        awaited = (*generation.members, *generation.leavers)
        if self.mutant is Mutant.NO_FAR_LEAVER:
            awaited = generation.members
        far = [self._read(state, i, j) for j in awaited if self.host_of[j] != host]
        if any(words.ack < me.generation for words in far):
            return
        own = state.hosts[host].commit
        begins = own
        if self.mutant is not Mutant.OWN_COMMIT:
            begins = max([own, *(words.commit for words in far)], key=seq_of)
        entered = state.entered[me.generation - 1]
        harmless = not lists(state.generations[-1], i)  # dropped: what it does reaches nobody any more
        if entered not in (TORN, begins) and not harmless:
            raise Violation(
                f"generation {me.generation} begins from {show(entered)}, for worker {i} from {show(begins)}"
            )
        seq = seq_of(begins) + 1
        if any(state.workers[j].returned >= seq for j in (*generation.members, *generation.leavers)) and not harmless:
            raise Violation(f"generation {me.generation} does seq {seq} again, somebody in it has returned from it")
        if begins != own:
            self.rolled += 1
        after = self._commit(put(state, i, me._replace(pc=self._first(seq), seq=seq)), i, begins)
        index = me.generation - 1
        if entered == TORN:
            after = after._replace(entered=(*state.entered[:index], begins, *state.entered[index + 1 :]))
        yield Step(f"{i} enters generation {me.generation}, from {show(begins)}", after)

    def _lane(self, state: State, i: int, words: Words) -> Worker:
        me = state.workers[i]
        source = state.hosts[self.host_of[i]].buffers[(me.seq - 1) & 1]
        begun = state.entered[me.generation - 1]
        if set(source) != {source[0]} or seq_of(source[0]) != me.seq - 1 or source[0] < begun:
            raise Violation(f"{i} computes seq {me.seq} from {[show(part) for part in source]}")
        return me._replace(pc=WAIT_READY, lane=tag(me.generation, me.seq), words=words)

    def _all(self, state: State, i: int, of: object, word: int, near: bool = False, far: bool = False) -> bool:
        me = state.workers[i]
        for j in state.generations[me.generation - 1].members:
            is_near = self.host_of[j] == self.host_of[i]
            if (near and not is_near) or (far and is_near):
                continue
            value = of(self._read(state, i, j))  # type: ignore[operator]
            if value != word and not (self.mutant is Mutant.OLD_FRAMES and seq_of(value) == me.seq):
                return False
        return True

    def _check_lanes(self, state: State, i: int) -> None:
        """The lanes that make up the sums, of all hosts: each host adds its own before it posts, while nobody there
        can have gone on."""
        me = state.workers[i]
        word = tag(me.generation, me.seq)
        members = state.generations[me.generation - 1].members
        lanes = [state.workers[j].lane for j in members if self.host_of[j] == self.host_of[i]]
        if any(lane != word for lane in lanes):
            raise Violation(f"{i} sums lanes {[show(lane) for lane in lanes]} for {show(word)}")
        if me.pc == END:
            sums = [self._read(state, i, j).summed for j in members if self.host_of[j] != self.host_of[i]]
            if any(one != word for one in sums):
                raise Violation(f"{i} steps with sums {[show(one) for one in sums]} for {show(word)}")

    def _fill(self, state: State, i: int, value: int) -> State:
        """Worker i's parts of its host's target buffer."""
        me = state.workers[i]
        number = self.host_of[i]
        host = state.hosts[number]
        members = [j for j in state.generations[me.generation - 1].members if self.host_of[j] == number]
        parts = len(self.near[number])
        each = -(-parts // len(members))
        mine = range(members.index(i) * each, (members.index(i) + 1) * each)
        target = me.seq & 1
        filled = tuple(value if part in mine else old for part, old in enumerate(host.buffers[target]))
        buffers = (filled, host.buffers[1]) if target == 0 else (host.buffers[0], filled)
        return put_host(state, number, host._replace(buffers=buffers))

    def _commit(self, state: State, i: int, word: int) -> State:
        number = self.host_of[i]
        host = state.hosts[number]
        if word == host.commit:
            return state
        if seq_of(word) != seq_of(host.commit) + 1:
            raise Violation(f"{i} stores COMMIT {show(word)} over {show(host.commit)}")
        if any(part != word for part in host.buffers[seq_of(word) & 1]):
            parts = [show(part) for part in host.buffers[seq_of(word) & 1]]
            raise Violation(f"{i} commits {show(word)}, its host's buffer is {parts}")
        return put_host(state, number, host._replace(commit=word))

    def _give_up(self, state: State, i: int) -> Iterator[Step]:
        me = state.workers[i]
        members = state.generations[me.generation - 1].members
        left = any(self._read(state, i, j).ack > me.generation for j in members)
        if self._newest(state, i) > me.generation:
            left = left or any(self._read(state, i, j).left == me.generation for j in members)
        faults = [
            g for g in range(me.generation + 1, self._newest(state, i) + 1) if state.generations[g - 1].fault
        ]  # fmt: skip
        if faults or left:
            known = max(me.known, faults[0] if faults else 0)
            yield Step(f"{i} gives up seq {me.seq}", put(state, i, me._replace(pc=MOVE, known=known)))

    # The coordinator

    def _coordinator(self, state: State) -> Iterator[Step]:
        number, newest = len(state.generations), state.generations[-1]
        for i in newest.leavers:
            entered = all(state.workers[j].generation == number and state.workers[j].pc > FAR for j in newest.members)
            said = entered or self.mutant is Mutant.EARLY_BYE
            if state.workers[i].pc == PARKED and state.workers[i].words.ack == number and said:
                yield Step(f"Bye to {i}", put(state, i, state.workers[i]._replace(pc=GONE)))
        listed = newest.members + newest.leavers
        dead = [i for i in listed if state.workers[i].pc == DEAD]
        for size in range(1, len(dead) + 1):
            for lost in itertools.combinations(dead, size):
                yield self._publish(state, lost, None, 0)
        if state.leaves:
            for i in newest.members:
                if state.workers[i].pc < DEAD and len(newest.members) > 1:
                    yield self._publish(state, (), i, 0)
        if state.drops:
            host = self.n_hosts - state.drops
            unreachable = tuple(i for i in listed if self.host_of[i] == host)
            if unreachable and len(unreachable) < len(newest.members):
                yield self._publish(state, unreachable, None, 1)

    def _publish(self, state: State, lost: tuple[int, ...], leaver: int | None, drops: int) -> Step:
        newest, number = state.generations[-1], len(state.generations) + 1
        workers = tuple(
            worker._replace(pc=GONE) if i in lost and worker.pc == DEAD else worker
            for i, worker in enumerate(state.workers)
        )
        members = tuple(i for i in newest.members if i not in lost and i != leaver)
        leavers = tuple(i for i in newest.leavers if i not in lost and workers[i].pc != GONE)
        leavers += () if leaver is None else (leaver,)
        after = state._replace(
            workers=workers,
            generations=(*state.generations, Generation(members, leavers, bool(lost))),
            entered=(*state.entered, TORN),
            leaves=state.leaves - (leaver is not None),
            drops=state.drops - drops,
        )
        forced = bool(lost) and not drops
        return Step(f"generation {number}: members {members}, leavers {leavers}, lost {lost}", after, forced)


def put(state: State, i: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:i], worker, *state.workers[i + 1 :]))


def put_host(state: State, number: int, host: Host) -> State:
    return state._replace(hosts=(*state.hosts[:number], host, *state.hosts[number + 1 :]))


def lists(generation: Generation, i: int) -> bool:
    return i in generation.members or i in generation.leavers


class Explored(NamedTuple):
    states: int
    finals: int
    rolled: int


def explore(scenario: Scenario) -> Explored:
    """Visit every reachable state. Raises Violation with a shortest trace."""
    model = Model(scenario)
    start = model.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    frontier = deque([start])
    finals = 0
    while frontier:
        state = frontier.popleft()
        forced = False
        try:
            for step in model.steps(state):
                forced = forced or step.forced
                if step.state not in came_from:
                    came_from[step.state] = (state, step.what)
                    frontier.append(step.state)
            if not forced:
                _check_rest(state)
                finals += 1
        except Violation as violation:
            raise Violation(violation.what, _trace(came_from, state)) from None
    return Explored(len(came_from), finals, model.rolled)


def _check_rest(state: State) -> None:
    newest = state.generations[-1]
    for i in newest.members + newest.leavers:
        finished = state.workers[i].pc == (IDLE if i in newest.members else GONE)
        if not finished:
            raise Violation(f"deadlock: worker {i} waits for ever\n{state}")


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> Trace:
    lines: list[str] = []
    while (step := came_from[state]) is not None:
        state, what = step
        lines.append(what)
    return tuple(reversed(lines))
