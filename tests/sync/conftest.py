"""Each test's arenas go with it: a mapping holds a descriptor until the collector has found its cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _arenas_are_freed() -> Iterator[None]:
    yield
    gc.collect()
