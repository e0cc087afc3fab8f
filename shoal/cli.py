"""The command line. It never imports torch, so that it answers at once.

Exit codes: 0 the job finished or was stopped; 2 something the user can put right, told in one line; 1 the job failed;
128 + n after signal n.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shoal import __version__, checkpoints, errors
from shoal.checkpoints import Checkpoint
from shoal.control import commands as client
from shoal.control import prometheus, rundir
from shoal.control.environment import WorkerEnvironment
from shoal.control.rundir import Committed, RunDir
from shoal.control.timeouts import DEFAULT_BUDGET_S, Timeouts
from shoal.launch.job import BEGINNING, Ending, Job, Origin, parse_size
from shoal.launch.local import LocalLauncher
from shoal.launch.relaunch import Relaunch
from shoal.launch.screen import Screen, prefixed
from shoal.launch.settings import JobSettings
from shoal.launch.tail import LOG_LIMIT_BYTES
from shoal.metrics import EventLog, read_events, write_end
from shoal.recipe import RUNNER, Recipe, check_model_file, read_config, with_values
from shoal.view import events as event_view
from shoal.view import logs as log_view
from shoal.view.state import audited, how_it_ended, line_of, live, name_of, of_this_life, state_of
from shoal.wording import counted

app = typer.Typer(
    help="Train one PyTorch model on many workers that come and go.",
    epilog="""**Examples**

`shoal doctor` — is this machine fit to train?

`shoal run -n 4 train.py`, then in another terminal `shoal top`

`shoal COMMAND --help` has examples of each; `shoal --install-completion` teaches your shell to complete them""",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _jobs(incomplete: str) -> list[str]:
    """For completion in a shell."""
    return [path.parent.name for path in sorted(rundir.RUNS.glob(f"{incomplete}*/job.json"))]


JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A run directory, or a name under ./shoal-runs; the newest if left out.",
        autocompletion=_jobs,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


class OnErrorChoice(str, Enum):
    stop = "stop"
    relaunch = "relaunch"


_POLL_S = 0.1
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str, option: str = "--memory") -> int:
    """`2G`, `512M`, `1.5GiB`: powers of 1024. Fails with SettingsContradict."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise errors.SettingsContradict(f"{option} {text} is not a number of bytes; write {option} 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def check_script(script: Path) -> None:
    """Fails with ScriptFailed for what can be known before torch is loaded: that it is not there, or does not parse."""
    try:
        source = script.read_bytes()
    except FileNotFoundError:
        raise errors.ScriptFailed(f"{script} does not exist; name a Python script") from None
    except OSError as problem:
        raise errors.ScriptFailed(f"{script} cannot be read: {problem.strerror}; name a Python script") from problem
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(script), "exec")
    except (SyntaxError, ValueError) as problem:
        where = f", line {problem.lineno}" if isinstance(problem, SyntaxError) and problem.lineno else ""
        text = problem.msg if isinstance(problem, SyntaxError) else problem
        raise errors.ScriptFailed(f"{script}{where}: {type(problem).__name__}: {text}") from None


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="""**Examples**

`shoal run -n 4 train.py` — four workers

`shoal run -n 2:8 train.py --lr 0.1` — elastic: pauses below two, grows to eight; what follows the script is its own

`shoal run -n 4 --dir runs/a --memory 2G --threads 2 --no-pin train.py`

Ctrl-C lets the workers finish their step and leave; Ctrl-C again kills them.""",
)
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script: it calls shoal.run(main).")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    workers: Annotated[
        str | None,
        typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; one for each core if left out."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory; a new one under ./shoal-runs if left out.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="How long an awaited worker may be silent.")
    ] = DEFAULT_BUDGET_S,
    on_error: Annotated[
        OnErrorChoice, typer.Option(help="When the script raises in a worker: stop the job, or start another worker.")
    ] = OnErrorChoice.stop,
    restarts: Annotated[
        int | None,
        typer.Option(help="Failed workers within a minute before the job gives up; 10, or 3 for each worker."),
    ] = None,
    backoff: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="The pause before replacing a worker that died young; doubles each time."),
    ] = Relaunch.first_delay_s,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="A cap on shared memory, as 2G; what the machine has if left out."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="torch threads of a worker; its share of the cores if left out.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Give each worker cores of its own.")] = True,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            metavar="STEPS|TIME|off", help="Take a checkpoint so often: 500 steps, 30s, 10m, 2h; also at the end."
        ),
    ] = checkpoints.DEFAULT_EVERY,
    keep: Annotated[int, typer.Option(help="How many checkpoints stay.")] = checkpoints.DEFAULT_KEEP,
    init_from: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Begin with the weights of a checkpoint, a run, or a safetensors file."),
    ] = None,
    log_size: Annotated[
        str, typer.Option(metavar="BYTES", help="A worker's log keeps between this much and twice as much of its end.")
    ] = f"{LOG_LIMIT_BYTES >> 20}M",
    metrics_port: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve figures for Prometheus there, on loopback if no host is named."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors and the summary only.")] = False,
) -> int:
    """Train with a script on this machine, while workers come and go."""
    cores = len(os.sched_getaffinity(0))
    size = parse_size(workers if workers is not None else str(cores), cores)
    if metrics_port is not None:
        prometheus.check_free(*prometheus.parse_address(metrics_port))
    settings = JobSettings(
        script=str(script.absolute()),
        cwd=os.getcwd(),
        args=tuple(args or ()),
        min=size.min,
        max=size.max,
        target=size.target,
        budget_s=Timeouts(budget_s).budget_s,
        on_error=on_error.value,
        restarts=restarts,
        backoff_s=backoff,
        memory_bytes=parse_bytes(memory) if memory is not None else None,
        threads=threads,
        pin=pin,
        log_bytes=parse_bytes(log_size, "--log-size"),
        metrics_port=metrics_port,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=keep,
        init_from=str(init_from.absolute()) if init_from is not None else "",
    )
    check_script(script)
    if init_from is not None:
        checkpoints.weights(init_from)
    kept = asdict(settings)
    run_dir = RunDir.create(directory, kept) if directory else rundir.create_default(script, kept)
    with run_dir.held():
        return _run_job(run_dir, settings, Screen(quiet))


ModelFile = Annotated[Path, typer.Argument(metavar="MODEL_FILE", help="A Python file with functions and no loop.")]
WorkersOption = Annotated[
    str | None,
    typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; one for each core if left out."),
]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="The run directory; a new one under ./shoal-runs if left out.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="job.toml", help="Settings in tables [job] and [train].")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting of the job or the training; may be repeated."),
]
BatchOption = Annotated[int | None, typer.Option(help="Samples of one worker in a step.")]
LoadersOption = Annotated[int | None, typer.Option(help="Loader processes of each worker.")]
WeightsOption = Annotated[
    Path, typer.Option("--from", metavar="PATH", help="The weights: a run, a checkpoint, or a safetensors file.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Errors and the summary only.")]


@app.command(
    epilog="""**Examples**

`shoal train mnist.py -n 4 --epochs 10 --batch-size 64` — a model file: functions `model, loss, optimizer, dataset`, and
if you like `metrics, schedulers, callbacks`

`shoal train mnist.py --config job.toml --set clip_norm=1.0`"""
)
def train(
    model_file: ModelFile,
    workers: WorkersOption = None,
    directory: DirOption = None,
    config: ConfigOption = None,
    epochs: Annotated[int | None, typer.Option(help="How often each sample is used.")] = None,
    batch_size: BatchOption = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of a step, whatever the number of workers.")] = None,
    loaders: LoadersOption = None,
    init_from: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Begin with these weights: a run, a checkpoint, a file.")
    ] = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> int:
    """Train the model of a file, without a loop of your own."""
    given = {"epochs": epochs, "batch_size": batch_size, "global_batch": global_batch, "loaders": loaders}
    return _use_model_file(Recipe(str(model_file)), given, workers, directory, config, init_from, settings, quiet)[0]


@app.command(
    epilog="""**Examples**

`shoal evaluate mnist.py --from runs/a -n 4`

`shoal evaluate mnist.py --from runs/a/checkpoints/step-000000500-g1 --json`"""
)
def evaluate(
    model_file: ModelFile,
    weights: WeightsOption,
    workers: WorkersOption = None,
    directory: DirOption = None,
    config: ConfigOption = None,
    batch_size: BatchOption = None,
    loaders: LoadersOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> int:
    """Score a trained model on `dataset("evaluate")` by the model file's `metrics`: each sample counted once."""
    recipe = Recipe(str(model_file), action="evaluate")
    given = {"batch_size": batch_size, "loaders": loaders}
    code, run_dir = _use_model_file(recipe, given, workers, directory, config, weights, settings, quiet=True)
    if code == 0:
        means = json.loads((run_dir.results / "pass-0.json").read_text())
        print(json.dumps(means) if as_json else "\n".join(f"{name} {value:.6g}" for name, value in means.items()))
    return code


@app.command(
    epilog="""**Examples**

`shoal predict mnist.py --from runs/a --out predictions.npy`"""
)
def predict(
    model_file: ModelFile,
    weights: WeightsOption,
    out: Annotated[Path, typer.Option(metavar="FILE.npy", help="Where the rows go, one for each sample, in order.")],
    workers: WorkersOption = None,
    directory: DirOption = None,
    config: ConfigOption = None,
    batch_size: BatchOption = None,
    loaders: LoadersOption = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> int:
    """Write the outputs of a trained model for `dataset("predict")`: one row for each sample, in order."""
    recipe = Recipe(str(model_file), action="predict", out=str(out.absolute()))
    given = {"batch_size": batch_size, "loaders": loaders}
    code, _ = _use_model_file(recipe, given, workers, directory, config, weights, settings, quiet)
    if code == 0:
        print(out)
    return code


def _use_model_file(
    recipe: Recipe,
    given: dict[str, Any],
    workers: str | None,
    directory: Path | None,
    config: Path | None,
    weights: Path | None,
    more: list[str] | None,
    quiet: bool,
) -> tuple[int, RunDir]:
    """What is given on the command line goes before the file of settings, and that before what is built in."""
    path = Path(recipe.file).absolute()
    check_script(path)
    check_model_file(path, recipe.action)
    of_job, of_training = read_config(config) if config is not None else ({}, {})
    recipe = with_values(replace(recipe, file=str(path)), of_training, str(config))
    recipe = with_values(
        recipe, {name: value for name, value in given.items() if value is not None}, "the command line"
    )
    for text in more or ():
        name, is_one, value = text.partition("=")
        if not is_one:
            raise errors.SettingsContradict(f"--set {text} has no value; write --set name=value")
        if name in {field.name for field in fields(JobSettings)} | {"workers"}:
            of_job[name] = _parsed(value)
        else:
            recipe = with_values(recipe, {name: _parsed(value)}, "--set")
    cores = len(os.sched_getaffinity(0))
    size = parse_size(str(workers or of_job.pop("workers", cores)), cores)
    of_job.pop("workers", None)
    if weights is not None:
        checkpoints.weights(weights)
        of_job["init_from"] = str(weights.absolute())
    unknown = sorted(set(of_job) - {field.name for field in fields(JobSettings)})
    if unknown:
        raise errors.SettingsContradict(f"there is no setting {unknown[0]!r} of a job; see shoal run --help")
    try:
        settings = JobSettings(
            **{**of_job, "script": str(RUNNER), "args": recipe.args(), "cwd": os.getcwd()},
            min=size.min,
            max=size.max,
            target=size.target,
        )
    except TypeError as problem:
        raise errors.SettingsContradict(f"a setting of the job has another type than it should: {problem}") from None
    kept = asdict(settings)
    run_dir = RunDir.create(directory, kept) if directory else rundir.create_default(path, kept)
    with run_dir.held():
        return _run_job(run_dir, settings, Screen(quiet)), run_dir


def _parsed(text: str) -> Any:
    """A value as TOML would read it; a word without quotes is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@app.command(
    epilog="""**Examples**

`shoal resume` — go on with the newest job under ./shoal-runs

`shoal resume runs/a -n 8` — with eight workers, whatever it had before"""
)
def resume(
    job: JobArgument = None,
    workers: Annotated[
        str | None,
        typer.Option("-n", "--workers", metavar="N|MIN:MAX", help="How many workers; as before if left out."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors and the summary only.")] = False,
) -> int:
    """Go on with a job that has ended or was killed, from its newest checkpoint that is whole."""
    run_dir = rundir.find(job)
    settings = JobSettings.read(run_dir.settings())
    if workers is not None:
        size = parse_size(workers, len(os.sched_getaffinity(0)))
        settings = replace(settings, min=size.min, max=size.max, target=size.target)
    check_script(Path(settings.script))
    screen = Screen(quiet)
    with run_dir.held():
        newest, damaged = checkpoints.newest_whole(run_dir.checkpoints)
        for line in damaged:
            screen.say(f"{line}; it is left out")
        if newest is None and how_it_ended(read_events(run_dir.events))[0] == "finished":
            raise errors.RunDirUnusable(
                f"{run_dir.path} has finished and left no checkpoint to go on from; run it anew with shoal run"
            )
        if settings.cwd and Path.cwd() != Path(settings.cwd):
            try:
                os.chdir(settings.cwd)
                screen.tell(f"in {settings.cwd}, where the job was started")
            except OSError as problem:
                screen.say(f"{settings.cwd}, where the job was started: {problem.strerror}; it goes on in {Path.cwd()}")
        if newest is None:
            screen.tell("there is no checkpoint to go on from: the job begins anew")
        else:
            screen.tell(f"going on from {newest.path.name}: step {newest.step:,}, epoch {newest.manifest['epoch']}")
        return _run_job(run_dir, settings, screen, _origin(run_dir, newest), newest)


def _origin(run_dir: RunDir, newest: Checkpoint | None) -> Origin:
    """Make the run directory that of a job that goes on from this checkpoint."""
    from shoal.data.fed import roll_back  # numpy costs a tenth of a second

    generation = run_dir.last_generation()
    at = None if newest is None else {**newest.manifest["record"], "seq": newest.seq}
    committed = None if at is None else Committed(**{field.name: at[field.name] for field in fields(Committed)})
    roll_back(run_dir.audit, generation, 0 if newest is None else newest.seq)
    run_dir.forget_ending()
    events = EventLog(run_dir.events)
    events.write(time.time(), "resumed", generation=generation, step=0 if newest is None else newest.step)
    events.close()
    return Origin(committed, generation, run_dir.next_worker())


def _run_job(
    run_dir: RunDir,
    settings: JobSettings,
    screen: Screen,
    origin: Origin = BEGINNING,
    checkpoint: Checkpoint | None = None,
) -> int:
    inherited = WorkerEnvironment.from_env(os.environ)
    environment = WorkerEnvironment(
        threads=settings.threads or 0,
        pin=settings.pin,
        plugin=inherited.plugin,
        faults=inherited.faults and os.path.abspath(inherited.faults),
        checkpoint_every=settings.checkpoint_every,
        checkpoint_keep=settings.checkpoint_keep,
        resume=str(checkpoint.path) if checkpoint is not None else "",
        init_from=settings.init_from,
    )
    make_launcher = functools.partial(
        LocalLauncher,
        Path(settings.script),
        list(settings.args),
        run_dir.logs,
        memory_limit_bytes=settings.memory_bytes,
    )
    screen.tell(f"job {name_of(run_dir)}: {counted(settings.target, 'worker')}, run directory {run_dir.path}")
    began = time.monotonic()

    async def go() -> Ending:
        relaunch, timeouts = settings.relaunch, settings.timeouts
        job = Job(
            run_dir,
            settings.size,
            timeouts,
            relaunch,
            settings.on_error,
            environment,
            screen,
            origin,
            settings.log_bytes,
        )
        return await job.run(make_launcher)

    ending = asyncio.run(go())
    took_s = time.monotonic() - began
    try:
        if ending.error is not None:
            raise ending.error
        lines = _summary(run_dir, ending, took_s)
    except errors.ShoalError as error:
        write_end(run_dir.events, "failed", _one_line(error))
        if ending.traceback is not None:
            screen.show(ending.traceback)
        raise
    finished = any(event["event"] == "finished" for event in of_this_life(read_events(run_dir.events)))
    write_end(run_dir.events, *(("finished", "") if finished else ("ended", f"stopped: {ending.reason}")))
    for line in lines:
        screen.say(line)
    return 0 if ending.signum is None else 128 + ending.signum


def _summary(run_dir: RunDir, ending: Ending, took_s: float) -> list[str]:
    events = read_events(run_dir.events)
    kinds = [event["event"] for event in events]
    if "generation" not in kinds:
        if ending.signum is None and "stopping" not in kinds:
            raise _never_joined(run_dir, called="finished" in kinds)
        return [f"stopped ({ending.reason}) before the job had begun"]
    finished = any(event["event"] == "finished" for event in of_this_life(events))
    how = "finished" if finished else f"stopped ({ending.reason})"
    report = audited(run_dir)
    lost, refused = ({event["worker_id"] for event in events if event["event"] == kind} for kind in ("lost", "refused"))
    line = (
        f"{how}: {counted(report.steps, 'step')}, {counted(report.samples, 'sample')} in {took_s:.1f} s, "
        f"{counted(kinds.count('generation'), 'generation')}, {counted(len(lost - refused), 'worker')} lost"
    )
    return [line, str(report)]


def _never_joined(run_dir: RunDir, called: bool) -> errors.ScriptFailed:
    script = Path(run_dir.settings()["script"]).name
    if called:
        return errors.trained_nothing(script)
    return errors.ScriptFailed(f"{script} ended without calling shoal.run(main); call it at the end of the script")


@app.command(
    epilog="""**Examples**

`shoal status` — the newest job under ./shoal-runs

`shoal status runs/a --json | jq .progress.done`

`shoal top` shows the same once a second"""
)
def status(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Show who is in, how far the job is, and how it ended if it has."""
    run_dir = rundir.find(job)
    state = state_of(run_dir)
    if as_json:
        print(json.dumps(state))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(line_of(name_of(run_dir), state))
    if state["workers"]:
        table = Table("worker", "rank", "state", "step", "pid", "host", box=None)
        for worker in state["workers"]:
            cells = [worker[name] for name in ("worker_id", "rank", "state", "step", "pid", "host")]
            if worker["suspect"]:
                cells[2] = f"{worker['state']}, suspect"
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        console.print(table)
    return 0


def _ended(run_dir: RunDir) -> str:
    """What there is to say to somebody who takes an ended job for a running one."""
    phase, reason = how_it_ended(read_events(run_dir.events))
    how = f"{phase}: {reason}" if phase == "failed" else reason or phase
    return f"{name_of(run_dir)} has ended ({how})"


@app.command(
    epilog="""**Examples**

`shoal scale train-20260101-120000 6` — six workers, whether that is more or fewer

`shoal scale runs/a 1`"""
)
def scale(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="A run directory, or a name under ./shoal-runs.", autocompletion=_jobs),
    ],
    target: Annotated[str, typer.Argument(metavar="N", help="How many workers.")],
) -> int:
    """Change the number of workers of a running job."""
    if not target.isdecimal() or int(target) < 1:
        raise errors.SettingsContradict(
            f"cannot scale to {target}: it is not a number of workers; write shoal scale JOB 4"
        )
    run_dir = rundir.find(job)
    if not run_dir.runs():
        raise errors.JobNotFound(f"{_ended(run_dir)}; go on with shoal resume -n {target}")
    state = client.scale(run_dir, int(target))
    print(f"{name_of(run_dir)}: {counted(state['target'], 'worker')} wanted")
    return 0


@app.command(
    epilog="""**Examples**

`shoal stop` — the newest job; one that has ended already is no error

`shoal stop runs/a && shoal events runs/a --follow` — until it has really ended"""
)
def stop(job: JobArgument = None) -> int:
    """Let every worker finish its step and leave, and end the job."""
    run_dir = rundir.find(job)
    if not run_dir.runs():
        print(_ended(run_dir))
        return 0
    client.stop(run_dir, "shoal stop")
    print(f"{name_of(run_dir)}: stopping")
    return 0


@app.command(
    epilog="""**Examples**

`shoal checkpoint` — of the newest job under ./shoal-runs

`shoal checkpoint runs/a --json | jq .path`"""
)
def checkpoint(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Take a checkpoint of the next step, and wait until it is on the disk."""
    run_dir = rundir.find(job)
    before = len(read_events(run_dir.events))
    asked = client.checkpoint(run_dir)["generation"]
    while True:
        for event in read_events(run_dir.events)[before:]:
            if event["event"] == "checkpointed":
                print(json.dumps(event) if as_json else f"{event['path']}: {event['text']}")
                return 0
            if event["event"] == "checkpoint_failed":
                raise errors.ShoalError(event["text"])
        state = live(run_dir)
        if not state:
            raise errors.JobNotFound(f"{name_of(run_dir)} ended before it had taken a checkpoint; see shoal status")
        if state["generation"] != asked:  # the lowest rank may have gone with the request
            asked = client.checkpoint(run_dir)["generation"]
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`| head` ends the command, with the exit code of a signal."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more at its end
        raise typer.Exit(128 + signal.SIGPIPE) from None


@app.command(
    epilog="""**Examples**

`shoal events` — the newest job, one line an event

`shoal events runs/a --follow` — until the job has ended

`shoal events --json | jq 'select(.event == "generation") | .members'`"""
)
def events(
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> int:
    """Show what happened: who joined, left or died, and why."""
    with _reader_may_leave():
        for event in event_view.events(rundir.find(job), follow):
            line = json.dumps(event) if as_json else f"{event_view.time_of(event)}  {event_view.event_line(event)}"
            print(line, flush=follow)
    return 0


def _workers(context: typer.Context, incomplete: str) -> list[str]:
    try:
        found = log_view.names(rundir.find(context.params.get("job")))
    except errors.ShoalError:
        return []
    return [name for name in found if name.startswith(incomplete)]


@app.command(
    epilog="""**Examples**

`shoal logs` — all that the workers of the newest job printed, worker by worker

`shoal logs -f` — the last lines, and then each as it comes, until the job has ended

`shoal logs runs/a --worker w3 -n 50`

`shoal logs --worker coordinator` — shoal's own: coordinator, forkserver"""
)
def logs(
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker", "-w", metavar="W", help="Of this worker only; may be repeated.", autocompletion=_workers
        ),
    ] = None,
    last_lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="No more than so many of each that are there already.")
    ] = None,
) -> int:
    """Show what the workers print."""
    read = log_view.follow if follow else log_view.logs
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with _reader_may_leave():
        for worker_id, line in read(rundir.find(job), worker or (), last_lines):
            if console.is_terminal:
                console.print(prefixed(worker_id, line))
            else:
                print(f"{worker_id} | {line}", flush=follow)
    return 0


@app.command(
    epilog="""**Examples**

`shoal top` — the newest job under ./shoal-runs

`shoal top runs/a --interval 5`

`shoal top | tee top.txt` — not on a terminal it is a line a second

q or Ctrl-C quits; the job goes on."""
)
def top(
    job: JobArgument = None,
    interval_s: Annotated[
        float, typer.Option("--interval", "-d", metavar="SECONDS", min=0.1, help="Between two looks.")
    ] = 1.0,
) -> int:
    """Watch a job as it trains: workers, speed, progress, events."""
    from shoal.view.top import watch

    with _reader_may_leave():
        return watch(rundir.find(job), Console(highlight=False, markup=False), interval_s)


@app.command(
    epilog="""**Examples**

`shoal doctor` — each line that is not ok says what to change

`shoal doctor --json | jq '.checks[] | select(.verdict != "ok")'`

Exits with 1 when something is bad, that is, when shoal cannot run."""
)
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Where run directories will be.")] = rundir.RUNS,
    as_json: JsonOption = False,
) -> int:
    """Check whether this machine is fit to train, and say what to change."""
    from shoal.view import doctor as doctor_view

    return doctor_view.report(directory, Console(highlight=False, markup=False), as_json)


@app.command(
    epilog="""**Examples**

`shoal audit runs/a` — exits with 1 when a sample was lost or trained twice

`shoal audit --json | jq .clean`"""
)
def audit(job: JobArgument = None, as_json: JsonOption = False) -> int:
    """Check, from what the workers really fed, that every sample was trained exactly once."""
    run_dir = rundir.find(job)
    report = audited(run_dir)
    if as_json:
        print(json.dumps({**vars(report), "clean": report.clean}))
    else:
        print(report)
        for line in report.mismatches:
            print(line)
    return 0 if report.clean else 1


@app.command(
    epilog="""**Examples**

`shoal report` — of the newest job, to report.html in its run directory

`shoal report runs/a --out a.html` — one file that needs no network"""
)
def report(
    job: JobArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the page goes; report.html in the run directory.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page about a job: step rate, where the time went, loss, and what every reconfiguration cost."""
    from shoal.report import page, read

    run_dir = rundir.find(job)
    found = read.read(run_dir, live(run_dir))
    path = out or run_dir.path / "report.html"
    try:
        path.write_text(page.page(found), encoding="utf-8")
    except OSError as problem:
        raise errors.SettingsContradict(f"{path} cannot be written: {problem.strerror}; choose another --out") from None
    if as_json:
        print(json.dumps({"page": str(path), **page.figures(found)}))
    else:
        for line in (*page.summary(found), str(path)):
            print(line)
    return 0


@app.command(
    epilog="""**Examples**

`shoal web` — the newest job; open the address that it prints

`shoal web runs/a --port 8080`"""
)
def web(
    job: JobArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0 for any that is free.")] = 0,
) -> int:
    """Show a job live in a browser, with buttons to scale it, take a checkpoint and stop it."""
    run_dir = rundir.find(job)
    try:
        import uvicorn

        from shoal.web.app import application, new_key
    except ImportError as problem:
        raise errors.SettingsContradict(
            f"shoal web needs {problem.name}, which is not installed; pip install 'shoal[web]'"
        ) from None
    key = new_key()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()  # before the address is told: who opens it at once waits, and is not refused
        except OSError as problem:
            raise errors.SettingsContradict(
                f"--port {port} cannot be used: {problem.strerror}; choose another, or 0 for any that is free"
            ) from None
        print(f"http://127.0.0.1:{server.getsockname()[1]}/?key={key}", flush=True)
        config = uvicorn.Config(application(run_dir, key), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[server])
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


# typer brings its own copy of click in newer versions, and exports this one of its errors only
_BadCommandLine: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _one_line(error: BaseException) -> str:
    first, start, rest = str(error).partition("\ndef ")  # an example of what is missing stays as it is
    text = " ".join(first.split()) + start + rest
    return text if type(error) is errors.ShoalError else f"{type(error).__name__}: {text}"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except errors.ShoalError as error:
        if error.__cause__ is not None and type(error) is errors.ShoalError:  # ours to put right, so show where
            traceback.print_exception(error.__cause__)
        print(f"shoal: {_one_line(error)}", file=sys.stderr)
        code = errors.exit_code(error)
    except _BadCommandLine as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            text = error.format_message().rstrip(".")
            print(f"shoal: SettingsContradict: {text}; see shoal --help", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)
