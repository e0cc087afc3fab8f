"""Which device a worker takes."""

from __future__ import annotations

import torch

from shoal import errors


def choose(wanted: str, slot: int) -> torch.device:
    """`wanted`: cpu, cuda, or auto for whichever there is. Workers of a host take its GPUs in turn. DeviceMissing."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no GPU is found here"
        raise errors.DeviceMissing(f"--device cuda: {why}; use --device cpu, or a machine with a GPU")
    return torch.device("cuda", slot % torch.cuda.device_count())
