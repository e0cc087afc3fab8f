"""A host that the job goes on without rests, and comes again; unless somebody ends it meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal.launch import join
from shoal.launch.remote import Told
from shoal.launch.screen import Screen
from shoal.launch.session import Host, host
from shoal.launch.settings import JobSettings

REST_S = 3600.0  # the test's own limit is shorter


class Heard(Screen):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Dropped:
    """Of a session, that the job goes on without this host; then `then` comes, while it rests."""

    committed = None
    again = True

    def __init__(self, slots: list[int], rest_s: float, then: Callable[[], object], host: Host) -> None:
        self._slots, self.rest_s, self._then = slots, rest_s, then
        self._slots.append(host.told.slots)

    async def run(self) -> None:
        asyncio.get_running_loop().call_later(0.0, self._then)

    def set_slots(self, slots: int) -> None:
        pass


class Pipe:
    """Home says this, and then no more."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def read(self, within_s: float) -> dict[str, Any]:
        return await self.said.get()

    def tell(self, said: dict[str, Any]) -> None:
        pass


def told(folder: Path) -> Told:
    (folder / "script.py").touch()
    settings = asdict(JobSettings(str(folder / "script.py")))
    return Told("spare", 2, "127.0.0.1:1", "token", {}, str(folder / "run"), settings)


def send(*signals: int) -> None:
    for signum in signals:
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 0), ((signal.SIGTERM,), 0), ((signal.SIGINT, signal.SIGTERM), 130)],
    ids=["Ctrl-C", "SIGTERM", "two signals"],
)
def test_a_signal_ends_a_host_that_was_added_by_hand_while_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[int, ...], code: int
) -> None:
    lives: list[int] = []
    monkeypatch.setattr(join, "Session", lambda here, *_: Dropped(lives, REST_S, lambda: send(*signals), here))
    screen = Heard()
    assert join.by_hand(told(tmp_path), screen) == code
    assert lives == [2]
    assert screen.lines == ["this host does not come again"]


def test_a_signal_ends_a_host_that_shoal_run_started_while_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[int] = []
    monkeypatch.setattr(join, "Session", lambda here, *_: Dropped(lives, REST_S, lambda: send(signal.SIGTERM), here))

    async def go(here: Host) -> None:
        await join._until_cut_off(here, Pipe(), Heard())  # type: ignore[arg-type]

    with host(told(tmp_path)) as here:
        asyncio.run(go(here))
    assert lives == [2]


def test_a_host_that_comes_again_has_the_slots_that_home_gave_it_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[int] = []

    async def go(here: Host) -> None:
        pipe, given = Pipe(), iter((3, 0))

        class Changed(Dropped):
            """Home gives it other slots before it is dropped."""

            async def run(self) -> None:
                self._heard = asyncio.Event()
                pipe.said.put_nowait({"slots": next(given)})
                await self._heard.wait()

            def set_slots(self, slots: int) -> None:
                self._heard.set()

        monkeypatch.setattr(join, "Session", lambda here, *_: Changed(lives, 0.0, lambda: None, here))
        await join._until_cut_off(here, pipe, Heard())  # type: ignore[arg-type]

    with host(told(tmp_path)) as here:
        asyncio.run(go(here))
    assert lives == [2, 3]
