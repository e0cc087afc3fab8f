"""Compression: tensors in fewer bytes, for whatever goes between workers. Pure: a flat tensor in, parts to send out.

    bf16()   int8(block=256)   top_k(0.01)   random_k(0.1, seed=3)   sign()   power_sgd(2)   parse("top_k(0.01)")

What is lost is lost, unless `Feedback` keeps it and adds it to what is sent next.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import SettingsContradict


@dataclass(frozen=True)
class Packed:
    """A flat tensor as it is sent. `step`: of the sender, on which random choices depend."""

    parts: tuple[torch.Tensor, ...]
    numel: int
    dtype: torch.dtype
    step: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)


class Compression(ABC):
    """`spec` says which and how, as `parse` reads it."""

    spec: str

    @abstractmethod
    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        """Of a flat tensor of floats."""

    @abstractmethod
    def unpack(self, packed: Packed) -> torch.Tensor:
        """What receivers have of it, the same on each."""

    def __str__(self) -> str:
        return self.spec


class _Narrow(Compression):
    def __init__(self, spec: str, dtype: torch.dtype) -> None:
        self.spec, self._dtype = spec, dtype

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        most = torch.finfo(self._dtype).max
        return Packed((flat.clamp(-most, most).to(self._dtype),), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        return packed.parts[0].to(packed.dtype)


class _Int8(Compression):
    """Each block by its largest element: 127 steps to either side of 0."""

    def __init__(self, block: int) -> None:
        self.spec, self._block = f"int8({block})", block

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        blocks = _padded(flat, self._block).view(-1, self._block)
        scale = blocks.abs().amax(1, keepdim=True).float() / 127
        # Of a block of zeros, and of one so small that the scale vanishes, nothing is sent but zeros.
        levels = torch.where(scale > 0, blocks.float() / scale, 0.0).round_().clamp_(-127, 127)
        return Packed((levels.to(torch.int8).view(-1)[: flat.numel()], scale.view(-1)), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        levels, scale = packed.parts
        blocks = _padded(levels, self._block).view(-1, self._block) * scale.view(-1, 1)
        return blocks.view(-1)[: packed.numel].to(packed.dtype)


class _TopK(Compression):
    """The largest elements, with their places."""

    def __init__(self, part: float) -> None:
        self.spec, self._part = f"top_k({part:g})", part

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        places = flat.abs().topk(_count(self._part, flat.numel()), sorted=False).indices
        return Packed((flat[places], places.to(torch.int32)), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        values, places = packed.parts
        return _zeros(packed).index_put_((places.long(),), values)


class _RandomK(Compression):
    """Elements at places that follow from seed and step, so that these need not be sent, and sums can be made of what
    is: all workers choose the same."""

    def __init__(self, part: float, seed: int) -> None:
        self.spec, self._part, self._seed = f"random_k({part:g}, {seed})", part, seed

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        return Packed((flat[self._places(flat.numel(), step, flat.device)],), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        (values,) = packed.parts
        return _zeros(packed).index_put_((self._places(packed.numel, packed.step, values.device),), values)

    def _places(self, numel: int, step: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        return torch.randperm(numel, generator=generator)[: _count(self._part, numel)].to(device)


class _Sign(Compression):
    """One bit each, times the mean of their sizes."""

    spec = "sign"

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        bits = _padded((flat >= 0).to(torch.uint8), 8).view(-1, 8)
        packed = (bits << _shifts(flat.device)).sum(1, dtype=torch.uint8)
        scale = flat.abs().float().mean() if flat.numel() else torch.zeros((), device=flat.device)
        return Packed((packed, scale.view(1)), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        bits, scale = packed.parts
        signs = (bits.unsqueeze(1) >> _shifts(bits.device) & 1).view(-1)[: packed.numel]
        return ((2.0 * signs - 1.0) * scale).to(packed.dtype)


class _PowerSGD(Compression):
    """The tensor as a matrix that is about square, by its product with a few directions: one step of the power method,
    which begins where the last one ended. So one of these is for one tensor of one sender."""

    def __init__(self, rank: int) -> None:
        self.spec, self._rank = f"power_sgd({rank})", rank
        self._directions: torch.Tensor | None = None

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        matrix = _padded(flat, _width(flat.numel())).view(-1, _width(flat.numel())).float()
        rank = min(self._rank, *matrix.shape)
        if self._directions is None or self._directions.shape != (matrix.shape[1], rank):
            generator = torch.Generator().manual_seed(0)
            self._directions = torch.randn(matrix.shape[1], rank, generator=generator).to(flat.device)
        left = torch.linalg.qr(matrix @ self._directions).Q
        self._directions = right = matrix.T @ left
        return Packed((left, right), flat.numel(), flat.dtype, step)

    def unpack(self, packed: Packed) -> torch.Tensor:
        left, right = packed.parts
        return (left @ right.T).view(-1)[: packed.numel].to(packed.dtype)


class Feedback:
    """One tensor of one sender: what compression has taken away so far is added to what is sent next."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.lost: torch.Tensor | None = None
        self.sent_bytes = self.saved_bytes = 0

    def pack(self, flat: torch.Tensor, step: int = 0) -> Packed:
        wanted = flat if self.lost is None else flat + self.lost
        packed = self.compression.pack(wanted, step)
        self.lost = wanted - self.compression.unpack(packed)
        self.sent_bytes += packed.size_bytes
        self.saved_bytes += flat.numel() * flat.element_size() - packed.size_bytes
        return packed


# By name.


def bf16() -> Compression:
    return _Narrow("bf16", torch.bfloat16)


def fp16() -> Compression:
    """What is too large for it is sent as the largest there is."""
    return _Narrow("fp16", torch.float16)


def int8(block: int = 256) -> Compression:
    """Fails with SettingsContradict, as all of these."""
    return _Int8(_whole("int8", "a block", block))


def top_k(part: float = 0.01) -> Compression:
    return _TopK(_part("top_k", part))


def random_k(part: float = 0.1, seed: int = 0) -> Compression:
    return _RandomK(_part("random_k", part), seed)


def sign() -> Compression:
    return _Sign()


def power_sgd(rank: int = 2) -> Compression:
    return _PowerSGD(_whole("power_sgd", "a rank", rank))


KNOWN: dict[str, Callable[..., Compression]] = {
    it.__name__: it for it in (bf16, fp16, int8, top_k, random_k, sign, power_sgd)
}


def parse(spec: str) -> Compression:
    """A new one, by its text: "bf16", "top_k(0.01)". Fails with SettingsContradict."""
    wrong = SettingsContradict(f"compression {spec!r}: there are {', '.join(KNOWN)}; write as top_k(0.01)")
    try:
        tree = ast.parse(spec, mode="eval").body
        name, arguments = (tree.func, tree.args) if isinstance(tree, ast.Call) else (tree, [])
        if not isinstance(name, ast.Name) or name.id not in KNOWN or getattr(tree, "keywords", []):
            raise wrong
        values: list[Any] = [ast.literal_eval(argument) for argument in arguments]
        return KNOWN[name.id](*values)
    except (SyntaxError, ValueError, TypeError):
        raise wrong from None


def _part(name: str, part: float) -> float:
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
        raise SettingsContradict(f"{name}({part}): it is a part of the elements, above 0 and up to 1")
    return part


def _whole(name: str, what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsContradict(f"{name}({value}): {what} is a whole number, 1 or more")
    return value


def _count(part: float, numel: int) -> int:
    return min(numel, max(1, round(part * numel)))


def _width(numel: int) -> int:
    return max(1, math.isqrt(numel))


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -flat.numel() % multiple
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _zeros(packed: Packed) -> torch.Tensor:
    return torch.zeros(packed.numel, dtype=packed.dtype, device=packed.parts[0].device)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
