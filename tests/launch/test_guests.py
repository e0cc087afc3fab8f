"""Machines that somebody adds to a job by hand: what is wrong with one costs the job that machine only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.metrics import read_events
from tests.launch.test_many_hosts import DEADLINE_S, ROOT, Run, running, until

# What a machine does otherwise is in its environment.
TRAINS = """
    import os, pathlib, time, torch, shoal

    wrong = os.environ.get("WRONG", "")

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 6400
        def __getitem__(self, index):
            if wrong == "sample":
                open("/nowhere/samples")
            return torch.ones(2), torch.ones(1)

    def main(worker):
        if wrong == "script":
            open("/nowhere/data")
        if wrong == "exit":
            os._exit(3)
        model = torch.nn.Linear(2, 2 if wrong == "shapes" else 1)
        clip_norm = 2.0 if wrong == "settings" else 1.0
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), clip_norm=clip_norm)
        epochs = {"epochs": 9, "fewer epochs": 1, "more epochs": 1001}.get(wrong, 1000)
        for x, y in worker.batches(Data(), global_batch=32, epochs=epochs):
            worker.step(((model(x) - y) ** 2).mean())
            time.sleep(0.002)
            if pathlib.Path("broken").exists():
                raise ValueError("broken")
            if pathlib.Path("enough").exists():
                break

    shoal.run(main)
"""


# As another machine would, which does not see the run directory.
APART = """
import functools, sys, shoal.cli, shoal.cli.hosts
shoal.cli.hosts.Told = functools.partial(shoal.cli.hosts.Told, own_dir=True)
shoal.cli.main(sys.argv[1:])
"""


class Guest:
    def __init__(self, run: Run, name: str, wrong: str, apart: bool) -> None:
        self.output = run.directory / name
        words = ("join", str(run.dir / "invitation"), "--slots", "1", "--host-name", name)
        env = {**os.environ, "PYTHONPATH": ROOT, "WRONG": wrong}
        with open(self.output, "w") as output:
            command = [sys.executable, *(("-c", APART) if apart else ("-m", "shoal")), *words]
            self.process = subprocess.Popen(
                command, cwd=run.directory, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    def printed(self) -> str:
        return self.output.read_text()


@contextmanager
def joins(run: Run, name: str, wrong: str = "", apart: bool = False) -> Iterator[Guest]:
    guest = Guest(run, name, wrong, apart)
    try:
        yield guest
    finally:
        guest.process.kill()
        guest.process.wait()


WRONGS = {
    "shapes": "WorkersDiffer: ",
    "script": "ScriptFailed: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/data'",
    "epochs": "WorkersDiffer: pass 0: epochs is 9 here and 1000 at the first worker",
    "fewer epochs": "WorkersDiffer: pass 0: epochs is 1 here, and the job is in epoch ",
    "more epochs": "WorkersDiffer: {name}-w0 and w0 differ in epochs (1001 and 1000)",
    "settings": "WorkersDiffer: {name}-w0 and w0 differ in clip_norm (2.0 and 1.0)",
    "sample": "ScriptFailed: FileNotFoundError: ",
    "exit": "ScriptFailed: {name}-w0 ended with exit status 3; its log says why",
}


EARLY = ("shapes", "script", "epochs", "exit")  # before it is a member
LATE = ("sample", "fewer epochs", "more epochs")


@pytest.mark.parametrize(
    "wrongs",
    [("settings",), *(pytest.param(each, marks=pytest.mark.slow) for each in (EARLY, LATE))],
    ids=", ".join,
)
def test_a_machine_on_which_the_script_fails_is_refused_in_one_line_and_the_job_trains_on(
    tmp_path: Path, wrongs: tuple[str, ...]
) -> None:
    with running(tmp_path, "-n", "1", "--address", "127.0.0.1", script=TRAINS) as run:
        run.until(lambda: run.members() == ["w0"])
        for wrong in wrongs:
            name = f"other-{wrong.replace(' ', '-')}"
            if wrong in LATE:
                run.until(lambda: commands.status(RunDir(run.dir))["epoch"] > 1)
            reason = f"{name} is refused, and the job goes on without it: {WRONGS[wrong].format(name=name)}"
            with joins(run, name, wrong, apart=wrong in LATE) as guest:
                assert guest.process.wait(DEADLINE_S) == 2, guest.printed()
                own = [line for line in guest.printed().splitlines() if line.startswith("shoal: ")]
                assert len(own) == 1, guest.printed()
                assert own[0].startswith(f"shoal: HostUnusable: {reason}")
                assert ("Traceback" in guest.printed()) == (wrong in ("script", "sample"))
            assert str(run.events("host_refused")[-1]["text"]).startswith(reason)
            run.until(lambda: run.members() == ["w0"])
            status = commands.status(RunDir(run.dir))
            assert (status["target"], status["phase"]) == (1, "running")
        run.finish()
    assert not run.events("failed")
    assert all(str(event["worker_id"]).startswith("other-") for event in run.events("lost"))


@pytest.mark.slow
def test_a_guest_says_why_the_job_failed(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--address", "127.0.0.1", script=TRAINS) as run:
        run.until(lambda: run.members() == ["w0"])
        with joins(run, "spare") as guest:
            run.until(lambda: run.members() == ["w0", "spare-w0"])
            (tmp_path / "broken").touch()
            assert run.process.wait(DEADLINE_S) == 2
            assert guest.process.wait(DEADLINE_S) == 2, guest.printed()
            assert guest.printed().splitlines()[-1].startswith("shoal: ScriptFailed: "), guest.printed()
            assert "broken" in guest.printed().splitlines()[-1]


@pytest.mark.slow
def test_a_guest_whose_coordinator_is_gone_says_so_and_leaves_at_the_first_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--address", "127.0.0.1", "--budget", "1", script=TRAINS) as run:
        run.until(lambda: run.members() == ["w0"])
        with joins(run, "spare") as guest:
            run.until(lambda: run.members() == ["w0", "spare-w0"])
            run.process.kill()
            run.process.wait()
            told = "no word from the coordinator of the job; spare waits for it: shoal coordinator"
            until(lambda: told in guest.printed(), guest.printed)
            guest.process.send_signal(signal.SIGINT)
            assert guest.process.wait(DEADLINE_S) == 0, guest.printed()
            assert "no coordinator answers: the workers of this host are ended" in guest.printed()


@pytest.mark.slow
def test_a_guest_says_when_the_coordinator_is_heard_again(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--address", "127.0.0.1", "--budget", "1", script=TRAINS) as run:
        run.until(lambda: run.members() == ["w0"])
        with joins(run, "spare") as guest:
            run.until(lambda: run.members() == ["w0", "spare-w0"])
            run.process.kill()
            run.process.wait()
            until(lambda: "no word from the coordinator" in guest.printed(), guest.printed)
            with open(tmp_path / "heir", "w") as output:
                heir = run.start("coordinator", "run", "--address", "127.0.0.2", output=output)
            try:
                until(lambda: "the coordinator of the job is heard again" in guest.printed(), guest.printed)
                until(lambda: run.members() == ["spare-w0"])
                (tmp_path / "enough").touch()
                assert guest.process.wait(DEADLINE_S) == 0, guest.printed()
                assert heir.wait(DEADLINE_S) == 0, (tmp_path / "heir").read_text()
            finally:
                heir.kill()
                heir.wait()
    assert [event["event"] for event in read_events(run.dir / "events.jsonl")][-1] == "over"
