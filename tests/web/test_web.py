"""The live page: who may see it, what it shows, and that it steers a real job."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from shoal import cli
from shoal.control.rundir import RunDir
from shoal.metrics import EventLog
from shoal.testing import LocalJob
from shoal.web.app import application
from shoal.web.picture import picture

KEY = "a-key-of-this-test"
BEARER = {"Authorization": f"Bearer {KEY}"}


def page_of(run_dir: RunDir) -> TestClient:
    return TestClient(application(run_dir, KEY), base_url="http://127.0.0.1:8000")


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run", {"script": "train.py", "target": 2, "min": 1, "max": 4})
    events = EventLog(run_dir.events)
    events.write(1.0, "generation", number=1, members=["w0"], leavers=[], fault=False, paused=False, cause="w0 joined")
    events.write(2.0, "finished", worker_id="w0", text="", step=3, seq=4, digest="", report={})
    events.close()
    return run_dir


def test_nothing_is_shown_without_the_key(ended: RunDir) -> None:
    page = page_of(ended)
    assert page.get("/").status_code == 403
    assert page.get("/?key=wrong").status_code == 403
    assert page.get("/live").status_code == 403
    assert page.get(f"/live?key={KEY}").status_code == 403, "only the page itself takes it from the address"
    assert page.get(f"/?key={KEY}").status_code == 200
    assert page.get("/live", headers=BEARER).status_code == 200


def test_a_name_of_somebody_elses_that_points_here_is_refused(ended: RunDir) -> None:
    page = page_of(ended)
    assert page.get(f"/?key={KEY}", headers={"Host": "evil.example:8000"}).status_code == 403
    assert page.get(f"/?key={KEY}", headers={"Host": "localhost:8000"}).status_code == 200


def test_commands_need_the_key_in_a_header_and_no_other_site_may_frame_or_script_the_page(ended: RunDir) -> None:
    page = page_of(ended)
    assert page.post(f"/command/stop?key={KEY}", json={}).status_code == 403
    assert page.get("/command/stop", headers=BEARER).status_code == 405
    policy = page.get(f"/?key={KEY}").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "access-control-allow-origin" not in page.get("/live", headers=BEARER).headers


def test_what_is_no_command_or_comes_too_late_is_said(ended: RunDir) -> None:
    page = page_of(ended)
    assert page.post("/command/dance", json={}, headers=BEARER).status_code == 400
    assert page.post("/command/scale", json={}, headers=BEARER).status_code == 400
    late = page.post("/command/scale", json={"target": 2}, headers=BEARER)
    assert late.status_code == 409
    assert "does not run" in late.text
    told = page.get("/live", headers=BEARER).json()
    assert told["over"]
    assert "finished" in told["line"]


def test_the_picture_has_every_worker_with_its_rank_and_state() -> None:
    base = {"pid": 1, "step": 3, "host": "<host>", "suspect": False}
    workers = [
        {**base, "worker_id": "w0", "rank": 0, "state": "member"},
        {**base, "worker_id": "w1", "rank": 1, "state": "member"},
        {**base, "worker_id": "w2", "rank": None, "state": "joining"},
    ]
    drawn = picture(workers)
    assert drawn.count("<circle") == 3
    assert drawn.count("<path") == 1, "the two members exchange"
    assert "&lt;host&gt;" in drawn
    assert picture([]) == '<p class="soft">no workers</p>'


def test_a_real_job_is_drawn_by_a_real_browser_and_steered_by_the_buttons_commands(running: LocalJob) -> None:
    run_dir = RunDir.open(running.directory)
    web = subprocess.Popen([sys.executable, "-m", "shoal", "web", str(run_dir.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert web.stdout is not None
        address = web.stdout.readline().strip()
        browser = shutil.which("chromium")
        if browser is not None:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
            shown = subprocess.run([browser, *flags, address], capture_output=True, text=True, timeout=60).stdout
            assert 'class="worker member"' in shown
            assert "running" in shown
            assert "goodput" in shown.lower()
    finally:
        web.terminate()
        web.communicate()
    page = page_of(run_dir)
    assert page.post("/command/scale", json={"target": 3}, headers=BEARER).text == "3 workers wanted"
    running.wait_until(lambda: len([w for w in running.status()["workers"] if w["rank"] is not None]) == 3)
    assert page.post("/command/checkpoint", json={}, headers=BEARER).status_code == 200
    running.wait_until(lambda: bool(running.events("checkpointed")))
    assert page.post("/command/stop", json={}, headers=BEARER).text == "stopping"
    assert running.wait().exit_code == 0


def test_the_address_can_be_opened_as_soon_as_it_is_printed(ended: RunDir) -> None:
    command = [sys.executable, "-m", "shoal", "web", str(ended.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as web:
        try:
            assert web.stdout is not None
            with urllib.request.urlopen(web.stdout.readline().strip(), timeout=60) as answer:
                assert answer.status == 200
        finally:
            web.terminate()


def test_a_port_in_use_is_one_line(ended: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as exit:
        cli.main(["web", str(ended.path), "--port", str(taken.getsockname()[1])])
    assert exit.value.code == 2
    assert "cannot be used: Address already in use" in capsys.readouterr().err
