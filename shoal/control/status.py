"""What a coordinator answers to those who look at the job."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from shoal.control.hosts import slots_of
from shoal.control.membership.values import Membership, State
from shoal.control.protocol import FromWorker
from shoal.control.rundir import RunDir, finite

RATE_WINDOW_S = 10.0
_REASON_CHARS = 4000  # the whole is in the event log; an answer must fit into a message


class Figures:
    """What was heard beside what decides: pids, and how far everybody is. Not in the journal: it is said again."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.counts: Counter[str] = Counter()  # of events of this coordinator's life, by kind
        self._beats: dict[str, Any] = {}
        self._front: Any = FromWorker().beat  # the newest of the worker that is furthest, also when all have gone
        self._samples: deque[tuple[float, int]] = deque()

    def on_beat(self, worker_id: str, beat: Any, now: float) -> None:
        self._beats[worker_id] = beat
        if beat.seq >= self._front.seq:
            self._front = beat
        if not beat.HasField("leases"):  # else the leases say what is used
            self.note_samples(beat.samples, now)

    def forget(self, worker_id: str) -> None:
        for kept in (self.pids, self._beats):
            kept.pop(worker_id, None)

    def note_samples(self, samples: int, now: float) -> None:
        if not samples:
            return  # of a job that goes on it is not the beginning, but a worker that does not know yet
        if not self._samples or samples > self._samples[-1][1]:
            self._samples.append((now, samples))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / max(last_at - first_at, 1e-9)

    def status(self, run_dir: RunDir, membership: Membership) -> dict[str, Any]:
        """What `shoal status` shows; everything in it can be written as JSON."""
        newest = membership.newest
        front = self._front
        # Without lockstep each worker has steps of its own: the job's are their sum.
        lent = membership.lent
        step, epoch = (lent.used()[1], lent.epoch()) if lent.passes else (front.step, front.epoch)
        workers = []
        for worker in membership.workers:
            beat = self._beats.get(worker.worker_id)
            workers.append(
                {
                    "worker_id": worker.worker_id,
                    "rank": newest.rank(worker.worker_id) if newest and worker.state is State.MEMBER else None,
                    "slot": worker.member.slot,
                    "host": worker.member.host,
                    "state": worker.state.value,
                    "pid": self.pids.get(worker.worker_id),
                    "step": None if beat is None else beat.step,
                    "seconds": {} if beat is None else dict(beat.seconds),
                    "suspect": worker.life.suspect,
                }
            )
        return {
            "dir": str(run_dir.path),
            "phase": _phase(membership),
            "reason": "" if membership.stopping is None else membership.stopping.reason[:_REASON_CHARS],
            "generation": membership.number,
            "workers": workers,
            "seq": front.seq,
            "step": step,
            "epoch": epoch,
            "samples": self._samples[-1][1] if self._samples else 0,
            "evaluating": front.evaluating if front.HasField("evaluating") else None,
            "evaluated": front.evaluated,
            "rate": self._rate(),
            "loss": finite(front.loss) if front.seq else None,
            "metrics": {name: value for name, value in front.metrics.items() if finite(value) is not None},
            "target": membership.target,
            "slots": slots_of(membership.hosts),
            "min": membership.min_size,
            "max": membership.max_size,
        }


def _phase(membership: Membership) -> str:
    if membership.ended:
        return "ended"
    if membership.stopping is not None:
        return "stopping"
    if membership.finishing:
        return "finishing"
    if membership.newest is None:
        return "starting"
    return "paused" if membership.newest.paused else "running"
