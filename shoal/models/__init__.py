"""The models of the experiments, found by name, with exact sizes."""

from __future__ import annotations

from torch import nn

from shoal.errors import SettingsContradict
from shoal.models import mlp, mobilenetv2, resnet50, resnet_cifar
from shoal.models.model_spec import ModelSpec

_FAMILIES: tuple[tuple[ModelSpec, ...], ...] = (mlp.SPECS, mobilenetv2.SPECS, resnet_cifar.SPECS, resnet50.SPECS)
_SPECS = {one.name: one for family in _FAMILIES for one in family}

__all__ = ["ModelSpec", "build", "names", "spec"]


def names() -> tuple[str, ...]:
    return tuple(_SPECS)


def spec(name: str) -> ModelSpec:
    """The facts about a model. Raises SettingsContradict for a name nobody defined."""
    if name not in _SPECS:
        raise SettingsContradict(f"there is no model {name!r}; the models are {', '.join(_SPECS)}")
    return _SPECS[name]


def build(name: str) -> nn.Module:
    """A freshly initialised model, in training mode, drawn from torch's global generator."""
    return spec(name).build()
