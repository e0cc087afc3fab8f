"""What kind of optimizer the user brought, found out by trying it on small tensors.

An optimizer may be cut by *element* (every flat piece can be stepped by another worker), by *tensor* (it looks at whole
tensors: norms, matrices) or only as the whole *model* (it looks across tensors). What it keeps as state is found the
same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from shoal import errors

Unit = Literal["element", "tensor", "model"]
Kind = Literal["plane", "blob", "scalar", "int", "float", "none"]

_STEPS = 3


@dataclass(frozen=True)
class StateSpec:
    """One entry of an optimizer's state of a tensor: a *plane* has the tensor's shape, a *blob* another one."""

    key: str
    kind: Kind
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def twin_of(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """The user's optimizer with the same options over other parameters, and no state."""
    twin = object.__new__(type(optimizer))
    # Learning-rate schedulers wrap `step` on the instance; the twin must have the class's own.
    twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(parameters)}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    return twin


def unit_of(optimizer: Optimizer, group: int, dtype: torch.dtype) -> Unit:
    """How finely the work of one parameter group can be cut. Fails with OptimizerUnusable if it cannot be done in parts
    that are decided here."""
    shapes = [(6, 8), (4, 5)]
    before = _options(optimizer, group)
    try:
        together = _try(optimizer, group, dtype, shapes, pieces=None)
    except Exception as problem:
        raise errors.OptimizerUnusable(
            f"{type(optimizer).__name__} cannot be split over workers: a step without closure and with dense gradients "
            f"fails ({problem}); use an optimizer whose step() needs gradients only"
        ) from problem
    if _options(optimizer, group) != before:
        raise errors.OptimizerUnusable(
            f"{type(optimizer).__name__} keeps state in its param_groups, which workers cannot share: use another"
        )
    apart = [value for shape in shapes for value in _try(optimizer, group, dtype, [shape], pieces=None, of=shapes)]
    if not _same(together, apart):
        return "model"
    try:
        cut = _try(optimizer, group, dtype, shapes, pieces=16)
    except Exception:  # an optimizer that refuses flat pieces is not elementwise, whatever it raises
        return "tensor"
    return "element" if _same(together, cut) else "tensor"


def states_of(optimizer: Optimizer, group: int, parameter: nn.Parameter, shape: tuple[int, ...]) -> list[StateSpec]:
    """What the optimizer keeps for one tensor of that shape: read off its state if it has some, tried out otherwise."""
    state = optimizer.state.get(parameter)
    if not state:
        sample = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
        sample.grad = torch.ones(shape, dtype=parameter.dtype)
        twin = _twin_of_group(optimizer, group, [sample])
        with torch.random.fork_rng(devices=[]):
            twin.step()
        state = twin.state.get(sample, {})
        own_shape = torch.Size(shape)
    else:
        own_shape = parameter.shape
    specs = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            kind: Kind = "scalar" if value.dim() == 0 else "plane" if value.shape == own_shape else "blob"
            specs.append(StateSpec(key, kind, value.dtype, tuple(value.shape) if kind == "blob" else ()))
        elif value is None:
            specs.append(StateSpec(key, "none", None, ()))
        elif isinstance(value, int):
            specs.append(StateSpec(key, "int", None, ()))
        elif isinstance(value, float):
            specs.append(StateSpec(key, "float", None, ()))
        else:
            raise errors.OptimizerUnusable(
                f"{type(optimizer).__name__} keeps {key!r} as {type(value).__name__}, which workers cannot share: "
                f"only tensors and numbers can be"
            )
    return specs


def _options(optimizer: Optimizer, group: int) -> str:
    return repr({key: value for key, value in optimizer.param_groups[group].items() if key != "params"})


def _twin_of_group(optimizer: Optimizer, group: int, parameters: Sequence[nn.Parameter]) -> Optimizer:
    twin = twin_of(optimizer, [parameters if index == group else [] for index in range(len(optimizer.param_groups))])
    stateful = [p for p in optimizer.param_groups[group]["params"] if optimizer.state.get(p)]
    given = next((p for p in stateful if p.dim() > 0), stateful[0] if stateful else None)
    if given is not None:  # some optimizers (Adagrad) make their state when they are built
        for parameter in parameters:
            twin.state[parameter] = {
                key: _seeded(value, given.shape, parameter) for key, value in optimizer.state[given].items()
            }
    twin.param_groups = [g for g in twin.param_groups if g["params"]]
    return twin


def _seeded(value: Any, given: torch.Size, parameter: nn.Parameter) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == given:
        return torch.full_like(parameter, value.reshape(-1)[0].item(), dtype=value.dtype)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _try(
    optimizer: Optimizer,
    group: int,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    *,
    pieces: int | None,
    of: Sequence[tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """The values of a few tensors after a few steps. `of` names the full set whose numbers the tensors are drawn
    from."""
    generator = torch.Generator().manual_seed(17)
    numbers = {
        shape: [torch.randn(shape, generator=generator).to(dtype) for _ in range(_STEPS + 1)]
        for shape in (of or shapes)
    }
    cut: list[tuple[tuple[int, ...], slice | None, nn.Parameter]] = []
    for shape in shapes:
        start = numbers[shape][0].clone()
        if pieces is None:
            cut.append((shape, None, nn.Parameter(start)))
        else:
            flat = start.reshape(-1)
            for lo in range(0, flat.numel(), pieces):
                piece = slice(lo, min(lo + pieces, flat.numel()))
                cut.append((shape, piece, nn.Parameter(flat[piece].clone())))
    twin = _twin_of_group(optimizer, group, [parameter for _, _, parameter in cut])
    for options in twin.param_groups:
        if "lr" in options:  # at the user's own, a schedule's warm-up may hide what the step does
            options["lr"] = torch.full_like(options["lr"], 1e-2) if isinstance(options["lr"], torch.Tensor) else 1e-2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        for step in range(_STEPS):
            for shape, part, parameter in cut:
                gradient = numbers[shape][step + 1]
                parameter.grad = gradient.clone() if part is None else gradient.reshape(-1)[part].clone()
            twin.step()
    return [torch.cat([parameter.detach().reshape(-1) for s, _, parameter in cut if s == shape]) for shape in shapes]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    tolerance = 1e-2 if one[0].element_size() < 4 else 1e-5
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance / 10) for a, b in zip(one, other, strict=True))
