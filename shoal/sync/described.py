"""A model's tensors in words, so that two models that are not alike can be told apart by name."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from shoal import errors
from shoal.sync.layout import Layout, dense_stride
from shoal.sync.replica import Replica

_SHOWN = 3  # differences that are told one by one
_OPTIMIZER = "the optimizer"  # no tensor has that name


def described(replica: Replica, layout: Layout | None = None) -> dict[str, str]:
    """By name, everything that must be alike where models are summed tensor by tensor; with a layout, also what the
    optimizer keeps."""
    groups = replica.optimizer.param_groups
    group_of = {id(it): index for index, group in enumerate(groups) for it in group["params"]}
    segments = layout.segments if layout is not None else ()
    keeps = {tensor.name: tensor.states for segment in segments for tensor in segment.tensors}
    words: dict[str, str] = {}
    for name, parameter in replica.model.named_parameters():
        said = _tensor(parameter)
        if id(parameter) not in group_of:
            said += ", not in the optimizer"
        elif len(groups) > 1:
            said += f", in group {group_of[id(parameter)]}"
        if states := keeps.get(name):
            said += f", with {', '.join(state.key for state in states)}"
        words[name] = said
    words |= {name: f"{_tensor(buffer)}, a buffer" for name, buffer in replica.model.named_buffers()}
    order = zlib.crc32(repr([replica.names[id(it)] for group in groups for it in group["params"]]).encode())
    number = layout.digest & 0xFFFFFFFF if layout else order
    words[_OPTIMIZER] = f"{type(replica.optimizer).__name__} over tensors in the order {number:08x}"
    return words


def _tensor(tensor: torch.Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "one number"
    stride = dense_stride(tensor)
    laid = "" if stride == torch.empty(tensor.shape, device="meta").stride() else f", strides {stride}"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{laid}"


def check_alike(worker_id: str, here: Mapping[str, str], job: Mapping[str, str]) -> None:
    """WorkersDiffer, with both shapes, where the job's model has other tensors than this worker's."""
    differences = [
        f"{name} is {said} here and {job[name]} in the job"
        for name, said in here.items()
        if name in job and job[name] != said
    ]
    differences += [f"{name} ({said}) is not in the job's" for name, said in here.items() if name not in job]
    differences += [f"{name} ({said}) is only in the job's" for name, said in job.items() if name not in here]
    if not differences:
        return
    if len(differences) > 1:  # its order follows from the tensors
        differences = [it for it in differences if not it.startswith(f"{_OPTIMIZER} ")]
    more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise errors.WorkersDiffer(
        f"the model of {worker_id} is not the job's: {'; '.join(differences[:_SHOWN])}{more}: every worker must build "
        "the same one"
    )
