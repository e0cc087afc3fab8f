"""The baselines of every training comparison: no exchange at all, a meeting at every step, and DistributedDataParallel
over gloo."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shoal import models
from shoal.bench.bodies import Setup, Step, Training
from shoal.bench.meeting import MeetingMemory, meet
from shoal.errors import SettingsContradict

# What a step costs does not depend on it. A fixed batch learned by heart would: its gradients sink below the smallest
# normal float, and arithmetic on those is slow.
_LEARNING_RATE = 1e-5

_STEPS_AN_EPOCH = 1000

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True),
}


@dataclass(frozen=True)
class Material:
    """What a loop trains, the same in every variant: the model by one seed, the batch by the worker's rank."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def material(work: Training, rank: int) -> Material:
    spec = models.spec(work.model)
    torch.manual_seed(0)
    model = spec.build()
    torch.manual_seed(1 + rank)
    inputs = torch.randn(work.batch, *spec.input_shape)
    if spec.classes == 1:
        return Material(model, inputs, torch.randn(work.batch, 1), F.mse_loss)
    return Material(model, inputs, torch.randint(0, spec.classes, (work.batch,)), F.cross_entropy)


def optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name not in OPTIMIZERS:
        raise SettingsContradict(f"there is no optimizer {name!r} to measure; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


def samples(setup: Setup, work: Training) -> TensorDataset:
    """What every loop draws batches from, though it trains on the fixed one: loading costs all of them the same."""
    return TensorDataset(torch.zeros(work.batch * setup.n_workers * _STEPS_AN_EPOCH))


def independent(setup: Setup) -> Step:
    """The plain loop, each worker for itself: what the machine gives when nobody waits for anybody."""
    work, made = _prepare(setup)
    return _loop(setup, work, made.model, made)


def lockstep(setup: Setup) -> Step:
    """The plain loop, and at the end of each step all wait for the slowest: what any exchange at every step costs,
    before a byte is exchanged. More than the spread of single steps says: workers that begin together also meet at
    the memory bus."""
    work, made = _prepare(setup)
    alone = _loop(setup, work, made.model, made)
    group = meet(setup, MeetingMemory(Path(setup.meeting_dir)))

    def step() -> None:
        alone()
        group.ready()  # nobody may be a commit ahead of who still looks for the one before
        group.commit()

    return step


def ddp(setup: Setup) -> Step:
    """The same loop, with DDP's defaults (buffers broadcast each forward) but gradients as views of its buckets."""
    work, made = _prepare(setup)
    join_gloo(setup)
    wrapped = DistributedDataParallel(made.model, gradient_as_bucket_view=True)
    return _loop(setup, work, wrapped, made)


def join_gloo(setup: Setup) -> None:
    """Meet the group over a file and talk over loopback; left again when the process ends."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", setup.interface)
    meeting = f"file://{setup.meeting_dir}/gloo"
    dist.init_process_group("gloo", init_method=meeting, rank=setup.rank, world_size=setup.n_workers)
    atexit.register(dist.destroy_process_group)


def _prepare(setup: Setup) -> tuple[Training, Material]:
    if not isinstance(setup.work, Training):
        raise SettingsContradict(f"body {setup.body!r} trains; it was given {setup.work}")
    torch.set_num_threads(setup.threads)
    return setup.work, material(setup.work, setup.rank)


def _loop(setup: Setup, work: Training, model: nn.Module, made: Material) -> Step:
    stepped = optimizer(work.optimizer, model.parameters())
    batches = _batches(setup, work)

    def step() -> None:
        next(batches)
        stepped.zero_grad()
        made.loss(model(made.inputs), made.targets).backward()  # type: ignore[no-untyped-call]
        stepped.step()

    return step


def _batches(setup: Setup, work: Training) -> Iterator[object]:
    data = samples(setup, work)
    sampler: DistributedSampler[int] = DistributedSampler(data, setup.n_workers, setup.rank)
    loader = DataLoader(data, batch_size=work.batch, sampler=sampler)
    while True:
        yield from loader
