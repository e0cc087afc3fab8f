"""Tasks of one owner on one event loop, none of which may fail unseen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from shoal import errors


class Tasks:
    """`on_problem` is called with what a task failed with. Make it on the loop that runs."""

    def __init__(self, on_problem: Callable[[errors.ShoalError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_problem = on_problem
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    def later(self, delay_s: float, act: Callable[..., None], *given: Any) -> None:
        self._loop.call_later(delay_s, act, *given)

    def on_loop(self, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, to be called from other threads and from handlers of signals."""

        def call(*said: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the job with it
                self._loop.call_soon_threadsafe(act, *said)

        return call

    async def cancel(self, but: asyncio.Task[Any] | None = None) -> None:
        others = self._running - {but}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._on_problem(_as_error(problem))


def _as_error(problem: BaseException) -> errors.ShoalError:
    if isinstance(problem, errors.ShoalError):
        return problem
    error = errors.ShoalError(f"the launcher failed: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
