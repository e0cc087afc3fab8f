"""Every verdict of `shoal doctor`, on any machine."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from shoal import cli
from shoal.control import certificates
from shoal.view import doctor, trust
from shoal.view.doctor import GIB, Check

HERE = Path("/runs")
VERDICTS = {
    "python": (doctor.python("3.11.2", ">=3.10"), "ok"),
    "old python": (doctor.python("3.9.18", ">=3.10"), "bad"),
    "kernel": (doctor.kernel("Linux", "6.1", "x86_64", []), "ok"),
    "no pidfd": (doctor.kernel("Linux", "4.4", "x86_64", ["pidfd_open"]), "bad"),
    "no linux": (doctor.kernel("Darwin", "23", "arm64", []), "bad"),
    "cores": (doctor.cores(8, 8, None, 1.0), "ok"),
    "quota": (doctor.cores(8, 8, 2.5, 1.0), "warn"),
    "wide quota": (doctor.cores(8, 4, 6.0, 1.0), "ok"),
    "busy": (doctor.cores(8, 8, None, 12.0), "warn"),
    "memory": (doctor.memory(16 * GIB, 9 * GIB, None), "ok"),
    "little memory": (doctor.memory(16 * GIB, GIB, None), "warn"),
    "small container": (doctor.memory(16 * GIB, 9 * GIB, GIB), "warn"),
    "no /dev/shm": (doctor.shared_memory(Path("/nowhere")), "warn"),
    "open files": (doctor.open_files(1024, 4096), "ok"),
    "few open files": (doctor.open_files(256, 4096), "warn"),
    "link": (doctor.link_check(30e-6, GIB), "ok"),
    "slow link": (doctor.link_check(5e-3, GIB), "warn"),
    "clock": (doctor.clock(1e-9, True), "ok"),
    "coarse clock": (doctor.clock(1e-2, True), "warn"),
    "clock on its own": (doctor.clock(1e-9, False), "warn"),
    "clock unknown": (doctor.clock(1e-9, None), "ok"),
    "no gpu": (doctor.gpus([]), "ok"),
    "disk": (doctor.disk_check(HERE, 50 * GIB, 1e-3, "ext4"), "ok"),
    "full disk": (doctor.disk_check(HERE, GIB // 2, 1e-3, "ext4"), "warn"),
    "slow disk": (doctor.disk_check(HERE, 50 * GIB, 0.5, "ext4"), "warn"),
    "nfs": (doctor.disk_check(HERE, 50 * GIB, 1e-3, "nfs4"), "warn"),
    "no directory": (doctor.disk(Path("/proc/nothing/here")), "bad"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_and_what_to_do_about_it(name):
    check, verdict = VERDICTS[name]
    assert check.verdict == verdict
    assert bool(check.todo) == (verdict != "ok")


def test_packages_are_compared_with_what_the_package_asks_for():
    there = {"torch": "2.13.0+cpu", "rich": "9.1"}
    needed = ["torch>=2.6", "rich>=13", "numpy", "pytest>=8; extra == 'dev'"]
    found = list(doctor.packages(needed, there.get))
    assert [(check.name, check.verdict) for check in found] == [("torch", "ok"), ("rich", "bad"), ("numpy", "bad")]
    assert [check.todo for check in found] == ["", "pip install 'rich>=13'", "pip install 'numpy'"]


def test_this_machine_is_checked_for_real(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctor", "--json", "--dir", str(tmp_path / "runs")])
    said = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in said["checks"]}
    assert names >= {"Python", "torch", "kernel", "cores", "memory", "/dev/shm", "loopback", "clock", "GPUs", "disk"}
    assert exit.value.code == (0 if said["fit"] else 1)
    assert str(tmp_path) in next(check["found"] for check in said["checks"] if check["name"] == "disk")


@pytest.mark.parametrize(
    ("kind", "verdicts", "said"),
    [
        ("good", ["ok", "ok"], "for 10.0.0.7, valid until "),
        ("ends soon", ["ok", "warn"], "for 10.0.0.7, valid until "),
        ("expired", ["ok", "bad"], "its certificate has expired"),
        ("another host", ["ok", "bad"], "its certificate is not for 10.0.0.7"),
        ("open key", ["bad", "ok"], "others can read coordinator.key"),
        ("missing", ["bad"], "is not a folder"),
    ],
)
def test_certificates_are_judged(kind, verdicts, said, tmp_path):
    folder = tmp_path / "certs"
    if kind != "missing":
        ago = {"ends soon": 350, "expired": 400}.get(kind, 0)
        made_at = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=ago)
        certificates.make(folder, ["node1" if kind == "another host" else "10.0.0.7"], now=made_at)
    if kind == "open key":
        (folder / "coordinator.key").chmod(0o644)
    found = list(trust.checks(folder, ["10.0.0.7"]))
    assert [check.verdict for check in found] == verdicts
    assert all(bool(check.todo) == (check.verdict != "ok") for check in found)
    assert said in found[0 if kind in ("open key", "missing") else 1].found


def test_what_is_bad_is_told_with_its_remedy_and_exit_code_1(monkeypatch, capsys):
    found = [Check("disk", "full", "warn", "free some"), Check("kernel", "old", "bad", "use a newer " + "one " * 40)]
    monkeypatch.setattr(doctor, "checks", lambda directory: iter(found))
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctor"])
    assert exit.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["warn  disk         full", "                   → free some"]
    assert lines[-1] == "1 thing to change before shoal can run here"
    assert max(len(line) for line in lines) <= 80
