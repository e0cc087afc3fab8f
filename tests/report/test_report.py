"""The page of a run: read from a real job with a death and a newcomer, and from directories with little in them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal import cli
from shoal.control.rundir import Committed, RunDir
from shoal.metrics import EventLog
from shoal.report.page import figures, page, summary
from shoal.report.read import Run, Steps, merge, read
from shoal.seconds import CATEGORIES
from shoal.testing import FaultPlan, LocalJob

SCRIPT = Path(__file__).with_name("training.py")
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Fails where tags do not match; keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: dict[str, int] = {}
        self._table = ""
        self.outside: list[str] = []  # what a browser would fetch
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.outside += [value for name in ("src", "href", "xlink:href") if (value := attributes.get(name))]
        if tag == "table":
            self._table = attributes.get("id") or "other"
        if tag == "tr":
            self.rows[self._table] = self.rows.get(self._table, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One job for the whole module: w1 is killed, and somebody joins."""
    directory = tmp_path_factory.mktemp("report") / "run"
    plan = FaultPlan().kill("w1", step=40, during="reduce").join(at_step=120)
    result = LocalJob(
        SCRIPT, workers=2, directory=directory, plan=plan, options=("--threads", "1", "--backoff", "0", "--budget", "2")
    ).run()
    assert result.exit_code == 0, result.output
    return RunDir.open(directory)


@pytest.fixture(scope="module")
def run(job: RunDir) -> Run:
    return read(job)


def test_every_step_is_told_once_with_its_metrics_although_rank_0_changes_hands(run: Run) -> None:
    assert run.steps == 320
    steps = [step for line in run.lines for step in range(line.first, line.step + 1)]
    assert len(steps) == len(set(steps))
    assert len(steps) >= 315, "more is missing than the last tenth of a second of a worker that died"
    assert run.metric_names == ["accuracy"]
    assert all(line.gradient_norm and line.loss and line.learning_rate for line in run.lines)
    assert run.audit is not None
    assert run.audit.clean


def test_seconds_of_a_worker_add_up_to_its_life(job: RunDir, run: Run) -> None:
    lines = [json.loads(line) for line in (job.metrics / "w0.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["event"] == "seconds"]
    lives = [sum(line["seconds"].values()) for line in told]
    for earlier, later in zip(range(len(told) - 1), range(1, len(told)), strict=True):
        wall_s = told[later]["time"] - told[earlier]["time"]
        assert lives[later] - lives[earlier] == pytest.approx(wall_s, abs=0.02 + 0.03 * wall_s)
    assert told[-1]["time"] - job.settings()["created"] >= lives[-1], "older than the job"
    assert set(told[-1]["seconds"]) == set(CATEGORIES)
    w0 = run.workers[0]
    assert min(w0.seconds[name] for name in ("compute", "exchange", "input", "wait", "startup")) > 0
    assert w0.seconds["redone"] > 0, "w1 died in the middle of a step of w0's"
    assert w0.seconds["checkpoint"] > 0, "rank 0 takes one at the end"


def test_a_death_and_a_join_are_reconfigurations_with_their_cost(run: Run) -> None:
    death = next(change for change in run.changes if change.fault)
    assert (death.before, death.after, death.redone_steps) == (2, 1, 1)
    assert list(death.costs) == ["w0"]
    cost = death.costs["w0"]
    assert cost.redone_s > 0
    assert cost.waited_s > 0
    assert 0 < cost.took_s < 1
    joins = [change for change in run.changes if change.after > change.before]
    assert joins
    assert all(change.redone_steps == 0 for change in joins)
    assert next(worker for worker in run.workers if worker.worker_id == "w1").ended == "lost (signal 9)"


def test_page_is_whole_needs_nothing_from_outside_and_has_a_row_for_each_reconfiguration(run: Run) -> None:
    text = page(run)
    found = Page(text)
    assert found.outside == []
    assert not re.search(r"https?://|@import|url\(|<script", text)
    assert found.rows["reconfigurations"] == 1 + len(run.changes)
    for said in ("finished", "accuracy", "norm of the gradient", "learning rate", "goodput", "lost (signal 9)"):
        assert said in text


def test_report_command_writes_the_page_and_prints_where(
    job: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shoal(*arguments: str) -> int:
        with pytest.raises(SystemExit) as exit:
            cli.main(["report", *arguments])
        return int(str(exit.value.code))

    assert shoal(str(job.path)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(job.path / "report.html")
    assert "goodput" in printed[0]
    Page((job.path / "report.html").read_text())
    out = tmp_path / "a.html"
    assert shoal(str(job.path), "--out", str(out), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["page"], told["steps"]) == (str(out), 320)
    assert 0 < told["goodput"] < 1
    assert shoal(str(job.path), "--out", str(tmp_path / "none" / "a.html")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_job_that_has_not_begun_still_has_a_page(tmp_path: Path) -> None:
    run = read(RunDir.create(tmp_path / "run", {"script": "train.py"}))
    assert (run.phase, run.goodput, run.samples_per_s, run.rate(10)) == ("not running", None, None, [])
    Page(page(run))
    assert "no worker has measured anything" in summary(run)[0]


def test_a_job_that_still_trains_says_so_and_counts_what_its_workers_last_beat(job: RunDir) -> None:
    seconds = dict.fromkeys(CATEGORIES, 1000.0)
    status = {"seq": 3, "reason": "", "workers": [{"worker_id": "w0", "seconds": seconds}]}
    run = read(job, status, now_s=time.time())
    assert run.phase == "running"
    assert run.workers[0].seconds == seconds
    assert ">running<" in page(run)


def test_a_job_that_failed_and_went_on_to_its_end_has_finished(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {"script": "train.py"})
    log = EventLog(run_dir.events)
    for kind in ("failed", "stopping", "resumed", "finished", "ended"):
        log.write(1.0, kind, worker_id="w0", text="")
    log.close()
    assert read(run_dir).phase == "finished"


def test_a_job_that_failed_tells_why_and_escapes_what_users_wrote(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {"script": "<b>.py", "args": ["--x", "<1&2>"]})
    log = EventLog(run_dir.events)
    log.write(1.0, "failed", worker_id="w0", text="ScriptFailed: x < 3 & </p><script>", traceback="…")
    log.write(2.0, "stopping", text="w0 failed")
    log.close()
    run_dir.write_committed(Committed(0, 0, 0, 0, None))
    run = read(run_dir)
    assert (run.phase, run.reason) == ("failed", "w0 failed: ScriptFailed: x < 3 & </p><script>")
    text = page(run)
    Page(text)
    assert "<script" not in text
    json.dumps(figures(run))


def line(generation: int, step: int, steps: int, **given: Any) -> Steps:
    empty = Steps(float(step), generation, step, steps, 0, 2, steps * 8, 0, 1.0, {}, 0.1, None)
    return replace(empty, **given)


def test_steps_that_two_workers_tell_are_taken_from_the_later_generation() -> None:
    before, overlapping, after = line(1, 10, 10), line(1, 20, 10), line(2, 22, 5)
    told = [(one.first, one.step, one.generation) for one in merge([after, overlapping, before])]
    assert told == [(1, 10, 1), (11, 17, 1), (18, 22, 2)]


def test_a_job_that_was_set_back_is_told_as_it_went_on() -> None:
    told = merge([line(1, 10, 10), line(1, 20, 10), line(1, 30, 10), line(2, 12, 2), line(2, 14, 2)])
    assert [(one.first, one.step, one.generation) for one in told] == [(1, 10, 1), (11, 12, 2), (13, 14, 2)]


def test_step_rate_is_steps_over_time_also_where_nothing_happened(run: Run) -> None:
    lines = [line(1, 10, 10, time_s=101.0), line(1, 20, 10, time_s=102.0), line(1, 30, 10, time_s=112.0)]
    # A gap of ten seconds shows as a low rate, not as a hole.
    rates = replace(run, trained_from_s=100.0, lines=lines).rate(6)
    assert [(round(at, 3), round(rate, 3)) for at, rate in rates] == [
        (101.0, 10.0), (103.0, 1.0), (105.0, 1.0), (107.0, 1.0), (109.0, 1.0), (111.0, 1.0)
    ]  # fmt: skip
