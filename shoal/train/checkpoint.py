"""A worker's side of checkpoints: what is in one, when the lowest rank takes one, and how a job starts from one.

The committed buffers stay as they are until the step after the next one reduces. A thread copies them in that time; a
step that comes too early waits for it. Then the thread writes to the disk, and training goes on whatever comes of that.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shoal import checkpoints
from shoal.checkpoints import Every, Tensor
from shoal.errors import CheckpointUnusable
from shoal.sync.record import Record
from shoal.sync.replica import BITS, Replica
from shoal.sync.sync import State
from shoal.wording import amount

_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_LOWEST_PRIORITY = 19
_PATIENCE_S = 600.0  # for a disk that does not answer

_log = logging.getLogger("shoal.checkpoint")


@dataclass(frozen=True)
class Moment:
    """What a checkpoint says beside tensors: where the job was."""

    seq: int
    generation: int
    record: Record
    text: bytes  # hyperparameters and schedulers

    def manifest(self) -> dict[str, Any]:
        record = {name: value for name, value in asdict(self.record).items() if not name.startswith("text_")}
        return {
            "step": self.record.step,
            "epoch": self.record.epoch,
            "samples": self.record.samples,
            "seq": self.seq,
            "generation": self.generation,
            "time": time.time(),
            "record": record,
            "text": self.text.decode(),
        }


class Saver:
    """Takes checkpoints on one worker, while it is the lowest rank. `tell` is given the kind, the text and the fields
    of an event, on another thread."""

    def __init__(
        self, folder: Path, every: Every, keep: int, began_at: float, tell: Callable[[str, str, dict[str, Any]], None]
    ) -> None:
        """`began_at`: of the job, in seconds since 1970."""
        self._folder, self._every, self._keep, self._tell = folder, every, keep, tell
        self._began_at = began_at
        self._due_at: float | None = None  # both are known once this worker is the lowest rank
        self._due_step: int | None = None
        self.saved_seq = 0  # the newest commit of which this worker has written a checkpoint
        self._wanted = False  # somebody asked for one
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._seq = 0  # of the commit that is being copied
        self._stalled_s = 0.0  # how long training waited for this one

    def due(self, step: int) -> bool:
        """Whether the lowest rank is to take a checkpoint of this commit. While one is being written, none is."""
        every, wanted = self._every, self._wanted
        if every.steps is not None:
            if self._due_step is None:
                self._due_step = -(-step // every.steps) * every.steps
            wanted = wanted or step >= self._due_step
        if every.seconds is not None:
            if self._due_at is None:
                self._due_at = max(checkpoints.written_at(self._folder) or 0.0, self._began_at) + every.seconds
            wanted = wanted or time.time() >= self._due_at
        return wanted and (self._thread is None or not self._thread.is_alive())

    def take(self, state: State, moment: Moment) -> None:
        """Start a checkpoint of commit `moment.seq`, whose state this is."""
        began_s = time.perf_counter()
        self._wanted = False
        if self._every.steps is not None:
            self._due_step = (moment.record.step // self._every.steps + 1) * self._every.steps
        if self._every.seconds is not None:
            self._due_at = time.time() + self._every.seconds
        self._seq = moment.seq
        self._copied.clear()
        self._thread = threading.Thread(target=self._save, args=(state, moment), name="shoal-checkpoint", daemon=True)
        self._thread.start()
        self._stalled_s = time.perf_counter() - began_s

    def ask(self) -> None:
        """Take one at the next commit."""
        self._wanted = True

    def before(self, seq: int) -> None:
        """Call it before commit `seq` is made ready for: from then on its buffers are written to."""
        if seq >= self._seq + 2 and not self._copied.is_set():
            self.hold()

    def finish(self) -> None:
        """Until the checkpoint that is being taken is written, or has failed."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def hold(self) -> None:
        """Until nothing is being copied any more."""
        began_s = time.perf_counter()
        self._copied.wait()
        self._stalled_s += time.perf_counter() - began_s

    def _save(self, state: State, moment: Moment) -> None:
        began_s = time.perf_counter()
        try:
            try:
                files = _copied(state)
            finally:
                self._copied.set()
            _stand_back()  # only now: nobody waits for the rest
            path = checkpoints.write(self._folder, moment.manifest(), files)
            checkpoints.prune(self._folder, self._keep)
        except Exception as problem:  # of the disk, of memory, of a dtype: none is a reason to stop training
            why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            text = f"no checkpoint of step {moment.record.step:,} in {self._folder}: {why}; training goes on"
            _log.warning(text)
            self._tell("checkpoint_failed", text, {"step": moment.record.step})
            return
        self.saved_seq = moment.seq
        size_bytes = sum(tensor.data.nbytes for tensors in files.values() for tensor in tensors.values())
        took_s = time.perf_counter() - began_s
        self._tell(
            "checkpointed",
            f"step {moment.record.step:,}, {amount(size_bytes)} in {took_s:.2f} s",
            {
                "step": moment.record.step,
                "seq": moment.seq,
                "path": str(path),
                "bytes": size_bytes,
                "took_s": took_s,
                "cpu_s": time.thread_time(),
                "stalled_s": self._stalled_s,
            },
        )


def _stand_back() -> None:
    """This thread takes what the training leaves over, on any core."""
    try:
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, _LOWEST_PRIORITY)
        os.sched_setaffinity(thread_id, range(os.cpu_count() or 1))
    except OSError:
        pass  # not allowed here: it only takes a little more from its neighbors


def _copied(state: State) -> dict[str, dict[str, Tensor]]:
    """Everything in memory of its own. By numpy: torch would start a second set of threads for it."""
    named = {checkpoints.MODEL: state.model, checkpoints.TRAINING: state.training}
    size_bytes = sum(_nbytes(tensor) for tensors in named.values() for tensor in tensors.values())
    memory = memoryview(mmap.mmap(-1, max(1, size_bytes)))  # given back to the machine when the last view goes
    files: dict[str, dict[str, Tensor]] = {}
    at = 0
    for file, tensors in named.items():
        files[file] = {}
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise CheckpointUnusable(f"{name} is {tensor.dtype}, which the format cannot hold")
            bits = tensor.detach().view(BITS[tensor.element_size()]).numpy()
            data = memory[at : at + _nbytes(tensor)]
            np.frombuffer(data, bits.dtype).reshape(bits.shape)[...] = bits
            files[file][name] = Tensor(_DTYPES[tensor.dtype], tuple(tensor.shape), data)
            at += _nbytes(tensor)
    return files


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Starting from one.


class Restored:
    """A checkpoint as it enters a script's model and optimizer. Raises CheckpointUnusable when it is of another model,
    or not whole."""

    def __init__(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        checkpoint = checkpoints.check(path)
        self._model, self._optimizer, self._checkpoint = model, optimizer, checkpoint
        self.seq = checkpoint.seq
        known = {field.name for field in fields(Record)}
        kept = {name: it for name, it in checkpoint.manifest["record"].items() if name in known}
        self.record = Record(**{**kept, "totals": tuple(kept.get("totals", ()))})
        self._text = str(checkpoint.manifest["text"]).encode()
        self.apply_weights()

    def apply_weights(self) -> None:
        take_weights(self._model, self._checkpoint.tensors(checkpoints.MODEL), str(self._checkpoint.path))

    def apply_training(self, replica: Replica) -> None:
        """Optimizer, schedulers and other buffers. Call it when the sync has looked at the optimizer: a newcomer's has
        no state when it looks, and both must see the same."""
        try:
            replica.take_text(self._text)
        except (ValueError, KeyError, TypeError) as problem:
            raise CheckpointUnusable(
                f"{self._checkpoint.path} has other parameter groups or schedulers than this script ({problem}); build "
                "what was saved"
            ) from None
        training = self._checkpoint.tensors(checkpoints.TRAINING)
        buffers = dict(self._model.named_buffers())
        parameters = dict(self._model.named_parameters())
        self._optimizer.state.clear()
        for name, tensor in training.items():
            kind, _, rest = name.partition("/")
            if kind == "buffer" and rest in buffers:
                _take(buffers[rest], tensor, rest, str(self._checkpoint.path))
                continue
            owner, _, key = rest.rpartition("/")
            if owner in parameters:
                parameter, value = parameters[owner], as_tensor(tensor)
                # A number that was on the CPU stays there, as Adam's count of steps, unless the optimizer is fused.
                on_cpu = not value.dim() and not any(
                    group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups
                )
                self._optimizer.state[parameter][key] = value if on_cpu else value.to(parameter.device)


def start_from(path: Path, model: nn.Module) -> None:
    """Give the model the weights that lie at `path`. Raises CheckpointUnusable."""
    take_weights(model, checkpoints.weights(path), str(path))


def take_weights(model: nn.Module, found: Mapping[str, Tensor], where: str) -> None:
    """Weights by name, all of them or none. Raises CheckpointUnusable, which names what differs with both shapes."""
    wanted = {name: it for name, it in model.state_dict().items() if isinstance(it, torch.Tensor)}
    problems = [
        f"{name} is {_shape(found[name].shape)} there and {_shape(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tuple(tensor.shape)
    ]
    problems += [f"it has no {name}" for name in wanted if name not in found]
    problems += [f"its {name} is not in the model" for name in found if name not in wanted]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointUnusable(
            f"{where} is of another model: {', '.join(problems[:3])}{more}; build the model that was saved"
        )
    for name, tensor in wanted.items():
        _take(tensor, found[name], name, where)


@torch.no_grad()
def _take(tensor: torch.Tensor, found: Tensor, name: str, where: str) -> None:
    if found.shape != tuple(tensor.shape):
        raise CheckpointUnusable(
            f"{where}: {name} is {_shape(found.shape)} there and {_shape(tensor.shape)} in the model; "
            "build the model that was saved"
        )
    tensor.copy_(as_tensor(found))


def as_tensor(found: Tensor) -> torch.Tensor:
    dtype = next((torch_name for torch_name, name in _DTYPES.items() if name == found.dtype), None)
    if dtype is None:
        raise CheckpointUnusable(f"a tensor of kind {found.dtype} cannot be read; convert it first")
    if not found.data.nbytes:
        return torch.empty(found.shape, dtype=dtype)
    return torch.frombuffer(bytearray(found.data), dtype=dtype).view(found.shape)


def _shape(shape: tuple[int, ...] | torch.Size) -> str:
    return "×".join(str(size) for size in shape) or "a single number"
