"""The user's optimizer, stepped without looking up at every step what does not change between two.

On a GPU that takes a third of the host's time for a step. By torch's own functions, for exactly these classes as torch
would step them by itself; any other, and anything out of the ordinary, is stepped by the optimizer as a whole. Which
way a step goes follows from the state and the gradients alone, so it is the same on ranks that have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class _Known:
    """One parameter group, every parameter of which has state."""

    parameters: list[torch.Tensor]
    states: list[dict[str, Any]]  # of each parameter
    kept: dict[str, list[Any]]  # what is in them, by its name
    foreach: bool | None
    strides: (
        list[tuple[int, ...]] | None
    )  # of parameters for which torch has one kernel for all of a step; None: others


class QuickStep:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[_Known] = []
        self._entries: list[Any] = []  # of its state, in their order

    def __call__(self, *, rounds_as_torch: bool = True) -> None:
        """Without `rounds_as_torch` it may be stepped by kernels that round in another way than those that torch takes
        by itself; only where no other rank has to have the same bits."""
        optimizer = self._optimizer
        if not self._holds():
            self._learn()
        gradients: list[list[Any]] = [[it.grad for it in known.parameters] for known in self._groups]
        if not gradients or any(it is None for one in gradients for it in one):
            optimizer.step()
            return
        with torch.no_grad():
            for group, known, given in zip(optimizer.param_groups, self._groups, gradients, strict=True):
                at_once = known.strides is not None and not rounds_as_torch
                if at_once and [it.stride() for it in given] == known.strides:
                    _step_sgd_at_once(group, known, given)
                else:
                    _STEPS[type(optimizer)](group, known, given)

    def _holds(self) -> bool:
        """Whether what is known is still so."""
        optimizer = self._optimizer
        if not self._groups or len(self._groups) != len(optimizer.param_groups) or not _ordinary(optimizer):
            return False
        # By identity, at the speed of C: hashing a tensor is what takes long in an optimizer's own step.
        entries = list(optimizer.state.values())
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(
            known.kept.keys() == set(_names(optimizer, group))
            and not isinstance(group["lr"], torch.Tensor)
            and all(all(map(is_, [it.get(key) for it in known.states], kept)) for key, kept in known.kept.items())
            for group, known in zip(optimizer.param_groups, self._groups, strict=True)
        )

    def _learn(self) -> None:
        optimizer, self._groups = self._optimizer, []
        if type(optimizer) not in _STEPS or not _ordinary(optimizer):
            return
        groups = []
        for group in optimizer.param_groups:
            if not _plain(group):
                return
            names = _names(optimizer, group)
            states = [optimizer.state.get(it, {}) for it in group["params"]]
            if any(state.get(name) is None for state in states for name in names):
                return
            # What torch takes where nothing is asked for, and which it would find out by looking at every tensor.
            on_gpu = all(it.is_cuda and type(it) is torch.nn.Parameter for it in group["params"])
            foreach = True if group["foreach"] is None and group["fused"] is None and on_gpu else group["foreach"]
            kept = {name: [state[name] for state in states] for name in names}
            known = _Known(list(group["params"]), states, kept, foreach, None)
            at_once = type(optimizer) is SGD and on_gpu and foreach and not group["fused"]
            groups.append(replace(known, strides=_strides(known)) if at_once else known)
        self._groups, self._entries = groups, list(optimizer.state.values())


def _ordinary(optimizer: Optimizer) -> bool:
    """Whether nobody is told of a step, and it is torch's own; schedulers wrap it only to know that it was called."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    step = vars(optimizer).get("step")
    return step is None or getattr(step, "__wrapped__", None) is type(optimizer).step


def _names(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """What such a group keeps of each parameter."""
    if type(optimizer) is SGD:
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _plain(group: dict[str, Any]) -> bool:
    if not group["params"] or isinstance(group["lr"], torch.Tensor):
        return False
    if group.get("differentiable") or group.get("capturable") or not {"foreach", "fused"} <= group.keys():
        return False
    if "betas" in group and "decoupled_weight_decay" not in group:
        return False  # of a torch whose Adam is another
    return not any(it.grad is None or it.grad.is_sparse or it.is_complex() for it in group["params"])


def _strides(known: _Known) -> list[tuple[int, ...]] | None:
    """Of the parameters, if those and their state are alike in all that torch's kernel wants alike."""
    lists = [known.parameters, *known.kept.values()]
    kinds = {(it.dtype, it.device) for tensors in lists for it in tensors}
    strides = [[it.stride() for it in tensors] for tensors in lists]
    return strides[0] if len(kinds) == 1 and all(it == strides[0] for it in strides) else None


def _step_sgd_at_once(group: dict[str, Any], known: _Known, gradients: list[Any]) -> None:
    torch._fused_sgd_(
        known.parameters,
        gradients,
        known.kept.get("momentum_buffer", []),
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
        **{name: group[name] for name in ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")},
    )


def _step_sgd(group: dict[str, Any], known: _Known, gradients: list[Any]) -> None:
    buffers, momentum, decay = known.kept.get("momentum_buffer"), group["momentum"], group["weight_decay"]
    if not known.foreach or group["fused"]:
        sgd(
            known.parameters,
            gradients,
            buffers or [None] * len(gradients),
            foreach=known.foreach,
            fused=group["fused"],
            weight_decay=decay,
            momentum=momentum,
            **{name: group[name] for name in ("lr", "dampening", "nesterov", "maximize")},
        )
        return
    # What that does, without sorting the tensors by where and what they are.
    if group["maximize"]:
        gradients = torch._foreach_neg(gradients)  # type: ignore[assignment]
    if decay and group["maximize"]:
        torch._foreach_add_(gradients, known.parameters, alpha=decay)
    elif decay:
        gradients = torch._foreach_add(gradients, known.parameters, alpha=decay)  # type: ignore[assignment]
    if buffers is not None:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients, alpha=1 - group["dampening"])
        if group["nesterov"]:
            torch._foreach_add_(gradients, buffers, alpha=momentum)
        else:
            gradients = buffers
    torch._foreach_add_(known.parameters, gradients, alpha=-group["lr"])


def _step_adam(group: dict[str, Any], known: _Known, gradients: list[Any]) -> None:
    kept = known.kept
    beta1, beta2 = group["betas"]
    adam(
        known.parameters,
        gradients,
        kept["exp_avg"],
        kept["exp_avg_sq"],
        kept.get("max_exp_avg_sq", []),
        kept["step"],
        foreach=known.foreach,
        fused=group["fused"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        beta1=beta1,
        beta2=beta2,
        **{name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")},
    )


_STEPS: dict[type[Optimizer], Callable[[dict[str, Any], _Known, list[Any]], None]] = {
    SGD: _step_sgd,
    Adam: _step_adam,
    AdamW: _step_adam,
}
