"""The messages of the control plane, and the options every end of it shares.

The classes are made from `protocol.desc` when this is imported, because generated code ties a package to one protobuf
version. After a change of `protocol.proto`, make the description again from the root of the repository:

    python -m grpc_tools.protoc -I shoal/control --descriptor_set_out=shoal/control/protocol.desc \
        --include_imports shoal/control/protocol.proto
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shoal.control.drift import Told
from shoal.control.generation import Generation, Member
from shoal.control.instructions import SetTarget, Stop
from shoal.control.timeouts import Timeouts
from shoal.data.leases import Extent, Lease, Said, Shard

# gRPC reads these when it is imported. Loader workers are forked from a process that has channels: its own fork
# handlers would stop the world there, and they never use gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

SERVICE = "shoal.Control"
VERSION = "1"  # a worker of another version is refused
MAX_MESSAGE_BYTES = 1 << 20
TRACEBACK_CHARS = 1 << 16
_STREAMS = 16  # of one connection; a worker and a launcher have one, a command has one for a moment

_BOTH = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # With each message it would measure the bandwidth by a ping and its answer: half of what a beat costs.
    ("grpc.http2.bdp_probe", 0),
]
_CHANNEL = [
    *_BOTH,
    # Each channel has its own connection: a shared one keeps the backoff of an attempt that failed before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # How long an attempt to connect may take: somebody who has the port now and says nothing must not hold us up.
    ("grpc.min_reconnect_backoff_ms", 2000),
]
# Between hosts a line may be cut without a word: both ends ask now and then, and the server lets them.
_KEEPALIVE = [("grpc.keepalive_time_ms", 5000), ("grpc.keepalive_timeout_ms", 5000)]


def channel_options(address: str) -> list[tuple[str, int]]:
    """On one host the kernel says when the other end is gone."""
    return _CHANNEL if address.startswith("127.") else [*_CHANNEL, *_KEEPALIVE]


def server_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    """Whoever connects and says nothing is let go, and so is one that is not there any more."""
    return [
        *_BOTH,
        ("grpc.so_reuseport", 0),  # two coordinators must never share a port
        ("grpc.server_handshake_timeout_ms", int(timeouts.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", int(timeouts.idle_s * 1000)),
        ("grpc.keepalive_time_ms", int(timeouts.idle_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.idle_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.max_concurrent_streams", _STREAMS),
    ]


def _load() -> dict[str, Any]:
    described = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("protocol.desc").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    classes: dict[str, Any] = {}
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
        for message in file.message_type:
            full_name = f"{file.package}.{message.name}"
            classes[message.name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
    return classes


_classes = _load()

FromWorker: Any = _classes["FromWorker"]
ToWorker: Any = _classes["ToWorker"]
FromLauncher: Any = _classes["FromLauncher"]
ToLauncher: Any = _classes["ToLauncher"]
CommandRequest: Any = _classes["CommandRequest"]
CommandReply: Any = _classes["CommandReply"]


def to_bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def kind_of(message: Any) -> tuple[str, Any]:
    """The name and the body of the one kind that is set; ("", None) when none is, as from a newer sender."""
    name = message.WhichOneof("kind")
    return (name, getattr(message, name)) if name else ("", None)


def to_wire(generation: Generation) -> dict[str, Any]:
    """The body of the message, whose fields have the same names."""
    return asdict(generation)


def from_wire(body: Any) -> Generation:
    def listed(members: Any) -> tuple[Member, ...]:
        return tuple(Member(it.worker_id, it.slot, it.host, it.address) for it in members)

    members, leavers, followers = listed(body.members), listed(body.leavers), listed(body.followers)
    return Generation(body.number, members, leavers, body.fault, body.paused, body.finishing, body.key, followers)


def target_to_wire(target: SetTarget, host: str) -> dict[str, Any]:
    """As the launcher of that host hears it."""
    return {
        "n": target.share(host),
        "finishing": target.finishing,
        "number": target.number,
        "total": target.target,
        "next_worker": target.next_workers.get(host, 0),
    }


def target_from_wire(body: Any, host: str) -> SetTarget:
    return SetTarget(body.total, body.finishing, body.number, {host: body.n}, {host: body.next_worker})


def stop_from_wire(body: Any) -> Stop:
    return Stop(body.reason, body.failed, body.kind)


def told_to_wire(told: Told) -> dict[str, Any]:
    copies = [{"workers": copy} for copy in told.copies]
    return {**vars(told), "copies": copies, "names": list(told.sums), "sums": list(told.sums.values())}


def told_from_wire(body: Any) -> Told:
    copies = tuple(tuple(copy.workers) for copy in body.copies)
    return Told(body.generation, body.seq, body.step, copies, dict(zip(body.names, body.sums, strict=True)))


def lease_to_wire(lease: Lease) -> dict[str, int]:
    return {"number": lease.number, **vars(lease.shard), "used": lease.used}


def lease_from_wire(body: Any, worker_id: str) -> Lease:
    return Lease(body.number, worker_id, Shard(body.pass_index, body.epoch, body.lo, body.hi), body.used)


def said_to_wire(said: Said | None) -> dict[str, Any] | None:
    if said is None:
        return None
    return {
        "extent": None if said.extent is None else vars(said.extent),
        "held": [lease_to_wire(lease) for lease in said.held],
        "ended": said.ended,
        "heard": said.heard,
        "wants": said.wants,
    }


def said_from_wire(body: Any, worker_id: str) -> Said:
    its = body.extent
    extent = Extent(its.pass_index, its.samples, its.epochs, its.step_samples) if body.HasField("extent") else None
    held = tuple(lease_from_wire(lease, worker_id) for lease in body.held)
    return Said(extent, held, tuple(body.ended), body.heard, body.wants)


def versions() -> dict[str, str]:
    """Of what must be the same on every host."""
    from importlib.metadata import PackageNotFoundError, version

    from shoal import __version__

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {"shoal": __version__, "torch": torch}


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call."""
    return (("authorization", f"Bearer {token}"),)


def term_to_wire(term: int) -> tuple[tuple[str, str], ...]:
    """The metadata of an answer: which coordinator of the job it is."""
    return (("term", str(term)),)


def term_from_wire(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    return int(next((value for key, value in metadata if key == "term"), 0))


def key_of(token: str, generation: int) -> bytes:
    """By which the workers of a generation know each other. Who has the token can make it, and nobody else."""
    return hmac.digest(token.encode(), b"generation %d" % generation, "sha256")


def admits(token: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether the metadata of a call carry the token; takes the same time for every wrong one."""
    given = next((value for key, value in metadata if key == "authorization"), "")
    given_bytes = given if isinstance(given, bytes) else given.encode()
    return hmac.compare_digest(given_bytes, f"Bearer {token}".encode())
