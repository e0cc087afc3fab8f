"""How far a job is, from what its workers declared and committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.data.fed import declare
from shoal.data.ledger import Pass
from shoal.data.progress import Passes, Progress, measure


def a_pass(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "num_samples": 100, "epochs": 3, "drop_last": False, "global_batch": None, **changes}


def test_without_a_pass_there_is_no_progress():
    assert measure([], 0, 0) is None


@pytest.mark.parametrize(
    ("epoch", "samples", "epoch_done", "done"), [(0, 0, 0, 0), (0, 30, 30, 30), (1, 130, 30, 130), (2, 300, 100, 300)]
)
def test_one_pass_counts_every_sample(epoch, samples, epoch_done, done):
    assert measure([a_pass()], epoch, samples) == Progress(0, epoch, 3, epoch_done, 100, done, 300)


def test_later_pass_counts_its_own_samples():
    passes = [a_pass(), a_pass(index=1, num_samples=50, epochs=2)]
    assert measure(passes, 1, 370) == Progress(1, 1, 2, 20, 50, 70, 100)


def test_pass_after_one_that_was_left_early_is_known_by_its_epoch():
    passes = [a_pass(), a_pass(index=1)]
    assert measure(passes, 2, 240) == Progress(1, 2, 3, 0, 100, 200, 300)


def test_epoch_of_the_pass_before_does_not_lead_out_of_a_new_one():
    found = measure([a_pass(epochs=9), a_pass(index=1, epochs=2)], 8, 900)
    assert found is not None
    assert found.done <= found.total == 200


def test_samples_that_every_epoch_drops_are_not_waited_for():
    found = measure([a_pass(drop_last=True, global_batch=30)], 2, 270)
    assert found is not None
    assert (found.done, found.total, found.fraction) == (270, 270, 1.0)


def test_passes_whose_epochs_are_known_in_all_count_as_one():
    passes = [a_pass(epochs=1), a_pass(index=1, epochs=1, train=False), a_pass(index=2, epochs=1)]
    assert measure(passes, 0, 120, all_epochs=6) == Progress(0, 1, 6, 20, 100, 120, 600)


def test_what_is_left_takes_as_long_as_its_rate_says():
    progress = Progress(0, 0, 1, 25, 100, 25, 100)
    assert progress.left_s(15.0) == 5.0
    assert progress.left_s(0.0) is None


def test_passes_are_read_as_workers_declare_them(tmp_path: Path):
    passes = Passes(tmp_path)
    assert passes.progress({"epoch": 0, "samples": 0}) is None
    for index in range(2):
        declare(tmp_path, Pass(index, 40, 2, 0, True, False, 8, None, 1))
        found = passes.progress({"epoch": 0, "samples": 80 * index + 16})
        assert found is not None
        assert (found.pass_index, found.done, found.total) == (index, 16, 80)


def test_an_evaluation_has_a_progress_of_its_own(tmp_path):
    (tmp_path / "pass-0.json").write_text(json.dumps(a_pass()))
    (tmp_path / "pass-1.json").write_text(json.dumps(a_pass(index=1, num_samples=40, epochs=1, train=False)))
    passes = Passes(tmp_path)
    status = {"epoch": 2, "samples": 300, "evaluating": 1, "evaluated": 10}
    assert passes.progress(status) == Progress(1, 0, 1, 10, 40, 10, 40)
    assert passes.progress({**status, "evaluating": None}) == Progress(0, 2, 3, 100, 100, 300, 300)
