"""What it takes a worker to learn with whom it averages, at each step and when a generation begins.

python -m benchmarks.topology --workers 1000
"""

from __future__ import annotations

import argparse
import statistics
import time

from rich.console import Console
from rich.table import Table

from shoal.bench.load import this_machine
from shoal.sync.topology import EXAMPLES, Topology, parse

_STEPS = 2000
_GENERATIONS = 5
_HOST = 8  # workers of a host


def measured(topology: Topology, workers: int) -> tuple[float, tuple[float, float, float]]:
    """Seconds to begin a generation, the first step of a rank included, at the median; and of a step the median and the
    quartiles."""
    hosts = [rank // _HOST for rank in range(workers)]
    rank = workers // 2
    begun = []
    for _ in range(_GENERATIONS):
        started = time.perf_counter()
        schedule = topology.on(workers, hosts)
        schedule.neighborhood(rank, 0)
        begun.append(time.perf_counter() - started)
    steps = []
    for step in range(_STEPS):
        started = time.perf_counter()
        schedule.neighborhood(rank, step)
        steps.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(steps, n=4)
    return statistics.median(begun), (middle, low, high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    workers = parser.parse_args().workers
    table = Table("topology", "generation, ms", "step, µs", "quartiles", title=f"{workers:,} workers")
    for spec in (*EXAMPLES, "one_peer(fully_connected)"):
        begin_s, (middle_s, low_s, high_s) = measured(parse(spec), workers)
        quartiles = f"{low_s * 1e6:.1f} to {high_s * 1e6:.1f}"
        table.add_row(spec, f"{begin_s * 1e3:.2f}", f"{middle_s * 1e6:.1f}", quartiles)
    console = Console(highlight=False)
    console.print(str(this_machine()))
    console.print(table)


if __name__ == "__main__":
    main()
