"""What a checkpoint costs the training: seconds it stood still, and CPU seconds that were taken from it.

python -m benchmarks.checkpoint --workers 2 --models mlp21m resnet20 --every 8 --seconds 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.core import BATCHES
from shoal.testing import LocalJob

_INTERVAL_S = 60.0  # between two checkpoints, for which the share is reckoned


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=("mlp21m", "resnet20"))
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between checkpoints while this measures")
    parser.add_argument("--count", type=int, default=6, help="checkpoints of each model")
    chosen = parser.parse_args(arguments)
    table = Table(title=f"checkpoints of {chosen.workers} workers, {chosen.optimizer}")
    share = f"of the workers' time, one in {_INTERVAL_S:.0f} s"
    for column in ("model", "MB", "s to the disk", "ms training stood still", "ms CPU", share):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model in chosen.models:
        found = _measure(model, chosen)
        stalled_s = statistics.median(one["stalled_s"] for one in found)
        cpu_s = statistics.median(one["cpu_s"] for one in found)
        # Everybody waits for the one that stands still; CPU is taken from one of them.
        cost = (stalled_s * chosen.workers + cpu_s) / (_INTERVAL_S * chosen.workers)
        took_s = statistics.median(one["took_s"] for one in found)
        cells = (f"{found[0]['bytes'] / 1e6:,.0f}", f"{took_s:.2f}", f"{stalled_s * 1e3:.1f}", f"{cpu_s * 1e3:.0f}")
        table.add_row(model, *cells, f"{cost:.2%}")
    Console().print(table)
    return 0


def _measure(model: str, chosen: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=".") as directory:
        job = LocalJob(
            Path(__file__).with_name("memory_loop.py"),
            [model, str(BATCHES[model]), chosen.optimizer],
            workers=chosen.workers,
            directory=Path(directory) / "run",
            options=["--threads", "1", "--quiet", "--checkpoint-every", f"{chosen.every}s"],
        )
        job.start()
        try:
            job.wait_until(lambda: len(job.events("checkpointed")) >= chosen.count, timeout_s=600.0)
            return job.events("checkpointed")
        finally:
            job.kill()


if __name__ == "__main__":
    sys.exit(main())
