"""A process that is a worker of a job: how it begins, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal import __version__, errors
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import Committed, RunDir, create_default, finite
from shoal.control.timeouts import Timeouts
from shoal.control.torchrun import Torchrun
from shoal.metrics import write_end
from shoal.sync.memory import Channel, OwnMemory, keep_freed_memory
from shoal.train.failure import last_words
from shoal.train.reconfigure import Leave, Placement
from shoal.train.torchrun import arrive
from shoal.train.worker import Worker


def run(main: Callable[[Worker], None]) -> None:
    """Run `main(worker)` as a worker of the job this process was started for; without one, as a job of one worker with
    a coordinator of its own."""
    keep_freed_memory()
    try:
        environment = WorkerEnvironment.from_env(os.environ)
        if environment.worker_id:
            _run_launched(main, environment)
        elif (torchrun := Torchrun.from_env(os.environ)) is not None:
            _run_as_guest(main, torchrun, environment)
        else:
            _run_alone(main, environment)
    except Leave:
        sys.exit(0)


def _run_launched(
    main: Callable[[Worker], None], environment: WorkerEnvironment, on_asked: Callable[[int], None] | None = None
) -> None:
    """`on_asked` is called, with the signal, when it is asked to leave; Ctrl-C counts as that then."""
    channel = socket.socket(fileno=os.dup(environment.channel_fd))
    channel.set_inheritable(False)
    worker = Worker(
        environment.worker_id,
        environment.host,
        RunDir.open(environment.dir),
        Channel(channel),
        Timeouts(environment.budget_s),
        Placement(environment.threads, environment.pin),
        environment,
    )
    _live(worker, main, environment, on_asked)


def _run_as_guest(main: Callable[[Worker], None], torchrun: Torchrun, environment: WorkerEnvironment) -> None:
    """As a worker of the job that the processes of this torchrun are, or join."""
    try:
        guest = arrive(torchrun, environment)
        told = guest.wait()
    except errors.ShoalError as error:
        print(f"shoal: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(errors.exit_code(error))
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    exit_code = 1
    try:
        _run_launched(main, told, guest.asked)
        exit_code = 0
    except Leave:
        exit_code = 0
        raise
    except SystemExit as exit:
        exit_code = exit.code if isinstance(exit.code, int) else 1
        raise
    except Exception as problem:
        packet, exit_code = last_words(problem, os.path.abspath(sys.argv[0]))
        with contextlib.suppress(OSError):
            Channel(socket.socket(fileno=os.dup(told.channel_fd))).send(packet)
        if isinstance(problem, errors.ShoalError):  # the launcher says it
            sys.exit(exit_code)
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        guest.leave(exit_code)


def _run_alone(main: Callable[[Worker], None], environment: WorkerEnvironment) -> None:
    from shoal.control.membership.values import found
    from shoal.control.serve import EmbeddedCoordinator

    try:
        script = sys.argv[0] or "python"
        # So that `shoal resume` can go on with it, from anywhere and with more workers.
        settings: dict[str, Any] = {"script": os.path.abspath(script), "args": sys.argv[1:], "cwd": os.getcwd()}
        settings |= {"min": 1, "max": 1, "target": 1, "version": __version__}
        given = environment.dir
        run_dir = RunDir.create(given, settings) if given else create_default(script, settings)
        print(f"shoal: one worker, run directory {run_dir.path}", file=sys.stderr)
        with run_dir.held():
            coordinator = EmbeddedCoordinator(run_dir, found(1, 1, 1))
            coordinator.start()
            worker = Worker("w0", socket.gethostname(), run_dir, OwnMemory(), Timeouts(), None, environment)
            how: signal.Signals | None = None
            before = signal.signal(signal.SIGINT, partial(_interrupted, worker))
            try:
                _live(worker, main, environment)
                if not worker.progress().seq:
                    raise errors.trained_nothing(os.path.basename(script))
            except Leave:
                how = signal.Signals(worker.left_by)
            finally:
                signal.signal(signal.SIGINT, before)
                coordinator.stop()
                at = worker.progress()
                run_dir.write_committed(Committed(at.seq, at.step, at.epoch, at.samples, finite(at.loss)))
            if how is not None:
                write_end(run_dir.events, "ended", f"stopped: {how.name}")
                sys.exit(128 + how)
    except errors.ShoalError as error:
        print(f"shoal: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(errors.exit_code(error))
    except KeyboardInterrupt:
        print("shoal: interrupted before the step had ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as problem:  # the exit code that `shoal run` has for it
        sys.excepthook(type(problem), problem, problem.__traceback__)
        sys.exit(2)


def _interrupted(worker: Worker, *_: object) -> None:
    """Ctrl-C ends the job at a step boundary, as it does under `shoal run`, and a second one at once."""
    try:
        worker.on_sigterm(signal.SIGINT)
    finally:
        # Last of all: a second one must not come in the middle of the above. And not print: that may be where the
        # script was interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nshoal: ends after this step; Ctrl-C once more ends it now\n")


def _asked(worker: Worker, tell: Callable[[int], None], signum: int, *_: object) -> None:
    tell(signum)
    worker.on_sigterm(signum)


def _live(
    worker: Worker,
    main: Callable[[Worker], None],
    environment: WorkerEnvironment,
    on_asked: Callable[[int], None] | None = None,
) -> None:
    if environment.plugin:
        module, function = environment.plugin.split(":")
        getattr(importlib.import_module(module), function)(worker)
    signal.signal(signal.SIGTERM, worker.on_sigterm)
    if on_asked is not None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, partial(_asked, worker, on_asked))
    try:
        if environment.device == "cuda":
            _ = worker.device  # which says so in one line where there is none
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
