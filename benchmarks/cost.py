"""What journal, events, metrics and progress cost: counted CPU seconds, against those of the training threads.

    python -m benchmarks.cost --workers 4 --seconds 30

A job whose steps take 10 ms runs for a while; then the CPU time that the kernel counted for each thread is compared.
Everything that is not a training thread is overhead: the client's threads of the workers, the coordinator (journal,
events), the launcher (progress, output), the fork server. What the training thread itself pays, for attributing its
seconds and telling its steps, is measured call by call and multiplied.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import timeit
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.cost_loop import STEP_S
from shoal.bench.load import this_machine
from shoal.seconds import COMPUTE, Seconds
from shoal.testing import LocalJob
from shoal.train.metrics_file import MetricsFile
from shoal.train.step import StepReport

SCRIPT = Path(__file__).with_name("cost_loop.py")
BOUND = 0.01
BY_THE_CLOCK = ("workers' client threads", "coordinator", "launcher", "fork server")
_CALLS = 20_000
# Seven that every step has, and to `wait` and back for each other worker, twice: an upper bound.
_SWITCHES = 7


@dataclass(frozen=True)
class Counted:
    """CPU seconds so far, by what they were spent on."""

    steps: int
    training_s: float
    parts_s: dict[str, float]


def thread_s(pid: int, tid: int) -> float:
    """CPU seconds of a thread, to the nanosecond."""
    return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) / 1e9


def count(job: LocalJob) -> Counted:
    status = job.status()
    workers = {worker["pid"] for worker in status["workers"]}
    launcher = psutil.Process(job.process.pid)
    parts = dict.fromkeys(BY_THE_CLOCK, 0.0)
    training_s = 0.0
    for process in (launcher, *launcher.children(recursive=True)):
        for thread in process.threads():
            used_s = thread_s(process.pid, thread.id)
            if process.pid in workers and thread.id == process.pid:
                training_s += used_s
            else:
                parts[_part(process, launcher, workers)] += used_s
    return Counted(status["step"], training_s, parts)


def _part(process: psutil.Process, launcher: psutil.Process, workers: set[int]) -> str:
    if process.pid in workers:
        return "workers' client threads"
    if process == launcher:
        return "launcher"
    return "coordinator" if any("coordinator" in word for word in process.cmdline()) else "fork server"


def call_costs_s(folder: Path) -> tuple[float, float]:
    """CPU seconds of one switch of category, and of telling one step at the rate of this benchmark."""
    switch = Seconds().switch
    switch_s = min(timeit.repeat(lambda: switch(COMPUTE), timer=time.thread_time, number=_CALLS, repeat=5)) / _CALLS
    now_s = [0.0]
    file = MetricsFile(folder / "w0.jsonl", 0.0, wall=lambda: now_s[0])
    report = StepReport(1, 0, 0.5, {"accuracy": 0.5}, 128, 4, 1, 0, False, 0.1, None, STEP_S)

    def tell() -> None:
        now_s[0] += STEP_S
        file.step(report)

    tell_s = min(timeit.repeat(tell, timer=time.thread_time, number=2000, repeat=5)) / 2000
    return switch_s, tell_s


def measure(workers: int, seconds: float, warmup_s: float) -> Counted:
    """What was spent while the job ran steadily for so long."""
    with tempfile.TemporaryDirectory(prefix="shoal-cost-") as folder:
        job = LocalJob(SCRIPT, workers=workers, directory=Path(folder) / "run", options=["--threads", "1"])
        job.start()
        job.wait_until(lambda: job.status().get("step", 0) > 50)
        time.sleep(warmup_s)
        before = count(job)
        time.sleep(seconds)
        after = count(job)
        job.stop()
        result = job.wait()
        switch_s, tell_s = call_costs_s(Path(folder))
    if result.exit_code != 0 or len(result.of("generation")) < 1:
        raise SystemExit(f"the job ended with {result.exit_code}:\n{result.output}")
    steps = after.steps - before.steps
    parts = {name: value - before.parts_s[name] for name, value in after.parts_s.items()}
    parts["attributing seconds"] = steps * workers * (_SWITCHES + 4 * (workers - 1)) * switch_s
    parts["telling steps"] = steps * tell_s  # rank 0 only
    own_s = parts["attributing seconds"] + parts["telling steps"]  # is in the training threads' time
    return Counted(steps, after.training_s - before.training_s - own_s, parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long is counted")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds of training before that")
    options = parser.parse_args()
    counted = measure(options.workers, options.seconds, options.warmup)
    took_s = options.seconds / counted.steps
    console = Console()
    console.print(table(counted, f"{options.workers} workers, {counted.steps:,} steps of {took_s * 1e3:.1f} ms"))
    share = sum(counted.parts_s.values()) / counted.training_s
    console.print(f"{share:.2%}: {'within' if share < BOUND else 'ABOVE'} the bound of {BOUND:.0%}", highlight=False)
    if took_s > 1.1 * STEP_S:
        # Most of the overhead goes by the clock: others that slow the training down make its share look larger.
        cores = min(options.workers, os.cpu_count() or 1)
        clocked_s = sum(counted.parts_s[name] for name in BY_THE_CLOCK)
        own_s = sum(counted.parts_s.values()) - clocked_s
        share = clocked_s / (options.seconds * cores) + own_s / counted.training_s
        console.print(f"{share:.2%} of what {cores} cores to itself would train: the machine was busy", highlight=False)
    console.print(str(this_machine()), highlight=False)


def table(counted: Counted, title: str) -> Table:
    shown = Table(title=f"{title}, {counted.training_s:.1f} CPU seconds of training")
    for column in ("overhead", "CPU ms", "µs a step", "of training"):
        shown.add_column(column, justify="left" if column == "overhead" else "right")
    for name, value_s in (*counted.parts_s.items(), ("together", sum(counted.parts_s.values()))):
        a_step_us, share = value_s / counted.steps * 1e6, value_s / counted.training_s
        shown.add_row(name, f"{value_s * 1e3:.1f}", f"{a_step_us:.1f}", f"{share:.3%}")
    return shown


if __name__ == "__main__":
    main()
