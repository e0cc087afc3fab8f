"""The process's sources of randomness: Python's, numpy's and torch's, taken as one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

States = tuple[Any, Any, torch.Tensor]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    # Not torch.manual_seed, which would seed the GPUs of the training loop too.
    torch.default_generator.manual_seed(number)


def draw() -> tuple[float, float, float]:
    """The next number of each source."""
    return random.random(), np.random.random_sample(), torch.rand((), dtype=torch.float64).item()


def states() -> States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_states(states: States) -> None:
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


@contextmanager
def untouched() -> Iterator[None]:
    """Put the states back at the end."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
