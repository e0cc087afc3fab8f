"""How long those who train are held up when a host joins that has no state yet. Hosts are network namespaces: needs
root.

    python -m benchmarks.joining --model mlp21m --optimizer adamw --mbit 1000 --rounds 3

The longest step from the moment the host begins to get the state until it has made steps of its own, beside the median
of the steps before and of those after, which both make; how many steps were made in that time; and what it would take
to send the state while all wait.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal import models
from shoal.control.rundir import RunDir
from shoal.metrics import read_events
from shoal.testing.network import Network, missing

SCRIPT = Path(__file__).with_name("joining_loop.py")
_STATES = {"sgd": 2, "adamw": 3}  # tensors of the model's size that belong to the state
_WAIT_S = 180.0
_BEFORE, _AFTER = 12, 6  # steps


def until(holds: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(log.read_text()[-3000:])
        time.sleep(0.05)


def steps(path: Path) -> list[dict[str, Any]]:
    return [event for event in (read_events(path) if path.exists() else []) if event["event"] == "step"]


def once(network: Network, asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    log, first = folder / "log", folder / "w0.jsonl"
    run_dir = RunDir(folder / "run")
    train = [str(SCRIPT), str(folder), asked.model, asked.optimizer, str(asked.batch)]
    run = ["run", "-n", "1", "--address", network.addresses[0], "--dir", str(run_dir.path), "--threads", "1", "--quiet"]
    join = ["join", str(run_dir.invitation_file), "--slots", "1", "--host-name", "far"]
    with open(log, "ab") as output:

        def start(host: int, command: list[str]) -> subprocess.Popen[bytes]:
            shoal = [sys.executable, "-m", "shoal", *command]
            return subprocess.Popen(network.on(host, shoal), stdout=output, stderr=output)

        processes = [start(0, [*run, *train])]
        try:
            until(lambda: len(steps(first)) > _BEFORE, log)
            processes.append(start(1, join))
            until(lambda: sum(it["group_size"] == 2 for it in steps(first)) > _AFTER, log)
            (folder / "end").touch()
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    found = steps(first)
    generations = [event for event in read_events(run_dir.events) if event["event"] == "generation"]
    began_s = next(it["time"] for it in generations if it["followers"])
    joined_s = next(it["time"] for it in generations if len(it["members"]) == 2)
    took = [(later["time"], later["time"] - earlier["time"]) for earlier, later in pairwise(found)]
    joins = [it["group_size"] for it in found].index(2)
    before = [it for at, it in took if at < began_s][2:]
    during = [it for at, it in took if at >= began_s and at <= found[joins]["time"]]
    return {
        "before_s": statistics.median(before),
        "longest_s": max(during),
        "after_s": statistics.median(it for at, it in took[joins:]),
        "steps": float(len(during)),
        "took_s": joined_s - began_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joining")
    parser.add_argument("--model", default="mlp21m")
    parser.add_argument("--optimizer", default="adamw", choices=_STATES)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    state_bytes = _STATES[asked.optimizer] * 4 * sum(it.numel() for it in models.spec(asked.model).build().parameters())
    found = []
    for round_ in range(asked.rounds):
        with Network(2) as network, tempfile.TemporaryDirectory() as folder:
            network.limit(asked.mbit)
            found.append(once(network, asked, Path(folder)))
            print(f"round {round_ + 1}: {found[-1]}", file=sys.stderr)
    columns = (
        "step before, s",
        "longest step, s",
        "step after, s",
        "steps meanwhile",
        "the state took, s",
        "sending it, s",
    )
    table = Table(*columns)

    def spread(key: str) -> str:
        values = [it[key] for it in found]
        return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"

    sending_s = state_bytes * 8 / (asked.mbit * 1e6)
    keys = ("before_s", "longest_s", "after_s", "steps", "took_s")
    table.add_row(*map(spread, keys), f"{sending_s:.2f}")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
