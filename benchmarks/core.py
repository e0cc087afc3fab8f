"""The core comparison: no exchange, DDP over gloo, and shoal, side by side on one host.

    python -m benchmarks.core --workers 2 --threads 1 --models tiny resnet20 --optimizers sgd --json out.json

Three sections. `training`: ms a step and efficiency against the same workers without any exchange, shoal against DDP,
and `lockstep`: the same workers, which wait for the slowest at each step but exchange nothing. `exchange`: a sum of
94 MB over the group against one copy of the same bytes. `memory`: what the whole group takes, each shared page once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from shoal.bench import results
from shoal.bench.bodies import Buffer, Training
from shoal.bench.footprint import Footprint, footprint
from shoal.bench.load import this_machine
from shoal.bench.processes import ProcessGroup
from shoal.bench.results import Result
from shoal.bench.runner import Variant, compare
from shoal.errors import UserMistake
from shoal.testing import LocalJob

BATCHES = {"mlp21m": 128, "mobilenetv2": 64, "resnet20": 64, "tiny": 32, "resnet50_cifar": 64}
DEFAULT_MODELS = ("mlp21m", "mobilenetv2", "resnet20", "tiny")
SECTIONS = ("training", "exchange", "memory")
EXCHANGE_BYTES = 94_000_000
MEMORY_WORK = Training("mlp21m", batch=128, optimizer="adamw")
_FILE_WIDTH = 140  # of the tables, where the output is not a terminal
_MEMORY_STEPS = 3  # after which gradients and the optimizer's state exist


TRAINED = ("independent", "lockstep", "ddp", "shoal")

# Which variants have malloc keep freed memory. As people run it, only shoal's do: it sets that for every script.
ALLOCATORS = {"on": TRAINED, "off": (), "as_run": ("shoal",)}


def training(work: Training, allocator: str, *, workers: int, threads: int, rounds: int, turn_s: float) -> Result:
    variants: dict[str, Variant] = {
        name: ProcessGroup(name, work, keep_freed_memory=name in ALLOCATORS[allocator]) for name in TRAINED
    }
    return compare(
        f"{work.model}, batch {work.batch}, {work.optimizer}, allocator {allocator}",
        variants,
        baseline="independent",
        n_workers=workers,
        cores_per_worker=threads,
        rounds=rounds,
        turn_s=turn_s,
        faster=[("shoal", "ddp")],
    )


def exchange(*, workers: int, threads: int, rounds: int, turn_s: float, size_bytes: int = EXCHANGE_BYTES) -> Result:
    """How many copies of the buffer a sum over the group costs."""
    measured = ("memcpy", "gloo_allreduce", "shoal_allreduce")
    return compare(
        f"{size_bytes / 1e6:.0f} MB",
        {name: ProcessGroup(name, Buffer(size_bytes), keep_freed_memory=True) for name in measured},
        baseline="memcpy",
        n_workers=workers,
        cores_per_worker=threads,
        rounds=rounds,
        turn_s=turn_s,
    )


def memory(*, workers: int, work: Training = MEMORY_WORK) -> list[Footprint]:
    """One group at a time: a library's pages that another variant maps too would count for less in both. Shoal's is a
    job as people start it, with launcher, coordinator and fork server counted in."""
    found = [_memory_of_a_job(workers, work)]
    for name in ("independent", "ddp"):
        group = ProcessGroup(name, work, keep_freed_memory=True, share_cores=True)
        try:
            group.start(workers, 1)
            group.measure(_MEMORY_STEPS)
            found.append(footprint(name, group.pids))
        finally:
            group.stop()
    return found


def _memory_of_a_job(workers: int, work: Training) -> Footprint:
    with tempfile.TemporaryDirectory(prefix="memory-") as directory:
        job = LocalJob(
            Path(__file__).with_name("memory_loop.py"),
            [work.model, str(work.batch), work.optimizer],
            workers=workers,
            directory=Path(directory) / "run",
            options=["--threads", "1", "--quiet"],
        )
        job.start()
        try:
            job.wait_until(lambda: job.status().get("step", 0) >= _MEMORY_STEPS, timeout_s=300.0)
            launcher = psutil.Process(job.process.pid)
            pids = [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]
            return replace(footprint("shoal", pids), n_workers=workers)
        finally:
            job.process.kill()
            job.process.communicate()


def memory_table(found: Sequence[Footprint], work: Training) -> Table:
    shown = Table(title=f"memory of {found[0].n_workers} workers, {work.model}, {work.optimizer}")
    for column in ("variant", "all together, MB", "of it private, MB", "a worker, MB"):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for one in found:
        sizes = (one.proportional_bytes, one.private_bytes, one.proportional_bytes / one.n_workers)
        shown.add_row(one.variant, *(f"{size / 1e6:,.0f}" for size in sizes))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    document: dict[str, Any] = {"command": sys.argv, "machine": results.as_json(this_machine())}
    size = {"workers": chosen.workers, "threads": chosen.threads, "rounds": chosen.rounds, "turn_s": chosen.turn_s}
    try:
        if "training" in chosen.sections:
            document["training"] = _all_training(chosen, size, console)
        if "exchange" in chosen.sections:
            result = exchange(**size)
            document["exchange"] = [results.as_json(result)]
            _show(console, [result])
        if "memory" in chosen.sections:
            found = memory(workers=chosen.memory_workers)
            document["memory"] = [results.as_json(one) for one in found]
            console.print(memory_table(found, MEMORY_WORK))
    except UserMistake as mistake:
        console.print(f"[red]{type(mistake).__name__}: {mistake}", highlight=False, soft_wrap=True)
        return 2
    if chosen.json is not None:
        results.write_json(chosen.json, document)
    return 0


def _all_training(chosen: argparse.Namespace, size: dict[str, Any], console: Console) -> list[dict[str, Any]]:
    found = []
    allocators = [chosen.only_allocator] if chosen.only_allocator else ALLOCATORS
    for model, optimizer, allocator in product(chosen.models, chosen.optimizers, allocators):
        found.append(training(Training(model, BATCHES[model], optimizer), allocator, **size))
        console.print(
            _line(found[-1]), highlight=False, soft_wrap=True
        )  # a long run that is broken off has said what it knew
    _show(console, found)
    return [results.as_json(result) for result in found]


def _line(result: Result) -> str:
    parts = [f"independent {result.of('independent').summary.median * 1e3:.2f} ms"]
    for one in result.comparisons:
        efficiency = one.efficiency
        name = one.variant if one.other == result.baseline else f"{one.variant}/{one.other}"
        parts.append(f"{name} {efficiency.value:.3f} ({efficiency.low:.3f}–{efficiency.high:.3f})")
    return f"{result.title}: {', '.join(parts)}"


def _show(console: Console, found: Sequence[Result]) -> None:
    console.print(results.table(found))
    for line in results.doubt_lines(found):
        console.print(f"[yellow]? {line}", highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="cores, and threads, of each worker")
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=DEFAULT_MODELS)
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adamw"), default=("sgd", "adamw"))
    parser.add_argument("--only-allocator", choices=ALLOCATORS, help="default: all of them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn-s", type=float, default=0.5, help="how long the baseline's turn in a round lasts")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--memory-workers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
