"""What workers write down of their steps: thinned out, and never in the way of the training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shoal.metrics import read_events
from shoal.train.metrics_file import MetricsFile
from shoal.train.reconfigure import Reconfiguration
from shoal.train.step import StepReport


class Wall:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def file(tmp_path: Path, wall: Wall) -> MetricsFile:
    return MetricsFile(tmp_path / "w0.jsonl", wall.now_s, wall)


def report(step: int, loss: float = 1.0, generation: int = 1, **metrics: float) -> StepReport:
    return StepReport(step, 0, loss, metrics, 8, 2, generation, 0, False, 0.1, None, 0.01)


def lines(tmp_path: Path, kind: str = "steps") -> list[dict[str, Any]]:
    return [line for line in read_events(tmp_path / "w0.jsonl") if line["event"] == kind]


def test_steps_within_a_tenth_of_a_second_share_a_line_of_means(tmp_path: Path, wall: Wall, file: MetricsFile) -> None:
    for step in range(1, 207):
        file.step(report(step, loss=float(step), accuracy=0.5))
        wall.now_s += 1 / 2048
    told = lines(tmp_path)
    assert [(line["step"], line["steps"]) for line in told] == [(1, 1), (206, 205)]
    assert told[1]["loss"] == pytest.approx(sum(range(2, 207)) / 205)
    assert told[1]["samples"] == 205 * 8
    assert told[1]["metrics"] == {"accuracy": 0.5}


def test_a_line_stands_for_more_the_older_the_job_is(tmp_path: Path, wall: Wall, file: MetricsFile) -> None:
    wall.now_s += 400_100.0
    for step in range(1, 1001):
        file.step(report(step))
        wall.now_s += 1.0
    assert [line["steps"] for line in lines(tmp_path)[:3]] == [1, 101, 101]


def test_no_line_stands_for_steps_of_two_generations(tmp_path: Path, wall: Wall, file: MetricsFile) -> None:
    file.step(report(1))
    file.step(report(2))
    file.step(report(3, generation=2))
    change = Reconfiguration(3, ("w0", "w2"), 0, 3, True, 0.01, 0.5, 0.25)
    file.reconfigured(change)
    assert [(line["generation"], line["step"], line["steps"]) for line in lines(tmp_path)] == [
        (1, 1, 1), (1, 2, 1), (2, 3, 1)
    ]  # fmt: skip
    [told] = lines(tmp_path, "reconfigured")
    assert (told["workers"], told["redone"], told["redone_s"], told["waited_s"]) == (["w0", "w2"], True, 0.5, 0.25)


def test_losses_that_are_no_numbers_do_not_spoil_the_mean(tmp_path: Path, wall: Wall, file: MetricsFile) -> None:
    file.step(report(1, loss=math.nan, accuracy=math.inf))
    file.step(report(2, loss=2.0))
    file.step(report(3, loss=math.nan))
    file.close(1, 3, {"compute": 1.0})
    assert [line["loss"] for line in lines(tmp_path)] == [None, 2.0]
    assert lines(tmp_path)[0]["metrics"] == {}
    assert lines(tmp_path, "seconds")[0]["seconds"] == {"compute": 1.0}


def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, wall: Wall, file: MetricsFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.metrics.os.write", full)
    file.step(report(1))
    wall.now_s += 1.0
    file.step(report(2))
    file.close(1, 2, {})
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'w0.jsonl'} is not written any more: No space left on device"
    ]
