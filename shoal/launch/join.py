"""A host takes part in a job: because `shoal run` started it and pings it, here or over ssh, or added by hand.

It ends with the job, when it is asked to, and when home is cut off. A host that was added by hand belongs to whoever
started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from shoal import errors
from shoal.control.timeouts import Timeouts
from shoal.launch.local import LocalLauncher
from shoal.launch.remote import LINE_BYTES, Told, line_of
from shoal.launch.screen import Screen
from shoal.launch.session import Host, Session, host
from shoal.process import die_with

_BACKLOG_BYTES = 1 << 20  # of lines that nobody reads; the logs have them all


class Lives:
    """The lives of this host in a job, one after the other: when the job goes on without it, it comes again."""

    def __init__(
        self,
        here: Host,
        screen: Screen,
        on_up: Callable[[], None],
        launcher: Callable[..., LocalLauncher] = LocalLauncher,
    ) -> None:
        """`on_up`: once the first of them is in the job."""
        self._here, self._screen, self._on_up, self._launcher = here, screen, on_up, launcher
        self._slots = here.told.slots
        self._session: Session | None = None  # none while it rests
        self._no_more = asyncio.Event()  # lives, after the one that is

    async def run(self, on_over: Callable[[Session], None] = lambda session: None) -> None:
        """Until the last is over; `on_over` is called with each. Raises what kept the host from taking part."""
        on_up = self._on_up
        while not self._no_more.is_set():
            here = replace(self._here, told=replace(self._here.told, slots=self._slots))
            self._session = session = Session(here, self._screen, on_up, self._launcher)
            await session.run()
            self._session, on_up = None, lambda: None
            on_over(session)
            if not session.again:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._no_more.wait(), session.rest_s)

    def set_slots(self, slots: int) -> None:
        """From now on; with none, the workers leave, and then it is over."""
        self._slots = slots
        if slots:
            self._no_more.clear()
        else:
            self._no_more.set()
        if self._session is not None:
            self._session.set_slots(slots)

    def leave(self) -> str:
        """With all workers. What comes now, in words."""
        self._no_more.set()
        return "this host does not come again" if self._session is None else self._session.leave()

    def stop(self, grace_s: float) -> None:
        """Ask the workers to leave, and end after that long."""
        self._no_more.set()
        if self._session is not None:
            self._session.stop(grace_s)

    def kill(self) -> None:
        self._no_more.set()
        if self._session is not None:
            self._session.kill()


# ---- by `shoal run` --------------------------------------------------------------------------------------------------


class ScreenAtHome(Screen):
    """What workers print goes home by the pipe. While nobody reads there, lines are left out."""

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        self._write = write
        self.live = False

    def say(self, line: str) -> None:
        self._write(line_of({"say": line}))

    def show(self, traceback: str) -> None:
        self.say(traceback.rstrip("\n"))

    def tell(self, line: str) -> None:
        pass

    def echo(self, worker_id: str, line: str) -> None:
        self._write(line_of({"echo": [worker_id, line[: LINE_BYTES // 8]]}))

    def close(self) -> None:
        pass


class HomePipe:
    """This end of the pipe to home."""

    @classmethod
    async def open(cls) -> HomePipe:
        """From standard input and output, which are the pipe's from now on."""
        pipe, loop = cls(), asyncio.get_running_loop()
        pipe._reader = asyncio.StreamReader(limit=LINE_BYTES)
        ours = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)  # whatever is printed by mistake is no line of ours
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe._reader), ours[0])
        pipe._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ours[1])
        return pipe

    _reader: asyncio.StreamReader
    _writer: asyncio.WriteTransport

    def write(self, line: bytes) -> bool:
        """Whether there was room for it."""
        if self._writer.is_closing() or self._writer.get_write_buffer_size() > _BACKLOG_BYTES:
            return False
        self._writer.write(line)
        return True

    def tell(self, said: dict[str, Any]) -> None:
        self.write(line_of(said))

    async def read(self, within_s: float) -> dict[str, Any] | None:
        """What home says next; None when it is cut off."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), within_s)
            said = json.loads(line) if line else None
        except (asyncio.TimeoutError, ValueError, OSError):
            return None
        return said if isinstance(said, dict) else None


async def _as_told() -> int:
    pipe = await HomePipe.open()
    said = await pipe.read(Timeouts().join_s)
    if said is None:
        return 1
    told = Told(**{field.name: said[field.name] for field in fields(Told) if field.name in said})
    if told.parent:
        die_with(told.parent)
    screen = ScreenAtHome(pipe.write)
    try:
        with host(told) as here:
            await _until_cut_off(here, pipe, screen)
    except errors.ShoalError as error:
        pipe.tell({"error": [type(error).__name__, str(error)]})
        return errors.exit_code(error)
    return 0


async def _until_cut_off(here: Host, pipe: HomePipe, screen: Screen) -> None:
    timeouts = here.settings.timeouts
    lives = Lives(here, screen, on_up=lambda: pipe.tell({"up": 1}))

    async def ping() -> None:
        while True:
            pipe.tell({"ping": 1})
            await asyncio.sleep(timeouts.beat_s)

    async def obey() -> None:
        while (said := await pipe.read(timeouts.cut_off_s)) is not None:
            if "slots" in said:
                lives.set_slots(said["slots"])
            elif "stop" in said:
                lives.stop(said["stop"])
            elif said.get("ping") and not here.shared:
                here.run_dir.write_address(said["ping"])
        lives.kill()

    def tell_committed(session: Session) -> None:
        if session.committed is not None:
            pipe.tell({"committed": session.committed})

    others = [asyncio.ensure_future(work) for work in (ping(), obey())]
    on_signal = asyncio.get_running_loop().add_signal_handler
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        on_signal(signum, lives.set_slots, 0)
    try:
        await lives.run(tell_committed)
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def as_told() -> int:
    """The process that `shoal run` starts on each host. The exit status."""
    code = asyncio.run(_as_told())
    sys.stderr.flush()
    return code


# ---- by hand ---------------------------------------------------------------------------------------------------------


def by_hand(told: Told, screen: Screen, launcher: Callable[..., LocalLauncher] = LocalLauncher) -> int:
    """Until the job ends, or Ctrl-C. The exit status."""

    async def take_part(here: Host) -> int:
        lives = Lives(here, screen, lambda: screen.say(f"{told.host} is in the job; Ctrl-C leaves it"), launcher)
        signals: list[int] = []

        def on_signal(signum: int) -> None:
            signals.append(signum)
            if len(signals) > 1:
                lives.kill()
            else:
                screen.say(lives.leave())

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
        await lives.run()
        return 128 + signals[0] if len(signals) > 1 else 0

    with host(told) as here:
        return asyncio.run(take_part(here))
