"""The script of a job whose user wrote a model file: its functions, and the loop around them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import shoal
from shoal.recipe import DEFAULT_BATCH, NEEDED, Recipe, missing
from shoal.train.attempt import Batch
from shoal.train.worker import Worker

_CALLBACKS = ("on_step", "on_epoch", "on_reconfigure")


def load(path: Path, action: str) -> ModuleType:
    """The model file as a module. Raises ScriptFailed when it lacks a function."""
    sys.path.insert(0, str(path.parent))  # its own neighbors, as in a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # loader processes and pickles look for it there
    spec.loader.exec_module(module)
    for name in NEEDED[action]:
        if not callable(getattr(module, name, None)):
            raise missing(path, name, action)
    return module


def main(worker: Worker) -> None:
    recipe = Recipe(**json.loads(sys.argv[1]))
    user = load(Path(recipe.file), recipe.action)
    torch.manual_seed(recipe.seed)
    net = user.model()
    if recipe.action == "train":
        train(worker, recipe, user, net)
    else:
        # Nothing is learned: an optimizer that keeps nothing.
        worker.attach(net, torch.optim.SGD(net.parameters(), lr=0.0))
        use = evaluate if recipe.action == "evaluate" else predict
        use(worker, recipe, user, net)


def train(worker: Worker, recipe: Recipe, user: ModuleType, net: nn.Module) -> None:
    optimizer = user.optimizer(net)
    made = user.callbacks() if hasattr(user, "callbacks") else {}
    callbacks = made if isinstance(made, Mapping) else {name: getattr(made, name, None) for name in _CALLBACKS}
    schedulers = user.schedulers(optimizer) if hasattr(user, "schedulers") else ()
    worker.attach(
        net,
        optimizer,
        clip_norm=recipe.clip_norm,
        accumulate=recipe.accumulate,
        schedulers=schedulers,
        **{name: callback for name, callback in callbacks.items() if callback is not None},
    )
    samples, metrics = user.dataset("train"), getattr(user, "metrics", None)
    evaluates = bool(recipe.evaluate_every and metrics)
    # An evaluation ends a pass; without any, one pass takes all epochs.
    lengths = [recipe.evaluate_every] * (recipe.epochs // recipe.evaluate_every) if evaluates else []
    if rest := recipe.epochs - sum(lengths):
        lengths.append(rest)
    done = 0
    for epochs in lengths:
        batches = worker.batches(
            samples,
            batch_size=None if recipe.global_batch else _size(recipe),
            global_batch=recipe.global_batch,
            epochs=epochs,
            shuffle=recipe.shuffle,
            seed=recipe.seed,
            num_workers=recipe.loaders,
        )
        for batch in batches:
            outputs = net(batch.x)
            more = metrics(outputs.detach(), batch.y) if metrics is not None else {}
            worker.step(user.loss(outputs, batch.y), **more)
        done += epochs
        if evaluates:
            evaluate(worker, recipe, user, net, f"epoch {done}: ")


def evaluate(worker: Worker, recipe: Recipe, user: ModuleType, net: nn.Module, title: str = "") -> None:
    samples = user.dataset("evaluate")
    if samples is None:
        return

    def score(batch: Batch) -> dict[str, Any]:
        return dict(user.metrics(net(batch.x), batch.y))

    means = worker.evaluate(samples, score, batch_size=_size(recipe), num_workers=recipe.loaders)
    if worker.rank == 0:
        print(title + ", ".join(f"{name} {value:.4f}" for name, value in means.items()), flush=True)


def predict(worker: Worker, recipe: Recipe, user: ModuleType, net: nn.Module) -> None:
    def outputs(batch: Batch) -> Any:
        return net(batch.x)

    worker.predict(
        user.dataset("predict"), outputs, recipe.out, batch_size=_size(recipe), num_workers=recipe.loaders
    )  # fmt: skip


def _size(recipe: Recipe) -> int:
    return recipe.batch_size or DEFAULT_BATCH


if __name__ == "__main__":
    shoal.run(main)
