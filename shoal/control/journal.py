"""What the coordinator must still know after it was killed: the membership, and every generation's number and cause."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from shoal.control import membership as m
from shoal.control.membership import Membership, Publish

_SCHEMA = """
CREATE TABLE IF NOT EXISTS membership (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS generations
    (number INTEGER PRIMARY KEY, time REAL NOT NULL, cause TEXT NOT NULL, json TEXT NOT NULL);
"""


class Journal:
    """One transaction a change: the newest membership replaces the one before, generations add up.

    A killed coordinator loses nothing that was recorded; a machine that loses power may lose the last changes.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)

    def load(self, now: float) -> Membership | None:
        """The membership last recorded, with everybody alive at `now`; None in a new journal."""
        row = self._database.execute("SELECT json FROM membership").fetchone()
        return None if row is None else m.from_json(row[0], now)

    def record(self, membership: Membership, published: Iterable[Publish], time_s: float) -> None:
        """Call it before anything of this change is told to anybody. A number twice is an error of ours."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.execute("INSERT OR REPLACE INTO membership VALUES (0, ?)", (m.to_json(membership),))
            for publish in published:
                generation = json.dumps(asdict(publish.generation))
                row = (publish.generation.number, time_s, publish.cause, generation)
                self._database.execute("INSERT INTO generations VALUES (?, ?, ?, ?)", row)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def generations(self) -> list[tuple[int, str]]:
        """Number and cause of every generation, in order."""
        return [(number, cause) for number, cause in self._database.execute("SELECT number, cause FROM generations")]

    def close(self) -> None:
        self._database.close()
