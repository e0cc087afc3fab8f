"""What each worker really fed to its steps: written down by the worker, read by the audits.

A worker records a step before it says that it is done with it, so every member of a committed step has a record.
Without lockstep it records each of its own steps before it says that the samples are used; a record's `seq` is the
number of its lease then, and [step_lo, step_hi) the lease's shard. An empty one says that the pass is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.ledger import Ids, Pass
from shoal.errors import WorkersDiffer


class Fed(NamedTuple):
    """One worker's part in an attempt at a step: the share [lo, hi) of the step's [step_lo, step_hi). An edit has an
    empty one."""

    generation: int
    seq: int
    pass_index: int
    epoch: int
    step_lo: int
    step_hi: int
    lo: int
    hi: int
    ids_digest: int
    skipped: bool
    last: bool = False  # step of its epoch


# In the file a record is its numbers in their order, 8 bytes each.
_RECORD = np.dtype([(name, "<i8") for name in Fed._fields])
_WRITTEN = struct.Struct(f"<{len(Fed._fields)}q")
_TABLE = np.dtype([*_RECORD.descr, ("worker", object)])
_ROLLBACKS = "rollbacks.jsonl"

Records = npt.NDArray[np.void]


def digest(ids: Sequence[Ids]) -> int:
    """One number for the ids of a share in the order they were fed, however they were cut in micro-batches."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in ids:
        hashed.update(np.ascontiguousarray(part, dtype="<i8").data)
    return int.from_bytes(hashed.digest(), "little", signed=True)


class AuditWriter:
    """Appends what one worker fed, one record a step. OSError when a record cannot be written whole."""

    def __init__(self, directory: Path, worker_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{worker_id}.bin"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # A worker that died while it wrote may have left half a record. It never said that it was done with that step,
        # so nothing is lost with it, and the records that follow must be aligned.
        size_bytes = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, size_bytes - size_bytes % _RECORD.itemsize)

    def write(self, fed: Fed) -> None:
        """Call it before the done word is written."""
        record = _WRITTEN.pack(*fed)
        if os.write(self._fd, record) != len(record):
            raise OSError(
                f"{self._path}: a record was cut short, the disk is full; free some space and start the job again"
            )

    def close(self) -> None:
        os.close(self._fd)


def declare(directory: Path, pass_: Pass) -> None:
    """Write down what the pass goes over. WorkersDiffer when another worker wrote something else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"pass-{pass_.index}.json"
    fd, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(pass_), file, default=int)  # a seed may be numpy's number
        # A link appears whole or not at all, and only the first one does.
        os.link(temporary, path)
    except FileExistsError:
        theirs, ours = json.loads(path.read_text()), asdict(pass_)
        if theirs != ours:
            raise _differ(pass_.index, ours, theirs) from None
    finally:
        os.unlink(temporary)


def _differ(index: int, ours: dict[str, Any], theirs: dict[str, Any]) -> WorkersDiffer:
    names = [name for name in ours if ours[name] != theirs.get(name)]
    pairs = ", ".join(f"{name} is {ours[name]} here and {theirs.get(name)} at the first worker" for name in names)
    return WorkersDiffer(
        f"pass {index}: {pairs}; give every worker, also of a job that goes on, the same data and arguments of "
        "batches()"
    )


def roll_back(directory: Path, generation: int, seq: int) -> None:
    """The job goes on from commit `seq`: whatever generations up to this one did after it is taken back. From 0 it
    begins anew, and may declare other passes."""
    if not seq:
        for path in directory.glob("pass-*.json"):
            path.unlink()
    with open(directory / _ROLLBACKS, "a") as file:
        file.write(json.dumps({"generation": generation, "seq": seq}) + "\n")
        file.flush()
        os.fsync(file.fileno())


# Reading it.


def read(directory: Path) -> Records:
    """Every whole record, with the worker that wrote it."""
    parts = [np.empty(0, _TABLE)]
    for path in sorted(directory.glob("*.bin")):
        data = path.read_bytes()
        part = np.empty(len(data) // _RECORD.itemsize, _TABLE)
        part[list(Fed._fields)] = np.frombuffer(data, _RECORD, count=len(part))
        part["worker"] = path.stem
        parts.append(part)
    return np.concatenate(parts)


def standing(directory: Path, records: Records) -> tuple[Records, int]:
    """Without what a job that went on from a checkpoint has taken back, and how many steps that were."""
    path = directory / _ROLLBACKS
    steps = 0
    for line in path.read_text().splitlines() if path.exists() else ():
        back = json.loads(line)
        stands = (records["generation"] > back["generation"]) | (records["seq"] <= back["seq"])
        steps += len(np.unique(records["seq"][~stands & (records["step_hi"] > records["step_lo"])]))
        records = records[stands]
    return records, steps


def last_generation(directory: Path) -> int:
    """The highest generation in which anybody fed anything."""
    return int(read(directory)["generation"].max(initial=0))


def declared(directory: Path) -> list[Pass]:
    """In their order. Read them after the records: a pass is declared before anything of it is fed."""
    passes = [Pass(**json.loads(path.read_text())) for path in directory.glob("pass-*.json")]
    return sorted(passes, key=lambda pass_: pass_.index)


class Findings:
    """What an audit has found: samples, and a line for each place."""

    def __init__(self) -> None:
        self.lost = 0
        self.repeated = 0
        self.lines: list[str] = []


def check_digests(pass_: Pass, epoch: int, records: Records, findings: Findings) -> None:
    """The ids that were fed are the ids of the order."""
    shares = zip(records["lo"].tolist(), records["hi"].tolist(), strict=True)
    expected = [digest([pass_.ids(epoch, lo, hi)]) for lo, hi in shares]
    for record in records[records["ids_digest"] != np.array(expected)]:
        count = int(record["hi"] - record["lo"])
        # Only the digest is known: up to all of the share's samples were left out, and others fed in their place.
        findings.lost += count
        findings.repeated += count
        findings.lines.append(
            f"seq {record['seq']}: {record['worker']} fed other ids than pass {pass_.index}, epoch {epoch} "
            f"has in [{record['lo']}, {record['hi']})"
        )
