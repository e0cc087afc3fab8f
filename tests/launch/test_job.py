"""`shoal run` as people meet it: real processes, faults from outside, and nothing left behind.

The scripts do not train; what a worker does with a coordinator is tested with training.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import shoal
from shoal.launch import tail

DEADLINE_S = 60.0
ROOT = str(Path(shoal.__file__).parents[1])

WAITS = """
    import signal
    print("waiting")
    signal.pause()
"""


class Run:
    """A `shoal run` under way, with what it has printed so far."""

    def __init__(self, directory: Path, script: str, *options: str) -> None:
        (directory / "script.py").write_text(textwrap.dedent(script))
        self.dir = directory / "run"
        self.out: list[str] = []
        self.err: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "run", "--dir", str(self.dir), *options, "script.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": ROOT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=lambda: self.out.extend(iter(self.process.stdout.readline, ""))),
            threading.Thread(target=lambda: self.err.extend(iter(self.process.stderr.readline, ""))),
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return code

    def says(self, line: str) -> None:
        until(lambda: self.process.poll() is not None or f"{line}\n" in self.out, lambda: str((self.out, self.err)))
        assert f"{line}\n" in self.out, (self.out, self.err)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def helper(self, module: str) -> psutil.Process:
        """The coordinator or the fork server."""
        return next(process for process in psutil.Process(self.process.pid).children() if module in process.cmdline())

    def worker(self, worker_id: str) -> psutil.Process:
        (process,) = (p for p in self.family() if f"logs/{worker_id}.log" in " ".join(_open_files(p)))
        return process

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "shoal", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    @property
    def last_line(self) -> str:
        return self.err[-1].rstrip("\n")


def _open_files(process: psutil.Process) -> list[str]:
    try:
        return [os.readlink(f"/proc/{process.pid}/fd/1")]
    except OSError:
        return []


def until(holds: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.01)


def ended(processes: list[psutil.Process]) -> bool:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(runs(process) for process in processes)


@contextmanager
def running(directory: Path, script: str, *options: str) -> Iterator[Run]:
    run = Run(directory, script, *options)
    try:
        yield run
    finally:
        family = run.family() if run.process.poll() is None else []
        run.process.kill()
        run.wait()
        until(lambda: ended(family))
        run.process.stdout.close()
        run.process.stderr.close()
    makers = tuple(f"torch_{process.pid}_" for process in family)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(makers)]


def test_output_of_workers_is_echoed_with_their_names(tmp_path):
    script = """
        import os, sys
        print("hello", sys.argv)
        sys.stdout.write("no newline")
    """
    with running(tmp_path, script, "-n", "2") as run:
        assert run.wait() == 2
        for worker_id in ("w0", "w1"):
            lines = [line for line in run.out if line.startswith(worker_id)]
            assert lines == [f"{worker_id} | hello ['{tmp_path}/script.py']\n", f"{worker_id} | no newline\n"]
        wanted = (
            "shoal: ScriptFailed: script.py ended without calling shoal.run(main); call it at the end of the script"
        )
        assert run.last_line == wanted


@pytest.mark.slow
def test_log_of_a_worker_that_prints_without_end_is_bounded_and_echoed_to_the_last_line(tmp_path):
    script = """
        import os, sys, time
        log = os.readlink("/proc/self/fd/1")
        number, olders = 0, set()
        while len(olders) < 3:
            for number in range(number + 1, number + 101):
                print("line", number)
            time.sleep(0.001)  # a launcher reads 10 MB a second
            if os.path.exists(log + ".1"):
                olders.add(os.stat(log + ".1").st_mtime_ns)
        print("last", number)
    """
    with running(tmp_path, script, "-n", "1", "--log-size", "64K") as run:
        assert run.wait() == 2
        lines = [line for line in run.out if line.startswith("w0 | line ")]
        numbers = [int(line.split()[-1]) for line in lines]
        if collapses(tmp_path / "probe"):
            assert numbers == list(range(1, len(numbers) + 1))
        else:
            assert numbers == sorted(set(numbers))
        assert f"w0 | last {numbers[-1]}\n" in run.out
        logs = run.dir / "logs"
        kept = (logs / "w0.log.1").stat().st_size + (logs / "w0.log").stat().st_size
        assert kept < sum(len(line) - len("w0 | ") for line in lines)
        assert run.command("logs", str(run.dir), "-n", "2") == f"w0 | line {numbers[-1]}\nw0 | last {numbers[-1]}\n"
        shown = run.command("logs", str(run.dir), "--worker", "w0").splitlines()
        assert [line.split()[-1] for line in shown[1:-1]] == [str(n) for n in numbers[-len(shown) + 2 :]]


def collapses(path: Path) -> bool:
    """Whether this file system can take a range out of a file: what is written meanwhile is never lost."""
    path.write_bytes(bytes(1 << 20))
    with path.open("rb+") as file:
        return tail._collapse(file.fileno(), 1 << 19)


def test_exception_of_many_workers_is_shown_once_and_stays_in_every_log(tmp_path):
    script = """
        print("before")
        raise ValueError("same everywhere")
    """
    with running(tmp_path, script, "-n", "3") as run:
        assert run.wait() == 2
        shown = "".join(run.out + run.err)
        assert shown.count("Traceback (most recent call last)") == 1
        assert run.last_line == "shoal: ScriptFailed: script.py, line 3: ValueError: same everywhere"
        assert "ValueError: same everywhere" in (run.dir / "logs" / "w0.log").read_text()


def test_user_mistake_in_a_worker_is_one_line_even_if_errors_relaunch(tmp_path):
    script = """
        from shoal import errors
        raise errors.DataUnusable("7 samples for 8 workers; use fewer")
    """
    with running(tmp_path, script, "-n", "2", "--on-error", "relaunch", "--quiet") as run:
        assert run.wait() == 2
        assert run.out == []
        assert run.err == ["shoal: DataUnusable: 7 samples for 8 workers; use fewer\n"]


def test_worker_that_raises_is_replaced_if_asked(tmp_path):
    script = """
        import os
        if os.environ["SHOAL_WORKER_ID"] == "w0":
            raise OSError("a bad disk")
        print("fine")
    """
    with running(tmp_path, script, "-n", "1", "--on-error", "relaunch") as run:
        run.wait()
        assert run.out == ["w1 | fine\n"]


def test_workers_that_keep_crashing_spend_the_budget(tmp_path):
    with running(tmp_path, "import os; os.abort()", "-n", "1", "--restarts", "2") as run:
        assert run.wait() == 1
        assert re.match(r"shoal: RestartBudgetSpent: 3 workers failed within 60 s.* w2 \(signal 6\)", run.last_line)


def test_exit_status_without_a_word_ends_the_job(tmp_path):
    with running(tmp_path, "import sys; sys.exit(3)", "-n", "1") as run:
        assert run.wait() == 2
        assert run.last_line == "shoal: ScriptFailed: w0 ended with exit status 3; its log says why"


def test_killed_worker_is_replaced_by_one_with_a_new_name_and_the_job_scales_and_stops(tmp_path):
    script = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("waiting")
        while True:
            signal.pause()
    """
    with running(tmp_path, script, "-n", "2") as run:
        run.says("w1 | waiting")
        run.says("w0 | waiting")
        run.worker("w1").kill()
        run.says("w2 | waiting")
        run.command("scale", str(run.dir), "3")
        run.says("w3 | waiting")
        state = json.loads(run.command("status", str(run.dir), "--json"))
        assert {worker["worker_id"] for worker in state["workers"]} == {"w0", "w2", "w3"}
        assert "w3" in run.command("status", str(run.dir))
        family = run.family()
        run.command("stop", str(run.dir))
        assert run.wait() == 0
        assert ended(family)


def test_first_signal_drains(tmp_path):
    script = """
        import signal, sys
        def leave(*_):
            print("left in order")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("waiting")
        while True:
            signal.pause()
    """
    with running(tmp_path, script, "-n", "1") as run:
        run.says("w0 | waiting")
        family = run.family()
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert "w0 | left in order\n" in run.out
        assert ended(family)


def test_second_signal_kills(tmp_path):
    script = """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("heard"))
        print("waiting")
        while True:
            signal.pause()
    """
    with running(tmp_path, script, "-n", "1", "--budget", "600") as run:
        run.says("w0 | waiting")
        family = run.family()
        run.process.send_signal(signal.SIGTERM)
        until(lambda: "w0 | heard\n" in run.out or "heard" in (run.dir / "logs" / "w0.log").read_text())
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert ended(family)


def test_signal_while_torch_still_loads_ends_the_job(tmp_path):
    with running(tmp_path, WAITS, "-n", "1") as run:
        until(lambda: (run.dir / "logs" / "forkserver.log").exists())
        family = run.family()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert "Traceback" not in "".join(run.err)
        until(lambda: ended(family))


@pytest.mark.slow  # tests/job has the like with a training
def test_killed_launcher_leaves_nothing(tmp_path):
    script = """
        import os, signal, socket
        from shoal.sync.memory import Channel
        Channel(socket.socket(fileno=int(os.environ["SHOAL_CHANNEL_FD"]))).open("arena", 1 << 20)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting")
        while True:
            signal.pause()
    """
    with running(tmp_path, script, "-n", "3") as run:
        for worker_id in ("w0", "w1", "w2"):
            run.says(f"{worker_id} | waiting")
        family = run.family()
        assert len(family) == 5  # the coordinator, the fork server and three workers
        run.process.kill()
        until(lambda: ended(family))


def test_death_of_a_process_the_job_needs_ends_it_with_one_line(tmp_path):
    with running(tmp_path, WAITS, "-n", "2") as run:
        run.says("w0 | waiting")
        run.says("w1 | waiting")
        family = run.family()
        run.helper("shoal.launch.forkserver").kill()
        assert run.wait() == 1
        assert run.last_line.startswith("shoal: ForkServerLost: the fork server ended with signal 9; ")
        assert "Traceback" not in "".join(run.err)
        until(lambda: ended(family))


def test_coordinators_that_cannot_serve_end_the_job_with_the_last_line_of_their_log(tmp_path):
    with running(tmp_path, WAITS, "-n", "2") as run:
        run.says("w0 | waiting")
        run.says("w1 | waiting")
        family = run.family()
        helper = run.helper("shoal.control.coordinator")
        helper.suspend()
        (run.dir / "token").unlink()
        helper.kill()
        assert run.wait() == 1
        assert run.last_line.startswith("shoal: CoordinatorLost: the coordinator ended with exit status 1: ")
        assert "is not a run directory" in run.last_line
        assert "Traceback" not in "".join(run.err)
        until(lambda: ended(family))


@pytest.mark.slow
def test_scaling_down_and_up_again_starts_as_many_as_are_missing(tmp_path):
    script = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("waiting")
        while True:
            signal.pause()
    """
    with running(tmp_path, script, "-n", "2") as run:
        run.says("w0 | waiting")
        run.says("w1 | waiting")
        run.command("scale", str(run.dir), "1")
        run.command("scale", str(run.dir), "2")
        run.says("w2 | waiting")
        run.command("scale", str(run.dir), "3")
        run.says("w3 | waiting")
        state = json.loads(run.command("status", str(run.dir), "--json"))
        assert {worker["worker_id"] for worker in state["workers"]} == {"w0", "w1", "w2", "w3"}


def test_reader_that_goes_away_does_not_stop_the_job(tmp_path):
    (tmp_path / "script.py").write_text("for number in range(20000): print(number)\n")
    command = f"{sys.executable} -m shoal run -n 1 --dir run script.py | head -n 1; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": ROOT}
    said = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["w0", "|", "0", "2"]
