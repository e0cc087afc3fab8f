from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

import shoal
from shoal import errors
from shoal.train.step import StepReport


def report(step: int, rank: int, loss: float = 0.5) -> StepReport:
    return StepReport(step, 0, loss, {"accuracy": 0.75}, 8, 2, 1, rank, False, 0.1, None, 0.01)


def test_each_step_is_written_once_by_whoever_was_rank_0_in_it(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before, after = shoal.TensorBoard(tmp_path), shoal.TensorBoard(tmp_path, every=1)
    for step in range(1, 4):
        before(report(step, rank=0))
        after(report(step, rank=1))
    after(report(4, rank=0, loss=math.nan))  # the other has died
    files = []
    for board in (before, after):
        board._writer.close()
    for path in sorted(tmp_path.iterdir()):
        events = accumulator.EventAccumulator(str(path))
        events.Reload()
        files.append({tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert sorted(steps for told in files for steps in told["accuracy"]) == [1, 2, 3, 4]
    assert sorted(steps for told in files for steps in told.get("loss", [])) == [1, 2, 3]
    assert set(files[0]) == {"loss", "accuracy", "learning_rate", "shoal/workers", "shoal/step_seconds"}


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(errors.SettingsContradict, match=r"pip install 'shoal\[tensorboard\]'"):
        shoal.TensorBoard(tmp_path)
