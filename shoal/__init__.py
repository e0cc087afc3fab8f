"""shoal trains one PyTorch model on many workers, while workers come and go."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.sync import topology
    from shoal.sync.allreduce import AllReduce
    from shoal.sync.batchnorm import SyncBatchNorm
    from shoal.sync.independent import Independent
    from shoal.sync.local_sgd import LocalSGD
    from shoal.sync.neighbor import Neighbor
    from shoal.sync.replicated import Replicated
    from shoal.sync.scaling import LossScaler
    from shoal.train.run import run
    from shoal.train.schedules import LinearScaling, SqrtScaling
    from shoal.train.tensorboard import TensorBoard
    from shoal.train.worker import Worker

__version__ = "0.2.0"

# Loaded on first use: the command line must not pay for the import of torch.
_HOMES = {
    "AllReduce": "shoal.sync.allreduce",
    "Independent": "shoal.sync.independent",
    "LinearScaling": "shoal.train.schedules",
    "LocalSGD": "shoal.sync.local_sgd",
    "LossScaler": "shoal.sync.scaling",
    "Neighbor": "shoal.sync.neighbor",
    "Replicated": "shoal.sync.replicated",
    "SqrtScaling": "shoal.train.schedules",
    "SyncBatchNorm": "shoal.sync.batchnorm",
    "TensorBoard": "shoal.train.tensorboard",
    "Worker": "shoal.train.worker",
    "run": "shoal.train.run",
}

__all__ = [
    "AllReduce", "Independent", "LinearScaling", "LocalSGD", "LossScaler", "Neighbor", "Replicated", "SqrtScaling",
    "SyncBatchNorm", "TensorBoard", "Worker", "run", "topology",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "topology":
        return importlib.import_module("shoal.sync.topology")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
