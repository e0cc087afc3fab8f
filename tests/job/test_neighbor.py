"""Neighbors as real processes: they come and go, the others average on, and every sample is used once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.testing import FaultPlan, LocalJob
from tests.job.test_faults import MANY
from tests.job.test_leases import SCENES, fed, progress

EPOCHS = 30
SLOW = pytest.mark.slow


def averaging(tmp_path: Path, workers: int, spec: str, order: str = "atc", plan: FaultPlan | None = None) -> LocalJob:
    arguments = ["neighbors", str(tmp_path), str(EPOCHS), spec, order]
    return LocalJob(SCENES, arguments, workers=workers, directory=tmp_path / "run", plan=plan, options=MANY)


def finish(tmp_path: Path, job: LocalJob, workers: int) -> None:
    """Nothing is lost or repeated, and the loss has fallen. (How near they are to each other at the end is not looked
    at here: who has samples left when others have none goes on without them.)"""
    (tmp_path / "go").touch()
    result = job.wait()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, (str(result.audit), result.audit.mismatches)
    lines = [line for path in (job.directory / "metrics").glob("*.jsonl") for line in path.read_text().splitlines()]
    changes = [json.loads(line) for line in lines if '"took_s"' in line]
    assert changes
    assert not any(change["redone"] for change in changes), "nobody redoes a step"
    said = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("w*.json")}
    assert len(said) == workers
    first = np.mean(said["w0"]["losses"][:5])
    for one in said.values():
        assert np.isfinite(one["values"]).all()
        assert np.mean(one["losses"][-20:]) < first


@pytest.mark.parametrize("order", ["atc", pytest.param("awc", marks=SLOW), pytest.param("local", marks=SLOW)])
def test_a_neighbor_is_killed_another_comes_and_nobody_redoes_a_step(tmp_path: Path, order: str) -> None:
    job = averaging(tmp_path, 3, "ring", order)
    job.start()
    progress(job)
    job.signal("w1")
    job.wait_until(lambda: fed(job)["w3"] > 0)
    progress(job)
    finish(tmp_path, job, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "during"),
    [("one_peer(exponential_2)", it) for it in ("park", "ready", "optimizer", "after_done")]
    + [("star", it) for it in ("lane", "reduce", "before_done")],
)
def test_a_neighbor_is_killed_at_each_point_of_a_step(tmp_path: Path, spec: str, during: str) -> None:
    step = 1 if during == "park" else 20
    job = averaging(tmp_path, 4, spec, plan=FaultPlan().kill("w2", step=step, during=during))
    job.start()
    job.wait_until(lambda: fed(job)["w4"] > 0)
    progress(job)
    finish(tmp_path, job, 4)
