"""How far a job is in the pass it declared last. Read from files, without numpy: the command line answers at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.leases import extent_of


@dataclass(frozen=True)
class Progress:
    """Samples of the newest pass, and of the epoch in it. A script that goes over its data in many passes does not say
    how many are to come: the total is this pass's. Where it is known how many epochs all of them have, they count as
    one."""

    pass_index: int
    epoch: int  # from 0
    epochs: int
    epoch_done: int
    epoch_samples: int
    done: int
    total: int

    @property
    def fraction(self) -> float:
        return self.done / self.total

    def left_s(self, rate: float) -> float | None:
        """Seconds to the end of the pass at that many samples a second; None while there is no rate."""
        return (self.total - self.done) / rate if rate > 0 else None


def measure(
    passes: Sequence[Mapping[str, Any]], epoch: int, samples: int, all_epochs: int | None = None
) -> Progress | None:
    """`passes` as they were declared, in order; `epoch` and `samples` of the newest commit; `all_epochs` of all passes
    together, if that is known. None without a pass, and with streams, which do not say how much is to come.

    `samples` counts from the job's beginning, and passes before may have been left by `break` or dropped ragged ends:
    the epoch bounds what can be wrong with the difference.
    """
    passes = [pass_ for pass_ in passes if pass_.get("train", True)]  # evaluations learn from no sample
    if not passes or any(pass_["num_samples"] is None for pass_ in passes):
        return None
    *before, newest = passes
    epoch_samples = _epoch_samples(newest)
    epoch = min(epoch, newest["epochs"] - 1)
    earlier = sum(_epoch_samples(pass_) * pass_["epochs"] for pass_ in before)
    if newest.get("leased"):  # no commit says in which epoch the job is
        epoch = max(epoch, min((samples - earlier) // epoch_samples, newest["epochs"] - 1))
    epoch_done = min(max(samples - earlier - epoch * epoch_samples, 0), epoch_samples)
    if all_epochs is not None:
        epoch_before = sum(int(pass_["epochs"]) for pass_ in before)
        done = earlier + epoch * epoch_samples + epoch_done
        total = max(all_epochs * epoch_samples, done)
        return Progress(0, epoch_before + epoch, all_epochs, epoch_done, epoch_samples, done, total)
    return Progress(
        pass_index=newest["index"],
        epoch=epoch,
        epochs=newest["epochs"],
        epoch_done=epoch_done,
        epoch_samples=epoch_samples,
        done=epoch * epoch_samples + epoch_done,
        total=newest["epochs"] * epoch_samples,
    )


def _epoch_samples(pass_: Mapping[str, Any]) -> int:
    """What an epoch uses. Without a global batch a dropped end depends on the number of workers: it is not left out."""
    if pass_.get("leased"):
        return extent_of(pass_).samples
    samples, batch = int(pass_["num_samples"]), pass_["global_batch"]
    return samples - samples % int(batch) if pass_["drop_last"] and batch else samples


def leased(directory: Path) -> bool:
    """Whether workers did not move in lockstep: then there is no newest commit."""
    return any(json.loads(path.read_text()).get("leased") for path in directory.glob("pass-*.json"))


class Passes:
    """What workers have declared in the audit's directory so far. Each file is read once, however often one looks."""

    def __init__(self, directory: Path, all_epochs: int | None = None) -> None:
        self._directory, self._all_epochs = directory, all_epochs
        self._known: dict[Path, dict[str, Any]] = {}

    def progress(self, status: Mapping[str, Any]) -> Progress | None:
        """`status` is the job's, of which this takes epoch and samples, or how far an evaluation is."""
        for path in self._directory.glob("pass-*.json"):
            if path not in self._known:
                self._known[path] = json.loads(path.read_text())
        passes = sorted(self._known.values(), key=lambda pass_: int(pass_["index"]))
        evaluation = [pass_ for pass_ in passes if pass_["index"] == status.get("evaluating")]
        if not evaluation:
            return measure(passes, status["epoch"], status["samples"], self._all_epochs)
        done, total = status["evaluated"], evaluation[0]["num_samples"]
        return None if total is None else Progress(evaluation[0]["index"], 0, 1, done, total, done, total)
