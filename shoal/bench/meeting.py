"""The host's memory for workers that the runner starts, without a launcher that holds it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.bench.bodies import Setup
from shoal.control.generation import Generation, Member
from shoal.sync.group import Group
from shoal.sync.memory import create
from shoal.sync.notice import Notice
from shoal.sync.words import Words


class MeetingMemory:
    """Whoever needs a piece first makes it, the others open its descriptor."""

    def __init__(self, meeting: Path) -> None:
        self._meeting = meeting

    def open(self, name: str, size_bytes: int) -> int:
        note = self._meeting / f"memory-{name}"
        made = self._meeting / f".memory-{name}-{os.getpid()}"
        fd = create(name, size_bytes)
        made.write_text(f"/proc/{os.getpid()}/fd/{fd}")
        try:
            os.link(made, note)
        except FileExistsError:
            os.close(fd)
            return os.open(note.read_text(), os.O_RDWR | os.O_CLOEXEC)
        return os.dup(fd)  # the caller may close its own; the others come for this one


def meet(setup: Setup, memory: MeetingMemory) -> Group:
    """All workers of the measured group as one generation, without a coordinator: nobody comes, goes or dies."""
    words = Words(memory)
    members = tuple(Member(f"w{rank}", rank, "here") for rank in range(setup.n_workers))
    group = Group(words, Notice(words), Generation(1, members), f"w{setup.rank}", spin=True)
    group.enter()
    return group
