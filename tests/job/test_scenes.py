"""Jobs as users run them: edits, passes, mistakes, signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shoal.data.ledger import Cursor, Pass, advance, take
from shoal.testing import FaultPlan, JobResult, LocalJob
from tests.job.traces import Traces
from tests.job.training import Gate

SCRIPT = Path(__file__).with_name("scenes.py")
QUICK = ("--threads", "1", "--backoff", "0")


def job(
    tmp_path: Path,
    scene: str,
    *args: str,
    plan: FaultPlan | None = None,
    workers: int | str = 2,
    options: Sequence[str] = (),
) -> LocalJob:
    (tmp_path / "out").mkdir(exist_ok=True)
    return LocalJob(
        SCRIPT,
        [scene, str(tmp_path / "out"), *args],
        workers=workers,
        directory=tmp_path / "run",
        plan=plan,
        options=(*QUICK, *options),
    )


def gate_of(running: LocalJob) -> Gate:
    return Gate(running.directory.parent / "out" / "gate")


def run_when_all_have_come(running: LocalJob, *, members: int, before: int, end: int) -> JobResult:
    """The job to its end, which waits at a step until it has so many members: newcomers are not always quick."""
    gate_of(running).open(before)
    running.start()
    running.wait_until(lambda: [len(it["members"]) for it in running.events("generation")][-1:] == [members])
    gate_of(running).open(end)
    return running.wait()


def written(tmp_path: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}


def last_line(output: str) -> str:
    return next(line for line in reversed(output.splitlines()) if line.strip())


def test_edits_are_committed_as_a_whole_while_workers_join_and_die(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=60).kill("w1", step=130, during="reduce")
    result = job(tmp_path, "edits", plan=plan).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(set(result.digests.values())) == 1
    assert {one["last"] for one in written(tmp_path).values()} == {300.0}


def test_every_sample_is_scored_and_predicted_once_while_workers_come_and_go(tmp_path: Path) -> None:
    result = job(tmp_path, "evaluates").run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert result.steps == 60
    assert len(result.of("lost")) == 2, result.output
    found = written(tmp_path)
    scores = [one["scores"] for one in found.values()]
    assert all(one == scores[0] for one in scores), "workers were told different scores"
    assert len(scores[0]) == 6
    for one in found.values():
        assert scores[0][-1]["loss"] == pytest.approx(one["loss"], rel=1e-10)
        np.testing.assert_allclose(np.load(tmp_path / "out" / "rows.npy"), one["outputs"], rtol=1e-10)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".json") == ["rows.npy"]


def test_a_stream_is_trained_on_and_scored_once_though_nobody_knows_its_length(tmp_path: Path) -> None:
    streams = job(tmp_path, "streams", "gated", plan=FaultPlan().join(at_step=15))
    result = run_when_all_have_come(streams, members=3, before=20, end=100)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(result.of("lost")) == 1, result.output
    found = written(tmp_path)
    assert found["w0"]["epochs"] == [0, 1, 2, 3]
    assert found["w2"]["generations"][0] == 0, "the others waited while a newcomer read what they had used"
    for one in found.values():
        assert one["found"]["loss"] == pytest.approx(one["loss"], rel=1e-10)


def test_streams_that_come_in_another_order_at_each_worker_end_the_job(tmp_path: Path) -> None:
    result = job(tmp_path, "streams_differ").run()
    assert result.exit_code == 2, result.output
    assert "differ in first sample of the step" in result.output


def test_a_script_may_call_batches_once_an_epoch_and_newcomers_find_the_right_one(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=30).kill("w0", step=50, during="backward")
    result = job(tmp_path, "passes", plan=plan).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert result.audit.samples == 8 * 480
    assert len(set(result.digests.values())) == 1


def test_a_loss_that_is_not_a_number_is_skipped_and_counted_if_asked_for(tmp_path: Path) -> None:
    result = job(tmp_path, "poisoned", "skip").run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert result.audit.skipped_steps == 1
    assert all(one["finite"] for one in written(tmp_path).values())


def test_a_loss_that_is_not_a_number_ends_the_job_with_one_line_otherwise(tmp_path: Path) -> None:
    result = job(tmp_path, "poisoned", "stop").run()
    assert result.exit_code == 2
    assert last_line(result.output).startswith("shoal: LossNotFinite: the loss of step 7 is nan on w1")


def test_an_exception_in_one_workers_code_is_shown_once_and_ends_the_job(tmp_path: Path) -> None:
    result = job(tmp_path, "raises").run()
    assert result.exit_code == 2
    assert result.output.count("Traceback (most recent call last)") == 1
    assert "the user's own mistake" in last_line(result.output)
    assert last_line(result.output).startswith("shoal: ScriptFailed")


@pytest.mark.slow
def test_an_exception_may_cost_one_worker_and_not_the_job(tmp_path: Path) -> None:
    result = job(tmp_path, "raises", options=("--on-error", "relaunch")).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert [event["worker_id"] for event in result.of("lost")] == ["w1"]


@pytest.mark.slow
def test_an_in_place_write_outside_an_edit_spoils_nothing_and_says_where_it_was(tmp_path: Path) -> None:
    result = job(tmp_path, "in_place").run()
    assert result.exit_code == 2
    assert "worker.edit()" in last_line(result.output)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("w*.log"))
    assert "in in_place" in logs


def test_workers_whose_hyperparameters_differ_end_the_job_with_one_line(tmp_path: Path) -> None:
    result = job(tmp_path, "differs").run()
    assert result.exit_code == 2
    assert last_line(result.output).startswith("shoal: WorkersDiffer: ")
    assert " lr of group 0 (" in last_line(result.output)


@pytest.mark.slow
def test_newcomers_have_the_hyperparameters_that_callbacks_and_edits_have_set(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=50).kill("w1", step=120, during="reduce").join(at_step=150)
    result = run_when_all_have_come(job(tmp_path, "decays", "gated", plan=plan), members=4, before=200, end=300)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(set(result.digests.values())) == 1
    rates = [one["rate"] for one in written(tmp_path).values()]
    assert len(rates) >= 3
    assert rates == pytest.approx([0.1 * 0.99**300] * len(rates))


@pytest.mark.slow
def test_newcomers_follow_members_that_have_left_a_pass_early(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=20).join(at_step=60).join(at_step=100).join(at_step=140)
    breaks = job(tmp_path, "breaks", "gated", plan=plan, workers="2:6")
    result = run_when_all_have_come(breaks, members=6, before=200, end=240)
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(set(result.digests.values())) == 1
    assert len(result.digests) == 6


@pytest.mark.slow
def test_an_edit_in_a_callback_may_meet_a_change_of_workers(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=20).kill("w1", step=60, during="ready").join(at_step=100).join(at_step=140)
    result = job(tmp_path, "edits_in_callback", plan=plan, workers="2:5").run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(set(result.digests.values())) == 1


@pytest.mark.slow
def test_newcomers_repeat_no_edit_and_count_no_batch_twice(tmp_path: Path) -> None:
    plan = FaultPlan().join(at_step=10).join(at_step=25).join(at_step=40).join(at_step=55)
    result = job(tmp_path, "stages", plan=plan, workers="2:6").run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert written(tmp_path)["w0"] == {"halved": 40.0, "batches": 80}
    assert len(set(result.digests.values())) == 1


def test_nobody_is_rank_0_but_rank_0(tmp_path: Path) -> None:
    ranks = job(tmp_path, "ranks", "gated", plan=FaultPlan().join(at_step=121), workers="2:3")
    result = run_when_all_have_come(ranks, members=3, before=150, end=180)
    assert result.exit_code == 0, result.output
    after = written(tmp_path)
    assert after["w0"] == [-1, 0, 0, 0]
    assert after["w1"] == [-1, 1, 1, 1]
    assert after["w2"] == [-1, -1, -1, 2]  # it came in the third pass


def test_a_lone_worker_that_finds_everything_trained_does_what_rank_0_has_to_do(tmp_path: Path) -> None:
    plan = FaultPlan().kill("w0", step=180, during="after_commit")  # the last step: what comes after it was not done
    result = job(tmp_path, "ranks", plan=plan, workers="1").run()
    assert result.exit_code == 0, result.output
    assert written(tmp_path)["w1"] == [0, 0, 0, 0]


def test_workers_that_are_all_stopped_are_noticed_and_replaced(tmp_path: Path) -> None:
    plan = FaultPlan().stop("w0", step=20).stop("w1", step=20)
    result = job(tmp_path, "passes", plan=plan, options=("--budget", "1")).run()
    assert result.exit_code == 0, result.output
    assert {event["worker_id"] for event in result.of("fenced")} == {"w0", "w1"}
    assert result.audit.clean, str(result.audit)


def test_a_newcomer_let_in_by_the_last_step_does_not_train_on_alone(tmp_path: Path) -> None:
    running = job(tmp_path, "stops", "gated", plan=FaultPlan().join(at_step=3), workers="2:3")
    gate_of(running).open(5)  # step 6 waits for the newcomer, which is a member from the commit of that step on
    result = running.run()
    assert result.exit_code == 0, result.output
    assert any("w2" in event["members"] for event in result.of("generation")), result.events
    assert result.steps == 6
    assert set(result.digests) == {"w0", "w1"}
    assert len(set(result.digests.values())) == 1
    assert not result.of("lost")


def test_scripts_are_told_of_every_generation_and_whether_a_step_is_redone(tmp_path: Path) -> None:
    plan = FaultPlan().kill("w1", step=5, during="reduce").join(at_step=20)
    reconfigures = job(tmp_path, "reconfigures", "gated", plan=plan, options=("--restarts", "5"))
    result = run_when_all_have_come(reconfigures, members=3, before=200, end=400)
    assert result.exit_code == 0, result.output
    seen = written(tmp_path)["w0"]
    death, *joins = seen
    assert (death["workers"], death["rank"], death["step"], death["redone"]) == (["w0"], 0, 4, True)
    sizes = [len(join["workers"]) for join in joins]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 3
    assert not any(join["redone"] for join in joins)
    assert [one["generation"] for one in seen] == sorted({one["generation"] for one in seen})
    assert all(one["took_s"] > 0 for one in seen)


HOSTS = ("-H", "localhost/a:1,localhost/b:1")


@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("", HOSTS),
        pytest.param("", (), marks=pytest.mark.slow),
        pytest.param("replicated", (), marks=pytest.mark.slow),
        pytest.param("replicated", HOSTS, marks=pytest.mark.slow),
    ],
)
def test_workers_whose_models_differ_end_the_job_with_both_shapes_in_one_line(
    tmp_path: Path, sync: str, options: tuple[str, ...]
) -> None:
    result = job(tmp_path, "shapes", sync, options=options).run()
    assert result.exit_code == 2
    assert "WorkersDiffer: the model of " in last_line(result.output)
    here, there = ("8×16 float64", "6×16 float64")[
        :: 1 if "of a-w0" in result.output or "of w0" in result.output else -1
    ]
    assert f"0.weight is {here} here and {there} in the job; 1.weight is " in last_line(result.output)


def test_states_of_two_hosts_that_differ_end_the_job_and_are_named(tmp_path: Path) -> None:
    result = job(tmp_path, "drifts", "b", options=HOSTS).run()
    assert result.exit_code == 1, result.output
    assert "shoal: StateDrifted: the states of a-w0 on a and b-w0 on b differ at step " in last_line(result.output)
    [drift] = result.of("drift")
    assert drift["workers"] == ["a-w0", "b-w0"]
    assert drift["alike_at"] == 1
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")), "nobody knows whether that is right"


@pytest.mark.slow
def test_the_state_of_one_host_of_three_that_drifted_is_taken_anew_from_the_others(tmp_path: Path) -> None:
    hosts = ("-H", "localhost/a:1,localhost/b:2,localhost/c:1")
    result = job(tmp_path, "drifts", "b", workers=4, options=hosts).run()
    assert result.exit_code == 0, result.output
    [drift] = result.of("drift")
    assert drift["workers"] == ["b-w0", "b-w1"]
    assert {event["worker_id"] for event in result.of("lost")} == {"b-w0", "b-w1"}
    assert len(set(result.digests.values())) == 1
    assert result.audit.clean


@pytest.mark.slow
def test_a_newcomer_of_another_model_is_told_both_shapes(tmp_path: Path) -> None:
    late = job(tmp_path, "shapes", "gated", workers=1, options=HOSTS)
    late.start()
    late.wait_until(lambda: bool(late.events("generation")))
    late.scale(2)
    result = late.wait(60)
    assert result.exit_code == 2
    wanted = "the model of b-w0 is not the job's: 0.weight is 6×16 float64 here and 8×16 float64 in the job"
    assert wanted in last_line(result.output)


@pytest.mark.parametrize("step", [2, 3])
def test_a_death_at_the_end_of_an_epoch_that_drops_its_rest_ends_it_once(tmp_path: Path, step: int) -> None:
    plan = FaultPlan().kill("w2", step=step, during="forward")
    result = job(tmp_path, "drops", plan=plan, workers=3, options=("--backoff", "30")).run()
    assert result.exit_code == 0, result.output
    assert result.audit.clean, str(result.audit)
    assert len(set(result.digests.values())) == 1
    for one in written(tmp_path).values():
        assert one["ended"] == [0, 1, 0, 1]


def test_a_stopped_worker_is_fenced_within_the_budget_and_changes_nothing_afterwards(tmp_path: Path) -> None:
    plan = FaultPlan().stop("w1", step=5, during="optimizer")
    running = job(tmp_path, "passes", plan=plan, workers=3, options=("--budget", "1"))
    running.start()
    running.wait_until(lambda: bool(running.events("fenced")))
    result = running.wait()
    assert result.exit_code == 0, result.output
    assert result.audit.clean
    assert len(set(result.digests.values())) == 1
    assert [event["worker_id"] for event in result.of("lost")] == ["w1"]
    fenced, lost = result.of("fenced")[0], result.of("lost")[0]
    following = next(event for event in result.of("generation") if event["time"] >= fenced["time"])
    assert fenced["time"] <= lost["time"] <= following["time"], "the next generation began before the worker was dead"
    assert "w1" not in following["members"]


def test_sigterm_lets_a_worker_finish_its_step_and_leave(tmp_path: Path) -> None:
    running = job(tmp_path, "long", "0", workers=3)
    running.start()
    running.wait_until(lambda: running.status().get("step", 0) > 0)
    running.signal("w2", signal.SIGTERM)
    running.wait_until(lambda: any(event["worker_id"] == "w2" for event in running.events("left")))
    running.process.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.exit_code == 128 + signal.SIGTERM
    assert not result.of("lost")
    assert result.audit.clean
    assert result.audit.redone == 0


def test_nothing_is_left_after_the_launcher_is_killed(tmp_path: Path, traces: Traces) -> None:
    running = job(tmp_path, "long", "2", workers=2)
    running.start()
    running.wait_until(lambda: running.status().get("step", 0) > 0)
    family = psutil.Process(running.process.pid).children(recursive=True)
    assert len(family) >= 2 + 2 + 2 * 2  # coordinator and fork server, two workers, two loaders of each
    traces.note(running)
    running.kill()
    assert traces.left(running, unfinished=True) == []


def test_a_worker_whose_loader_process_is_killed_is_replaced_and_no_sample_is_lost(tmp_path: Path) -> None:
    running = job(tmp_path, "long", "2", workers=2)
    running.start()
    running.wait_until(lambda: running.status().get("step", 0) > 0)
    os.kill(int((tmp_path / "run" / "loaders").read_text().split()[0]), signal.SIGKILL)
    running.wait_until(lambda: any("w2" in event["members"] for event in running.events("generation")))
    running.process.send_signal(signal.SIGTERM)
    result = running.wait()
    assert result.exit_code == 128 + signal.SIGTERM
    assert len(result.of("lost")) == 1
    assert result.audit.clean, str(result.audit)
    lost = result.of("lost")[0]["worker_id"]
    assert "LoaderLost: pass 0: loader process" in (tmp_path / "run" / "logs" / f"{lost}.log").read_text()


def test_metrics_are_averaged_over_all_samples_and_epochs_end_once(tmp_path: Path) -> None:
    result = job(tmp_path, "measures", workers=3).run()
    assert result.exit_code == 0, result.output
    pass_ = Pass(0, 40, 3, 0, True, False, 7, None, 1)
    wanted, cursor = [], Cursor()
    while (batch := take(pass_, cursor, 3)) is not None:
        rate = 0.1 * 0.5**batch.epoch
        wanted.append((pass_.order(batch.epoch)[batch.lo : batch.hi].mean(), rate))
        cursor = advance(cursor, batch)
    for one in written(tmp_path).values():
        assert one["epochs"] == [0, 1, 2]
        assert [tuple(pair) for pair in one["reports"]] == pytest.approx([pytest.approx(pair) for pair in wanted])
