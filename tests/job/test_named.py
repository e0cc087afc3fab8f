"""Operations by name in real jobs: workers are killed in the middle of them, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing import FaultPlan, JobResult, LocalJob
from tests.job import named
from tests.job.test_faults import MANY


def run(mode: str, tmp_path: Path, rounds: int, plan: FaultPlan | None = None, *options: str) -> JobResult:
    out = tmp_path / "out"
    out.mkdir()
    arguments = [mode, str(out), str(rounds)]
    workers = 3 if mode == "counts" else 2
    script, options = Path(named.__file__), (*MANY, *options)
    return LocalJob(script, arguments, workers=workers, directory=tmp_path / "run", plan=plan, options=options).run()


def told(tmp_path: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}


def test_they_are_used_inside_a_training_whose_workers_die(tmp_path: Path) -> None:
    plan = FaultPlan().kill("w1", step=9, during="forward").kill("w0", step=30, during="backward")
    result = run("trains", tmp_path, 20, plan)
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert result.steps == 80
    assert len(set(result.digests.values())) == 1
    found = told(tmp_path)
    assert len(found) == 2
    assert any(int(it.split()[0]) >= 40 for it in found.values()), found


@pytest.mark.slow
def test_they_work_between_hosts_whose_workers_die(tmp_path: Path) -> None:
    plan = FaultPlan().kill("b-w0", step=9, during="forward").kill("a-w0", step=30, during="backward")
    result = run("trains", tmp_path, 20, plan, "-H", "localhost/a:1,localhost/b:1")
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert result.steps == 80


def test_a_script_without_a_model_goes_on_with_what_is_left(tmp_path: Path) -> None:
    result = run("counts", tmp_path, 300)
    assert result.exit_code == 0, result.output
    assert set(told(tmp_path).values()) == {"[300.0, 300.0] 0"}
