"""Commands that show graphs of neighbors, before any job uses one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal import errors
from shoal.cli.options import JsonOption, normalized, within
from shoal.cli.shell import app
from shoal.control.generation import MAX_SLOTS

_DEFAULT_WORKERS = 8
_BESIDE = 79  # columns that the facts and the picture need side by side

commands = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(commands, name="topology", help="Look at the graphs over which workers average with their neighbors.")


@commands.callback()
def _small() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # on small matrices its threads wait for each other, for seconds


def _specs(incomplete: str) -> list[str]:
    from shoal.sync.topology import EXAMPLES

    return [spec for spec in EXAMPLES if spec.startswith(incomplete)]


WorkersOption = Annotated[
    int | None,
    typer.Option(
        "-n", "--workers", callback=within(1, MAX_SLOTS), help=f"How many workers; {_DEFAULT_WORKERS} if left out."
    ),
]
HostsOption = Annotated[
    str | None, typer.Option("--hosts", metavar="N,N,…", help="How many workers each host has, as 4,4,3; one host.")
]


def _placed(workers: int | None, hosts: str | None) -> tuple[int, list[int] | None]:
    """How many workers, and the host of each rank."""
    if hosts is None:
        return workers or _DEFAULT_WORKERS, None
    sizes = hosts.split(",")
    if not all(size.strip().isdecimal() and 0 < int(size) <= MAX_SLOTS for size in sizes):
        raise errors.SettingsContradict(f"--hosts {hosts} are not the sizes of hosts; write them as --hosts 4,4,3")
    placed = [host for host, size in enumerate(sizes) for _ in range(int(size))]
    if workers not in (None, len(placed)) or len(placed) > MAX_SLOTS:
        wanted = f"-n {workers}" if workers is not None else f"the most that a job takes, {MAX_SLOTS}"
        raise errors.SettingsContradict(f"--hosts {hosts} has {len(placed)} workers, not {wanted}; change one of them")
    return len(placed), placed


@commands.command(
    epilog="""**Examples**

`shoal topology show ring -n 7`

`shoal topology show "one_peer(exponential_2)" -n 8 --step 2` — a schedule, and who sends to whom at step 2

`shoal topology show star --weights uniform` — what other weights do to it

`shoal topology show inner_outer_ring --hosts 4,4,3 --svg picture.svg`

`shoal topology show torus -n 12 --json | jq .spectral_gap`"""
)
def show(
    spec: Annotated[
        str,
        typer.Argument(metavar="TOPOLOGY", help="As shoal topology list names it.", autocompletion=_specs),
    ],
    workers: WorkersOption = None,
    weights: Annotated[
        str | None, typer.Option(metavar="uniform|metropolis", help="Other weights than the topology's own.")
    ] = None,
    step: Annotated[int, typer.Option(callback=within(0), help="Of a schedule, the step that is drawn.")] = 0,
    hosts: HostsOption = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=normalized, help="Write the picture there, as SVG.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show what a topology costs, how fast workers agree over it, and what it looks like."""
    from shoal.sync.mixing import WEIGHTS
    from shoal.sync.topology import KNOWN, parse
    from shoal.view.topology import facts_of, lines_of, picture, sent_in

    topology = parse(spec)
    if weights is not None:
        if weights not in WEIGHTS:
            raise errors.SettingsContradict(f"--weights {weights}: there are {' and '.join(WEIGHTS)}")
        topology = KNOWN[weights](topology)
    count, placed = _placed(workers, hosts)
    facts = facts_of(topology, count, placed, step)
    mixing = topology.mixing(count, step, placed)
    title = f"{topology}, {count} worker{'s' * (count != 1)}{f', step {step}' if topology.dynamic else ''}"
    if svg is not None:
        from shoal.report.topology import svg as drawn

        said = [f"{name} {text}" for name, text in lines_of(facts)]
        try:
            svg.write_text(drawn(mixing, title, said, placed), encoding="utf-8")
        except OSError as problem:
            raise errors.SettingsContradict(
                f"{svg} cannot be written: {problem.strerror}; choose another --svg"
            ) from None
    if as_json:
        print(json.dumps(facts))
        return 0
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)
    lines = [Text(), *(Text(name.ljust(14), style="dim") + Text(text) for name, text in lines_of(facts))]
    lines += [Text(), *map(Text, sent_in(facts))]
    drawing = Text() if console.options.ascii_only else picture(mixing)
    if console.width < _BESIDE:
        console.print(Text("\n").join([*lines, Text(), drawing]))
    else:
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("\n").join(lines), drawing)
        console.print(table)
    if svg is not None:
        console.print(str(svg), soft_wrap=True)
    return 0


@commands.command(
    "list",
    epilog="""**Examples**

`shoal topology list` — over 8 workers

`shoal topology list -n 13 --json | jq '.[] | select(.steps_to_a_thousandth < 20) | .topology'`

`shoal topology list --hosts 8,8,4`""",
)
def list_(workers: WorkersOption = None, hosts: HostsOption = None, as_json: JsonOption = False) -> int:
    """Compare the topologies that there are, over one number of workers."""
    from shoal.sync.topology import EXAMPLES, parse
    from shoal.view.topology import facts_of, number

    count, placed = _placed(workers, hosts)
    found = [facts_of(parse(spec), count, placed) for spec in EXAMPLES]
    if as_json:
        print(json.dumps([{name: facts[name] for name in facts if name != "neighbors"} for facts in found]))
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("topology", no_wrap=True)
    for name in ("sends", "diameter", "period", "gap", "rate", "steps"):
        table.add_column(name, justify="right")
    for facts in found:
        gap, rate = (facts[name] for name in ("spectral_gap", "rate"))
        table.add_row(
            facts["topology"],
            f"{facts['sends']:.3g}",
            "–" if facts["diameter"] is None else str(facts["diameter"]),
            "–" if facts["period"] is None else "" if facts["period"] == 1 else str(facts["period"]),
            "–" if gap is None else number(gap),
            "–" if rate is None else number(rate),
            "–" if facts["steps_to_a_thousandth"] is None else f"{facts['steps_to_a_thousandth']:,}",
        )
    console = Console(highlight=False, markup=False)
    console.print(
        f"over {count} worker{'s' * (count != 1)}; rate: of disagreement, a step; steps: to a thousandth of it",
        style="dim",
    )
    console.print(table)
    return 0
