"""What is known about a model before it is built: its ends, and the counts that say it is the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModelSpec:
    """`input_shape` leaves the batch out. `classes` is the width of the output; 1 means a regression.

    `published` is the figure of the document the model comes from, by that document's own way of counting; None where
    there is no such document.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    trainable: int
    tensors: int
    moving_statistics: int
    published: int | None
