"""Each test's arenas go with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sync.harness import free_all


@pytest.fixture(autouse=True)
def _arenas_are_freed() -> Iterator[None]:
    yield
    free_all()
