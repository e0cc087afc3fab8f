"""The residual networks made for CIFAR: 6n + 2 layers, three stages of 16, 32 and 64 channels.

Their shortcuts hold no parameters (option A: every second pixel, new channels zero), and their convolutions no bias.
The documents count trainable + moving statistics + 1 (a step counter), and keep an eleventh class for "background".
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from shoal.models.model_spec import ModelSpec

_WIDTHS = (16, 32, 64)
_CLASSES = 11


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self._shortcut(x))

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        before = self.new_channels // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new_channels - before))


def resnet_cifar(blocks: int, classes: int) -> nn.Module:
    """`blocks` residual blocks in each of the three stages."""
    channels = _WIDTHS[0]
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    for width in _WIDTHS:
        for block in range(blocks):
            layers.append(BasicBlock(channels, width, stride=2 if block == 0 and width != channels else 1))
            channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _spec(layers: int, published: int, trainable: int, moving_statistics: int) -> ModelSpec:
    blocks = (layers - 2) // 6
    return ModelSpec(
        name=f"resnet{layers}",
        build=partial(resnet_cifar, blocks=blocks, classes=_CLASSES),
        input_shape=(3, 32, 32),
        classes=_CLASSES,
        trainable=trainable,
        tensors=3 * (6 * blocks + 1) + 2,
        moving_statistics=moving_statistics,
        published=published,
    )


SPECS = (
    _spec(20, published=271_164, trainable=269_787, moving_statistics=1_376),
    _spec(32, published=466_492, trainable=464_219, moving_statistics=2_272),
    _spec(44, published=661_820, trainable=658_651, moving_statistics=3_168),
    _spec(56, published=857_148, trainable=853_083, moving_statistics=4_064),
    _spec(110, published=1_736_124, trainable=1_728_027, moving_statistics=8_096),
)
