"""Workers that the real torchrun starts, and how it and they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shoal import checkpoints
from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.control.torchrun import Torchrun
from shoal.data.audit import audit
from shoal.metrics import read_events
from tests.launch.test_many_hosts import DEADLINE_S, ROOT, alive, processes_in, running, until

# It goes on until the file `enough` is there, epoch by epoch, for some epochs at least.
SCRIPT = """
    import json, os, pathlib, torch, shoal

    def main(worker):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        losses = open("losses", "a")

        def on_step(report):
            if report.rank == 0:
                print(json.dumps([report.step, report.loss]), file=losses, flush=True)

        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), on_step=on_step)
        x = torch.randn(64, 4)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        print(worker.id, "is rank", os.environ["RANK"], flush=True)
        if os.environ["RANK"] == os.environ.get("FAILS"):
            raise ValueError("on purpose")
        for epoch in range(100000):
            for a, b in worker.batches(data, batch_size=8, epochs=1, num_workers=LOADERS):
                worker.step(((model(a) - b) ** 2).mean())
            if epoch > 20 and pathlib.Path("enough").exists():
                break

    shoal.run(main)
    pathlib.Path(f"after-{os.environ['RANK']}").touch()
"""


class Torch:
    """A torchrun under way in `directory`, with two processes."""

    def __init__(self, directory: Path, *options: str, loaders: int = 0, **env: str) -> None:
        self.directory, self.run_dir = directory, RunDir(directory / "run")
        script = textwrap.dedent(SCRIPT).replace("LOADERS", str(loaders))
        (directory / "train.py").write_text(script)
        self.output = directory / "output"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
        env = {**os.environ, "PYTHONPATH": ROOT, "SHOAL_DIR": "run", **env}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [*command, *options, "train.py"], cwd=directory, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    def printed(self) -> str:
        return self.output.read_text()

    def until(self, holds: Callable[[], bool]) -> None:
        until(lambda: holds() or self.process.poll() is not None, self.printed)
        assert holds(), self.printed()

    def steps(self) -> list[int]:
        path = self.directory / "losses"
        return [json.loads(line)[0] for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def trains(self) -> None:
        """Wait for a step more."""
        before = len(self.steps())
        self.until(lambda: len(self.steps()) > before)

    def workers(self) -> list[psutil.Process]:
        """By rank."""
        mine = psutil.Process(self.process.pid).children()
        return sorted(mine, key=lambda process: int(process.environ()["RANK"]))

    def launcher(self) -> psutil.Process:
        parent = psutil.Process(self.run_dir.coordinator()[0]).parent()
        assert parent is not None
        return parent

    def finish(self) -> None:
        (self.directory / "enough").touch()
        self.ended(0)
        committed = self.run_dir.committed()
        assert committed is not None
        report = audit(self.run_dir.audit, committed.seq)
        assert report.clean, str(report)
        losses = [json.loads(line) for line in (self.directory / "losses").read_text().split("\n")[:-1]]
        steps = [step for step, _ in losses]
        assert steps == sorted(set(steps)), "no step twice"
        assert losses[-1][1] < losses[0][1] / 10

    def ended(self, code: int | None) -> None:
        """With that exit status, or any but 0."""
        ended = self.process.wait(DEADLINE_S)
        assert ended == code or (code is None and ended), self.printed()
        until(lambda: not processes_in(self.directory), lambda: str(processes_in(self.directory)))


@contextmanager
def torchrun(directory: Path, *options: str, loaders: int = 0, **env: str) -> Iterator[Torch]:
    run = Torch(directory, *options, loaders=loaders, **env)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        until(lambda: not processes_in(directory), lambda: str(processes_in(directory)))


def test_two_processes_of_torchrun_train_one_model_and_go_on_after_it(tmp_path: Path) -> None:
    with torchrun(tmp_path) as run:
        run.trains()
        assert set(re.findall(r"w\d is rank (\d)", run.printed())) == {"0", "1"}
        pids = {worker["pid"] for worker in commands.status(run.run_dir)["workers"]}
        assert pids == {process.pid for process in run.workers()}
        run.finish()
    assert {path.name for path in tmp_path.glob("after-*")} == {"after-0", "after-1"}
    assert run.printed().rstrip().split("\n")[-1].startswith("audit: 0 lost, 0 repeated")


@pytest.mark.slow
def test_a_worker_is_killed_and_torchrun_starts_all_again_where_they_were(tmp_path: Path) -> None:
    with torchrun(tmp_path, "--max-restarts", "1", loaders=1) as run:
        run.trains()
        run.workers()[0].kill()  # the one that has started the launcher
        run.until(lambda: "going on from" in run.printed())
        run.trains()
        run.finish()
    assert len([event for event in read_events(run.run_dir.events) if event["event"] == "checkpointed"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["torchrun asked to end", "torchrun killed", "launcher killed", "worker killed"])
def test_whatever_ends_nothing_is_left(tmp_path: Path, fate: str) -> None:
    with torchrun(tmp_path, loaders=1) as run:
        run.trains()
        workers, launcher = run.workers(), run.launcher()
        if fate == "torchrun asked to end":
            run.process.terminate()
        elif fate == "torchrun killed":
            run.process.kill()
        elif fate == "launcher killed":
            launcher.kill()
        else:
            workers[1].kill()
        run.ended(None)
        assert not any(alive(process) for process in (*workers, launcher))
    if fate in ("torchrun asked to end", "worker killed"):
        (newest, _), committed = checkpoints.newest_whole(run.run_dir.checkpoints), run.run_dir.committed()
        assert newest is not None
        assert committed is not None
        assert newest.step == committed.step, "stopped with a checkpoint of its last step"
        # Whoever tells of steps may be the one that was killed, after the commit and before it told of it.
        untold = newest.step - run.steps()[-1]
        assert untold == 0 or (fate == "worker killed" and untold == 1)


@pytest.mark.slow
def test_a_script_that_fails_is_one_line_beside_its_traceback(tmp_path: Path) -> None:
    with torchrun(tmp_path, FAILS="1") as run:
        run.ended(None)
    lines = run.printed().split("\n")
    assert [line for line in lines if "shoal: " in line] == [
        "shoal: ScriptFailed: train.py, line 18: ValueError: on purpose"
    ]
    assert lines.count("ValueError: on purpose") == 1


@pytest.mark.slow
def test_the_processes_of_torchrun_join_a_job_that_runs(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "torch").mkdir()
    script = textwrap.dedent(SCRIPT).replace("LOADERS", "0").replace('os.environ["RANK"]', "0")
    with running(tmp_path / "job", "-n", "1", "--address", "127.0.0.1", script=script) as job:
        job.until(lambda: job.members() == ["w0"])
        with torchrun(tmp_path / "torch", SHOAL_INVITATION=str(job.dir / "invitation")) as run:
            job.until(lambda: len(job.members()) == 3)
            run.process.send_signal(signal.SIGTERM)
            run.ended(None)
        job.until(lambda: job.members() == ["w0"])
        assert not job.events("lost")
        job.finish()


def test_processes_of_one_round_meet_and_others_do_not() -> None:
    env = {"TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}

    def hall(**others: str) -> str:
        found = Torchrun.from_env({**env, **others})
        assert found is not None
        return found.hall

    env["TORCHELASTIC_ERROR_FILE"] = "/tmp/torchelastic_a/none_b/attempt_0/0/error.json"
    assert hall(LOCAL_RANK="1", TORCHELASTIC_ERROR_FILE="/tmp/torchelastic_a/none_b/attempt_0/1/error.json") == hall()
    assert hall(TORCHELASTIC_ERROR_FILE="/tmp/torchelastic_c/none_d/attempt_0/0/error.json") != hall()
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"):
        assert hall(**{name: "7"}) != hall()
    assert Torchrun.from_env({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_several_nodes_without_an_invitation_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    said = subprocess.run(
        [sys.executable, "-c", "import shoal; shoal.run(print)"],
        env={**os.environ, **env, "PYTHONPATH": ROOT}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (said.returncode, said.stderr.count("\n")) == (2, 1), said.stderr
    assert "SettingsContradict: torchrun with several nodes: " in said.stderr
