"""One worker on a GPU against a plain loop, and several that share one while they die and come.

    python -m benchmarks.gpu --json gpu.json

Images/s of a worker that is alone, as a ratio to a plain PyTorch loop: the same model object, optimizer, data set and
settings (bf16 autocast, channels_last), in turns, in one process. Then jobs of two to four NCCL ranks on one GPU: one
is killed with kill -9, one joins, and all must end with the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_loop import MODELS
from shoal.bench.statistics import paired_ratio
from shoal.testing import FaultPlan, LocalJob

LOOP, JOB = (Path(__file__).with_name(name) for name in ("gpu_loop.py", "gpu_job.py"))
BOUND = 0.98


def main(argv: list[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    console = Console(width=120)
    root = str(Path(__file__).parents[1])  # the scripts of the jobs find this package by it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if not torch.cuda.is_available():
        console.print("benchmarks.gpu needs a GPU, and torch finds none here", style="red")
        return 2
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for one in product(asked.models, asked.compile) for row in alone(Path(folder), *one, asked)]
        if rows:
            console.print(_table(rows))
        # At once: what counts here is how they end, and starting takes them longest.
        with ThreadPoolExecutor(max(1, len(asked.workers))) as pool:
            jobs = list(pool.map(partial(together, Path(folder)), asked.workers))
    for job in jobs:
        console.print(_line(job), highlight=False, soft_wrap=True)
    if asked.json:
        asked.json.write_text(json.dumps({"alone": rows, "together": jobs}))
    held = all(row["ratio"] >= BOUND for row in rows) and all(job["alike"] for job in jobs)
    return 0 if held else 1


def alone(folder: Path, model: str, compiled: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    out = folder / f"{model}-{compiled}.json"
    settings = {
        "model": model,
        "compile": compiled == "yes",
        "batches": asked.batches,
        "side": asked.side,
        "rounds": asked.rounds,
        "turn_s": asked.turn_s,
        "out": str(out),
    }
    environment = {**os.environ, "SHOAL_DEVICE": "cuda", "SHOAL_DIR": str(folder / f"run-{model}-{compiled}")}
    subprocess.run([sys.executable, str(LOOP), json.dumps(settings)], env=environment, check=True, stdout=sys.stderr)
    rows = json.loads(out.read_text())
    for row in rows:
        rates = {name: [row["batch"] / it for it in seconds] for name, seconds in row["seconds"].items()}
        ratio = paired_ratio(rates["shoal"], rates["plain"])
        row |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "rates": rates}
    return list(rows)


def together(folder: Path, workers: int) -> dict[str, Any]:
    plan = FaultPlan().kill("w1", step=40, during="reduce").join(at_step=80)
    directory = folder / f"job-{workers}"
    job = LocalJob(
        JOB, ["12"], workers=workers, directory=directory, plan=plan, options=["--device", "cuda", "--backoff", "0"]
    )
    result = job.run(timeout_s=240.0)
    changes = [
        json.loads(line)
        for path in sorted((directory / "metrics").glob("*.jsonl"))
        for line in path.read_text().splitlines()
        if '"took_s"' in line
    ]
    return {
        "workers": workers,
        "exit_code": result.exit_code,
        "lost": len(result.of("lost")),
        "generations": len(result.of("generation")),
        "digests": result.digests,
        "alike": result.exit_code == 0 and result.audit.clean and len(set(result.digests.values())) == 1,
        "audit": str(result.audit),
        "took_ms": sorted(round(change["took_s"] * 1e3) for change in changes),
        "output": result.output[-2000:],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "batch", "compiled", "plain, images/s", "shoal, images/s", "shoal / plain (95 %)")
    for row in rows:
        plain, ours = (sorted(row["rates"][it])[len(row["rates"][it]) // 2] for it in ("plain", "shoal"))
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
        table.add_row(
            row["model"], str(row["batch"]), "yes" if row["compile"] else "no", f"{plain:,.0f}", f"{ours:,.0f}", ratio
        )
    return table


def _line(job: dict[str, Any]) -> str:
    bits = "the same bits on all" if job["alike"] else f"NOT ALIKE ({job['output']})"
    return (
        f"{job['workers']} NCCL ranks on one GPU, {job['lost']} killed, 1 joined, {job['generations']} generations: "
        f"{bits}; {job['audit']}; a change took {job['took_ms']} ms"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--compile", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn-s", type=float, default=0.3)
    parser.add_argument("--workers", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
