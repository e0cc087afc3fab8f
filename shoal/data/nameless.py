"""What a loader process hands over has no name in the file system, so nothing of one that was killed is left there.

torch makes shared memory as a file in /dev/shm, which it unlinks at once; multiprocessing gives descriptors away at a
socket in a directory for temporary files, which it removes at the end. A process that is killed may leave the one, and
always leaves the other.
"""

from __future__ import annotations

import os
import secrets
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

_named_address = connection.arbitrary_address  # type: ignore[attr-defined]


def leave_no_names() -> None:
    """Call it in a loader process before it has handed over anything. It lasts as long as the process."""
    connection.arbitrary_address = _address  # type: ignore[attr-defined]
    torch.UntypedStorage._new_using_fd_cpu = classmethod(_storage)  # type: ignore[assignment]
    ForkingPickler.register(torch.UntypedStorage, _reduce)
    ForkingPickler.register(torch.Tensor, _reduce_tensor)


def _address(family: str) -> Any:
    """Of a socket in the kernel's own list of names, from which it goes with the socket. A stranger who guesses it is
    refused: whoever connects has to know the key that processes of one family share."""
    return f"\0shoal-{os.getpid()}-{secrets.token_hex(8)}" if family == "AF_UNIX" else _named_address(family)


def _storage(kind: Any, size_bytes: int) -> Any:
    fd = os.memfd_create("shoal-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        return kind._new_shared_fd_cpu(fd, size_bytes)
    finally:
        os.close(fd)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """What is a view of something larger goes without the rest."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        if tensor.nbytes < storage.nbytes() and not storage.is_shared():
            tensor = tensor.clone()
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _reduce(storage: torch.UntypedStorage) -> Any:
    plain = storage.device.type == "cpu" and not storage.is_shared() and storage.nbytes()
    if plain and get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        shared = _storage(type(storage), storage.nbytes())
        shared.copy_(storage, False)
        storage = shared
    return reduce_storage(storage)  # type: ignore[no-untyped-call]
