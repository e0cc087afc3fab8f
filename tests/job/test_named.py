"""Operations by name in real jobs: workers are killed in the middle of them, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing import FaultPlan, LocalJob
from tests.job import named
from tests.job.test_faults import MANY


def job_of(mode: str, tmp_path: Path, rounds: int, plan: FaultPlan | None = None, *options: str) -> LocalJob:
    out = tmp_path / "out"
    out.mkdir()
    arguments = [mode, str(out), str(rounds)]
    workers = 3 if mode == "counts" else 2
    script, options = Path(named.__file__), (*MANY, *options)
    return LocalJob(script, arguments, workers=workers, directory=tmp_path / "run", plan=plan, options=options)


def told(tmp_path: Path) -> dict[str, str]:
    return {path.name: text for path in (tmp_path / "out").iterdir() if (text := path.read_text())}


@pytest.mark.parametrize(
    ("hosts", "survivor", "victim"),
    [
        ("", "w0", "w1"),
        pytest.param("", "w1", "w0", marks=pytest.mark.slow),
        pytest.param("localhost/a:1,localhost/b:1", "a-w0", "b-w0", marks=pytest.mark.slow),
    ],
)
def test_a_training_uses_them_and_a_worker_dies(tmp_path: Path, hosts: str, survivor: str, victim: str) -> None:
    plan = FaultPlan().kill(victim, step=9, during="forward")
    result = job_of("trains", tmp_path, 20, plan, *(("-H", hosts) if hosts else ())).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert result.steps == 80
    checked, shared = map(int, told(tmp_path)[survivor].split())
    assert checked >= 80
    assert shared >= 8


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["w1", "w0"])
def test_a_script_without_a_model_goes_on_with_what_is_left(tmp_path: Path, victim: str) -> None:
    """w0 decides which names are ready, and lets the others wait when one of them is killed, or itself."""
    job = job_of("counts", tmp_path, 300)
    job.start()
    job.wait_until((tmp_path / "out" / "pauses").exists)
    job.signal(victim)
    job.wait_until(lambda: bool(job.events("lost")))
    (tmp_path / "out" / "go on").touch()
    result = job.wait()
    assert result.exit_code == 0, result.output
    found = told(tmp_path)
    states, changes = {it.rpartition(" ")[0] for it in found.values()}, [int(it.split()[-1]) for it in found.values()]
    assert states == {"[300.0, 300.0]"}
    assert {"w0", "w1", "w2"} - {victim} <= found.keys()
    assert max(changes) >= 1
