"""Commands that train, score and use the model of a file that has functions and no loop."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import checkpoints, errors, given
from shoal.cli.job import check_script, checked_address, run_job
from shoal.cli.options import (
    BatchOption,
    ConfigOption,
    DirOption,
    InitOption,
    JsonOption,
    LoadersOption,
    ModelFile,
    QuietOption,
    SetOption,
    WeightsOption,
    WorkersOption,
    normalized,
)
from shoal.cli.shell import app
from shoal.control import prometheus, rundir
from shoal.control.rundir import RunDir
from shoal.launch.screen import Screen
from shoal.launch.settings import JobSettings, parse_size
from shoal.process import cores
from shoal.recipe import RUNNER, TRAINING, Recipe, check_model_file, read_config, with_values

_BATCHES = {"batch_size", "global_batch"}  # of which a recipe has one
_OF_JOB = JobSettings.names() | {"workers"}


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
    init_from: InitOption = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> int:
    """Train the model of a file, without a loop of your own."""
    here = {"epochs": epochs, "batch_size": batch_size, "global_batch": global_batch, "loaders": loaders}
    return _use_model_file(Recipe(str(model_file)), here, workers, directory, config, init_from, settings, quiet)[0]


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
    here = {"batch_size": batch_size, "loaders": loaders}
    code, run_dir = _use_model_file(recipe, here, workers, directory, config, weights, settings, quiet=True)
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
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.npy", callback=normalized, help="Where the rows go, one for each sample, in order."),
    ],
    workers: WorkersOption = None,
    directory: DirOption = None,
    config: ConfigOption = None,
    batch_size: BatchOption = None,
    loaders: LoadersOption = None,
    settings: SetOption = None,
    quiet: QuietOption = False,
) -> int:
    """Write the outputs of a trained model for `dataset("predict")`: one row for each sample, in order."""
    if not out.parent.is_dir():
        raise errors.SettingsContradict(
            f"--out {out}: there is no folder {out.parent}; make it, or choose another --out"
        )
    if out.is_dir():
        raise errors.SettingsContradict(f"--out {out} is a folder; name a file in it, as {out / 'rows.npy'}")
    recipe = Recipe(str(model_file), action="predict", out=str(out.absolute()))
    here = {"batch_size": batch_size, "loaders": loaders}
    code, _ = _use_model_file(recipe, here, workers, directory, config, weights, settings, quiet)
    if code == 0:
        print(out)
    return code


def _use_model_file(
    recipe: Recipe,
    here: dict[str, Any],
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
    of_job = _of_job(of_job, f"{config} [job]")
    here = {name: value for name, value in here.items() if value is not None}
    given_here = {*here, *(text.partition("=")[0] for text in more or ())}
    if given_here & _BATCHES:  # one of them, and the file's other is not meant any more
        of_training = {name: value for name, value in of_training.items() if name not in _BATCHES}
    recipe = with_values(replace(recipe, file=str(path)), of_training, f"{config} [train]")
    recipe = with_values(recipe, here, "the command line")
    for text in more or ():
        name, is_one, value = text.partition("=")
        if not is_one:
            raise errors.SettingsContradict(f"--set {text} has no value; write --set name=value")
        one = {name: _parsed(value)}
        if name in TRAINING:
            recipe = with_values(recipe, one, "--set")
        else:
            of_job |= _of_job(one, "--set", also=TRAINING)
    elsewhere = of_job.pop("workers", cores())
    size = parse_size(str(elsewhere), cores(), "workers =") if workers is None else parse_size(workers, cores())
    if weights is None and of_job.get("init_from"):
        weights = Path(of_job["init_from"])
    if weights is not None:
        checkpoints.weights(weights)
        of_job["init_from"] = str(weights.absolute())
    if of_job.get("tls"):
        of_job["tls"] = os.path.abspath(of_job["tls"])
    settings = JobSettings(
        script=str(RUNNER),
        args=recipe.args(),
        cwd=os.getcwd(),
        min=size.min,
        max=size.max,
        target=size.target,
        **of_job,
    )
    address = checked_address(settings)
    if settings.metrics_port is not None:
        prometheus.check_free(*prometheus.parse_address(settings.metrics_port))
    kept = asdict(settings)
    run_dir = RunDir.create(directory, kept) if directory else rundir.create_default(path, kept)
    with run_dir.held():
        return run_job(run_dir, settings, address, Screen(quiet)), run_dir


def _of_job(values: dict[str, Any], where: str, also: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Settings of the job, checked. `workers` is read later, like -n: a number, or `"2:8"`. `also`: names that could
    have been meant too."""
    others = {name: value for name, value in values.items() if name != "workers"}
    return {**values, **given.fitted(others, JobSettings, _OF_JOB | also, where)}


def _parsed(text: str) -> Any:
    """A value as TOML would read it; a word without quotes is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
