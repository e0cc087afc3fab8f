"""What a message may say. Whoever has the token is believed, and may still be broken or of another kind: a message that
cannot be meant ends its stream, before anything is decided by it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from shoal.control import protocol
from shoal.control.generation import MAX_SLOTS

MAX_GENERATION = 1 << 31  # half of what the words of an arena hold
MAX_COUNT = 1 << 53  # steps, samples and numbers; what every reader of JSON knows
MAX_TEXT = 2 * protocol.TRACEBACK_CHARS
MAX_NAME = 256
MAX_METRICS = 256
MAX_MODEL_BYTES = 1 << 19
_MAX_SUMS = 4096
_MAX_CATEGORIES = 32  # of seconds
_MAX_LEASES = 4096
_MAX_ROSTER = 4 * MAX_SLOTS  # those that have not gone yet while others take their place
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):\d{1,5}")
_RESERVED = {"time", "event", "worker_id", "text"}  # of a line in the event log


class BadMessage(Exception):
    """Internal: what is wrong with a message, in one line."""


def parse(message_class: Any, data: bytes) -> tuple[str, Any]:
    """Kind and body, as of `protocol.kind_of`. Fails with BadMessage for what is no message, or cannot be meant."""
    try:
        kind, body = protocol.kind_of(message_class.FromString(data))
    except DecodeError as error:
        raise BadMessage(f"it is no message ({error})") from None
    check = _CHECKS.get(kind)
    if check is not None:
        check(body)
    return kind, body


def details(text: str) -> dict[str, Any]:
    """What a worker tells in JSON. Fails with BadMessage."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"what it reports is no JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise BadMessage("what it reports is not a JSON object")
    return value


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise BadMessage(what)


def _worker_id(name: str) -> None:
    _need(_WORKER_ID.fullmatch(name) is not None, f"{name[:64]!r} is no worker's name")


def _host(name: str) -> None:
    _need(0 < len(name) < MAX_NAME and name.isprintable(), f"{name[:64]!r} is no host's name")


def _address(address: str) -> None:
    _need(not address or _ADDRESS.fullmatch(address) is not None, f"{address[:64]!r} is no worker's address")


def _counts(body: Any, *fields: str, most: int = MAX_COUNT) -> None:
    for field in fields:
        _need(getattr(body, field) <= most, f"{field} is {getattr(body, field)}")


def _texts(body: Any, *fields: str, most: int = MAX_TEXT) -> None:
    for field in fields:
        _need(len(getattr(body, field)) <= most, f"{field} is of {len(getattr(body, field))} characters")


def _few(items: Iterable[Any], what: str, most: int) -> None:
    number = len(list(items))
    _need(number <= most, f"{number} {what}, {most} are the most")


def _generation(body: Any) -> None:
    _counts(body, "number", most=MAX_GENERATION)
    listed = [*body.members, *body.leavers, *body.followers]
    _few(listed, "workers in a generation", MAX_SLOTS)
    for member in listed:
        _worker_id(member.worker_id)
        _host(member.host)
        _counts(member, "slot", most=MAX_SLOTS - 1)
        _address(member.address)
    for field in ("slot", "worker_id"):
        _need(
            len({getattr(member, field) for member in listed}) == len(listed), f"two in a generation have one {field}"
        )


def _leases(body: Any) -> None:
    _few(body.held, "leases", _MAX_LEASES)
    _few(body.ended, "leases ended", _MAX_LEASES)
    _counts(body, "heard")
    for number in body.ended:
        _need(number <= MAX_COUNT, f"lease {number}")
    for lease in body.held:
        _counts(lease, "pass_index", "epoch", "hi")
        _need(lease.number <= body.heard, f"lease {lease.number} is newer than the newest it was given, {body.heard}")
        _need(
            lease.lo <= lease.used <= lease.hi, f"lease {lease.number} is of [{lease.lo}, {lease.hi}) to {lease.used}"
        )
    if body.HasField("extent"):
        extent = body.extent
        _counts(extent, "pass_index", "samples", "epochs", "step_samples")
        _need(extent.step_samples > 0, "a pass has steps of no sample")


def _join(body: Any) -> None:
    _worker_id(body.worker_id)
    _host(body.host)
    _texts(body, "version", most=MAX_NAME)
    _counts(body, "last_fault", most=MAX_GENERATION)
    _counts(body, "slot", most=MAX_SLOTS - 1)
    _address(body.address)
    if body.HasField("newest"):
        _generation(body.newest)
        listed = (*body.newest.members, *body.newest.leavers, *body.newest.followers)
        its = [member.slot for member in listed if member.worker_id == body.worker_id]
        _need(bool(its), "the generation that it knows does not list it")
        _need(
            not body.HasField("slot") or its == [body.slot], f"its slot is {body.slot}, and {its[0]} in its generation"
        )
    if body.HasField("leases"):
        _leases(body.leases)


def _beat(body: Any) -> None:
    _counts(body, "seq", "step", "epoch", "samples", "evaluating", "evaluated")
    _few(body.waiting_for, "workers waited for", MAX_SLOTS)
    for worker_id in body.waiting_for:
        _worker_id(worker_id)
    _named(body.seconds, "categories", _MAX_CATEGORIES)
    _named(body.metrics, "metrics", MAX_METRICS)
    _need(all(math.isfinite(value) for value in body.seconds.values()), "seconds are not finite")
    if body.HasField("leases"):
        _leases(body.leases)


def _named(values: Mapping[str, float], what: str, most: int) -> None:
    _few(values, what, most)
    _need(all(len(name) <= MAX_NAME for name in values), f"one of the {what} has a name that is too long")


def _checked(body: Any) -> None:
    _counts(body, "generation", most=MAX_GENERATION)
    _counts(body, "seq", "step")
    _few(body.names, "checksums", _MAX_SUMS)
    _need(len(set(body.names)) == len(body.sums) == len(body.names) > 0, "checksums and their names are not as many")
    _need(all(len(name) <= MAX_NAME for name in body.names), "a tensor has a name that is too long")
    _few(body.copies, "copies", MAX_SLOTS)
    _need(len(body.copies) > 1, "there is nothing to compare")
    for copy in body.copies:
        _need(len(copy.workers) > 0, "a copy that nobody has")
        _few(copy.workers, "workers of a copy", MAX_SLOTS)
        for worker_id in copy.workers:
            _worker_id(worker_id)


def _finished(body: Any) -> None:
    _texts(body, "digest", most=MAX_NAME)
    _counts(body, "step", "seq")
    details(body.report_json)


def _failed(body: Any) -> None:
    _texts(body, "kind", most=MAX_NAME)
    _texts(body, "message", "traceback")


def _note(body: Any) -> None:
    _texts(body, "text")
    _counts(body, "number")
    _need(not _RESERVED & details(body.fields_json).keys(), "a note has fields that are not its own")


def _hello(body: Any) -> None:
    _host(body.host)
    _counts(body, "slots", most=MAX_SLOTS)
    _few(body.workers, "workers of a launcher", _MAX_ROSTER)
    for worker in body.workers:
        _worker_id(worker.worker_id)
    if body.HasField("target"):
        _counts(body.target, "n", most=MAX_SLOTS)
        _counts(body.target, "number")
    if body.HasField("stop"):
        _stop(body.stop)
        _texts(body.stop, "kind", most=MAX_NAME)


def _unlisted(body: Any) -> None:
    _few(body.hosts, "hosts", _MAX_ROSTER)
    for name in body.hosts:
        _host(name)


def _stop(body: Any) -> None:
    _texts(body, "reason")


def _gone(body: Any) -> None:
    _worker_id(body.worker_id)
    _texts(body, "reason")
    if body.HasField("failed"):
        _failed(body.failed)


def _evidence(body: Any) -> None:
    _worker_id(body.worker_id)
    _need(math.isfinite(body.cpu_time_s), "a CPU time is not finite")


_CHECKS = {
    "join": _join,
    "beat": _beat,
    "leases": _leases,
    "checked": _checked,
    "finished": _finished,
    "failed": _failed,
    "entered": lambda body: _counts(body, "generation", most=MAX_GENERATION),
    "broken": lambda body: _counts(body, "generation", most=MAX_GENERATION),
    "model": lambda body: _need(len(body.tensors) <= MAX_MODEL_BYTES, f"a model of {len(body.tensors)} bytes"),
    "slots": lambda body: _counts(body, "n", most=MAX_SLOTS),
    "scale": lambda body: _counts(body, "number"),
    "note": _note,
    "hello": _hello,
    "started": lambda body: _worker_id(body.worker_id),
    "gone": _gone,
    "evidence": _evidence,
    "stop": _stop,
    "unlisted": _unlisted,
}
