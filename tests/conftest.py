from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# No test asserts a time: on a busy machine an example may take as long as it likes.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds none here"))
