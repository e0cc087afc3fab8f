"""The coordinator and its clients, for real over loopback in one process."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.control import commands
from shoal.control.client import Client, LauncherClient, Progress
from shoal.control.generation import Generation
from shoal.control.membership.values import found
from shoal.control.rundir import RunDir, write_atomically
from shoal.control.serve import EmbeddedCoordinator
from shoal.control.timeouts import Timeouts
from shoal.errors import CoordinatorLost, JobNotFound, RunDirUnusable, SettingsContradict, TokenRefused
from shoal.metrics import read_events
from shoal.testing.faults import JournalFate, lose_journal

WAIT_S = 20.0
QUICK = Timeouts(0.5)


class Job:
    """A coordinator that can be killed and brought back, and whoever has joined it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.run_dir = RunDir.create(path, {"script": "train.py"})
        self.options = options
        self.clients: list[Any] = []
        self.bring_up()

    def bring_up(self, budget_s: float = 60.0, **sizes: int) -> None:
        sizes = {"min_size": 1, "max_size": 8, "target": 2, **self.options.get("sizes", {}), **sizes}
        timeouts = Timeouts(self.options.get("budget_s", budget_s), beat_s=0.05, probe_s=0.05)
        membership = found(**sizes, timeouts=timeouts)
        self.server = EmbeddedCoordinator(self.run_dir, membership, self.options.get("on_error", "stop"))
        self.address = self.server.start()

    def worker(self, worker_id: str, progress: Callable[[], Progress] = Progress) -> Worker:
        worker = Worker(self.run_dir, worker_id, progress)
        self.clients.append(worker.client)
        worker.slot = worker.client.connect()
        return worker

    def launcher(self, live: dict[str, int]) -> Launcher:
        launcher = Launcher(self.run_dir, live)
        self.clients.append(launcher.client)
        launcher.client.start()
        return launcher

    def status(self) -> dict[str, Any]:
        return commands.status(self.run_dir)

    def kinds(self) -> list[str]:
        return [event["event"] for event in read_events(self.run_dir.events)]

    def end(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()


class Worker:
    def __init__(self, run_dir: RunDir, worker_id: str, progress: Callable[[], Progress]) -> None:
        self.pushed: list[Generation] = []
        self.slot = -1
        timeouts = Timeouts(0.5, beat_s=0.05)
        self.client = Client(run_dir, worker_id, "here", timeouts, progress, self.pushed.append)

    def told_bye(self) -> bool:
        self.client.wait_newer(1 << 62, WAIT_S)
        return self.client.dismissed

    def newer(self, number: int) -> Generation:
        generation = self.client.wait_newer(number, WAIT_S)
        assert generation is not None, f"no generation above {number}"
        return generation


class Launcher:
    def __init__(self, run_dir: RunDir, live: dict[str, int], home: bool = True) -> None:
        self.heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.client = LauncherClient(
            run_dir,
            "here",
            QUICK,
            live.items,
            on_target=lambda told: self.heard.put(("target", told.target, told.finishing)),
            on_fence=lambda worker_id: self.heard.put(("fence", worker_id)),
            on_probe=lambda worker_id: self.heard.put(("probe", worker_id)),
            on_excuse=lambda worker_id: self.heard.put(("excuse", worker_id)),
            on_stop=lambda stop: self.heard.put(("stop", stop.reason, stop.failed, stop.kind)),
            on_refused=lambda reason: self.heard.put(("refused", reason)),
            home=home,
        )

    def hear(self, kind: str) -> tuple[Any, ...]:
        """The next message of that kind."""
        while (message := self.heard.get(timeout=WAIT_S))[0] != kind:
            pass
        return message


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        jobs.append(Job(tmp_path / f"run{len(jobs)}", **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def ids(members: tuple[Any, ...]) -> list[str]:
    return [member.worker_id for member in members]


def test_two_founders_become_one_generation_in_slots_zero_and_one(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    assert (first.slot, second.slot) == (0, 1)
    first.client.ready()
    second.client.ready()
    generation = first.newer(0)
    assert generation == second.newer(0)
    assert (generation.number, ids(generation.members), generation.fault) == (1, ["w0", "w1"], False)
    assert job.kinds() == ["joined", "joined", "ready", "ready", "generation"]


def test_a_leaver_gets_bye_only_after_it_parked_in_the_newest_generation(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    second.newer(0)
    second.client.leave()
    generation = second.newer(1)
    assert (ids(generation.members), ids(generation.leavers)) == (["w0"], ["w1"])
    assert first.newer(1) == generation
    second.client.parked(1)
    second.client.parked(generation.number)
    assert second.told_bye()
    assert not first.client.dismissed
    assert job.status()["generation"] == 2


def test_a_host_with_the_name_of_the_jobs_own_is_refused(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    own = job.launcher({})
    own.hear("target")
    for _ in range(2):  # also while its own is not connected
        other = Launcher(job.run_dir, {}, home=False)
        other.client.start()
        try:
            assert other.hear("refused")[1] == "the job has a host here already; name this one with --host-name"
        finally:
            other.client.close()
        own.client.close()
    assert "host_lost" not in job.kinds()


def test_a_host_that_is_refused_hears_nothing_else_of_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job()
    own = job.launcher({})
    own.hear("target")
    other = Launcher(job.run_dir, {}, home=False)
    other.client.start()
    try:
        refused = other.hear("refused")
        for target in (3, 4):
            commands.scale(job.run_dir, target)
            while own.hear("target")[1] != target:
                pass
        commands.stop(job.run_dir, "enough")
        own.hear("stop")
        assert other.client.answered, "nobody has ended its stream"
    finally:
        other.client.close()
    heard = [other.heard.get_nowait() for _ in range(other.heard.qsize())]
    assert [message for message in heard if message != refused] == []


def test_a_wrong_token_is_refused_for_workers_and_commands(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.run_dir.token_file.write_text("guess")
    worker = Worker(job.run_dir, "w0", Progress)
    job.clients.append(worker.client)
    with pytest.raises(TokenRefused, match="run directory"):
        worker.client.connect()
    with pytest.raises(TokenRefused):
        commands.status(job.run_dir)


def test_a_worker_that_finds_no_coordinator_gives_up_after_the_join_timeout(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    run_dir.write_address("127.0.0.1:9")
    worker = Client(run_dir, "w0", "here", Timeouts(0.5, join_s=0.5), Progress, print)
    with pytest.raises(CoordinatorLost, match=r"0\.5 s"):
        worker.connect()
    worker.close()


def test_workers_go_on_after_the_coordinator_was_killed_and_came_back(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    assert first.newer(0).number == second.newer(0).number == 1
    address = job.address
    job.server.stop()
    second.client.leave()  # said while nobody listens
    job.bring_up()
    assert job.address == address
    generation = first.newer(1)
    assert (generation.number, ids(generation.members), ids(generation.leavers)) == (2, ["w0"], ["w1"])
    second.newer(1)
    second.client.parked(2)
    assert second.told_bye()
    assert {worker["worker_id"]: worker["slot"] for worker in job.status()["workers"]}["w0"] == 0


def test_a_death_told_by_the_launcher_is_a_fault_generation_with_its_signal_as_cause(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    launcher = job.launcher({"w0": 1, "w1": 2})
    assert launcher.hear("target") == ("target", 2, False)
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    launcher.client.gone("w1", "signal 9")
    generation = first.newer(1)
    assert (ids(generation.members), generation.fault) == (["w0"], True)
    causes = [event["cause"] for event in read_events(job.run_dir.events) if event["event"] == "generation"]
    assert causes[-1] == "w1 left (signal 9)"


def test_a_death_while_the_coordinator_was_away_is_known_when_it_is_back(make_job: Callable[..., Job]) -> None:
    job = make_job()
    live = {"w0": 1, "w1": 2}
    launcher = job.launcher(live)
    launcher.hear("target")
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    job.server.stop()
    second.client.close()  # a dead process does not come back to say that it is ready
    del live["w1"]
    job.bring_up()
    generation = first.newer(1)
    assert (ids(generation.members), generation.fault) == (["w0"], True)


def test_a_silent_worker_somebody_waits_for_is_probed_then_fenced(make_job: Callable[..., Job]) -> None:
    job = make_job(budget_s=1.0)
    launcher = job.launcher({"w0": 1, "w1": 2})
    waiting: list[str] = []
    first = job.worker("w0", lambda: Progress(waiting_for=tuple(waiting)))
    second = job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    second.client.close()  # the process lives on, as far as the launcher knows
    waiting.append("w1")
    assert launcher.hear("probe") == ("probe", "w1")
    assert launcher.hear("fence") == ("fence", "w1")
    assert first.client.newest is not None
    assert first.client.newest.number == 1, "a fenced worker is not lost before its launcher says so"
    launcher.client.gone("w1", "signal 9")
    assert first.newer(1).fault


def test_scaling_down_drains_the_newest_and_out_of_range_is_an_error(make_job: Callable[..., Job]) -> None:
    job = make_job()
    launcher = job.launcher({"w0": 1, "w1": 2})
    launcher.hear("target")
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    with pytest.raises(SettingsContradict, match="cannot scale to 9"):
        commands.scale(job.run_dir, 9)
    assert commands.scale(job.run_dir, 1)["target"] == 1
    assert launcher.hear("target") == ("target", 1, False)
    assert launcher.hear("excuse") == ("excuse", "w1")
    assert ids(second.newer(1).leavers) == ["w1"]


def test_an_exception_in_user_code_stops_the_job_once(make_job: Callable[..., Job]) -> None:
    job = make_job()
    launcher = job.launcher({"w0": 1, "w1": 2})
    first, second = job.worker("w0"), job.worker("w1")
    first.client.failed("ValueError", "bad batch", "Traceback …")
    assert launcher.hear("stop") == ("stop", "w0 failed: ValueError: bad batch", True, "ValueError")
    second.client.failed("ValueError", "bad batch", "Traceback …")
    second.client.close()  # returns when it was heard
    assert first.told_bye()
    assert job.kinds().count("failed") == 1


def test_a_failure_of_one_ends_the_waits_of_the_others_and_they_leave(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    second.client.failed("ValueError", "bad batch", "Traceback …")
    generation = first.newer(1)
    assert (generation.members, ids(generation.leavers), generation.fault) == ((), ["w0", "w1"], True)


def test_a_newcomer_that_the_job_has_no_room_for_is_refused_and_the_job_goes_on(make_job: Callable[..., Job]) -> None:
    job = make_job(sizes={"target": 1})
    launcher = job.launcher({"w0": 1})
    first = job.worker("w0")
    first.client.ready()
    first.newer(0)
    commands.scale(job.run_dir, 2)
    second = job.worker("w1")
    second.client.failed("OutOfSharedMemory", "no room", "")
    assert launcher.hear("excuse") == ("excuse", "w1")
    assert launcher.hear("target") == ("target", 1, False)
    status = job.status()
    assert (status["phase"], status["target"]) == ("running", 1)
    (refused,) = (event for event in read_events(job.run_dir.events) if event["event"] == "refused")
    assert refused["text"] == "OutOfSharedMemory: no room; the job goes on with 1 worker"


def test_with_relaunch_an_exception_in_user_code_is_left_to_the_launcher(make_job: Callable[..., Job]) -> None:
    job = make_job(on_error="relaunch")
    launcher = job.launcher({"w0": 1, "w1": 2})
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    second.client.failed("ValueError", "bad batch", "Traceback …")
    second.client.close()
    launcher.client.gone("w1", "exit status 1")
    assert first.newer(1).fault
    assert "failed" in job.kinds()
    assert "stopping" not in job.kinds()


def test_a_job_ends_when_all_have_finished_and_gone(make_job: Callable[..., Job]) -> None:
    job = make_job(sizes={"min_size": 2})
    launcher = job.launcher({"w0": 1, "w1": 2})
    workers = [job.worker("w0"), job.worker("w1")]
    for worker in workers:
        worker.client.ready()
    for worker in workers:
        worker.newer(0)
        worker.client.finished("abc", 10, 11, {"loss": 0.5})
    for worker, worker_id in zip(workers, ("w0", "w1"), strict=True):
        number = 1
        while not worker.client.dismissed:
            generation = worker.client.wait_newer(number, WAIT_S)
            if generation is None:
                break
            assert not generation.paused
            number = generation.number
            if generation.leaves(worker_id):
                worker.client.parked(number)
    for worker, worker_id in zip(workers, ("w0", "w1"), strict=True):
        assert worker.told_bye()
        launcher.client.gone(worker_id, "exit status 0")
    assert launcher.hear("stop") == ("stop", "every worker has gone", False, "")
    finished = [event for event in read_events(job.run_dir.events) if event["event"] == "finished"]
    assert [(event["digest"], event["step"], event["report"]) for event in finished] == [("abc", 10, {"loss": 0.5})] * 2
    assert job.kinds()[-1] == "ended"
    assert job.status()["phase"] == "ended"


def test_status_tells_progress_from_the_beats(make_job: Callable[..., Job]) -> None:
    job = make_job(sizes={"target": 1})
    asked = threading.Semaphore(0)

    def progress() -> Progress:
        asked.release()
        return Progress(seq=8, step=7, epoch=1, samples=448, loss=0.25)

    worker = job.worker("w0", progress)
    worker.client.ready()
    worker.newer(0)
    for _ in range(2):  # the second beat is asked for when the first is out
        assert asked.acquire(timeout=WAIT_S)
    worker.client.leave()
    worker.newer(1)  # in order behind the beats
    status = job.status()
    assert (status["phase"], status["step"], status["epoch"], status["loss"]) == ("paused", 7, 1, 0.25)
    assert (status["samples"], status["seq"]) == (448, 8)
    assert status["workers"][0]["step"] == 7


def test_stop_drains_every_worker(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    assert commands.stop(job.run_dir, "asked by a test")["phase"] == "stopping"
    generation = first.newer(1)
    assert (generation.members, ids(generation.leavers), generation.paused) == ((), ["w0", "w1"], False)


def test_a_command_to_a_job_that_ended_says_so(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.server.stop()
    with pytest.raises(JobNotFound, match="does not run"):
        job.status()


def test_a_launcher_that_reconnects_tells_of_a_death_once_and_how_it_ended(make_job: Callable[..., Job]) -> None:
    job = make_job()
    live = {"w0": 1, "w1": 2}
    launcher = job.launcher(live)
    launcher.hear("target")
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    second.client.close()
    job.server.stop()
    del live["w1"]
    launcher.client.gone("w1", "signal 9")
    for _ in range(2):
        job.bring_up()
        launcher.hear("target")
        assert first.newer(1).fault
        job.server.stop()
    job.bring_up()
    events = read_events(job.run_dir.events)
    assert [event["text"] for event in events if event["event"] == "lost"] == ["signal 9"]
    assert [event["event"] for event in events].count("joined") == 2


def test_a_worker_of_another_version_is_refused(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    worker = Worker(job.run_dir, "w0", Progress)
    job.clients.append(worker.client)
    join = worker.client._join

    def old_join() -> Any:
        message = join()
        message.join.version = "0"
        return message

    monkeypatch.setattr(worker.client._link, "_opening", old_join)
    with pytest.raises(SettingsContradict, match="the same shoal"):
        worker.client.connect()


def test_a_coordinator_that_cannot_write_its_journal_tells_nobody_and_ends(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    worker = job.worker("w0")

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(job.server._coordinator._decisions._journal, "record", full)
    worker.client.leave()
    job.server._thread.join(WAIT_S)
    assert not job.server._thread.is_alive()
    assert not worker.client.dismissed


def test_a_coordinator_whose_port_was_taken_is_found_at_another(make_job: Callable[..., Job]) -> None:
    job = make_job()
    launcher = job.launcher({"w0": 1, "w1": 2})
    launcher.hear("target")
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    before = job.address
    job.server.stop()
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        job.bring_up()
        assert job.address != before
        assert launcher.hear("target") == ("target", 2, False)
        second.client.close()  # a dead process does not come back
        launcher.client.gone("w1", "signal 9")
        assert first.newer(1).fault
        assert job.status()["generation"] == 2


def test_a_command_waits_for_a_coordinator_that_is_on_its_way_back(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    tried = threading.Event()
    ask = commands.Commands._ask

    def ask_and_tell(*arguments: Any) -> dict[str, Any]:
        try:
            return ask(*arguments)
        finally:
            tried.set()

    monkeypatch.setattr(commands.Commands, "_ask", ask_and_tell)
    job.server.stop()
    with job.run_dir.held(), ThreadPoolExecutor() as pool:
        assert job.run_dir.runs()
        answer = pool.submit(commands.status, job.run_dir, WAIT_S)
        assert tried.wait(WAIT_S), "it was asked while there was no coordinator"
        job.bring_up()
        assert answer.result(WAIT_S)["phase"] == "starting"
    assert not job.run_dir.runs()


@pytest.mark.parametrize("journal", ["deleted", "overwritten"])
def test_without_a_journal_what_workers_and_launcher_say_suffices(
    make_job: Callable[..., Job], journal: JournalFate
) -> None:
    job = make_job(sizes={"target": 3})
    live = {"w0": 1, "w1": 2, "w2": 3}
    launcher = job.launcher(live)
    launcher.hear("target")
    workers = [job.worker(worker_id) for worker_id in live]
    for worker in workers:
        worker.client.ready()
    first, second, third = workers
    third.newer(0)
    third.client.leave()
    assert first.newer(1).number == third.newer(1).number == 2
    job.server.stop()
    lose_journal(job.run_dir, journal)
    second.client.close()
    del live["w1"]
    launcher.client.gone("w1", "signal 9")
    job.bring_up()
    generation = first.newer(2)
    assert (generation.number, ids(generation.members), ids(generation.leavers)) == (3, ["w0"], ["w2"])
    assert generation.fault
    third.newer(2)
    third.client.parked(3)
    assert third.told_bye()
    kinds = job.kinds()
    assert kinds.index("journal_lost") < kinds.index("rebuilt") < kinds.index("lost")
    assert kinds.count("joined") == 3
    assert {worker["worker_id"]: worker["slot"] for worker in job.status()["workers"]} == {"w0": 0, "w2": 2}
    assert (job.run_dir.path / "journal.damaged-1").exists() == (journal == "overwritten")


def test_without_a_journal_nothing_is_decided_until_everyone_has_come_back(make_job: Callable[..., Job]) -> None:
    job = make_job()
    live = {"w0": 1, "w1": 2}
    launcher = job.launcher(live)
    launcher.hear("target")
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    second.client.close()
    job.server.stop()
    lose_journal(job.run_dir, "deleted")
    job.bring_up()  # its budget is a minute
    first.client.leave()
    assert first.client.wait_newer(1, 0.5) is None, "w1 lives, and has not said what it knows"
    launcher.client.gone("w1", "signal 9")
    generation = first.newer(1)
    assert (generation.number, generation.fault, ids(generation.leavers)) == (2, True, ["w0"])


def test_a_stop_in_progress_goes_on_after_the_coordinators_death(make_job: Callable[..., Job]) -> None:
    job = make_job()
    first, second = job.worker("w0"), job.worker("w1")
    first.client.ready()
    second.client.ready()
    first.newer(0)
    commands.stop(job.run_dir, "asked by a test")
    job.server.stop()
    job.bring_up()
    assert (job.status()["phase"], job.status()["reason"]) == ("stopping", "asked by a test")
    launcher = job.launcher({"w0": 1, "w1": 2})
    assert launcher.hear("stop") == ("stop", "asked by a test", False, "")
    assert ids(first.newer(1).leavers) == ["w0", "w1"]


def test_a_wish_that_a_killed_coordinator_has_not_acknowledged_counts_once(make_job: Callable[..., Job]) -> None:
    job = make_job()
    worker = job.worker("w0")
    job.server.stop()
    worker.client.scale(1, relative=True)
    worker.client.scale(1, relative=True)
    for _ in range(2):
        job.bring_up()
        launcher = job.launcher({"w0": 1})
        while launcher.hear("target") != ("target", 4, False):
            pass
        launcher.client.close()
        job.server.stop()
    job.bring_up()
    assert job.status()["target"] == 4


def test_a_failure_that_only_the_launcher_still_knows_costs_the_job_the_newcomer_only(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(sizes={"target": 1})
    live = {"w0": 1}
    launcher = job.launcher(live)
    first = job.worker("w0")
    first.client.ready()
    first.newer(0)
    commands.scale(job.run_dir, 2)
    live["w1"] = 2
    launcher.client.started("w1", 2)
    job.worker("w1").client.close()
    job.server.stop()
    del live["w1"]
    launcher.client.gone("w1", "exit status 1", ("OutOfSharedMemory", "no room"))
    job.bring_up()
    assert launcher.hear("excuse") == ("excuse", "w1")
    status = job.status()
    assert (status["phase"], status["target"]) == ("running", 1)


def test_a_coordinator_that_was_followed_by_another_elsewhere_decides_nothing_more_and_ends(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    job.worker("w0")
    # As one does that comes up on another machine, where the lock of a machine that is cut off has been given up.
    write_atomically(job.run_dir.term_file, str(job.run_dir.term() + 1))
    assert job.server.ended(WAIT_S)
    assert isinstance(job.server.error, RunDirUnusable)
    assert "taken this one's place" in str(job.server.error)


def test_an_old_coordinator_that_comes_back_is_not_listened_to(make_job: Callable[..., Job]) -> None:
    job = make_job()

    def another(after: int) -> None:
        job.server.stop()
        write_atomically(job.run_dir.term_file, str(after))
        job.bring_up()

    another(after=1 << 40)
    worker = job.worker("w0")
    worker.client.ready()
    another(after=1)
    job.worker("w1").client.ready()
    assert worker.client.wait_newer(0, 1.0) is None
    another(after=1 << 41)
    assert worker.client.wait_newer(0, WAIT_S) is not None


def test_a_coordinator_goes_on_and_is_followed_although_the_number_of_its_term_is_lost(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    workers = [job.worker("w0"), job.worker("w1")]
    job.run_dir.term_file.unlink()
    for worker in workers:
        worker.client.ready()
    first = [worker.client.wait_newer(0, WAIT_S) for worker in workers]
    assert None not in first
    job.server.stop()
    job.run_dir.term_file.unlink(missing_ok=True)
    job.bring_up()
    job.worker("w2").client.ready()
    commands.scale(job.run_dir, 3)
    assert all(worker.client.wait_newer(1, WAIT_S) is not None for worker in workers)
