"""What evaluations and predictions leave behind: results that every worker reads, and rows in a file, each written for
its sample whoever computes it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.control.rundir import write_atomically
from shoal.errors import DataUnusable, RunDirUnusable, WorkersDiffer


class Results:
    """The means of each evaluation, by the number of its pass. They are there before the commit that ends the pass, so
    a worker that finds the pass complete finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, pass_index: int, totals: Mapping[str, float], samples: int) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        means = {name: total / samples for name, total in totals.items()}
        write_atomically(self._path(pass_index), json.dumps(means))

    def read(self, pass_index: int) -> dict[str, float]:
        means: dict[str, float] = json.loads(self._path(pass_index).read_text())
        return means

    def _path(self, pass_index: int) -> Path:
        return self._folder / f"pass-{pass_index}.json"


class Rows:
    """An array of one row for each sample, in the order of the data set, as a `.npy` file that many workers write to.
    A row that is computed again lands in the same place. The file has its name once all rows are in; until then it has
    one of its own for each `job` and pass, who goes on with it after a resume."""

    def __init__(self, path: Path, count: int, job: str) -> None:
        self._path, self._count = path, count
        self._draft = path.with_name(f".{path.name}.{job}.draft")
        self._file: npt.NDArray[Any] | None = None

    def write(self, lo: int, rows: object, samples: int) -> None:
        """The rows of `samples` samples from position `lo` on. DataUnusable if there are not as many."""
        array = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
        if array.dtype == object or not array.ndim or len(array) != samples:
            found = f"{array.shape} of {array.dtype}"
            raise DataUnusable(
                f"predictions of {samples} samples came as {found}; return an array with a row for each sample"
            )
        if self._file is None:
            self._file = self._open(array)
        if (self._file.dtype, self._file.shape[1:]) != (array.dtype, array.shape[1:]):
            raise WorkersDiffer(
                f"a prediction is {array.shape[1:]} of {array.dtype}, an earlier one {self._file.shape[1:]} of "
                f"{self._file.dtype}; every row must have the same shape"
            )
        self._file[lo : lo + samples] = array

    def close(self) -> None:
        """All rows are in, and the commit that says so has happened. Every worker calls it; the first one renames."""
        if self._file is not None:
            self._file.flush()  # type: ignore[attr-defined]
        self._file = None
        with contextlib.suppress(FileNotFoundError):
            self._draft.rename(self._path)

    def _copy_whole(self, rows: npt.NDArray[Any]) -> None:
        """A job that had finished these rows, and went on from a checkpoint before that, computes only the last ones
        again."""
        with contextlib.suppress(OSError, ValueError):
            before = np.load(self._path, mmap_mode="r")
            if (before.dtype, before.shape) == (rows.dtype, rows.shape):
                rows[:] = before

    def _open(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd, made = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            os.close(fd)
            try:
                rows = np.lib.format.open_memmap(made, "w+", array.dtype, (self._count, *array.shape[1:]))
                self._copy_whole(rows)
                with contextlib.suppress(FileExistsError):  # another worker was first
                    os.link(made, self._draft)
            finally:
                os.unlink(made)
            return np.lib.format.open_memmap(self._draft, "r+")
        except OSError as problem:
            raise RunDirUnusable(f"{self._path} cannot be written: {problem.strerror}; choose another place") from None


def summed(before: Sequence[float], names: Sequence[str], metrics: Mapping[str, float], samples: int) -> list[float]:
    """Totals over all samples so far, in the order of the names."""
    earlier = before or [0.0] * len(names)
    return [total + metrics[name] * samples for total, name in zip(earlier, names, strict=True)]
