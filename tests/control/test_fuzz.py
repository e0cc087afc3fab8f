"""Whatever comes to the control port, the coordinator lives, decides nothing strange, and serves the others."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.control import bounds, commands, protocol, tls
from shoal.control.client import Client, Progress
from shoal.control.coordinator.server import Coordinator
from shoal.control.generation import MAX_SLOTS
from shoal.control.journal import Journal
from shoal.control.membership.values import found
from shoal.control.protocol import CommandRequest, FromLauncher, FromWorker, ToWorker
from shoal.control.rundir import RunDir
from shoal.control.serve import EmbeddedCoordinator
from shoal.control.timeouts import Timeouts
from shoal.testing.faults import lose_journal

WAIT_S = 20.0
TIMEOUTS = Timeouts(0.5, beat_s=0.05, probe_s=0.05)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Job:
    """A coordinator, and one worker that goes on whatever else happens."""

    def __init__(self, path: Path, encrypted: bool = False, budget_s: float = 60.0) -> None:
        self.run_dir = RunDir.create(path, {"script": "train.py"})
        if encrypted:
            tls.make_for_job(self.run_dir, tls.LOOPBACK)
        self.bring_up(budget_s)
        self.honest = Stream(self, "Work", WORKER, FromWorker(ready={}))
        self.honest.hear("generation")
        self.notes = 0

    def bring_up(self, budget_s: float = 60.0) -> None:
        timeouts = Timeouts(budget_s, beat_s=0.05, probe_s=0.05)
        self.server = EmbeddedCoordinator(self.run_dir, found(1, 8, 1, timeouts), "relaunch")
        self.address = self.server.start()

    def channel(self) -> Any:
        return tls.channel(self.run_dir.tls(), self.address)

    def check(self) -> None:
        """The honest worker's stream is the same as ever, and the state of the job is one that can be."""
        self.notes += 1
        self.honest.say(FromWorker(note={"kind": "checkpointed", "number": self.notes}))
        while self.honest.hear("heeded").number != self.notes:
            pass
        state = commands.status(self.run_dir)
        json.dumps(state, allow_nan=False)
        assert 1 <= state["target"] <= 8
        assert state["generation"] < 1000 * (1 << 20)
        slots = [worker["slot"] for worker in state["workers"]]
        assert len(set(slots)) == len(slots) <= MAX_SLOTS
        assert max(slots, default=0) < MAX_SLOTS

    def check_journal(self) -> None:
        """Another coordinator can go on from it."""
        self.honest.end()
        self.server.stop()
        journal = Journal(self.run_dir.journal)
        assert journal.load(0.0) is not None
        journal.close()
        self.bring_up()
        commands.status(self.run_dir)

    def end(self) -> None:
        self.honest.end()
        self.server.stop()


class Stream:
    """One that is held open, of bytes or messages."""

    def __init__(self, job: Job, method: str, *first: Any) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in first:
            self.say(message)
        self._channel = job.channel()
        call = self._channel.stream_stream(f"/{protocol.SERVICE}/{method}")
        self._call = call(iter(self._outgoing.get, None), metadata=protocol.credentials(job.run_dir.token()))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def say(self, message: Any) -> None:
        self._outgoing.put(message if isinstance(message, bytes) else message.SerializeToString())

    def hear(self, kind: str) -> Any:
        while True:
            told, body = self._heard.get(timeout=WAIT_S)
            assert told != "ended", body
            if told == kind:
                return body

    def _listen(self) -> None:
        try:
            for message in self._call:
                self._heard.put(protocol.kind_of(ToWorker.FromString(message)))
            self._heard.put(("ended", "by the coordinator"))
        except grpc.RpcError as error:
            self._heard.put(("ended", error))

    def end(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join(WAIT_S)
        self._channel.close()


def worker(worker_id: str = "x1", **more: Any) -> Any:
    return FromWorker(join={"worker_id": worker_id, "host": "elsewhere", "version": protocol.VERSION, **more})


WORKER = worker("w0")


def send(job: Job, method: str, *messages: Any, token: str | None = None) -> tuple[grpc.StatusCode, str]:
    """On a stream of its own to its end; how that was."""
    data = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
    metadata = protocol.credentials(job.run_dir.token() if token is None else token)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(job.address, options=options) as channel:
        try:
            if method == "Command":
                channel.unary_unary(f"/{protocol.SERVICE}/{method}")(data[0], metadata=metadata, timeout=WAIT_S)
            else:
                call = channel.stream_stream(f"/{protocol.SERVICE}/{method}")
                list(call(iter(data), metadata=metadata, timeout=WAIT_S))
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        jobs.append(Job(tmp_path / f"run{len(jobs)}", **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()


# Bytes.


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_garbage_and_connections_that_say_nothing_are_let_go(make_job: Callable[..., Job], encrypted: bool) -> None:
    job = make_job(encrypted=encrypted, budget_s=0.5)
    noise = random.Random(0)
    said = [
        *[b""] * 100,
        PREFACE[:10],
        PREFACE,
        PREFACE + SETTINGS,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(500),  # as TLS begins
        b"\x16\x03\x01",
        *(noise.randbytes(300) for _ in range(20)),
        *(PREFACE + noise.randbytes(300) for _ in range(20)),
        *(PREFACE + SETTINGS + noise.randbytes(300) for _ in range(20)),
    ]
    host, _, port = job.address.rpartition(":")
    connections = [socket.create_connection((host, int(port)), WAIT_S) for _ in said]
    for connection, data in zip(connections, said, strict=True):
        connection.sendall(data)
    job.check()
    for connection in connections:
        with connection:
            try:
                while connection.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass
    job.check()


def test_a_message_above_the_bound_is_dropped_and_its_stream_with_it(job: Job) -> None:
    assert send(job, "Work", worker(), bytes(2 * protocol.MAX_MESSAGE_BYTES))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert send(job, "Command", bytes(2 * protocol.MAX_MESSAGE_BYTES))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    job.check()


@pytest.mark.parametrize("method", ["Work", "Launch", "Command"])
def test_whoever_has_not_the_token_is_told_so_whatever_it_says(job: Job, method: str) -> None:
    for message in (worker(), b"\xff\xff", FromLauncher(hello={"host": "h"}), CommandRequest(stop={})):
        for token in ("", "guess", "x" * 4000):
            assert send(job, method, message, token=token)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert [it["worker_id"] for it in commands.status(job.run_dir)["workers"]] == ["w0"]
    job.check()


# Messages that cannot be meant.

HUGE = (1 << 64) - 1
LISTED = {"number": HUGE, "members": [{"worker_id": "x1", "slot": 1, "host": "h"}]}
EXTENT = {"pass_index": 0, "samples": 10, "epochs": 1, "step_samples": 0}
BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "no message": ("Work", (b"\xff\xff\xff",)),
    "not UTF-8": ("Work", (worker().SerializeToString().replace(b"\x02x1", b"\x02x\xff"),)),
    "an empty name": ("Work", (worker(""),)),
    "a name that is a path": ("Work", (worker("../w1"),)),
    "a name that is too long": ("Work", (worker("x" * 100),)),
    "no host": ("Work", (worker(host=""),)),
    "a slot beyond all": ("Work", (worker(slot=MAX_SLOTS),)),
    "a generation beyond all": ("Work", (worker(slot=1, newest=LISTED),)),
    "a generation nobody knows": ("Work", (worker(slot=1, newest={**LISTED, "number": bounds.MAX_GENERATION}),)),
    "a generation without it": ("Work", (worker(slot=1, newest={"number": 1}),)),
    "one slot twice": (
        "Work",
        (worker(newest={"number": 1, "members": [{"worker_id": f"x{n}", "slot": 1, "host": "h"} for n in (1, 2)]}),),
    ),
    "steps of no sample": ("Work", (worker(), FromWorker(leases={"extent": EXTENT, "wants": 1}))),
    "a lease that ends before it begins": (
        "Work",
        (worker(leases={"heard": 1, "held": [{"number": 1, "lo": 5, "used": 5, "hi": 4}]}),),
    ),
    "a lease nobody gave": ("Work", (worker(leases={"heard": HUGE}),)),
    "a report that is no JSON": ("Work", (worker(), FromWorker(finished={"report_json": "{"}))),
    "a report that is no object": ("Work", (worker(), FromWorker(finished={"report_json": "[1]"}))),
    "JSON without end": ("Work", (worker(), FromWorker(note={"kind": "checkpointed", "fields_json": "[" * 90_000}))),
    "another event": (
        "Work",
        (worker(), FromWorker(note={"kind": "checkpointed", "fields_json": '{"event": "over"}'})),
    ),
    "categories beyond counting": (
        "Work",
        (worker(), FromWorker(beat={"seconds": {f"{n:0100}": 1.0 for n in range(2000)}})),
    ),
    "seconds that are none": ("Work", (worker(), FromWorker(beat={"seconds": {"compute": float("nan")}}))),
    "a model beyond all": ("Work", (worker(), FromWorker(model={"tensors": bytes(bounds.MAX_MODEL_BYTES + 1)}))),
    "checksums without names": (
        "Work",
        (worker(), FromWorker(checked={"copies": [{"workers": ["x1"]}, {"workers": ["x2"]}], "sums": [1]})),
    ),
    "no host's launcher": ("Launch", (FromLauncher(hello={}),)),
    "a launcher of crowds": (
        "Launch",
        (FromLauncher(hello={"host": "h", "workers": [{"worker_id": f"x{n}"} for n in range(20_000)]}),),
    ),
    "a target beyond all": ("Launch", (FromLauncher(hello={"host": "h", "target": {"n": 1 << 31}}),)),
    "the start of nobody": (
        "Launch",
        (FromLauncher(hello={"host": "h"}), FromLauncher(started={"worker_id": ""})),
    ),
    "no command": ("Command", (b"\xff\xff\xff",)),
    "a reason without end": ("Command", (CommandRequest(stop={"reason": "x" * 900_000}),)),
}


@pytest.mark.parametrize(("method", "messages"), BAD.values(), ids=BAD.keys())
def test_a_message_that_cannot_be_meant_ends_its_stream_with_a_line_in_the_log(
    job: Job, caplog: pytest.LogCaptureFixture, method: str, messages: tuple[Any, ...]
) -> None:
    code, why = send(job, method, *messages)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, why
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert why in told[0]
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
    job.check()


def test_a_worker_may_have_more_metrics_than_fit_and_is_not_dropped_for_it(job: Job) -> None:
    metrics = {f"metric {n}": float(n) for n in range(2 * bounds.MAX_METRICS)}
    heard = threading.Event()

    def progress() -> Progress:
        heard.set()
        return Progress(seq=1, metrics=metrics)

    client = Client(job.run_dir, "w1", "here", TIMEOUTS, progress, print)
    client.connect()
    client.note("checkpointed", "", {})
    assert heard.wait(WAIT_S)
    client.close()  # the note is delivered, after the beat
    assert len(commands.status(job.run_dir)["metrics"]) == bounds.MAX_METRICS


def test_a_lease_of_a_pass_that_nobody_declared_costs_its_worker_and_not_the_coordinator(job: Job) -> None:
    job.honest.end()
    job.server.stop()
    lose_journal(job.run_dir, "deleted")
    job.bring_up(budget_s=0.5)
    lease = {"number": 3, "pass_index": 7, "epoch": 1 << 50, "lo": 0, "used": 1, "hi": 4}
    newest = {"number": 1, "members": [{"worker_id": "x1", "slot": 1, "host": "h"}]}
    stream = Stream(job, "Work", worker(slot=1, newest=newest, leases={"heard": 3, "held": [lease]}))
    stream.hear("welcome")
    state = commands.status(job.run_dir)
    assert [it["worker_id"] for it in state["workers"]] == ["x1"]
    stream.end()


def test_a_command_that_nobody_waits_for_any_more_does_not_end_a_coordinator_without_a_journal(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", {})
    run_dir.write_address("127.0.0.1:0")  # there was one before
    now = [0.0]

    async def commanded() -> None:
        coordinator = Coordinator(run_dir, found(1, 8, 2, Timeouts(60.0)), clock=lambda: now[0])
        address = await coordinator.start()
        metadata = protocol.credentials(run_dir.token())
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{protocol.SERVICE}/Command")
            status = CommandRequest(status={}).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await call(status, metadata=metadata, timeout=0.2)
            now[0] = 100.0  # it has waited long enough for workers
            assert b"generation" in await call(status, metadata=metadata, timeout=WAIT_S)
        await coordinator.close()
        assert coordinator._broken is None

    asyncio.run(commanded())


# Messages of every kind.

WILD_NUMBERS = st.sampled_from([255, 256, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, 1 << 63, HUGE])
WILD_TEXTS = st.sampled_from(["", "../x", "ä\n\0", "[]", "{", "y" * 5000])
WILD_FLOATS = st.sampled_from([-1.0, 1e308, float("inf"), float("nan")])
NAMES = st.sampled_from(["x1", "x2", "x3"])  # never the honest one's: what is said of a worker is believed
TEXTS = {
    "worker_id": NAMES,
    "gone": NAMES,
    "waiting_for": NAMES,
    "host": st.just("elsewhere"),
    "address": st.just("127.0.0.1:1"),
    "version": st.just(protocol.VERSION),
    "kind": st.sampled_from(["checkpointed", "DataUnusable", "ValueError"]),
    "report_json": st.just("{}"),
    "fields_json": st.just("{}"),
}
TYPES = {1: "double", 4: "uint64", 8: "bool", 9: "string", 12: "bytes", 13: "uint32", 17: "sint32"}
MOST = {"uint64": HUGE, "uint32": (1 << 32) - 1, "sint32": (1 << 31) - 1}
WILD = st.integers(0, 15).map(lambda number: number == 0)


def value_of(draw: Callable[[Any], Any], name: str, kind: str) -> Any:
    """Mostly what could be meant, so that the rest gets further than the door."""
    wild = draw(WILD)
    if kind == "bool":
        return draw(st.booleans())
    if kind == "bytes":
        return draw(st.binary(max_size=9))
    if kind == "string":
        return draw(WILD_TEXTS if wild else TEXTS.get(name, st.just("x1")))
    if kind == "double":
        return draw(WILD_FLOATS if wild else st.floats(0, 10))
    return min(draw(WILD_NUMBERS if wild else st.integers(0, 9)), MOST[kind])


def fill(draw: Callable[[Any], Any], message: Any) -> None:
    """Give its fields values, and leave some out."""
    for field in message.DESCRIPTOR.fields:
        optional = field.message_type is not None or field.is_repeated or field.has_presence
        if optional and not draw(st.booleans()):
            continue
        at, times = getattr(message, field.name), draw(st.integers(1, 3)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = TYPES[field.message_type.fields_by_name["value"].type]
            at.update({draw(WILD_TEXTS if draw(WILD) else NAMES): value_of(draw, "", of) for _ in range(times)})
        elif field.message_type is not None:
            for _ in range(times):
                fill(draw, at.add() if field.is_repeated else at)
            if not field.is_repeated:
                at.SetInParent()
        elif field.is_repeated:
            at.extend(value_of(draw, field.name, TYPES[field.type]) for _ in range(times))
        else:
            setattr(message, field.name, value_of(draw, field.name, TYPES[field.type]))


@st.composite
def messages(draw: Callable[[Any], Any], message_class: Any, kinds: tuple[str, ...] = ()) -> Any:
    message = message_class()
    fields = message.DESCRIPTOR.oneofs_by_name["kind"].fields
    kind = draw(st.sampled_from(kinds or [field.name for field in fields]))
    body = getattr(message, kind)
    body.SetInParent()
    fill(draw, body)
    leases = (
        [body] if kind == "leases" else [body.leases] if kind in ("join", "beat") and body.HasField("leases") else []
    )
    for said in leases:
        for lease in said.held:
            lease.lo, lease.used, lease.hi = sorted((lease.lo, lease.used, lease.hi))
        said.heard = max(said.heard, *(lease.number for lease in said.held), 0)
    if kind == "join" and body.HasField("newest"):
        del body.newest.leavers[:]
        del body.newest.members[:]
        body.newest.members.add(worker_id=body.worker_id, slot=body.slot, host=body.host)
    return message


READY = FromWorker(ready={})
HELLO = FromLauncher(hello={"host": "elsewhere", "workers": [{"worker_id": "x1"}]})
ANY = st.one_of(
    st.tuples(st.just("Work"), st.lists(messages(FromWorker), max_size=6).map(lambda more: [worker(), READY, *more])),
    st.builds(
        lambda join, more: ("Work", [join, READY, *more]),
        messages(FromWorker, ("join",)),
        st.lists(messages(FromWorker), max_size=4),
    ),
    st.tuples(st.just("Work"), st.lists(messages(FromWorker), min_size=1, max_size=2)),
    st.tuples(st.just("Launch"), st.lists(messages(FromLauncher), max_size=6).map(lambda more: [HELLO, *more])),
    st.tuples(st.just("Launch"), st.lists(messages(FromLauncher), min_size=1, max_size=2)),
    st.tuples(st.just("Command"), st.lists(messages(CommandRequest), min_size=1, max_size=1)),
)
ENDINGS = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
QUIETLY: Any = {"deadline": None, "derandomize": True, "database": None}
QUIETLY["suppress_health_check"] = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def talk(job: Job, said: list[tuple[str, list[Any]]]) -> None:
    for method, sequence in said:
        code, why = send(job, method, *sequence)
        assert code in ENDINGS, why
    job.check()


def with_a_journal(tmp_path: Path, said: list[tuple[str, list[Any]]]) -> None:
    job = Job(Path(tempfile.mkdtemp(dir=tmp_path)) / "run")
    try:
        talk(job, said)
        job.check_journal()
    finally:
        job.end()


def without_a_journal(tmp_path: Path, said: list[tuple[str, list[Any]]]) -> None:
    job = Job(Path(tempfile.mkdtemp(dir=tmp_path)) / "run")
    try:
        job.honest.end()
        job.server.stop()
        lose_journal(job.run_dir, "deleted")
        job.bring_up(budget_s=0.5)
        job.honest = Stream(job, "Work", WORKER)
        talk(job, [(method, sequence) for method, sequence in said if method != "Command"])
        job.check_journal()
    finally:
        job.end()


@settings(max_examples=15, **QUIETLY)
@given(said=st.lists(ANY, min_size=1, max_size=6))
def test_whatever_is_said_the_job_goes_on(tmp_path: Path, said: list[tuple[str, list[Any]]]) -> None:
    with_a_journal(tmp_path, said)


@settings(max_examples=5, **QUIETLY)
@given(said=st.lists(ANY, min_size=1, max_size=6))
def test_whatever_is_said_to_a_coordinator_without_a_journal_it_goes_on(
    tmp_path: Path, said: list[tuple[str, list[Any]]]
) -> None:
    without_a_journal(tmp_path, said)


@pytest.mark.slow
@settings(max_examples=400, **{**QUIETLY, "derandomize": False})
@given(said=st.lists(ANY, min_size=1, max_size=8))
def test_whatever_is_said_many_jobs_go_on(tmp_path: Path, said: list[tuple[str, list[Any]]]) -> None:
    with_a_journal(tmp_path, said)


@pytest.mark.slow
@settings(max_examples=100, **{**QUIETLY, "derandomize": False})
@given(said=st.lists(ANY, min_size=1, max_size=8))
def test_whatever_is_said_to_many_coordinators_without_a_journal_they_go_on(
    tmp_path: Path, said: list[tuple[str, list[Any]]]
) -> None:
    without_a_journal(tmp_path, said)
