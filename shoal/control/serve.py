"""The coordinator as a process of its own, which ends with its parent, or in a thread.

python -m shoal.control.coordinator --dir DIR --min 1 --max 8 --target 4 --budget 5
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from typing import get_args

from shoal.control import coordinator
from shoal.control.coordinator.server import Coordinator
from shoal.control.environment import COORDINATOR_PLUGIN
from shoal.control.generation import MAX_SLOTS
from shoal.control.hosts import Host
from shoal.control.membership.failures import OnError
from shoal.control.membership.values import Membership, found
from shoal.control.rundir import RunDir
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.errors import ShoalError
from shoal.process import die_with

_log = logging.getLogger("shoal.coordinator")


class EmbeddedCoordinator:
    """A coordinator in a daemon thread of this process, for a job of one worker and for tests."""

    def __init__(self, run_dir: RunDir, membership: Membership, on_error: OnError = "stop") -> None:
        self._run_dir = run_dir
        self._membership = membership
        self._on_error: OnError = on_error
        self._started = threading.Event()
        self._address = ""
        self.error: Exception | None = None  # that it ended with
        self._thread = threading.Thread(target=self._run, name="shoal-coordinator", daemon=True)

    def start(self) -> str:
        """host:port, once it serves. Raises what kept it from serving."""
        self._thread.start()
        self._started.wait()
        if self.error is not None:
            raise self.error
        return self._address

    def ended(self, timeout_s: float) -> bool:
        """Whether it ends within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the server; workers are not told, as if it had been killed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._coordinator.request_stop)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # whatever it is: `start` raises it, and later nobody waits for this thread
            self.error = error
            _log.exception("the coordinator ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = Coordinator(self._run_dir, self._membership, self._on_error)
        await self._coordinator.serve(self._serving)

    def _serving(self, address: str) -> None:
        self._address = address
        self._started.set()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shoal.control.coordinator", description=coordinator.__doc__.split("\n")[0]
    )
    parser.add_argument("--dir", required=True, help="the run directory")
    parser.add_argument("--min", type=int, default=1, help="fewer members than this pause the job")
    parser.add_argument("--max", type=int, default=MAX_SLOTS, help="no more members than this")
    parser.add_argument("--target", type=int, default=1, help="how many workers found the job")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds an awaited worker may be silent"
    )
    parser.add_argument("--on-error", choices=get_args(OnError), default="stop", help="when a worker's code raises")
    parser.add_argument(
        "--generation", type=int, default=0, help="the highest number used before, for a job that goes on"
    )
    parser.add_argument("--next-worker", type=int, default=0, help="the lowest number that no worker has had")
    parser.add_argument("--address", default="127.0.0.1", help="where to serve, as every host of the job reaches it")
    parser.add_argument("--hosts", default="", help="the hosts of the job, as a:4,b:4")
    parser.add_argument("--after", default="", help="how the coordinator before this one ended, if there was one")
    parser.add_argument("--parent", type=int, help="the pid that started this; exit if it is not the parent")
    options = parser.parse_args()
    die_with(options.parent if options.parent is not None else os.getppid())
    # Connections that say nothing are let go after a while; until then they must not keep others out.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    async def serve() -> None:
        named = (host.rpartition(":") for host in options.hosts.split(",") if host)
        hosts = [Host(name, int(slots)) for name, _, slots in named]
        membership = found(options.min, options.max, options.target, Timeouts(options.budget), hosts)
        membership = replace(membership, number=options.generation, next_worker=options.next_worker)
        server = Coordinator(
            RunDir.open(options.dir), membership, options.on_error, options.after, bind=options.address
        )
        if plugin := os.environ.get(COORDINATOR_PLUGIN):
            module, function = plugin.split(":")
            getattr(importlib.import_module(module), function)(server)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.request_stop)
        await server.serve()

    try:
        asyncio.run(serve())
    except ShoalError as error:
        sys.exit(f"{type(error).__name__}: {error}")
