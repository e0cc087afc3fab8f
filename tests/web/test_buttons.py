"""The buttons of the live page, clicked in a real browser: what they do to a real job, and what the page says."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import checkpoints
from shoal.control.rundir import RunDir
from shoal.testing import LocalJob
from tests.web import browser
from tests.web.browser import Browser

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")


@contextlib.contextmanager
def served(job: LocalJob, *options: str) -> Iterator[str]:
    """The address of the job's page."""
    command = [sys.executable, "-m", "shoal", "web", str(job.directory), *options]
    web = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert web.stdout is not None
        yield web.stdout.readline().strip()
    finally:
        web.terminate()
        web.communicate()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with browser.browsing(tmp_path / "profile") as opened:
        yield opened


def says(page: Browser, text: str) -> None:
    page.wait_until(f"document.getElementById('said').textContent.includes({text!r})")


def members(job: LocalJob) -> int:
    return len([worker for worker in job.status()["workers"] if worker["rank"] is not None])


def test_buttons_scale_save_and_stop_a_job_and_the_page_says_so(running: LocalJob, page: Browser) -> None:
    with served(running) as address:
        page.open(address)
        page.wait_until("document.querySelectorAll('.worker.member').length > 0")
        before = members(running)
        wanted = 3 if before != 3 else 1
        page.write("#target", str(wanted))
        page.click("#scale")
        says(page, f"{wanted} workers wanted")
        running.wait_until(lambda: members(running) == wanted)
        page.wait_until(f"document.querySelectorAll('.worker.member').length === {wanted}")

        assert not running.events("checkpointed")
        page.click("#checkpoint")
        says(page, "a checkpoint is taken at the next step")
        running.wait_until(lambda: bool(running.events("checkpointed")))
        newest, damaged = checkpoints.newest_whole(RunDir(running.directory).checkpoints)
        assert newest is not None
        assert not damaged

        page.click("#stop", accept=False)
        assert not running.events("stopping"), "it was asked whether it should, and should not"
        page.click("#stop", accept=True)
        says(page, "stopping")
        assert running.wait().exit_code == 0
        page.wait_until("[...document.querySelectorAll('#bar button')].every(one => one.disabled)")
        assert "ended" in page.text("#line")
    assert [event["text"] for event in running.events("stopping")] == ["shoal web"]


def test_what_is_refused_and_who_does_not_answer_is_said_in_the_page(running: LocalJob, page: Browser) -> None:
    with served(running) as address:
        page.open(re.sub("key=.*", "key=wrong", address))
        assert "the key is missing or wrong: open the address that shoal web printed" in page.text("body")
        page.open(address)
        page.write("#target", "9")
        page.click("#scale")
        says(page, "SettingsContradict")
        assert not running.events("target")
    port = address.split(":")[2].partition("/")[0]
    page.click("#checkpoint")
    says(page, "shoal web does not answer")
    with served(running, "--port", port) as another:
        page.click("#checkpoint")  # with the key of the one before
        says(page, "the key is missing or wrong")
        page.open(another)
        page.click("#checkpoint")
        says(page, "a checkpoint is taken at the next step")
