from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import DataUnusable, WorkersDiffer
from shoal.train.evaluate import Rows


def test_what_a_job_that_was_killed_left_is_gone_on_with_by_itself_and_by_nobody_else(tmp_path: Path) -> None:
    out = tmp_path / "rows.npy"
    Rows(out, 4, "1").write(0, torch.ones(2, 3), 2)  # and then the job is killed
    other = Rows(out, 4, "2")
    other.write(0, np.zeros((4, 5)), 4)
    other.close()
    assert np.load(out).shape == (4, 5)
    resumed = Rows(out, 4, "1")
    resumed.write(2, 2 * torch.ones(2, 3), 2)
    resumed.close()
    assert np.load(out)[:, 0].tolist() == [1, 1, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_job_that_goes_on_from_before_its_rows_were_finished_still_has_all_of_them(tmp_path: Path) -> None:
    out = tmp_path / "rows.npy"
    first = Rows(out, 4, "1")
    first.write(0, np.arange(4), 4)
    first.close()
    again = Rows(out, 4, "1")  # from a checkpoint in the middle of the pass
    again.write(3, np.array([3]), 1)
    again.close()
    assert np.load(out).tolist() == [0, 1, 2, 3]


def test_rows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.npy", 4, "1")
    with pytest.raises(DataUnusable, match="predictions of 2 samples came as"):
        rows.write(0, [1.0, 2.0, 3.0], 2)
    rows.write(0, [1.0, 2.0], 2)
    with pytest.raises(WorkersDiffer, match="every row must have the same shape"):
        rows.write(2, [[1.0], [2.0]], 2)
