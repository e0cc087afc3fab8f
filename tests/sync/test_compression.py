"""What compression sends, what comes of it, and that feedback loses nothing in the long run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SettingsContradict
from shoal.sync import compression
from shoal.sync.compression import Feedback

SPECS = ["bf16", "fp16", "int8", "int8(16)", "top_k(0.1)", "random_k(0.25)", "sign", "power_sgd(2)"]
SIZES = st.integers(1, 700)
SEEDS = st.integers(0, 2**32 - 1)


def vector(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(spec: str, flat: torch.Tensor, step: int = 0) -> torch.Tensor:
    chosen = compression.parse(spec)
    came = chosen.unpack(chosen.pack(flat, step))
    assert came.shape == flat.shape
    assert came.dtype == flat.dtype
    return came


@given(st.sampled_from(SPECS), SIZES, SEEDS, st.sampled_from([torch.float32, torch.float64]))
def test_what_comes_is_nearer_than_nothing(spec: str, numel: int, seed: int, dtype: torch.dtype) -> None:
    flat = vector(numel, seed, dtype)
    lost = flat - through(spec, flat, step=seed % 7)
    assert lost.norm() <= flat.norm() * (1 + 1e-5)


@given(SIZES, SEEDS)
def test_int8_is_off_by_half_a_level_of_its_block_at_most(numel: int, seed: int) -> None:
    flat = vector(numel, seed) * torch.logspace(-3, 3, numel)
    came = through("int8(16)", flat)
    for lo in range(0, numel, 16):
        block = flat[lo : lo + 16]
        assert (block - came[lo : lo + 16]).abs().max() <= block.abs().max() / 127 * 0.501


@given(SIZES, SEEDS)
def test_top_k_sends_the_largest_as_they_are(numel: int, seed: int) -> None:
    flat = vector(numel, seed)
    came = through("top_k(0.1)", flat)
    count = max(1, round(0.1 * numel))
    assert int((came != 0).sum()) == count
    assert torch.equal(came[came != 0], flat[came != 0])
    if count < numel:
        assert came[came != 0].abs().min() >= flat[came == 0].abs().max()


@given(SIZES, SEEDS)
def test_random_k_chooses_by_the_step_and_the_same_everywhere(numel: int, seed: int) -> None:
    one, other = vector(numel, seed), vector(numel, seed + 1)
    first, second = (compression.parse("random_k(0.25, 3)") for _ in range(2))
    packed = [first.pack(one, 5), second.pack(other, 5)]
    both = first.unpack(packed[0]) + second.unpack(packed[1])
    assert torch.equal(both, through("random_k(0.25, 3)", one + other, step=5)), "sums of what is sent are sent sums"


def test_random_k_comes_to_every_element() -> None:
    flat = torch.ones(40)
    seen = sum(through("random_k(0.1)", flat, step) for step in range(400))
    assert isinstance(seen, torch.Tensor)
    assert seen.min() > 10
    assert seen.max() < 90


@given(SIZES, SEEDS)
def test_sign_keeps_signs_and_the_mean_size(numel: int, seed: int) -> None:
    flat = vector(numel, seed)
    came = through("sign", flat)
    assert torch.equal(came >= 0, flat >= 0)
    assert torch.allclose(came.abs(), flat.abs().mean().expand(numel), rtol=1e-5)


def test_power_sgd_comes_to_a_matrix_of_low_rank_and_keeps_at_it() -> None:
    matrix = vector(2 * 20, 1).view(20, 2) @ vector(2 * 20, 2).view(2, 20)
    chosen = compression.parse("power_sgd(2)")
    for _ in range(5):
        came = chosen.unpack(chosen.pack(matrix.reshape(-1)))
    assert torch.allclose(came.view(20, 20), matrix, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "part"),
    [("bf16", 1 / 2), ("fp16", 1 / 2), ("int8", 1 / 4 + 1 / 256), ("top_k(0.01)", 0.02), ("random_k(0.1)", 0.1),
     ("sign", 1 / 32), ("power_sgd(2)", 4 / 256)],
)  # fmt: skip
def test_as_many_bytes_are_sent_as_one_would_expect(spec: str, part: float) -> None:
    flat = vector(256 * 256, 0)
    packed = compression.parse(spec).pack(flat)
    assert packed.size_bytes == pytest.approx(part * 4 * flat.numel(), rel=0.02)


@given(st.sampled_from(SPECS), SIZES, SEEDS)
def test_with_feedback_all_that_was_given_is_sent_but_for_what_is_kept(spec: str, numel: int, seed: int) -> None:
    feedback = Feedback(compression.parse(spec))
    given_, came = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(6):
        flat = vector(numel, seed + step, torch.float64)
        packed = feedback.pack(flat, step)
        given_ += flat
        came += feedback.compression.unpack(packed)
    assert feedback.lost is not None
    assert torch.allclose(given_, came + feedback.lost, atol=1e-9)


def test_with_feedback_a_descent_comes_to_its_minimum_where_without_it_does_not() -> None:
    target = vector(50, 3)

    def descend(feedback: bool) -> float:
        chosen, at = compression.parse("top_k(0.02)"), torch.zeros(50)
        kept = Feedback(chosen)
        for step in range(1500):
            # Half of the gradients are noise that cancels out, and by far the largest.
            gradient = 0.02 * (at - target) + (0.1 if step % 2 else -0.1) * torch.eye(50)[0]
            packed = kept.pack(gradient, step) if feedback else chosen.pack(gradient, step)
            at = at - chosen.unpack(packed)
        return float((at - target)[1:].norm() / target[1:].norm())

    assert descend(feedback=False) > 0.9
    assert descend(feedback=True) < 0.4


@pytest.mark.parametrize(
    "spec",
    ["zip", "top_k(0)", "top_k(2)", "int8(0)", "power_sgd(1.5)", "top_k(k)", "bf16(", "top_k(part=1)", "sign(1)"],
)
def test_what_there_is_not_is_one_line(spec: str) -> None:
    with pytest.raises(SettingsContradict) as problem:
        compression.parse(spec)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_says_what_it_was_made_of(spec: str) -> None:
    assert str(compression.parse(str(compression.parse(spec)))) == str(compression.parse(spec))


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_stay_small(spec: str) -> None:
    assert through(spec, torch.zeros(33)).abs().max() == 0


def test_fp16_sends_what_is_too_large_as_its_largest() -> None:
    assert torch.isfinite(through("fp16", torch.tensor([1e30, -1e30, 1.0]))).all()
