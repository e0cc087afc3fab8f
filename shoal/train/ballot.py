"""The ballot: what each worker brings to a commit, said in its slot before it is ready, and whether all agree.

A statement is a few lines of JSON: samples, settings, model, hyperparameters. Digests of it are compared at every
commit; the lines themselves are read only to tell a user what differs.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal.sync import words as w
from shoal.sync.group import Group
from shoal.sync.replica import Replica
from shoal.train.attempt import Attempt, Policy

# What a worker brings to a commit. FRESH: a step, by a newcomer that takes its hyperparameters from rank 0.
TRAIN, EDIT, FOUND, FRESH = 1, 2, 3, 4


@dataclass(frozen=True)
class Tally:
    loss: float  # mean over the step's samples
    metrics: dict[str, float]
    losses: list[float]  # of each rank, summed over its samples
    finite: bool


class Ballot:
    def __init__(self, replica: Replica, policy: Policy, model: str) -> None:
        """`model` describes its tensors, alike on workers whose models are."""
        self._replica = replica
        self._names: tuple[bytes, list[str]] = (b"[]", [])  # of metrics, as told last
        self._own_names: tuple[list[str], bytes] = ([], b"[]")
        # An object without a repr of its own shows its address, which says nothing.
        settings = {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in vars(policy).items()}
        self._always = f"{json.dumps(settings)}\n{json.dumps({'model': model})}"

    def post(self, group: Group, kind: int, attempt: Attempt | None = None) -> None:
        """Say what this worker brings to the next commit. Call it before the ready word."""
        words, slot = group.words, group.slot
        said = b""
        if group.size > 1:
            said = self._statement(attempt)
            words.set_statement(slot, said)
        words.put(slot, w.STATEMENT, kind << 32 | zlib.crc32(said))
        if attempt is not None:
            words.set_value(slot, w.PASS, attempt.pass_index)
            self._post_metrics(group, attempt)

    def _statement(self, attempt: Attempt | None) -> bytes:
        return f"{attempt or '{}'}\n{self._always}\n{self._replica.options_text()}".encode()

    def _post_metrics(self, group: Group, attempt: Attempt) -> None:
        words, slot = group.words, group.slot
        names = sorted(attempt.metrics)
        if names != self._own_names[0]:
            self._own_names = names, json.dumps(names).encode()
        text = self._own_names[1]
        if len(names) > w.MAX_METRICS or len(text) > w.MAX_NAMES_BYTES:
            raise errors.SettingsContradict(
                f"{len(names)} metrics with names of {len(text)} bytes in one step: at most {w.MAX_METRICS}, with "
                f"{w.MAX_NAMES_BYTES} bytes, are averaged; leave some out"
            )
        words.put(slot, w.NAMES, zlib.crc32(text) if attempt.counted else 0)
        if group.rank == 0:
            if text != words.names:
                words.names = text
            if group.far is not None:
                group.far.tell_names(text)
        words.set_value(slot, w.WEIGHT, attempt.counted)
        words.set_value(slot, w.LOSS, attempt.loss)
        for index, name in enumerate(names):
            words.set_value(slot, w.METRICS + index, attempt.metrics[name])

    def newest_pass(self, group: Group) -> int:
        """The pass of the step that is voted on; a newcomer's may be behind it, if the others left theirs early."""
        return int(max(group.words.value(slot, w.PASS) for slot in group.slots))

    def editor(self, group: Group) -> int | None:
        """The rank whose parameters are to be committed instead of a step: the lowest that edits, or, where a newcomer
        is in an earlier pass than the others and its gradients are of no use, the lowest that is not."""
        words = group.words
        for rank, slot in enumerate(group.slots):
            if words.get(slot, w.STATEMENT) >> 32 == EDIT:
                return rank
        newest = self.newest_pass(group)
        behind = [slot for slot in group.slots if words.value(slot, w.PASS) < newest]
        if behind and all(words.get(slot, w.STATEMENT) >> 32 == FRESH for slot in behind):
            return next(rank for rank, slot in enumerate(group.slots) if slot not in behind)
        return None

    def check(self, group: Group, fresh: Attempt | None = None) -> None:
        """WorkersDiffer when somebody brings another thing than this worker to the same commit. `fresh`: what this
        newcomer brings, now that it has the others' hyperparameters. It alone compares: if it differs, it is the one
        that is wrong, and the others are well without it."""
        words = group.words
        mine, names = words.get(group.slot, w.STATEMENT), words.get(group.slot, w.NAMES)
        said = None if fresh is None else self._statement(fresh)
        if said is not None:
            mine = TRAIN << 32 | zlib.crc32(said)
        for rank, slot in enumerate(group.slots):
            statement = words.get(slot, w.STATEMENT)
            if statement >> 32 == FRESH:
                continue  # it looks at the others' hyperparameters and takes them
            if statement != mine:
                raise self._differ(
                    group, rank, _differences(said or words.statement(group.slot), words.statement(slot))
                )
            if mine >> 32 == TRAIN and names and words.get(slot, w.NAMES) not in (0, names):
                raise self._differ(group, rank, ["the names of their metrics"])

    def _differ(self, group: Group, rank: int, what: list[str]) -> errors.WorkersDiffer:
        here, there = group.members[group.rank].worker_id, group.members[rank].worker_id
        return errors.WorkersDiffer(
            f"{here} and {there} differ in {', '.join(what)}: every worker must run the same script with the same "
            f"settings; what one changes while it trains, all must change"
        )

    def tally(self, group: Group) -> Tally:
        """Everybody's losses and metrics, read while nobody can move on."""
        words = group.words
        told = words.names  # rank 0's: a worker with an empty share has none of its own
        if told != self._names[0]:
            self._names = told, json.loads(told)
        names = self._names[1]
        samples = sum(words.value(slot, w.WEIGHT) for slot in group.slots) or 1.0
        losses = [words.value(slot, w.LOSS) for slot in group.slots]
        # A slot whose worker counted nothing has not written its values.
        counted = [slot for slot in group.slots if words.value(slot, w.WEIGHT)]
        sums = [words.values(slot, w.METRICS, len(names)) for slot in counted]
        metrics = {name: sum(values[index] for values in sums) / samples for index, name in enumerate(names)}
        loss = sum(losses) / samples
        return Tally(loss, metrics, losses, math.isfinite(loss))


def _differences(here: bytes, there: bytes) -> list[str]:
    """What two statements say differently, with both values: `lr of group 0 (0.1 and 0.2)`."""
    found: list[str] = []
    for mine, theirs in zip(here.decode().split("\n"), there.decode().split("\n"), strict=False):
        if mine != theirs:
            try:
                pairs = zip(_named(json.loads(mine)), _named(json.loads(theirs)), strict=False)
            except ValueError:  # of a line that was too long to be kept whole
                break
            found += [f"{name} ({one} and {other})" for (name, one), (_, other) in pairs if one != other]
    return found or ["hyperparameters"]  # the last line, and the only one that can be too long


def _named(line: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(line, dict):
        yield from line.items()
    else:
        for index, group in enumerate(line):
            yield from ((f"{key} of group {index}", value) for key, value in group.items())
