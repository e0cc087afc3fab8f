"""Files that workers write on a host without sight of the run directory: they come home piece by piece."""

from __future__ import annotations

import os
import re

from shoal.control.hosts import is_name
from shoal.control.rundir import RunDir, write_atomically

PIECE_BYTES = 256 << 10
_GROWING = (("audit", "bin"), ("metrics", "jsonl"), ("logs", "log"))
_WRITTEN_ONCE = re.compile(r"(?:audit|results)/pass-\d+\.json")


def is_known(host: str, path: str) -> bool:
    """Whether a worker of that host may write there: nothing else of a run directory is written from elsewhere."""
    if not is_name(host):
        return False
    named = "|".join(rf"{folder}/{re.escape(host)}-w\d+\.{suffix}" for folder, suffix in _GROWING)
    return re.fullmatch(named, path) is not None or _WRITTEN_ONCE.fullmatch(path) is not None


def take(run_dir: RunDir, path: str, offset: int, data: bytes) -> int:
    """Add a piece of a known file, if it begins where the file ends. How much of the file is here then, from where the
    host goes on. OSError when the disk is full."""
    at = run_dir.path / path
    if _WRITTEN_ONCE.fullmatch(path):
        at.parent.mkdir(mode=0o700, exist_ok=True)
        if not at.exists():  # a worker of another host may have written the same
            write_atomically(at, data.decode())
        return offset + len(data)
    with open(os.open(at, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb+", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if offset == size_bytes:
            size_bytes += os.pwrite(file.fileno(), data, offset)
        return size_bytes


def written(run_dir: RunDir, host: str) -> list[str]:
    """What workers of that host have written, of what is known."""
    names = (f"{folder}/{entry.name}" for folder in ("audit", "metrics", "logs", "results")
             if (run_dir.path / folder).is_dir() for entry in os.scandir(run_dir.path / folder))  # fmt: skip
    return [name for name in names if is_known(host, name)]
