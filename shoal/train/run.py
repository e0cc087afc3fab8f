"""A process that is a worker of a job: how it begins, and how it ends."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable

from shoal import errors
from shoal.control.rundir import Committed, RunDir, create_default, finite
from shoal.control.timeouts import Timeouts
from shoal.sync.memory import Channel, OwnMemory, keep_freed_memory
from shoal.train.reconfigure import Leave, Placement
from shoal.train.worker import Worker


def run(main: Callable[[Worker], None]) -> None:
    """Run `main(worker)` as a worker of the job this process was started for; without one, as a job of one worker with
    a coordinator of its own."""
    keep_freed_memory()
    try:
        if "SHOAL_WORKER_ID" in os.environ:
            _run_launched(main)
        else:
            _run_alone(main)
    except Leave:
        sys.exit(0)


def _run_launched(main: Callable[[Worker], None]) -> None:
    env = os.environ
    channel = socket.socket(fileno=os.dup(int(env["SHOAL_CHANNEL_FD"])))
    channel.set_inheritable(False)
    placement = Placement(int(env.get("SHOAL_THREADS", "0")), env.get("SHOAL_PIN", "1") == "1")
    worker = Worker(
        env["SHOAL_WORKER_ID"],
        env["SHOAL_HOST"],
        RunDir.open(env["SHOAL_DIR"]),
        env["SHOAL_ADDRESS"],
        Channel(channel),
        Timeouts(float(env["SHOAL_BUDGET_S"])),
        placement,
    )
    _live(worker, main)


def _run_alone(main: Callable[[Worker], None]) -> None:
    from shoal.control.coordinator import EmbeddedCoordinator
    from shoal.control.membership import found

    try:
        script = sys.argv[0] or "python"
        settings = {"script": script, "workers": 1}
        path = os.environ.get("SHOAL_DIR")
        run_dir = RunDir.create(path, settings) if path else create_default(script, settings)
        print(f"shoal: one worker, run directory {run_dir.path}", file=sys.stderr)
        coordinator = EmbeddedCoordinator(run_dir, found(1, 1, 1))
        address = coordinator.start()
        worker = Worker("w0", socket.gethostname(), run_dir, address, OwnMemory(), Timeouts(), None)
        try:
            _live(worker, main)
        finally:
            coordinator.stop()
            at = worker.progress()
            run_dir.write_committed(Committed(at.seq, at.step, at.epoch, at.samples, finite(at.loss)))
    except errors.ShoalError as error:
        print(f"shoal: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, errors.UserMistake) else 1)
    except Exception as problem:  # the exit code that `shoal run` has for it
        sys.excepthook(type(problem), problem, problem.__traceback__)
        sys.exit(2)


def _live(worker: Worker, main: Callable[[Worker], None]) -> None:
    if (plugin := os.environ.get("SHOAL_PLUGIN")) is not None:  # "module:function", called with the worker
        module, function = plugin.split(":")
        getattr(importlib.import_module(module), function)(worker)
    signal.signal(signal.SIGTERM, worker.on_sigterm)
    try:
        try:
            main(worker)
        except SystemExit as exit:  # with 0, it is one way more to return
            if exit.code:
                raise
        worker.finish()
    except Exception as problem:
        worker.fail(problem)
        raise
    finally:
        worker.close()
