"""What the coordinator must still know after it was killed: the membership, and the lines of its last change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.control.generation import Generation, Member
from shoal.control.hosts import Host
from shoal.control.instructions import Stop
from shoal.control.membership.values import Life, Membership, State, Worker
from shoal.control.timeouts import Timeouts
from shoal.data import leases

_SCHEMA = """
CREATE TABLE IF NOT EXISTS journal
    (id INTEGER PRIMARY KEY CHECK (id = 0), membership TEXT NOT NULL, lines TEXT NOT NULL, at_bytes INTEGER NOT NULL);
"""


class JournalDamaged(Exception):
    """What is in the file is no journal, or not whole. Internal: the coordinator goes on without it."""


@dataclass(frozen=True)
class Entry:
    """The last change: the membership after it, and its lines of the event log, which begin at `at_bytes` there."""

    membership: Membership
    lines: tuple[str, ...]
    at_bytes: int


class Journal:
    """One row, replaced in one transaction a change: it does not grow. Raises JournalDamaged, at `load` at the latest.

    A killed coordinator loses nothing that was recorded; a machine that loses power may lose the last changes.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise JournalDamaged(str(error)) from error

    def load(self, now: float) -> Entry | None:
        """What was last recorded, with everybody alive at `now`; None in a new journal."""
        try:
            row = self._database.execute("SELECT membership, lines, at_bytes FROM journal").fetchone()
            return None if row is None else Entry(from_json(row[0], now), tuple(json.loads(row[1])), row[2])
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            self._database.close()
            raise JournalDamaged(f"{type(error).__name__}: {error}") from error

    def record(self, membership: Membership, lines: Sequence[str] = (), at_bytes: int = 0) -> None:
        """Call it before anything of this change is told to anybody."""
        row = (to_json(membership), json.dumps(lines), at_bytes)
        self._database.execute("INSERT OR REPLACE INTO journal VALUES (0, ?, ?, ?)", row)

    def close(self) -> None:
        self._database.close()


def put_aside(path: Path) -> Path | None:
    """Make room for a new journal; where the old one lies now, None if there was no file."""
    for log in ("-wal", "-shm"):  # they belong to the old one, and would be read with the new
        path.with_name(path.name + log).unlink(missing_ok=True)
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)


def to_json(membership: Membership) -> str:
    """Everything but the signs of life."""
    value = asdict(membership)
    del value["ticked_at"]
    if value["newest"] is not None:
        del value["newest"]["key"]  # it is made anew whenever it is told
    for worker in value["workers"]:
        del worker["life"]
    for host in value["hosts"]:
        del host["heard_at"]
    return json.dumps(value)


def from_json(text: str, now: float) -> Membership:
    """The membership as it was written; everybody counts as alive at `now`, and nobody as awaited."""
    value = json.loads(text)
    newest = value.pop("newest")
    if newest is not None:
        for kind in ("members", "leavers", "followers"):
            newest[kind] = tuple(Member(**member) for member in newest[kind])
        newest = Generation(**newest)
    workers = tuple(
        Worker(
            **{**worker, "member": Member(**worker["member"]), "state": State(worker["state"])},
            life=Life(alive_at=now),
        )
        for worker in value.pop("workers")
    )
    timeouts = Timeouts(**value.pop("timeouts"))
    causes = tuple(value.pop("causes"))
    stop = value.pop("stopping")
    stopping = None if stop is None else Stop(**stop)
    lent = leases.from_dict(value.pop("lent"))
    hosts = tuple(Host(**host, heard_at=now) for host in value.pop("hosts"))
    dropped, outcasts, homes = (tuple(value.pop(name)) for name in ("dropped", "outcasts", "homes"))
    return Membership(
        **value,
        newest=newest,
        workers=workers,
        timeouts=timeouts,
        causes=causes,
        stopping=stopping,
        lent=lent,
        hosts=hosts,
        dropped=dropped,
        outcasts=outcasts,
        homes=homes,
    )
