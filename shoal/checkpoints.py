"""Checkpoints on disk: folders that are whole or not there, and say so themselves.

A checkpoint is a folder `step-…` with `model.safetensors` (the weights, for whoever reads that format),
`training.safetensors` (what the optimizer keeps, and buffers outside the state dict) and `manifest.json` (where the job
was, and the length and checksum of everything). It is written under another name, synced to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointUnusable, SettingsContradict

VERSION = 1
MODEL, TRAINING, MANIFEST = "model.safetensors", "training.safetensors", "manifest.json"
DEFAULT_EVERY = "10m"
DEFAULT_KEEP = 3

_NAME = re.compile(r"step-(\d+)-g(\d+)(?:-c(\d+))?$")
_DRAFT = re.compile(r"\.(?:draft|gone)-(\d+)-")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class Every:
    """When a checkpoint is due: after so many steps, or so many seconds. Neither: only when asked for."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Every:
        """`500` steps, `30s`, `10m`, `2h`, or `off`. Raises SettingsContradict."""
        if text == "off":
            return cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        if found is None or float(found[1]) <= 0 or (not found[2] and "." in found[1]):
            raise SettingsContradict(f"--checkpoint-every {text}: write 500 for steps, 30s, 10m or 2h, or off")
        if found[2]:
            return cls(seconds=float(found[1]) * _UNITS_S[found[2]])
        return cls(steps=int(found[1]))


@dataclass(frozen=True)
class Tensor:
    """A tensor in the terms of safetensors; `data` are its elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def seq(self) -> int:
        return int(self.manifest["seq"])

    def tensors(self, file: str) -> dict[str, Tensor]:
        return read_tensors(self.path / file)


# Writing.


def write(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """A new checkpoint in `folder`, which is there, whole and on the disk, when this returns. `manifest` has `step`,
    `generation` and `seq` at least. Raises OSError, and leaves nothing then."""
    path = folder / f"step-{manifest['step']:09d}-g{manifest['generation']}"
    if path.exists():
        try:
            if (there := check(path)).seq >= manifest["seq"]:  # by whoever was the lowest rank before
                return there.path
            path = folder / f"{path.name}-c{manifest['seq']}"  # an edit came after the step
            if path.exists():
                return check(path).path
        except CheckpointUnusable:
            shutil.rmtree(path)
    folder.mkdir(mode=0o700, exist_ok=True)
    draft = folder / f".draft-{os.getpid()}-{path.name}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        sums = {name: _write_tensors(draft / name, tensors) for name, tensors in files.items()}
        body = {"version": VERSION, **manifest, "files": sums}
        text = json.dumps({**body, "sum": _sum(body)}, indent=1).encode()
        _write_synced(draft / MANIFEST, [text])
        _sync_folder(draft)
        draft.rename(path)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what writers that died have left."""
    for old in listed(folder)[keep:]:
        gone = folder / f".gone-{os.getpid()}-{old.name}"
        with contextlib.suppress(FileNotFoundError):  # whoever was the lowest rank before prunes too
            old.rename(gone)  # never half a checkpoint under a checkpoint's name
        shutil.rmtree(gone, ignore_errors=True)
    for left, pid in _drafts(folder):
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def remove_drafts(folder: Path) -> None:
    """Remove what writers have left. None of them may be alive."""
    for left, _ in _drafts(folder):
        shutil.rmtree(left, ignore_errors=True)


def being_written(folder: Path) -> bool:
    """Whether somebody who lives is writing a checkpoint."""
    return any(Path(f"/proc/{pid}").exists() for _, pid in _drafts(folder))


def _drafts(folder: Path) -> list[tuple[Path, str]]:
    """What is not a checkpoint yet or any more, and the pid of who makes it so."""
    if not folder.is_dir():
        return []
    return [(path, found[1]) for path in folder.iterdir() if (found := _DRAFT.match(path.name))]


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.data.nbytes]}
        at += tensor.data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _write_synced(path, [struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())])


def _write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    summed = hashlib.sha256()
    size_bytes = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=1 << 20) as file:
        for part in parts:
            rest = memoryview(part).cast("B")
            for at in range(0, len(rest), _WRITE_BYTES):
                piece = rest[at : at + _WRITE_BYTES]
                summed.update(piece)
                file.write(piece)
            size_bytes += len(rest)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size_bytes, "sha256": summed.hexdigest()}


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# Reading.


def listed(folder: Path) -> list[Path]:
    """Whatever has a checkpoint's name, newest first: by generation, which is never used twice, then by step."""
    if not folder.is_dir():
        return []
    named = [(path, found) for path in folder.iterdir() if (found := _NAME.match(path.name))]
    return [path for path, found in sorted(named, key=lambda it: _age(it[1]), reverse=True)]


def _age(name: re.Match[str]) -> tuple[int, int, int]:
    step, generation, seq = name.groups()
    return int(generation), int(step), int(seq or 0)


def check(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte of it as it was written. Raises CheckpointUnusable that says what is not."""
    try:
        body = json.loads((path / MANIFEST).read_bytes())
        told = body.pop("sum")
    except (OSError, ValueError, KeyError, AttributeError) as problem:
        raise _damaged(path, MANIFEST, "is missing" if isinstance(problem, OSError) else "cannot be read") from None
    if told != _sum(body):
        raise _damaged(path, MANIFEST, "is not as it was written")
    if body["version"] > VERSION:
        raise CheckpointUnusable(f"{path} is of a newer version of shoal; use that one")
    for name, expected in body["files"].items():
        try:
            size_bytes = (path / name).stat().st_size
            if size_bytes != expected["bytes"]:
                raise _damaged(path, name, f"has {size_bytes:,} bytes of {expected['bytes']:,}")
            if _file_sum(path / name) != expected["sha256"]:
                raise _damaged(path, name, "is not as it was written")
        except OSError as problem:
            raise _damaged(path, name, f"cannot be read: {problem.strerror}") from None
    return Checkpoint(path, body)


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, if there is one, and a line for each newer one that is not."""
    damaged: list[str] = []
    for path in listed(folder):
        try:
            return check(path), damaged
        except CheckpointUnusable as problem:
            damaged.append(str(problem))
    return None, damaged


def weights(path: Path) -> dict[str, Tensor]:
    """The model's weights in a safetensors file, a checkpoint, or the newest whole checkpoint of a run directory."""
    if path.is_file():
        return read_tensors(path)
    if (path / MANIFEST).exists():
        return check(path).tensors(MODEL)
    newest, damaged = newest_whole(path / "checkpoints")
    if newest is None:
        why = f": {damaged[0]}" if damaged else ""
        raise CheckpointUnusable(f"{path} has no weights: it is no safetensors file, checkpoint or run with one{why}")
    return newest.tensors(MODEL)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which is mapped, not read. Raises CheckpointUnusable."""
    try:
        with open(path, "rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = struct.unpack_from("<Q", mapped)
        header = json.loads(bytes(mapped[8 : 8 + length]))
        header.pop("__metadata__", None)
        data = mapped[8 + length :]
        return {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }
    except OSError as problem:
        raise CheckpointUnusable(f"{path} cannot be read: {problem.strerror}; name another one") from None
    except (ValueError, KeyError, TypeError, struct.error):
        raise CheckpointUnusable(f"{path} is not a safetensors file; name another one") from None


def _file_sum(path: Path) -> str:
    summed = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_WRITE_BYTES):
            summed.update(piece)
    return summed.hexdigest()


def _damaged(path: Path, name: str, what: str) -> CheckpointUnusable:
    return CheckpointUnusable(f"checkpoint {path.name} is damaged: {name} {what}")


def written_at(folder: Path) -> float | None:
    """When the newest checkpoint was written, in seconds since 1970."""
    for path in listed(folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return None
