from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.testing import LocalJob

SCENES = Path(__file__).parents[1] / "job" / "scenes.py"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalJob]:
    """A job of one to three workers that trains until it is stopped."""
    (tmp_path / "out").mkdir()
    args = ["long", str(tmp_path / "out"), "0"]
    job = LocalJob(SCENES, args, workers="1:3", directory=tmp_path / "run", options=["--threads", "1"])
    job.start()
    job.wait_until(lambda: job.status().get("step", 0) > 0)
    yield job
    if job.process.poll() is None:
        job.kill()
