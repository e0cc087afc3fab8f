"""A job's figures for Prometheus: what the coordinator knows, in the text format, over HTTP where it was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import SettingsContradict

_HEAD_BYTES = 1 << 14
_PATIENCE_S = 5.0
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def parse_address(text: str) -> tuple[str, int]:
    """`9100` is on loopback, `0.0.0.0:9100` is where others can reach it. Fails with SettingsContradict."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsContradict(f"--metrics-port {text} is not a port; write --metrics-port 9100")
    return host.strip("[]") or "127.0.0.1", int(port)


def check_free(host: str, port: int) -> None:
    """Fails with SettingsContradict where nothing can be served."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        raise SettingsContradict(
            f"--metrics-port {host}:{port} cannot be served: {problem.strerror}; choose another port"
        ) from None


def exposition(status: Mapping[str, Any], events: Mapping[str, int]) -> str:
    """`status` is the coordinator's, `events` counts those of its life by kind."""
    return "".join(_lines(status, events))


def _lines(status: Mapping[str, Any], events: Mapping[str, int]) -> Iterator[str]:
    members = [worker for worker in status["workers"] if worker["rank"] is not None]

    yield from _metric("shoal_step", "gauge", "Steps committed so far.", [({}, status["step"])])
    yield from _metric("shoal_epoch", "gauge", "The epoch of the newest step, from 0.", [({}, status["epoch"])])
    yield from _metric("shoal_samples_total", "counter", "Samples trained so far.", [({}, status["samples"])])
    yield from _metric("shoal_samples_per_second", "gauge", "Samples a second of late.", [({}, status["rate"])])
    if status["loss"] is not None:
        yield from _metric("shoal_loss", "gauge", "Loss of the newest step.", [({}, status["loss"])])
    said = [({"name": name}, value) for name, value in status["metrics"].items()]
    yield from _metric("shoal_metric", "gauge", "What the script gave to step(), averaged over all samples.", said)
    yield from _metric("shoal_workers", "gauge", "Workers that train together.", [({}, len(members))])
    yield from _metric("shoal_workers_wanted", "gauge", "Workers that are asked for.", [({}, status["target"])])
    yield from _metric("shoal_generation", "gauge", "Number of the newest generation.", [({}, status["generation"])])
    counted = [({"event": kind}, count) for kind, count in sorted(events.items())]
    help_ = "Events of the log since this coordinator began, by kind: joined, lost, left, generation and more."
    yield from _metric("shoal_events_total", "counter", help_, counted)
    seconds = [
        ({"worker": worker["worker_id"], "category": category}, value)
        for worker in status["workers"]
        for category, value in worker["seconds"].items()
    ]
    help_ = "Seconds of each worker's life, by where they went; compute and exchange are goodput."
    yield from _metric("shoal_worker_seconds_total", "counter", help_, seconds)


def _metric(name: str, kind: str, help_: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {help_}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}\n" if inside else f"{name} {value!r}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


async def serve(host: str, port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answer `GET /metrics` with `text()` until the server is closed. OSError when the address is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever asks for too much, too slowly, or goes away gets nothing.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE_S)
            method, path = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:2]
            if method in (b"GET", b"HEAD") and path.split(b"?")[0] == b"/metrics":
                code, body = "200 OK", text().encode()
            else:
                code, body = "404 Not Found", b"GET /metrics\n"
            header = f"HTTP/1.1 {code}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
            writer.write(header.encode() + b"\r\n" + (b"" if method == b"HEAD" else body))
            await asyncio.wait_for(writer.drain(), _PATIENCE_S)
        writer.close()

    return await asyncio.start_server(answer, host, port, limit=_HEAD_BYTES)
