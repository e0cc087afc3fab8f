"""MobileNetV2 at width 1: inverted residuals, no bias in a convolution."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shoal.models.model_spec import ModelSpec

# expansion, channels, blocks, stride of the first block
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM = 32
_HEAD = 1280


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class InvertedResidual(nn.Module):
    """Widen, filter each channel alone, narrow; the narrow ends are what the shortcut joins."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [*_conv_norm(inputs, hidden, 1), nn.ReLU6()] if expansion != 1 else []
        filter_each = [*_conv_norm(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *filter_each, *_conv_norm(hidden, outputs, 1))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.shortcut else y


def mobilenetv2(classes: int) -> nn.Module:
    """The ImageNet strides are kept at CIFAR size, as in the document: the last map is 1×1."""
    layers: list[nn.Module] = [*_conv_norm(3, _STEM, 3, stride=2), nn.ReLU6()]
    channels = _STEM
    for expansion, outputs, blocks, stride in _STAGES:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, outputs, stride if block == 0 else 1, expansion))
            channels = outputs
    layers += [*_conv_norm(channels, _HEAD, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(_HEAD, classes))


SPECS = (
    ModelSpec(
        name="mobilenetv2",
        build=partial(mobilenetv2, classes=10),
        input_shape=(3, 32, 32),
        classes=10,
        trainable=2_236_682,
        tensors=158,
        moving_statistics=34_112,
        published=2_236_682,
    ),
)
