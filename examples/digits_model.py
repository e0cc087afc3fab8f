"""A model file: `shoal train examples/digits_model.py -n 2 --epochs 8`. The digits come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

_HELD_BACK = 360


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def dataset(mode: str) -> Dataset[tuple[torch.Tensor, ...]]:
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    part = slice(_HELD_BACK, None) if mode == "train" else slice(_HELD_BACK)
    return TensorDataset(inputs[part], targets[part])


def metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"accuracy": (outputs.argmax(1) == targets).float().mean()}
