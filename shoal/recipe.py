"""What `shoal train`, `evaluate` and `predict` do with a model file: a Python file with functions, and no loop."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from shoal import errors, given

DEFAULT_BATCH = 32
# Which functions each action needs; `metrics` is wanted by `train` too, `schedulers` and `callbacks` may be there.
NEEDED = {
    "train": ("model", "loss", "optimizer", "dataset"),
    "evaluate": ("model", "dataset", "metrics"),
    "predict": ("model", "dataset"),
}
EXAMPLES = {
    "model": "def model():\n    net = torch.nn.Linear(784, 10)\n    return net",
    "loss": "def loss(outputs, targets):\n    # one number, the mean over the samples\n"
    "    return torch.nn.functional.cross_entropy(outputs, targets)",
    "optimizer": "def optimizer(model):\n    rate = 0.01\n    return torch.optim.AdamW(model.parameters(), lr=rate)",
    "dataset": "def dataset(mode):  # 'train', 'evaluate' or 'predict'\n    file = f'{mode}.pt'\n"
    "    return torch.utils.data.TensorDataset(*torch.load(file))",
    "metrics": "def metrics(outputs, targets):\n    right = outputs.argmax(1) == targets\n"
    "    return {'accuracy': right.float().mean()}",
}
RUNNER = Path(__file__).parent / "train" / "model_file.py"


def epochs_of(settings: Mapping[str, Any]) -> int | None:
    """How often a job with these settings uses each sample, if it trains a model file; a script of one's own does not
    say."""
    if settings.get("script") != str(RUNNER) or not settings.get("args"):
        return None
    used = json.loads(settings["args"][0])
    return int(used["epochs"]) if used["action"] == "train" else None


@dataclass(frozen=True)
class Recipe:
    """How a model file is used. Raises SettingsContradict for what cannot be."""

    file: str
    action: str = "train"
    epochs: int = 1
    batch_size: int | None = None  # of one worker; DEFAULT_BATCH if neither is given
    global_batch: int | None = None  # of a step, whatever the number of workers
    evaluate_every: int = 1  # epochs; 0: never
    seed: int = 0
    shuffle: bool = True
    loaders: int = 0  # loader processes of each worker
    accumulate: int = 1
    clip_norm: float | None = None
    out: str = ""  # of predictions

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.global_batch is not None:
            raise errors.SettingsContradict("batch_size and global_batch are both given; give one of them")
        lowest = {"epochs": 1, "batch_size": 1, "global_batch": 1, "accumulate": 1, "evaluate_every": 0, "loaders": 0}
        for name, least in lowest.items():
            if (number := getattr(self, name)) is not None and number < least:
                raise errors.SettingsContradict(f"{name} is {number}; write {least} or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise errors.SettingsContradict(f"clip_norm is {self.clip_norm:g}; write a number above 0")

    def args(self) -> tuple[str, ...]:
        """For the runner."""
        return (json.dumps(asdict(self)),)


# What a user may give by name.
TRAINING = frozenset(field.name for field in fields(Recipe)) - {"file", "action", "out"}


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables `[job]` and `[train]` of a `job.toml`. Raises SettingsContradict."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as problem:
        raise errors.SettingsContradict(f"{path} cannot be read: {problem.strerror}; name a TOML file") from None
    except tomllib.TOMLDecodeError as problem:
        raise errors.SettingsContradict(f"{path} is not TOML: {problem}") from None
    unknown = set(document) - {"job", "train"}
    if unknown:
        raise errors.SettingsContradict(f"{path} has [{min(unknown)}]; there are the tables [job] and [train]")
    return document.get("job", {}), document.get("train", {})


def with_values(recipe: Recipe, values: dict[str, Any], where: str) -> Recipe:
    """The recipe with some of its values replaced. Raises SettingsContradict for what it cannot be given."""
    return replace(recipe, **given.fitted(values, Recipe, TRAINING, where))


def check_model_file(path: Path, action: str) -> None:
    """Fails with ScriptFailed for what can be seen without running it: that a needed function is not there."""
    tree = ast.parse(path.read_text())
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named.add(node.name)
        elif isinstance(node, ast.Assign):
            named |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            named |= {alias.asname or alias.name for alias in node.names}
    if "*" in named:
        return
    for name in NEEDED[action]:
        if name not in named:
            raise missing(path, name, action)


def missing(path: Path, name: str, action: str) -> errors.ScriptFailed:
    return errors.ScriptFailed(f"{path} has no function {name}, which shoal {action} needs, such as\n{EXAMPLES[name]}")
