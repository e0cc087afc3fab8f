"""Multi-layer perceptrons: one that is all parameters, and one so small that only latency counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from shoal.models.model_spec import ModelSpec


def _tanh_layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for features, width in pairwise(widths[:-1]):
        layers += [nn.Linear(features, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def mlp21m() -> nn.Module:
    """The 21 M-parameter regression: little arithmetic for each parameter, so the exchange is most of what is added."""
    return _tanh_layers((3000, 4000, 2000, 500, 300, 1))


def tiny() -> nn.Module:
    """About 10 k parameters on 8×8 digits: a step is shorter than most ways of agreeing on it."""
    return _tanh_layers((64, 128, 10))


SPECS = (
    ModelSpec(
        name="mlp21m",
        build=mlp21m,
        input_shape=(3000,),
        classes=1,
        trainable=21_157_101,
        tensors=10,
        moving_statistics=0,
        published=21_157_101,
    ),
    ModelSpec(
        name="tiny",
        build=tiny,
        input_shape=(64,),
        classes=10,
        trainable=9_610,
        tensors=4,
        moving_statistics=0,
        published=None,
    ),
)
