"""The directory of a run: what the processes of a job, and those who look at it later, find where."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal import checkpoints
from shoal.control.tls import LOOPBACK, Tls, host_of, needed
from shoal.errors import JobNotFound, RunDirUnusable
from shoal.metrics import read_events

RUNS = Path("shoal-runs")
_DRAFTS = (
    ".job.json.*",
    ".address.*",
    ".invitation.*",
    ".committed.json.*",
    "audit/.pass-*.json.*",
    "results/.pass-*.json.*",
)


@dataclass(frozen=True)
class Committed:
    """The newest commit of a job: its number, and how far the training was with it."""

    seq: int
    step: int
    epoch: int
    samples: int
    loss: float | None  # None: not a finite number


@dataclass(frozen=True)
class RunDir:
    """A run's directory, readable by its owner only. Make one with `create`, meet one with `open`."""

    path: Path

    @classmethod
    def create(cls, path: Path | str, settings: dict[str, Any]) -> RunDir:
        """A new run directory; `settings` go to `job.json`. Raises RunDirUnusable where something is already."""
        run_dir = cls(Path(path).absolute())
        try:
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(run_dir.path.iterdir()):
                whose = "holds another job" if run_dir.job_file.exists() else "is not empty"
                raise RunDirUnusable(f"{run_dir.path} {whose}; choose another --dir, or go on with shoal resume")
            run_dir.path.chmod(0o700)
            for folder in (run_dir.logs, run_dir.audit, run_dir.metrics):
                folder.mkdir(mode=0o700)
            # Exclusive: of two jobs that found the directory empty, one gets it.
            token_fd = os.open(run_dir.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise RunDirUnusable(f"{path} is a file or another job just took it; choose another --dir") from None
        except OSError as error:
            raise RunDirUnusable(f"{path} cannot be made: {error.strerror}; choose another --dir") from error
        with os.fdopen(token_fd, "w") as file:
            file.write(secrets.token_urlsafe(32))
        write_atomically(run_dir.job_file, json.dumps({"created": time.time(), **settings}, indent=1))
        return run_dir

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """The run directory at `path`. Raises RunDirUnusable if it is none."""
        run_dir = cls(Path(path).absolute())
        if not run_dir.job_file.exists() or not run_dir.token_file.exists():
            raise RunDirUnusable(f"{run_dir.path} is not a run directory; name one that shoal run has made")
        return run_dir

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def address_file(self) -> Path:
        return self.path / "address"

    @property
    def coordinator_file(self) -> Path:
        """Locked by the coordinator as long as it lives; holds its pid."""
        return self.path / "coordinator"

    @property
    def invitation_file(self) -> Path:
        """What another machine needs to join; only in a job for several hosts."""
        return self.path / "invitation"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def committed_file(self) -> Path:
        return self.path / "committed.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def faults(self) -> Path:
        return self.path / "faults.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def loaders(self) -> Path:
        """Pids of loader processes, one a line."""
        return self.path / "loaders"

    @property
    def audit(self) -> Path:
        return self.path / "audit"

    @property
    def results(self) -> Path:
        """Of evaluations."""
        return self.path / "results"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """What each worker measured, a file of JSON lines for each."""
        return self.path / "metrics"

    @property
    def tls_folder(self) -> Path:
        return self.path / "tls"

    def token(self) -> str:
        return self.token_file.read_text().strip()

    def settings(self) -> dict[str, Any]:
        """What `create` was given, and when (`created`, seconds since 1970)."""
        try:
            settings: dict[str, Any] = json.loads(self.job_file.read_text())
        except ValueError:
            raise RunDirUnusable(f"{self.job_file} is damaged; put back a copy, or begin a new job") from None
        return settings

    def address(self) -> str | None:
        """host:port of the coordinator, or None before it first served."""
        try:
            return self.address_file.read_text().strip()
        except FileNotFoundError:
            return None

    def tls(self, host: str = "") -> Tls | None:
        """What the coordinator and its clients show each other; None in a job that speaks plain text. `host`: where the
        coordinator is met, if the run directory does not know yet. Raises RunDirUnusable where it was to be there."""
        if self.tls_folder.is_dir():
            return Tls(self.tls_folder)
        if needed(self.settings(), host or host_of(self.address() or f"{LOOPBACK}:0")):
            raise RunDirUnusable(f"{self.tls_folder} is gone; shoal resume puts it back")
        return None

    def write_address(self, address: str) -> None:
        write_atomically(self.address_file, address)

    def coordinator(self) -> tuple[int, bool]:
        """The pid of the newest coordinator, 0 before the first, and whether it came to serve."""
        try:
            pid, *phase = self.coordinator_file.read_text().split() or ["0"]
        except FileNotFoundError:
            return 0, False
        return int(pid), bool(phase)

    def serving(self) -> int:
        """The pid of the coordinator, if it serves and lives on this machine; else 0."""
        pid, serves = self.coordinator()
        return pid if serves and Path(f"/proc/{pid}").exists() else 0

    def claim(self) -> Claim:
        """For a coordinator. Raises RunDirUnusable while another one lives."""
        fd = os.open(self.coordinator_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise RunDirUnusable(f"another coordinator serves {self.path}; a job has one") from None
        claim = Claim(fd)
        claim.write("")
        return claim

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """By the process that runs the job, for as long as it does: however it ends, the kernel lets go. Raises
        RunDirUnusable while another one has it."""
        fd = os.open(self.lock_file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunDirUnusable(
                    f"a job is running in {self.path}; see shoal status, or end it with shoal stop"
                ) from None
            yield
        finally:
            os.close(fd)

    def forget_ending(self) -> None:
        """The job goes on: how it ended is no longer so, and its coordinator begins anew."""
        for name in ("committed.json", "address", "journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"):
            (self.path / name).unlink(missing_ok=True)

    def remove_drafts(self) -> None:
        """What processes that were killed had not finished writing. For whoever holds the directory, when no other
        process of the job is left."""
        for pattern in _DRAFTS:
            for draft in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    draft.unlink()
        for folder in self.path.glob(".tls.*"):
            shutil.rmtree(folder, ignore_errors=True)
        checkpoints.remove_drafts(self.checkpoints)

    def last_generation(self) -> int:
        """The highest number that anybody may have heard of."""
        from shoal.data.fed import last_generation  # numpy costs a tenth of a second

        told = (event["number"] for event in read_events(self.events) if event["event"] == "generation")
        return max(max(told, default=0), last_generation(self.audit))

    def next_worker(self) -> int:
        """The lowest number that no worker of this run has had."""
        names = [path.stem for path in (*self.logs.glob("*.log"), *self.audit.glob("*.bin"))]
        numbered = (re.search(r"(?:^|-)w(\d+)$", name) for name in names)
        return max((int(found[1]) + 1 for found in numbered if found), default=0)

    def runs(self) -> bool:
        """Whether somebody runs the job now, also while no coordinator answers."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def committed(self) -> Committed | None:
        """Where the job was when it ended; None while it runs, or if it was killed with its launcher."""
        try:
            return Committed(**json.loads(self.committed_file.read_text()))
        except FileNotFoundError:
            return None

    def write_committed(self, committed: Committed) -> None:
        write_atomically(self.committed_file, json.dumps(asdict(committed)))


@dataclass(frozen=True)
class Claim:
    """One coordinator's hold of a run directory."""

    fd: int

    def write(self, phase: str) -> None:
        """Beside the pid; any but an empty one means that it serves. Always as long: readers see all or nothing."""
        os.pwrite(self.fd, f"{os.getpid():>10} {phase:<6}\n".encode(), 0)

    def release(self) -> None:
        os.close(self.fd)


def finite(loss: float) -> float | None:
    """As JSON can say it: None for what is no number."""
    return loss if math.isfinite(loss) else None


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole text or what was there before; only the owner can read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def default_path(script: Path | str, now: float | None = None) -> Path:
    """shoal-runs/<name of the script>-<date and time>, at this moment unless `now` is given."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return RUNS / f"{Path(script).stem}-{stamp}"


def create_default(script: Path | str, settings: dict[str, Any]) -> RunDir:
    """A new run directory at the default path, or beside it when a job of this script began in the same second."""
    path = default_path(script)
    for number in range(2, 100):
        with contextlib.suppress(RunDirUnusable):
            return RunDir.create(path, settings)
        path = path.with_name(f"{default_path(script).name}-{number}")
    return RunDir.create(path, settings)


def find(job: str | None = None) -> RunDir:
    """The run at that path, or of that name under ./shoal-runs, or the newest there. Raises JobNotFound."""
    if job is not None:
        places = dict.fromkeys((Path(job), RUNS / job))  # one place, when the path begins at the root
        for path in places:
            if (path / "job.json").exists():
                return RunDir.open(path)
        where = " or ".join(str(path) for path in places)
        raise JobNotFound(f"no job at {where}; name a run directory, or a job under {RUNS}")
    found = [path.parent for path in RUNS.glob("*/job.json")]
    if not found:
        raise JobNotFound(f"no job under {RUNS.absolute()}; start one with shoal run, or name its run directory")
    return RunDir.open(max(found, key=lambda path: ((path / "job.json").stat().st_mtime_ns, path.name)))
