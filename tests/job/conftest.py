from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.traces import Traces


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Jobs that this test starts have a directory for temporary files of their own. Its path is short: that of a socket
    has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="s") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        yield Traces(Path(temporary))
