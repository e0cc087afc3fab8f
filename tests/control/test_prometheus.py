"""Figures for Prometheus: text that its own parser reads, over HTTP from a coordinator."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal import errors
from shoal.control import prometheus
from shoal.control.membership.values import found
from shoal.control.rundir import RunDir
from shoal.control.serve import EmbeddedCoordinator

STATUS: dict[str, Any] = {
    "step": 412, "epoch": 3, "samples": 52_736, "rate": 1234.5, "loss": 0.25, "metrics": {'top"1\\': 0.5},
    "generation": 7, "target": 3,
    "workers": [
        {"worker_id": "w0", "rank": 0, "seconds": {"compute": 10.5, "wait": 0.25}},
        {"worker_id": "w3", "rank": None, "seconds": {}},
    ],
}  # fmt: skip


def parsed(text: str) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_what_the_coordinator_knows() -> None:
    told = parsed(prometheus.exposition(STATUS, {"joined": 4, "lost": 2}))
    assert told["shoal_step",] == 412
    assert told["shoal_samples_total",] == 52_736
    assert told["shoal_loss",] == 0.25
    assert told["shoal_workers",] == 1, "one that is not in yet does not train"
    assert told["shoal_workers_wanted",] == 3
    assert told["shoal_events_total", ("event", "lost")] == 2
    assert told["shoal_metric", ("name", 'top"1\\')] == 0.5
    assert told["shoal_worker_seconds_total", ("category", "compute"), ("worker", "w0")] == 10.5


def test_every_metric_has_help_and_type_and_none_is_empty() -> None:
    bare = prometheus.exposition({**STATUS, "loss": None, "metrics": {}, "workers": []}, {})
    assert "shoal_loss" not in bare
    named = [line.split()[2] for line in bare.splitlines() if line.startswith("# TYPE")]
    assert len(named) == len(set(named))
    assert {line.split("{")[0].split()[0] for line in bare.splitlines() if not line.startswith("#")} == set(named)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_coordinator_answers_on_the_port_it_was_given_and_on_no_other_path(tmp_path: Path, port: int) -> None:
    server = EmbeddedCoordinator(RunDir.create(tmp_path / "run", {"metrics_port": str(port)}), found(1, 4, 2))
    server.start()
    try:
        answers = []
        for path in ("/metrics", "/"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read().decode()))
            connection.close()
    finally:
        server.stop()
    assert [code for code, _ in answers] == [200, 404]
    assert parsed(answers[0][1])["shoal_workers_wanted",] == 2


def test_a_port_that_is_taken_is_known_before_the_job_begins(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(errors.SettingsContradict, match="Address already in use; choose another port"):
            prometheus.check_free("127.0.0.1", port)
    prometheus.check_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "address"),
    [("9100", ("127.0.0.1", 9100)), ("0.0.0.0:9100", ("0.0.0.0", 9100)), ("[::1]:9100", ("::1", 9100))],
)
def test_a_port_alone_is_on_loopback(text: str, address: tuple[str, int]) -> None:
    assert prometheus.parse_address(text) == address
