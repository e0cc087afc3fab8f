"""What it costs when a worker is killed, and when one joins: three workers of the tiny model on one machine.

    python -m benchmarks.recovery --repetitions 50 --peer-repetitions 3 --json out.json

A trial kills the youngest worker (kill -9, with everything it started) and waits until the survivors step again; then
it starts a new one and waits until the newcomer and the others step together. Times come from what the workers write
down, on one clock; that this program looks at the files only now and then adds nothing to them. A step's own time is
taken off: from the kill, what the interrupted step had taken and one step of the survivors; from the stall, one step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import torchrun_loop
from shoal.bench import results
from shoal.bench.load import LoadProbe, load_doubts, this_machine
from shoal.bench.recovery import (
    Recovery,
    StepDone,
    Trial,
    all_stepped_at,
    longest_gap_s,
    lost_to_kill_s,
    restarted,
    typical,
    usual_step_s,
)
from shoal.metrics import read_events
from shoal.testing import LocalJob

N_WORKERS = 3
PACE_S = 0.01
_LOOK_S = 0.05
_LIFETIME_S = 900.0
_FILE_WIDTH = 140
_TAIL_CHARACTERS = 1000


class DidNotHappen(Exception):
    """Something a trial waits for did not come; what, in words."""


class System(Protocol):
    """What a trial is done to. Times are by the clock that all processes of the machine share."""

    def members(self) -> list[str]:
        """The workers, the youngest last."""

    def steps(self) -> list[StepDone]: ...

    def ended(self) -> str | None:
        """What gave up, and its last words; None while all live that should."""

    def kill(self, worker: str) -> float:
        """kill -9 of all that the worker consists of; returns when."""

    def stay(self) -> None:
        """From now on, nobody takes the place of who was killed."""

    def join(self) -> float:
        """Ask for one more worker; returns when."""


def trial(system: System, settle_s: float, timeout_s: float) -> Trial:
    """`settle_s` of steps lie between one change and the next."""
    kill_to_step_s = join_to_step_s = stall_s = None
    was_restarted, failure = False, None
    probe = LoadProbe()

    def stepped(what: str, who: Collection[str], group_size: int, after_s: float) -> float:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if (found := all_stepped_at(system.steps(), who, group_size, after_s)) is not None:
                return found
            if (gone := system.ended()) is not None:
                raise DidNotHappen(f"{what}: {gone}")
            time.sleep(_LOOK_S)
        raise DidNotHappen(f"{what}: not within {timeout_s:.0f} s")

    try:
        workers = system.members()
        *survivors, victim = workers
        begin_s = stepped("the first step of all", workers, N_WORKERS, 0.0)
        stepped("steps before the kill", workers, N_WORKERS, begin_s + settle_s)
        before = _last_of_each(system.steps())
        killed_s = system.kill(victim)
        resumed_s = stepped("steps after the kill", survivors, N_WORKERS - 1, killed_s)
        was_restarted = restarted([*before, *(s for s in system.steps() if s.time_s > killed_s)], survivors)
        system.stay()
        stepped("steps before the join", survivors, N_WORKERS - 1, time.monotonic() + settle_s)
        usual_s = usual_step_s(system.steps(), survivors, resumed_s, time.monotonic())
        kill_to_step_s = lost_to_kill_s(system.steps(), survivors, killed_s, resumed_s, usual_s)
        joined_s = system.join()
        end_s = stepped("steps after the join", survivors, N_WORKERS, joined_s)
        join_to_step_s = stepped("the newcomer's step", system.members()[-1:], N_WORKERS, joined_s) - joined_s
        gap_s = longest_gap_s(system.steps(), survivors, joined_s, end_s)
        stall_s = None if gap_s is None else max(0.0, gap_s - usual_s)
    except DidNotHappen as missing:
        failure = str(missing)
    return Trial(kill_to_step_s, join_to_step_s, stall_s, was_restarted, probe.end(), failure)


def _last_of_each(steps: Sequence[StepDone]) -> list[StepDone]:
    return list({step.worker: step for step in steps}.values())


def _steps_in(directory: Path) -> list[StepDone]:
    events = [event for log in directory.glob("*.jsonl") for event in read_events(log)]
    done = [StepDone(e["time"], e["worker"], e["pid"], e["group_size"]) for e in events if e["event"] == "step"]
    return sorted(done, key=lambda step: step.time_s)


class Nodes:
    """Processes of a peer, each with one worker, as if each were a node of its own.

    `command` gives what the node of that number runs.
    """

    def __init__(
        self, directory: Path, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._command = command
        self._environment = environment
        self._started = 0
        self._live: dict[str, subprocess.Popen[bytes]] = {}

    def members(self) -> list[str]:
        return list(self._live)

    def steps(self) -> list[StepDone]:
        return _steps_in(self._directory)

    def ended(self) -> str | None:
        for node, process in self._live.items():
            if process.poll() is not None:
                said = (self._directory / f"{node}.err").read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
                return f"{node} ended with {process.returncode}; it said: {said}"
        return None

    def kill(self, worker: str) -> float:
        process = self._live.pop(worker)
        doomed = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        killed_s = time.monotonic()
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # went with its parent
                pass
        process.wait()
        return killed_s

    def stay(self) -> None:
        pass  # a node that is gone comes back only if someone starts it

    def join(self) -> float:
        node = f"node{self._started}"
        joined_s = time.monotonic()
        environment = {
            **os.environ,
            **self._environment,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            torchrun_loop.LOG_DIR: str(self._directory),
            torchrun_loop.NODE: node,
            torchrun_loop.PACE_S: str(PACE_S),
            torchrun_loop.END_S: str(joined_s + _LIFETIME_S),
        }
        with (self._directory / f"{node}.err").open("ab") as sink:
            self._live[node] = subprocess.Popen(self._command(self._started), env=environment, stdout=sink, stderr=sink)
        self._started += 1
        return joined_s

    def stop(self) -> None:
        for node in self.members():
            if self._live[node].poll() is None:
                self.kill(node)


def nodes_trial(command: Callable[[int], Sequence[str]], environment: Mapping[str, str], timeout_s: float) -> Trial:
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        nodes = Nodes(Path(directory), command, environment)
        try:
            for _ in range(N_WORKERS):
                nodes.join()
            # When the first step is done, torchrun's agents are still busy with the last one to come.
            return trial(nodes, settle_s=1.0, timeout_s=timeout_s)
        finally:
            nodes.stop()


@dataclass(frozen=True)
class TorchrunSettings:
    flags: tuple[str, ...]
    rendezvous: Mapping[str, int]
    environment: Mapping[str, str]


# `tuned` is as short as the agents bear. Intervals are whole seconds; with two attempts instead of three a newcomer was
# seen to take the living for dead and to train alone. With the agents' shared store, which is the default, a newcomer
# waits for an address that rank 0 writes in its first round only (`next_rendezvous`, torch 2.13): every join failed. So
# `tuned` shares no store, and `default` is expected to let nobody join.
TORCHRUN_SETTINGS = {
    "default": TorchrunSettings(flags=(), rendezvous={}, environment={}),
    "tuned": TorchrunSettings(
        flags=("--monitor-interval=0.1",),
        rendezvous={"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3, "join_timeout": 60},
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
}


def torchrun_trial(settings: TorchrunSettings, timeout_s: float) -> Trial:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def agent(number: int) -> list[str]:
        # The first one holds the rendezvous; without it no other recovers. Said, not left to chance: by default
        # whichever agent binds the port first is the host.
        rendezvous = {**settings.rendezvous, "is_host": int(number == 0)}
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=100", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=recovery"),
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in rendezvous.items())}",
            *settings.flags,
            *("-m", "benchmarks.torchrun_loop"),
        ]

    return nodes_trial(agent, settings.environment, timeout_s)


def measure_torchrun(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    trials = tuple(torchrun_trial(TORCHRUN_SETTINGS[settings], timeout_s) for _ in range(repetitions))
    return Recovery("torchrun, node lost", settings, trials)


@dataclass(frozen=True)
class TorchftSettings:
    gloo_timeout_s: float
    heartbeat_s: float
    lighthouse: Mapping[str, int]


# `default` is what torchft's README and its `train_ddp.py` use. `tuned` is as short as the replicas bear: survivors
# wait for the lighthouse's join timeout, the heartbeats' need not pass first; with 10 ms of it, two trials of three did
# not come to a group of all. In torchft 0.2.0 a survivor whose allreduce fails ends with an AssertionError (2 trials of
# 11); in the nightly of 2026-10-26 that is mended.
TORCHFT_SETTINGS = {
    "default": TorchftSettings(
        gloo_timeout_s=5.0,
        heartbeat_s=0.1,
        lighthouse={"join_timeout_ms": 10_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5_000},
    ),
    "tuned": TorchftSettings(
        gloo_timeout_s=0.05,
        heartbeat_s=0.02,
        lighthouse={"join_timeout_ms": 20, "quorum_tick_ms": 5, "heartbeat_timeout_ms": 100},
    ),
}


def torchft_trial(settings: TorchftSettings, timeout_s: float) -> Trial:
    os.environ.setdefault("RUST_LOG", "warn")  # read at import; else every step is told, here and in each replica
    from torchft.coordination import LighthouseServer

    # In this process: no worker is killed with it, and it ends when the benchmark does.
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **settings.lighthouse)
    replica = (
        *(sys.executable, "-m", "benchmarks.torchft_loop"),
        *(str(settings.gloo_timeout_s), str(settings.heartbeat_s)),
    )
    try:
        return nodes_trial(lambda _number: replica, {"TORCHFT_LIGHTHOUSE": lighthouse.address()}, timeout_s)
    finally:
        lighthouse.shutdown()


def measure_torchft(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    if importlib.util.find_spec("torchft") is None:
        return Recovery("torchft", settings, (), skipped="torchft is not installed here")
    trials = tuple(torchft_trial(TORCHFT_SETTINGS[settings], timeout_s) for _ in range(repetitions))
    return Recovery("torchft", settings, trials)


class ShoalJob:
    """One job for all trials: it has no reason to end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._job = LocalJob(
            Path(__file__).with_name("shoal_loop.py"),
            workers=N_WORKERS,
            directory=directory / "run",
            # A killed worker is not replaced by itself: the trial asks for the newcomer when it is time.
            options=["--threads", "1", "--quiet", "--backoff", "30", "--restarts", "100000"],
        )

    def start(self, timeout_s: float) -> None:
        os.environ.update(
            {
                torchrun_loop.LOG_DIR: str(self._directory),
                torchrun_loop.PACE_S: str(PACE_S),
                torchrun_loop.END_S: str(time.monotonic() + _LIFETIME_S),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            }
        )
        self._job.start()
        self._job.wait_until(lambda: len(self.members()) == N_WORKERS, timeout_s)

    def members(self) -> list[str]:
        generations = self._job.events("generation")
        return list(generations[-1]["members"]) if generations else []

    def steps(self) -> list[StepDone]:
        return _steps_in(self._directory)

    def ended(self) -> str | None:
        return None if self._job.process.poll() is None else f"the job ended with {self._job.process.returncode}"

    def kill(self, worker: str) -> float:
        pid = next(one["pid"] for one in self._job.status()["workers"] if one["worker_id"] == worker)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed_s

    def stay(self) -> None:
        self._job.scale(N_WORKERS - 1)

    def join(self) -> float:
        joined_s = time.monotonic()
        self._job.scale(N_WORKERS)
        return joined_s

    def stop(self) -> None:
        self._job.process.kill()
        self._job.process.communicate()


def measure_shoal(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        job = ShoalJob(Path(directory))
        trials: list[Trial] = []
        try:
            job.start(timeout_s)
            # A trial that failed leaves a job that the next cannot begin with.
            while len(trials) < repetitions and all(done.failure is None for done in trials):
                trials.append(trial(job, settle_s=0.3, timeout_s=timeout_s))
        finally:
            job.stop()
    return Recovery("shoal", settings, tuple(trials))


SYSTEMS: Mapping[str, Callable[[str, int, float], Recovery]] = {
    "torchrun": measure_torchrun,
    "torchft": measure_torchft,
    "shoal": measure_shoal,
}


def table(found: Sequence[Recovery]) -> Table:
    shown = Table(title=f"{N_WORKERS} workers, seconds: median (worst) of what happened")
    for column in (
        "system",
        "settings",
        "kill → next step",
        "restarted?",
        "join → first step",
        "others stall",
        "failed",
    ):
        shown.add_column(column)
    for one in found:
        if one.skipped is not None:
            shown.add_row(one.system, one.settings, f"skipped: {one.skipped}")
            continue
        shown.add_row(
            one.system,
            one.settings,
            _cell([trial.kill_to_step_s for trial in one.trials]),
            "yes" if any(trial.survivors_restarted for trial in one.trials) else "no",
            _cell([trial.join_to_step_s for trial in one.trials]),
            _cell([trial.stall_s for trial in one.trials]),
            f"{sum(trial.failure is not None for trial in one.trials)} of {len(one.trials)}",
        )
    return shown


def _cell(values: Sequence[float | None]) -> str:
    found = typical(values)
    return "never" if found is None else f"{found.median_s:.3f} ({found.worst_s:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=tuple(SYSTEMS))
    parser.add_argument("--settings", nargs="+", choices=TORCHRUN_SETTINGS, default=("tuned",))
    parser.add_argument("--repetitions", type=int, default=10, help="of shoal's trial, which takes a second")
    parser.add_argument("--peer-repetitions", type=int, default=2, help="of the others', which take half a minute")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="for each thing a trial waits for")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    found = [
        SYSTEMS[system](
            settings, chosen.repetitions if system == "shoal" else chosen.peer_repetitions, chosen.timeout_s
        )
        for system in chosen.systems
        for settings in chosen.settings
    ]
    console.print(table(found))
    for one in found:
        for failure in (trial.failure for trial in one.trials if trial.failure is not None):
            console.print(f"[yellow]? {one.system}, {one.settings}: {failure}", highlight=False, soft_wrap=True)
        for doubt in load_doubts([trial.load for trial in one.trials]):
            console.print(f"[yellow]? {one.system}, {one.settings}: {doubt}", highlight=False, soft_wrap=True)
    if chosen.json is not None:
        document = {
            "command": sys.argv,
            "machine": results.as_json(this_machine()),
            "recovery": [results.as_json(one) for one in found],
        }
        results.write_json(chosen.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
