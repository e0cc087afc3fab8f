"""The commands that look at a job, on a real one: they follow it, change nothing, and end when it does."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import cli
from shoal.testing import LocalJob

SCRIPT = """
import torch
import shoal
from torch.utils.data import TensorDataset

def main(worker):
    net = torch.nn.Linear(4, 1)
    worker.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    try:
        data = TensorDataset(torch.zeros(60, 4))
        for number, batch in enumerate(worker.batches(data, epochs=10**6, global_batch=12)):
            if number % 500 == 0:
                print("batch", number)
            worker.step(net(batch.x).square().mean())
    finally:
        print("bye")

shoal.run(main)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal", *arguments]


class Looking:
    """A command that goes on, with what it has said so far; on a terminal of 80×24 if asked."""

    def __init__(self, *arguments: str, on_terminal: bool = False) -> None:
        self.said = ""
        self._news = threading.Condition()
        if on_terminal:
            self._end, self.terminal = pty.openpty()
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            self.modes = termios.tcgetattr(self.terminal)
        else:
            self._end, self.terminal = os.pipe()
        env = {**os.environ, "TERM": "xterm-256color"}
        stdin = self.terminal if on_terminal else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command(*arguments), env=env, stdin=stdin, stdout=self.terminal, stderr=self.terminal
        )
        if not on_terminal:
            os.close(self.terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._end, 65536)
            except OSError:
                return
            with self._news:
                self.said += data.decode()
                self._news.notify_all()
            if not data:
                return

    def until(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.said, 60), (text, self.said)

    def press(self, key: bytes) -> None:
        os.write(self._end, key)

    def end(self) -> int:
        return self.process.wait(60)

    @property
    def lines(self) -> list[str]:
        self._reader.join(60)
        return self.said.splitlines()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    folder = tmp_path_factory.mktemp("views")
    (folder / "train.py").write_text(SCRIPT)
    running = LocalJob(
        folder / "train.py",
        workers=2,
        directory=folder / "run",
        options=["--quiet", "--threads", "1", "--backoff", "0"],
    )
    running.start()
    try:
        running.wait_until(lambda: running.status().get("step", 0) > 0)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def restored(looking: Looking) -> bool:
    """Out of the alternate screen, the cursor shown, the keyboard as it was."""
    looking.until("\x1b[?1049l")
    return looking.said.rindex("\x1b[?25h") > looking.said.rindex("\x1b[?25l") and (
        termios.tcgetattr(looking.terminal) == looking.modes
    )


def test_top_quits_by_key_and_by_signal_and_gives_the_terminal_back(job: LocalJob) -> None:
    looks = [Looking("top", str(job.directory), on_terminal=True) for _ in range(3)]
    for look in looks:
        look.until("samples/s")
        look.until("w1 ")
    looks[0].press(b"x")
    looks[0].press(b"q")
    looks[1].process.send_signal(signal.SIGINT)
    looks[2].process.send_signal(signal.SIGTERM)
    assert [look.end() for look in looks] == [0, 0, 128 + signal.SIGTERM]
    assert all(restored(look) for look in looks)
    assert job.process.poll() is None


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_what_follows_a_job_tells_all_of_it_and_ends_with_it(job: LocalJob, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(job.directory)
    events = Looking("events", where, "--follow", "--json")
    logs = Looking("logs", where, "-f", "--worker", "w0", "-n", "1")
    top = Looking("top", where, on_terminal=True)
    plain = Looking("top", where, "--interval", "0.1")
    events.until('"generation"')
    logs.until("w0 | batch")
    top.until("ETA")
    plain.until("samples/s")
    job.signal("w1")
    events.until("w1 left (signal 9)")
    top.until("w1 left (signal 9)")
    state = json.loads(said_by(capsys, "status", where, "--json"))
    assert (state["phase"], state["progress"]["total"]) == ("running", 60 * 10**6)
    assert 0 < state["progress"]["done"] <= state["samples"]

    assert said_by(capsys, "stop", where).endswith("run: stopping\n")
    assert [look.end() for look in (events, logs, top, plain)] == [0, 0, 0, 0]
    assert restored(top)
    written = [json.loads(line) for line in Path(where, "events.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in events.lines] == written
    assert (written[-1]["event"], written[-1]["phase"]) == ("over", "ended")
    assert logs.lines[-1] == "w0 | bye"
    for look in (top, plain):
        look.until(": ended (stopped: shoal stop), generation")
    assert re.search(r"epoch [\d,]+ of 1,000,000  step [\d,]+  .* samples/s", plain.said)
    job.process.communicate()

    assert said_by(capsys, "stop", where).endswith("run has ended (stopped: shoal stop)\n")
    listed = said_by(capsys, "events", where)
    assert listed.count("\n") == len(written)
    assert listed.endswith("  job ended: stopped: shoal stop\n")
    head = subprocess.run(
        f"{' '.join(command('events', where, '--follow'))} | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert head.stderr == ""
    assert head.stdout.splitlines()[1] in ("0", "141")
    assert head.stdout.count("\n") == 2
