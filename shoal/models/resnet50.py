"""ResNet50 of the first version: the stride sits on the first 1×1, and the convolutions have a bias."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from shoal.models.model_spec import ModelSpec

# inner width, blocks, stride of the first block
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_EXPANSION = 4
_STEM = 64


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            if inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


def resnet50(classes: int) -> nn.Module:
    """Any image size; at CIFAR's 32×32 the last map is 1×1, so a training batch needs two images or more."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, _STEM, 7, stride=2, padding=3),
        nn.BatchNorm2d(_STEM),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = _STEM
    for width, blocks, stride in _STAGES:
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = width * _EXPANSION
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


SPECS = (
    ModelSpec(
        name="resnet50_cifar",
        build=partial(resnet50, classes=10),
        input_shape=(3, 32, 32),
        classes=10,
        trainable=23_555_082,
        tensors=214,
        moving_statistics=53_120,
        published=23_555_082,
    ),
)
