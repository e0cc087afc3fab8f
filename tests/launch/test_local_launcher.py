"""Real workers, forked with torch imported; the scripts here need no more of shoal than the launcher gives them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal import errors
from shoal.control.environment import WorkerEnvironment
from shoal.launch.exits import Exit, Failure
from shoal.launch.local import HeldMemory, LocalLauncher

DEADLINE_S = 60.0


class Watched:
    """A launcher whose callbacks can be awaited."""

    def __init__(
        self, directory: Path, script: str, memory_limit_bytes: int | None, env: Mapping[str, str] | None
    ) -> None:
        self.directory = directory
        path = directory / "script.py"
        path.write_text(textwrap.dedent(script))
        self.failures: list[Failure] = []
        self.lost: asyncio.Future[errors.ShoalError] = asyncio.get_running_loop().create_future()
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self.launcher = LocalLauncher(
            path,
            ["--lr", "0.1"],
            directory,
            memory_limit_bytes=memory_limit_bytes,
            env=env or {},
            on_exit=lambda exit: self._exit(exit.worker_id).set_result(exit),
            on_failure=self.failures.append,
            on_lost=self.lost.set_result,
        )

    async def start(self, worker_id: str) -> int:
        return await self.launcher.start(WorkerEnvironment(worker_id=worker_id))

    def _exit(self, worker_id: str) -> asyncio.Future[Exit]:
        return self._exits.setdefault(worker_id, asyncio.get_running_loop().create_future())

    async def exited(self, worker_id: str) -> Exit:
        return await asyncio.wait_for(self._exit(worker_id), DEADLINE_S)

    def log(self, worker_id: str) -> str:
        path = self.directory / f"{worker_id}.log"
        return path.read_text() if path.exists() else ""

    async def says(self, worker_id: str, text: str) -> None:
        await until(lambda: text in self.log(worker_id))


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), DEADLINE_S)


@asynccontextmanager
async def launching(
    directory: Path, script: str, memory_limit_bytes: int | None = None, env: Mapping[str, str] | None = None
) -> AsyncIterator[Watched]:
    watched = Watched(directory, script, memory_limit_bytes, env)
    try:
        await watched.launcher.open()
        yield watched
    finally:
        await watched.launcher.close()


WAITS = """
    import signal
    print("waiting")
    signal.pause()
"""


@pytest.mark.parametrize(("asked", "given"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2")])
def test_worker_has_as_many_threads_of_numpy_as_were_asked_for(tmp_path, asked, given):
    script = """
        import os, numpy
        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        print(os.environ["OPENBLAS_NUM_THREADS"])
    """

    async def go():
        async with launching(tmp_path, script, env=asked) as watched:
            for worker_id in ("w0", "w1"):
                await watched.start(worker_id)
                assert await watched.exited(worker_id) == Exit(worker_id, exit_code=0)
                assert watched.log(worker_id) == f"{given}\n"

    asyncio.run(go())


def test_worker_gets_its_arguments_environment_log_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("EXTRA", "here")
    script = """
        import os, sys, torch
        import neighbor_module
        print(__name__, sys.argv[1:], os.environ["SHOAL_WORKER_ID"], os.environ["EXTRA"], torch.get_num_threads())
        print("to stderr", file=sys.stderr)
        print(os.path.basename(sys.argv[0]), neighbor_module.VALUE)
    """
    (tmp_path / "neighbor_module.py").write_text("VALUE = 7")

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w5")
            assert await watched.exited("w5") == Exit("w5", exit_code=0)
            assert watched.log("w5").splitlines() == [
                "__main__ ['--lr', '0.1'] w5 here 1",
                "to stderr",
                "script.py 7",
            ]
            assert watched.failures == []

    asyncio.run(go())


def test_fork_server_has_one_thread_when_it_forks(tmp_path):
    async def go():
        async with launching(tmp_path, "") as watched:
            server = watched.launcher._server
            assert server is not None
            assert await server.ready() == 1

    asyncio.run(go())


def test_more_starts_than_the_fork_servers_socket_holds_wait_for_their_turn(tmp_path):
    async def go():
        async with launching(tmp_path, "pass") as watched:
            server = watched.launcher._server._process
            server.send_signal(signal.SIGSTOP)  # it takes nothing
            starts = [asyncio.ensure_future(watched.start(f"w{number}")) for number in range(400)]
            done, waiting = await asyncio.wait(starts, timeout=0.5)
            assert not [start.exception() for start in done]
            for start in waiting:
                start.cancel()
            await asyncio.wait(starts)

    asyncio.run(go())


def test_exception_in_user_code_is_told_with_the_users_frames_only(tmp_path):
    script = """
        def loss():
            raise ValueError("bad\\nshape")

        loss()
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w0")
            assert await watched.exited("w0") == Exit("w0", exit_code=1)
            (failure,) = watched.failures
            assert (failure.worker_id, failure.kind) == ("w0", "ScriptFailed")
            assert failure.message == "script.py, line 3: ValueError: bad shape"
            assert failure.traceback is not None
            assert failure.traceback.startswith("Traceback")
            assert "runpy" not in failure.traceback
            assert "forkserver" not in failure.traceback
            assert "ValueError: bad\nshape" in watched.log("w0")

    asyncio.run(go())


def test_user_mistake_is_told_by_its_name_without_a_traceback(tmp_path):
    script = """
        from shoal import errors
        raise errors.ModelUnusable("the model has no parameters; pass one that has")
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w0")
            assert await watched.exited("w0") == Exit("w0", exit_code=2)
            text = "the model has no parameters; pass one that has"
            assert watched.failures == [Failure("w0", "ModelUnusable", text)]

    asyncio.run(go())


EACH_ITS_OWN = """
    import os, runpy
    runpy.run_path(os.environ["SHOAL_WORKER_ID"] + ".py", run_name="__main__")
"""

ENDINGS = {
    "def f(:\n    pass\n": (1, "SyntaxError"),
    "import no_such_module\n": (1, "ModuleNotFoundError: No module named 'no_such_module'"),
    "import sys; sys.exit(3)\n": (3, None),
    "import sys; sys.exit(0)\n": (0, None),
    "from shoal import errors; raise errors.CoordinatorLost('silence')\n": (1, "silence"),
    "import os; os.abort()\n": (None, None),
}


def test_exit_status_follows_how_the_script_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))

    async def go():
        async with launching(tmp_path, EACH_ITS_OWN) as watched:
            for number, (script, (status, told)) in enumerate(ENDINGS.items()):
                worker_id = f"w{number}"
                (tmp_path / f"{worker_id}.py").write_text(script)
                await watched.start(worker_id)
                exit = await watched.exited(worker_id)
                assert exit == Exit(worker_id, status, None if status is not None else signal.SIGABRT)
                failures = [failure.message for failure in watched.failures if failure.worker_id == worker_id]
                assert len(failures) == (told is not None)
                assert told is None or told in failures[0]

    asyncio.run(go())


def test_fenced_worker_is_dead_when_fence_returns_and_its_signal_is_known(tmp_path):
    async def go():
        async with launching(tmp_path, WAITS) as watched:
            pid = await watched.start("w0")
            await watched.says("w0", "waiting")
            await watched.launcher.fence("w0")
            assert not is_running(pid)
            assert await watched.exited("w0") == Exit("w0", signal=signal.SIGKILL)
            await watched.launcher.fence("w0")  # again, and of one that never was: nothing to do
            await watched.launcher.fence("w99")

    asyncio.run(go())


def test_what_a_killed_worker_had_started_ends_with_it(tmp_path):
    script = """
        import os, signal
        child = os.fork()
        if child == 0:
            signal.pause()
        print("loader", child)
        signal.pause()
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w0")
            await watched.says("w0", "\n")
            loader = int(watched.log("w0").split()[1])
            watched.launcher.signal("w0", signal.SIGKILL)
            assert await watched.exited("w0") == Exit("w0", signal=signal.SIGKILL)
            await until(lambda: not is_running(loader))

    asyncio.run(go())


def test_evidence_tells_a_stopped_worker_from_a_busy_one(tmp_path):
    script = """
        print("busy")
        while True:
            pass
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w0")
            await watched.says("w0", "busy")
            first = watched.launcher.evidence("w0")
            assert first is not None
            assert not first.stopped
            await until(lambda: watched.launcher.evidence("w0").cpu_s > first.cpu_s)
            watched.launcher.signal("w0", signal.SIGSTOP)
            await until(lambda: watched.launcher.evidence("w0").stopped)
            await watched.launcher.fence("w0")
            assert watched.launcher.evidence("w0") is None

    asyncio.run(go())


def test_stop_lets_workers_finish_and_kills_those_that_do_not(tmp_path):
    script = """
        import os, signal, sys
        if os.environ["SHOAL_WORKER_ID"] == "w0":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting")
        while True:
            signal.pause()
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            for worker_id in ("w0", "w1"):
                await watched.start(worker_id)
                await watched.says(worker_id, "waiting")
            await watched.launcher.stop(grace_s=5.0)
            assert await watched.exited("w0") == Exit("w0", exit_code=0)
            assert await watched.exited("w1") == Exit("w1", signal=signal.SIGKILL)

    asyncio.run(go())


@pytest.mark.parametrize("busy", [True, False])
def test_stop_waits_longer_for_workers_that_are_busy(tmp_path, busy):
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting")
        while not os.path.exists(os.environ["DONE"]):
            time.sleep(0.01)
    """
    done, looks = tmp_path / "done", []

    def still_busy():
        looks.append(1)
        if len(looks) == 3:
            done.touch()
        return busy

    async def go():
        async with launching(tmp_path, script) as watched:
            await watched.start("w0")
            await watched.says("w0", "waiting")
            await watched.launcher.stop(grace_s=0.0, busy=still_busy)
            expected = Exit("w0", exit_code=0) if busy else Exit("w0", signal=signal.SIGKILL)
            assert await watched.exited("w0") == expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DONE", str(done))
        asyncio.run(go())


def test_workers_share_memory_by_name(tmp_path):
    script = """
        import mmap, os, socket
        from shoal.sync.memory import Channel
        channel = Channel(socket.socket(fileno=int(os.environ["SHOAL_CHANNEL_FD"])))
        with mmap.mmap(channel.open("arena", 8192), 8192) as memory:
            if os.environ["SHOAL_WORKER_ID"] == "w0":
                memory[:5] = b"hello"
                print("written")
            else:
                print(bytes(memory[:5]))
    """

    async def go():
        async with launching(tmp_path, script) as watched:
            for worker_id in ("w0", "w1"):
                await watched.start(worker_id)
                assert (await watched.exited(worker_id)).clean, watched.log(worker_id)
            assert watched.log("w1") == "b'hello'\n"

    asyncio.run(go())


def test_memory_that_cannot_be_given_is_an_error_at_the_worker(tmp_path, monkeypatch):
    script = """
        import json, os, socket
        from shoal.sync.memory import Channel
        channel = Channel(socket.socket(fileno=int(os.environ["SHOAL_CHANNEL_FD"])))
        for name, size in json.loads(os.environ["SIZES_OF_" + os.environ["SHOAL_WORKER_ID"]]):
            channel.open(name, size)
    """
    cases = {
        "w0": ([("arena", 1 << 20), ("arena", 2 << 20)], "WorkersDiffer", "another worker wants 2,097,152"),
        "w1": ([("lanes", 3 << 20)], "OutOfSharedMemory", "needs 3.0 MiB of shared memory, 1.0 MiB is free"),
        "w2": ([("lanes", 1 << 50)], "OutOfSharedMemory", "--memory"),
    }
    for worker_id, (sizes, _, _) in cases.items():
        monkeypatch.setenv(f"SIZES_OF_{worker_id}", json.dumps(sizes))

    async def go():
        async with launching(tmp_path, script, memory_limit_bytes=2 << 20) as watched:
            for worker_id, (_, kind, text) in cases.items():
                await watched.start(worker_id)
                assert (await watched.exited(worker_id)).exit_code == 2, watched.log(worker_id)
                assert watched.failures[-1].kind == kind
                assert text in watched.failures[-1].message

    asyncio.run(go())


def test_memory_cap_counts_all_regions_together():
    async def go():
        memory = HeldMemory(limit_bytes=3 << 20)
        first = await memory.open("arena", 2 << 20)
        assert await memory.open("arena", 2 << 20) == first
        with pytest.raises(errors.OutOfSharedMemory, match=r"1\.0 MiB is free"):
            await memory.open("lanes", 2 << 20)
        await memory.open("lanes", 1 << 20)
        await memory.close()

    asyncio.run(go())


def test_death_of_the_fork_server_is_told_and_takes_its_workers_along(tmp_path):
    async def go():
        async with launching(tmp_path, WAITS) as watched:
            pid = await watched.start("w0")
            await watched.says("w0", "waiting")
            os.kill(watched.launcher._server._process.pid, signal.SIGKILL)
            lost = await asyncio.wait_for(watched.lost, DEADLINE_S)
            assert "fork server" in str(lost)
            assert not (await watched.exited("w0")).clean
            assert not is_running(pid)
            with pytest.raises(errors.ShoalError, match="fork server"):
                await watched.start("w1")

    asyncio.run(go())


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
