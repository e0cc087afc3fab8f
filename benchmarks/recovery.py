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


class TorchrunNodes:
    """Agents of torchrun, each with one worker, as if each were a node of its own.

    The first one holds the rendezvous; without it no other recovers.
    """

    def __init__(self, directory: Path, settings: TorchrunSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def start(self, node: str) -> None:
        environment = {
            **os.environ,
            **self._settings.environment,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            torchrun_loop.LOG_DIR: str(self._directory),
            torchrun_loop.NODE: node,
            torchrun_loop.PACE_S: str(PACE_S),
            torchrun_loop.END_S: str(time.monotonic() + _LIFETIME_S),
        }
        # Said, not left to chance: by default whichever agent binds the port first is the host.
        rendezvous = {**self._settings.rendezvous, "is_host": int(not self._agents)}
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=100", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=recovery"),
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in rendezvous.items())}",
            *self._settings.flags,
            *("-m", "benchmarks.torchrun_loop"),
        ]
        with (self._directory / f"{node}.err").open("ab") as sink:
            self._agents[node] = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)

    def kill(self, node: str) -> float:
        """kill -9 of the agent and all below it; returns when that was, by the shared clock."""
        agent = self._agents.pop(node)
        doomed = [agent.pid, *(child.pid for child in psutil.Process(agent.pid).children(recursive=True))]
        killed_s = time.monotonic()
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # went with its parent
                pass
        agent.wait()
        return killed_s

    def steps(self) -> list[StepDone]:
        return _steps_in(self._directory)

    def ended(self) -> str | None:
        """Which agent gave up, and its last words; None while all live that should."""
        for node, agent in self._agents.items():
            if agent.poll() is not None:
                said = (self._directory / f"{node}.err").read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
                return f"the agent of {node} ended with {agent.returncode}; it said: {said}"
        return None

    def stop(self) -> None:
        for node in list(self._agents):
            if self._agents[node].poll() is None:
                self.kill(node)


def _steps_in(directory: Path) -> list[StepDone]:
    events = [event for log in directory.glob("*.jsonl") for event in read_events(log)]
    done = [StepDone(e["time"], e["worker"], e["pid"], e["group_size"]) for e in events if e["event"] == "step"]
    return sorted(done, key=lambda step: step.time_s)


class DidNotHappen(Exception):
    """Something a trial waits for did not come; what, in words."""


def torchrun_trial(settings: TorchrunSettings, timeout_s: float) -> Trial:
    workers = [f"node{index}" for index in range(N_WORKERS)]
    *survivors, victim = workers
    newcomer = f"node{N_WORKERS}"
    kill_to_step_s = join_to_step_s = stall_s = None
    was_restarted, failure = False, None
    probe = LoadProbe()
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        nodes = TorchrunNodes(Path(directory), settings)

        def stepped(what: str, who: Collection[str], group_size: int, after_s: float) -> float:
            deadline_s = time.monotonic() + timeout_s
            while time.monotonic() < deadline_s:
                if (found := all_stepped_at(nodes.steps(), who, group_size, after_s)) is not None:
                    return found
                if (gone := nodes.ended()) is not None:
                    raise DidNotHappen(f"{what}: {gone}")
                time.sleep(_LOOK_S)
            raise DidNotHappen(f"{what}: not within {timeout_s:.0f} s")

        try:
            for worker in workers:
                nodes.start(worker)
            begin_s = stepped("the first step of all", workers, N_WORKERS, 0.0)
            # A second of steps between changes: when the first step is done, agents are still busy with the last one.
            stepped("steps before the kill", workers, N_WORKERS, begin_s + 1.0)
            before = nodes.steps()
            killed_s = nodes.kill(victim)
            resumed_s = stepped("steps after the kill", survivors, N_WORKERS - 1, killed_s)
            after_kill = [step for step in nodes.steps() if step.time_s > killed_s]
            was_restarted = restarted([*_last_of_each(before), *after_kill], survivors)
            stepped("steps before the join", survivors, N_WORKERS - 1, resumed_s + 1.0)
            joined_s = time.monotonic()
            usual_s = usual_step_s(nodes.steps(), survivors, resumed_s, joined_s)
            kill_to_step_s = lost_to_kill_s(nodes.steps(), survivors, killed_s, resumed_s, usual_s)
            nodes.start(newcomer)
            end_s = stepped("steps after the join", [*survivors, newcomer], N_WORKERS, joined_s)
            first_s = stepped("the newcomer's step", [newcomer], N_WORKERS, joined_s)
            join_to_step_s = first_s - joined_s
            gap_s = longest_gap_s(nodes.steps(), survivors, joined_s, end_s)
            stall_s = None if gap_s is None else max(0.0, gap_s - usual_s)
        except DidNotHappen as missing:
            failure = str(missing)
        finally:
            load = probe.end()
            nodes.stop()
    return Trial(kill_to_step_s, join_to_step_s, stall_s, was_restarted, load, failure)


def _last_of_each(steps: Sequence[StepDone]) -> list[StepDone]:
    return list({step.worker: step for step in steps}.values())


def measure_torchrun(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    trials = tuple(torchrun_trial(TORCHRUN_SETTINGS[settings], timeout_s) for _ in range(repetitions))
    return Recovery("torchrun, node lost", settings, trials)


def measure_torchft(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    if importlib.util.find_spec("torchft") is None:
        return Recovery("torchft", settings, (), skipped="torchft is not installed here")
    return Recovery("torchft", settings, (), skipped="torchft is installed, but no trial is written for it")


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

    def start(self) -> None:
        os.environ.update(
            {
                torchrun_loop.LOG_DIR: str(self._directory),
                torchrun_loop.PACE_S: str(PACE_S),
                torchrun_loop.END_S: str(time.monotonic() + _LIFETIME_S),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            }
        )
        self._job.start()

    def steps(self) -> list[StepDone]:
        return _steps_in(self._directory)

    def live(self) -> list[str]:
        generations = self._job.events("generation")
        return list(generations[-1]["members"]) if generations else []

    def kill(self, worker_id: str) -> float:
        pid = next(worker["pid"] for worker in self._job.status()["workers"] if worker["worker_id"] == worker_id)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed_s

    def scale(self, target: int) -> float:
        asked_s = time.monotonic()
        self._job.scale(target)
        return asked_s

    def ended(self) -> str | None:
        return None if self._job.process.poll() is None else f"the job ended with {self._job.process.returncode}"

    def stop(self) -> None:
        self._job.process.kill()
        self._job.process.communicate()


def measure_shoal(settings: str, repetitions: int, timeout_s: float) -> Recovery:
    """The same trial on `shoal run`: kill the youngest worker, then scale back up."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        job = ShoalJob(Path(directory))
        job.start()
        try:
            _until(job, "the first step of all", ["w0", "w1", "w2"], N_WORKERS, 0.0, timeout_s)
            trials = tuple(shoal_trial(job, timeout_s) for _ in range(repetitions))
        finally:
            job.stop()
    return Recovery("shoal", settings, trials)


def shoal_trial(job: ShoalJob, timeout_s: float) -> Trial:
    probe = LoadProbe()
    *survivors, victim = job.live()
    pids = _last_of_each(job.steps())
    _until(job, "steps before the kill", [*survivors, victim], N_WORKERS, time.monotonic() + 0.3, timeout_s)
    killed_s = job.kill(victim)
    resumed_s = _until(job, "steps after the kill", survivors, N_WORKERS - 1, killed_s, timeout_s)
    job.scale(N_WORKERS - 1)
    _until(job, "steps before the join", survivors, N_WORKERS - 1, time.monotonic() + 0.3, timeout_s)
    joined_s = job.scale(N_WORKERS)
    end_s = _until(job, "steps after the join", survivors, N_WORKERS, joined_s, timeout_s)
    newcomer = job.live()[-1]
    first_s = _until(job, "the newcomer's step", [newcomer], N_WORKERS, joined_s, timeout_s)
    steps = job.steps()
    usual_s = usual_step_s(steps, survivors, resumed_s, joined_s)
    stall_s = longest_gap_s(steps, survivors, joined_s, end_s)
    return Trial(
        lost_to_kill_s(steps, survivors, killed_s, resumed_s, usual_s),
        first_s - joined_s,
        None if stall_s is None else max(0.0, stall_s - usual_s),
        restarted([*pids, *(step for step in steps if step.time_s > killed_s)], survivors),
        probe.end(),
    )


def _until(job: ShoalJob, what: str, who: Collection[str], group_size: int, after_s: float, timeout_s: float) -> float:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if (found := all_stepped_at(job.steps(), who, group_size, after_s)) is not None:
            return found
        if (gone := job.ended()) is not None:
            raise DidNotHappen(f"{what}: {gone}")
        time.sleep(_LOOK_S)
    raise DidNotHappen(f"{what}: not within {timeout_s:.0f} s")


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
