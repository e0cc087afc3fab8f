"""Shoal beside DDP over gloo on several hosts, which are network namespaces of this machine. Needs root.

    python -m benchmarks.network --hosts 2 --each 2 --models mlp21m --mbit 1000 0 --rounds 7

For each model, limit (0: none) and layout: the steps of DDP, of shoal, and of shoal with bf16 between hosts, in turns;
and the bytes that a host sends for a step, as a multiple of the gradients', counted at its interface with all headers.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal import models
from shoal.bench import results
from shoal.bench.bodies import Training
from shoal.bench.processes import Place, ProcessGroup
from shoal.bench.results import Result
from shoal.bench.runner import Variant, compare
from shoal.errors import UserMistake
from shoal.testing.network import Network, missing

BATCHES = {"mlp21m": 128, "mobilenetv2": 64, "resnet50_cifar": 64, "resnet20": 64}
_TUNED_STEPS = 26  # after which shoal has found out how large its buckets are to be
_COUNTED_STEPS = 3


def places(network: Network, each: int) -> list[Place]:
    return [
        Place(f"host{host}", address, "eth0", tuple(network.on(host, [])))
        for host, address in enumerate(network.addresses)
        for _ in range(each)
    ]


class Counted:
    """A variant whose bytes are counted in its first turn past the warm-up."""

    def __init__(self, group: ProcessGroup, network: Network) -> None:
        self._group, self._network = group, network
        self.bytes_a_step = 0.0

    def start(self, n_workers: int, cores_per_worker: int) -> None:
        self._group.start(n_workers, cores_per_worker)
        self._group.measure(_TUNED_STEPS)
        before = self._network.sent_bytes(0)
        self._group.measure(_COUNTED_STEPS)
        self.bytes_a_step = (self._network.sent_bytes(0) - before) / (_COUNTED_STEPS + 1)  # one leads in

    def measure(self, steps: int) -> float:
        return self._group.measure(steps)

    def stop(self) -> None:
        self._group.stop()


def cell(network: Network, work: Training, each: int, asked: argparse.Namespace) -> tuple[Result, dict[str, float]]:
    where = places(network, each)

    def made(body: str, wire: str = "full") -> Counted:
        group = ProcessGroup(body, work, keep_freed_memory=True, share_cores=True, places=where, wire=wire)
        return Counted(group, network)

    variants = {"ddp": made("ddp"), "shoal": made("shoal"), "shoal, bf16": made("shoal", "bf16")}
    chosen: dict[str, Variant] = {name: one for name, one in variants.items() if name in ("ddp", *asked.variants)}
    result = compare(
        f"{work.model}, {len(network.addresses)} hosts × {each}",
        chosen,
        baseline="ddp",
        n_workers=len(where),
        cores_per_worker=1,
        rounds=asked.rounds,
        turn_s=asked.turn_s,
        faster=[(name, "ddp") for name in chosen if name != "ddp"],
    )
    return result, {name: variants[name].bytes_a_step for name in chosen}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", nargs="+", type=int, default=[1, 2], help="workers on each host")
    parser.add_argument("--models", nargs="+", default=["mlp21m", "mobilenetv2", "resnet50_cifar"])
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mbit", nargs="+", type=float, default=[1000, 0], help="what a host can send; 0: no limit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-s", type=float, default=3.0)
    parser.add_argument("--variants", nargs="+", default=["shoal", "shoal, bf16"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    console = Console(width=140)
    table = Table("model", "workers", "Mbit/s", "variant", "ms a step", "times DDP (95 %)", "bytes / gradient")
    found: list[Result] = []
    for model, each, mbit in product(asked.models, asked.each, asked.mbit):
        spec = models.spec(model)
        gradient_bytes = 4 * sum(one.numel() for one in spec.build().parameters())
        work = Training(model, BATCHES.get(model, 64), asked.optimizer)
        with Network(asked.hosts) as network:
            if mbit:
                network.limit(mbit)
            result, sent = cell(network, work, each, asked)
        found.append(result)
        for measured in result.measured:
            ratio = next((it.time_ratio for it in result.comparisons if it.variant == measured.variant), None)
            times = "" if ratio is None else f"{1 / ratio.value:.2f} ({1 / ratio.high:.2f}–{1 / ratio.low:.2f})"
            ms = f"{measured.summary.median * 1e3:.0f}"
            bytes_ = f"{sent[measured.variant] / gradient_bytes:.3f}"
            row = model, f"{asked.hosts} × {each}", f"{mbit:g}", measured.variant, ms, times, bytes_
            table.add_row(*row)
            console.print("  ".join(row), style="dim", highlight=False)
        for doubt in result.doubts:
            console.print(f"{model}, {each}, {mbit:g}: {doubt}")
    console.print(table)
    if asked.json is not None:
        results.write_json(asked.json, {"results": [results.as_json(one) for one in found]})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserMistake as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
